"""The CUDA back end with cuDNN for the blocks that it can take; the others run on the kernels.

cuDNN takes blocks of float16 and bfloat16 whose rows see a staircase of keys (`row_runs`), without softcap.  It neither
adds to a partial nor takes delta, and its results have the dtype of its inputs.  So a block's result is rounded to that
dtype, and then added by the kernels.
"""

import weakref
from itertools import starmap

import numpy as np

from ..block import BlockInputs
from . import cudnn_library, row_runs
from .backend import CudaBackend, _CupyLaunches, _launched
from .cudnn_graphs import BACKWARD, FORWARD, Graphs

HALF = "float16", "bfloat16"
DIM_MULTIPLE = 8
LARGEST_DIM = 256
LARGEST_BACKWARD_DIM = {9: 256}  # by the major number of the compute capability; of others 128
TAKEN = "q", "k", "v", "begin", "end", "scale"
OTHERS = [name for name in BlockInputs._fields if name not in TAKEN]  # a block that has one of them is for the kernels


class CudnnBackend(CudaBackend):
    """As `CudaBackend`, with cuDNN.

    Gradients of the same inputs may differ in their last bits: cuDNN sums dq in any order.

    blocks: how many blocks cuDNN has computed, and how many the kernels, as {"cudnn": count, "kernels": count}.
    graphs: the `Graphs`.
    """

    name = "cuda+cudnn"
    dlse_on_all = True  # see `delta`

    @classmethod
    def missing(cls):
        return super().missing() or cudnn_library.missing()

    def __init__(self, transport="auto", local_rank=0):
        super().__init__(transport, local_rank)
        cudnn = cudnn_library.load()
        self.version += f", cuDNN {cudnn.backend_version_string()}"
        with self.cupy.cuda.Device(self.device):
            self.graphs = Graphs(cudnn, self.stream.ptr, self.empty)
        self.blocks = {"cudnn": 0, "kernels": 0}
        self._on_host = {}  # by the id of an array of row intervals: a reference to it, and its values
        self._runs = {}  # by the ids of begin and end: the references, and the block's runs
        self._delta_of_out = False

    def close(self):
        super().close()
        self.graphs.close()

    # Row intervals.  They come as NumPy arrays and stay on the device for many calls, so a block is looked at once.

    def contiguous(self, array, *arguments, **options):
        copy = super().contiguous(array, *arguments, **options)
        if isinstance(array, np.ndarray) and array.dtype == np.int32 and array.ndim == 2:
            key = id(copy)
            self._on_host[key] = weakref.ref(copy, lambda _: self._on_host.pop(key, None)), array
        return copy

    def _runs_of(self, begin, end):
        """The runs of a block, or None; `row_runs.runs_of`, kept for as long as the arrays live."""
        key = id(begin), id(end)
        if key in self._runs:
            return self._runs[key][1]
        if isinstance(begin, np.ndarray):  # which the caller may change
            return row_runs.runs_of(begin, end)
        sides = [self._on_host.get(id(side)) for side in (begin, end)]
        runs = None if None in sides else row_runs.runs_of(*(array for _, array in sides))
        references = [weakref.ref(side, lambda _: self._runs.pop(key, None)) for side in (begin, end)]
        self._runs[key] = references, runs
        return runs

    def _takes(self, block, largest):
        """Whether cuDNN takes a block with such inputs, whatever its mask.  What it may not know is for the kernels."""
        if block.v is None or block.scale <= 0 or block.q.dtype.name not in HALF:
            return False
        if any(getattr(block, name) is not None for name in OTHERS):
            return False
        return all(dim % DIM_MULTIPLE == 0 and dim <= largest for dim in (block.q.shape[2], block.v.shape[2]))

    # Launches

    @_launched
    def attend(self, block, out, lse, after=(), meanwhile=None):
        runs = self._runs_of(block.begin, block.end) if self._takes(block, LARGEST_DIM) else None
        parts = None if runs is None else self._forward_parts(runs, block)
        if parts is None:
            _CupyLaunches.attend(self, block, out, lse)
        for run, of_out, of_lse in parts or ():
            rows = slice(run.start, run.stop)
            _CupyLaunches.merge(self, out[rows], lse[rows], of_out, of_lse)
        self.blocks["kernels" if parts is None else "cudnn"] += 1

    def _forward_parts(self, runs, block):
        """[(run, its out, its lse)], computed by cuDNN; None if it has no plan for one of them."""
        q, k, v = self._arrays(block)
        parts = []
        for run in runs:
            rows = q[run.start : run.stop]
            out, lse = self.empty((*rows.shape[:2], v.shape[2]), q.dtype), self.empty(rows.shape[:2], "float32")
            arrays = rows, k[: run.keys], v[: run.keys], out, lse
            if not self.graphs.run(FORWARD, arrays, block.scale, run.right):
                return None
            parts.append((run, out, lse))
        return parts

    @_launched
    def delta(self, delta, dout, out, dlse):
        # cuDNN forms delta itself, of an out that is made of delta and dout.  There is none where dout is 0 and delta
        # is not, which a dlse may cause, on any rank.  Then all ranks leave the backward pass to the kernels.
        self._delta_of_out = dlse is None
        _CupyLaunches.delta(self, delta, dout, out, dlse)

    @_launched
    def attend_backward(self, block, given, grads, after=(), meanwhile=None):
        largest = LARGEST_BACKWARD_DIM.get(self.architecture // 10, 128)
        takes = self._delta_of_out and self._takes(block, largest)
        runs = self._runs_of(block.begin, block.end) if takes else None
        parts = None if runs is None else self._backward_parts(runs, block, given)
        if parts is None:
            _CupyLaunches.attend_backward(self, block, given, grads)
        for run, gradients in parts or ():
            keys = slice(run.keys)
            _CupyLaunches.add(self, (grads.dq[run.start : run.stop], grads.dk[keys], grads.dv[keys]), gradients)
        self.blocks["kernels" if parts is None else "cudnn"] += 1

    def _backward_parts(self, runs, block, given):
        """[(run, (dq, dk, dv))], computed by cuDNN; None if it has no plan for one of them."""
        (q, k, v), dout = self._arrays(block), self.contiguous(given.dout)
        _, lse, delta = given
        parts = []
        for run in runs:
            rows, keys = slice(run.start, run.stop), slice(run.keys)
            inputs = q[rows], k[keys], v[keys]
            of_rows = self.contiguous(lse[rows])  # which may begin anywhere
            out = self.empty(dout[rows].shape, dout.dtype)
            self._out_of_delta(out, dout[rows], delta[rows])
            gradients = tuple(starmap(self.empty, ((array.shape, array.dtype) for array in inputs)))
            arrays = *inputs, out, dout[rows], of_rows, *gradients
            if not self.graphs.run(BACKWARD, arrays, block.scale, run.right):
                return None
            parts.append((run, gradients))
        return parts
