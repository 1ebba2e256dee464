"""Launches of the GPU kernels, shared by the GPU back end and the emulation on the CPU.

The back end runs the kernels.  It provides:
- `_run(kernel, grid, *arguments)`, with its own arrays and NumPy scalars, as CuPy takes them; runs in call order;
- `empty` and `contiguous`, and `_address(array)`, the address of an array's first byte;
- `processors`, the number of multiprocessors, and `architecture`, the compute capability, such as 90.
"""

from typing import NamedTuple

import numpy as np

from ...errors import ArgumentError
from ..base import Array
from ..kept import Kept
from ..pages import Tables
from . import launches, tile_table
from .decode_work import decode_work, in_units, spans_of
from .extras import Extras, of_dropout
from .launches import (
    THREADS,
    WARPS,
    BlockShape,
    PagesLaunch,
    backward_launches,
    cast_kernel,
    forward_launch,
    merge_kernel,
    pages_launch,
    partials_kernel,
)

ELEMENTS_PER_THREAD = 16  # of the memory-bound kernels, so that grids stay small and several loads are on their way
VECTOR = 4  # elements per load and store of a cast, if they are contiguous in both arrays
# Elements that a thread takes at a time, if rows and addresses allow: 16 bytes of a half type, or of float32.  If it
# took 32 bytes, the threads of a warp would not read and write consecutive ones.
ROW_VECTOR = {"delta": 8, "out_of_delta": 8, "merge": 4, "add": 4}
BATCH = 4  # rows of a thread of merge
TAKEN = "q", "k", "v", "begin", "end", "scale", "softcap"  # of every block


KEPT_WORKS = 512  # lists of work, of some 10 KiB, and ways to find them


class _Work(NamedTuple):
    """A list of work of `decode_work` on the device.

    array: int32, the items, then `firsts`.  items, parts: numbers of items and of partials.  most: the largest number
    of partials of a sequence.  launch: what it was made for, which lives as long as this: its id is a key.
    """

    array: Array
    items: int
    parts: int
    most: int
    launch: PagesLaunch


class KernelLaunches:
    """`attend` and the other computing launches of `mpiattn.backends.base`, as kernel launches."""

    dtypes: tuple[str, ...] = tuple(tile_table.ELEMENTS)
    takes: tuple[str, ...] = (*TAKEN, "pages", "page_size", "bias", "dropout")

    def __init__(self):
        super().__init__()
        self._work_array = Kept(self.empty)  # each reused by the next launches
        self._works = {}  # `_Work` by launch and rounded lengths, and by lengths in units

    def scratch_bytes(self, head_dim, value_dim, dtype, backward=False, shared_kv=False, lists=False):
        tile_table.itemsize(dtype)  # raises ArgumentError for another dtype
        return launches.scratch_bytes(
            dtype, head_dim, value_dim, self.architecture, self.processors, backward, shared_kv
        )

    # Attention

    def attend(self, block, out, lse, after=(), meanwhile=None):
        _check_groups(block)
        if not (len(block.q) and len(block.k)):
            return
        extras = Extras.of(block, self._address)
        shape = BlockShape.of(block, out.shape[2], len(block.begin), extras)
        launch = forward_launch(shape, self.architecture, self.processors)
        self._check_alignment("out", out, launch.alignment)
        splits = launch.grid[1]
        into = (
            (out, lse)
            if splits == 1
            else (
                self._work_array("out", (splits, *out.shape), "float32"),
                self._work_array("lse", (splits, *lse.shape), "float32"),
            )
        )
        begin, end = self._numbers(block.begin, block.end)
        more = () if extras is None else (*extras.of_bias(block), *self._of_dropout(block))
        self._run(launch.kernel, launch.grid, *self._arrays(block), begin, end, *into, *launch.numbers, *more)
        if splits > 1:
            self._merge((out, lse), into, begin, 0, lse.size, splits, splits)  # `begin` is not read

    def _of_dropout(self, block):
        return of_dropout(block.dropout, lambda positions: self.contiguous(positions, 4))

    def _arrays(self, block):
        """(q, k, v) of a block, contiguous; k again where keys hold the values."""
        q, k = self.contiguous(block.q), self.contiguous(block.k)
        return q, k, k if block.v is None else self.contiguous(block.v)

    def attend_pages(self, block, out, lse, after=(), meanwhile=None):
        if not len(block.q):
            return
        tables, begin, end = Tables.of(block.pages), block.begin, block.end
        extras = Extras.of_pages(block, self._address, len(tables))
        shape = BlockShape.of(block, out.shape[2], len(tables), extras)
        launch = pages_launch(shape, self.architecture, self.processors)
        self._check_alignment("out", out, launch.alignment)
        work = self._work_of(launch, begin.reshape(len(tables), -1), end.reshape(len(tables), -1))
        rows = len(block.q) // len(tables)
        into = (out, lse)
        if work.parts:
            count = work.parts * rows * lse.shape[1]
            into = (
                self._work_array.memory("out", count * out.shape[2], "float32"),
                self._work_array.memory("lse", count, "float32"),
            )
        self._run(
            launch.kernel,
            (work.items * launch.blocks, 1, 1),
            *self._arrays(block),
            work.array,
            self._upload(np.concatenate((begin, end))),  # one copy to the device for both
            tables.kept(self._on_device),
            out,
            lse,
            *into,
            *launch.numbers,
            *(() if extras is None else extras.of_bias(block)),
        )
        if work.parts:
            self._merge((out, lse), into, work.array, 4 * work.items, rows * lse.shape[1], work.most, 0)

    def _upload(self, array):
        """A flat int32 NumPy array on the device, for the next launch."""
        return self.contiguous(array, 4)

    def _work_of(self, launch, begin, end):
        """The `_Work` of a launch on pages whose queries see the keys [begin, end), (sequences, queries)."""
        units = in_units(begin, end)
        in_short = id(launch), *(bounds.tobytes() for bounds in units)  # takes less time than `spans_of`
        work = self._works.get(in_short)
        if work is not None:
            return work
        if len(self._works) >= KEPT_WORKS:
            self._works.clear()
        spans = spans_of(*units)
        key = id(launch), spans.tobytes()
        work = self._works.get(key)
        if work is None:
            items, firsts = decode_work(spans, launch.columns, launch.blocks, launch.places, launch.work)
            array = self.contiguous(np.concatenate((items, firsts), axis=None))
            most = int(np.diff(firsts).max(initial=0))
            work = self._works[key] = _Work(array, len(items), int(firsts[-1]), most, launch)
        self._works[in_short] = work
        return work

    def _on_device(self, tables):
        """What the kernels read of block tables: where the table of each sequence begins, then all tables."""
        joined, starts = tables.joined
        return self.contiguous(np.concatenate([starts[:-1] + len(tables), joined]).astype(np.int32), 4)

    def _merge(self, whole, of_parts, work, firsts_at, rows, most, parts):
        """Launch merge_parts, whose arguments these are, of partials (out, lse).  most: most parts of a row."""
        self._run(
            merge_kernel(most),
            (whole[1].size, 1, 1),
            *whole,
            *of_parts,
            work,
            np.int64(firsts_at),
            np.int64(rows),
            np.int32(whole[0].shape[2]),
            np.int32(parts),
        )

    def attend_backward(self, block, given, grads, after=(), meanwhile=None):
        _check_groups(block)
        if not (len(block.q) and len(block.k)):
            return
        (dq, dk, dv, dbias), extras = grads, Extras.of(block, self._address, grads.dbias)
        shape = BlockShape.of(block, given.dout.shape[2], len(block.begin), extras)
        of_q, of_hulls, of_kv, key_sums = backward_launches(shape, self.architecture, self.processors)
        self._check_alignment("dq", dq, of_q.alignment)
        self._check_alignment("dk", dk, of_q.alignment)
        if not shape.shared_kv:
            self._check_alignment("dv", dv, of_kv.alignment)
        (q, k, v), dout = self._arrays(block), self.contiguous(given.dout)
        lse, delta, begin, end = self._numbers(given.lse, given.delta, block.begin, block.end)
        inputs = q, dout, lse, delta, k, v, begin, end
        more_of_q = more_of_kv = ()
        if extras is not None:
            of_bias, of_gradient, of_sums, dropout = extras.of_bias(block), (), (), self._of_dropout(block)
            if key_sums:
                sums_launch, sums_shape = key_sums
                of_queries = self._work_array("key sums", sums_shape, "float32")
                of_sums = of_queries, *of_kv.of_gradient
            elif dbias is not None:
                of_gradient = dbias, *extras.dbias.numbers(), *of_q.of_gradient
            more_of_q, more_of_kv = (*of_bias, *of_gradient, *dropout), (*of_bias, *of_sums, *dropout)
        self._run(of_q.kernel, of_q.grid, *inputs, dq, *of_q.numbers, *more_of_q)
        hulls = self._work_array("hulls", (of_hulls.grid[0], 4), "int32")
        self._run(of_hulls.kernel, of_hulls.grid, begin, end, hulls, *of_hulls.numbers)
        splits = of_kv.grid[2]
        results = [dk] if shape.shared_kv else [dk, dv]
        sums = results
        if splits > 1:
            sums = [
                self._work_array(name, (splits, *result.shape), "float32")
                for name, result in zip(("dk", "dv"), results)
            ]
            for of_splits in sums:
                of_splits.fill(0)
        self._run(
            of_kv.kernel, of_kv.grid, *inputs, hulls, sums[0], sums[-1], *of_kv.numbers, *more_of_kv
        )  # without v, dv is unused
        if key_sums:
            self._run(sums_launch.kernel, sums_launch.grid, dbias, of_queries, *sums_launch.numbers)
        if splits > 1:
            for result, of_splits in zip(results, sums):
                fours = result.size // 4
                self._run(
                    partials_kernel("add_splits", "float32"),
                    _flat_grid(result),
                    result,
                    of_splits,
                    np.int64(fours),
                    np.int32(splits),
                )

    def _numbers(self, *arrays):
        """Make int32 or float32 arrays contiguous.  Kernels read them by element: 4-byte alignment is enough."""
        return [self.contiguous(array, 4) for array in arrays]

    def _check_alignment(self, name, array, wanted):
        """Check the address of a result, because kernels write several elements of a row at a time.  wanted: bytes."""
        if self._address(array) % wanted:
            raise ArgumentError(
                f"{name} begins at address {self._address(array):#x}; with rows of {array.shape[-1]} "
                f"numbers it must begin at a multiple of {wanted} bytes"
            )

    # Partials

    def _run_rows(self, name, dtype, rows, *arguments):
        """Run a kernel of partials.cu with one warp per row."""
        self._run(partials_kernel(name, dtype), (-(-rows // WARPS), 1, 1), *arguments)

    def _row_vector(self, name, dim, *arrays):
        """Elements that a thread of a kernel takes at a time of arrays with rows of `dim` numbers."""
        vector = ROW_VECTOR[name]
        wide = dim % vector == 0 and not any(self._address(array) % 16 for array in arrays)
        return vector if wide else 1

    def _run_lanes(self, name, of_rows, rows, *arguments, more=(), batch=1):
        """Run a kernel of partials.cu, with as many lanes for a row as it has vectors.

        of_rows: the arrays among the arguments whose rows have columns; the last has the kernel's dtype.
        batch: rows of a thread.
        """
        dim = of_rows[-1].shape[-1]
        vector = self._row_vector(name, dim, *of_rows)
        lanes = min(32, 1 << (-(-dim // vector) - 1).bit_length())
        self._run(
            partials_kernel(name, of_rows[-1].dtype.name, vector),
            (-(-rows * lanes // (THREADS * batch)), 1, 1),
            *arguments,
            np.int64(rows),
            *map(np.int32, (dim, lanes, *more)),
        )

    def merge(self, out, lse, out_b, lse_b, after=()):
        self._run_lanes("merge", (out, out_b), lse.size, out, lse, out_b, lse_b, batch=BATCH)

    def unnormalize(self, out, lse, top):
        self._run_rows("unnormalize", "float32", lse.size, out, lse, top, np.int64(lse.size), np.int32(out.shape[-1]))

    def normalize(self, out, lse, top):
        self._run_rows("normalize", "float32", lse.size, out, lse, top, np.int64(lse.size), np.int32(out.shape[-1]))

    def add(self, arrays, others, after=()):
        for array, other in zip(arrays, others):
            kernel = partials_kernel("add", other.dtype.name, self._row_vector("add", array.size, array, other))
            self._run(kernel, _flat_grid(array), array, other, np.int64(array.size))

    def delta(self, delta, dout, out, dlse):
        given = dlse is not None
        self._run_lanes("delta", (out, dout), delta.size, delta, dout, out, dlse if given else delta, more=(given,))

    def _out_of_delta(self, out, dout, delta):
        """Set out to one with rowsum(dout * out) = delta; dims are multiples of 8, up to 256."""
        self._run_lanes("out_of_delta", (out, dout), delta.size, out, dout, delta)

    def sink(self, out, lse, sinks):
        self._run_rows(
            "sink",
            "float32",
            lse.size,
            out,
            lse,
            sinks,
            np.int64(lse.size),
            np.int32(lse.shape[1]),
            np.int32(out.shape[-1]),
        )

    def sink_gradient(self, gradient, sinks, lse, delta):
        self._run(
            partials_kernel("sink_gradient", "float32"),
            (len(gradient), 1, 1),
            gradient,
            sinks,
            lse,
            delta,
            np.int32(len(lse)),
            np.int32(len(gradient)),
        )

    def copy(self, dst, src, after=()):
        axes = _collapsed(dst.shape, *([stride // array.itemsize for stride in array.strides] for array in (dst, src)))
        count, *innermost = axes[-1]
        steps = [count, *(stride for axis in axes[:-1] for stride in axis[1:])]
        whole = (
            innermost == [1, 1]
            and not any(step % VECTOR for step in steps)
            and not any(self._address(array) % (VECTOR * array.itemsize) for array in (dst, src))
        )
        numbers = [np.int64(n) for of_axis in zip(*axes) for n in of_axis]  # shape, then strides of dst and src
        self._run(
            cast_kernel(dst.dtype.name, src.dtype.name, VECTOR if whole else 1, dst.size < 2**31),
            _flat_grid(dst),
            dst,
            src,
            *numbers,
        )


def _collapsed(shape, *strides):
    """The axes of equally shaped arrays as four [count, stride, ...]; adjacent axes are joined where strides allow."""
    axes = []
    for count, *of in zip(shape, *strides):
        if count == 1:
            continue
        if axes and all(outer == count * inner for outer, inner in zip(axes[-1][1:], of)):
            axes[-1] = [axes[-1][0] * count, *of]
        else:
            axes.append([count, *of])
    return [[1] + [0] * len(strides)] * (4 - len(axes)) + axes


def _flat_grid(array):
    return -(-array.size // (THREADS * ELEMENTS_PER_THREAD)), 1, 1


def _check_groups(block):
    groups, kv_heads = len(block.begin), block.k.shape[1]
    if kv_heads % groups:
        raise ArgumentError(f"begin has {groups} groups of heads; of {kv_heads} KV heads it may have a divisor")
