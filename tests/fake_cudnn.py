"""What `backends.cuda.cudnn_graphs` uses of cuDNN's frontend, on the arrays and streams of fake_cupy.

A graph means what cuDNN's documentation says, in float64, rounded to the dtype of its tensors.  It runs when its turn
comes on the stream of the handle, fills its working memory with garbage, and reads and writes nothing but the addresses
that it is given.  `install` puts it and the made-up CuPy in place; test_cudnn_library.py compares it with the real one.
"""

import enum
import itertools
import sys
from contextlib import contextmanager

import fake_cupy
import ml_dtypes
import numpy as np

data_type = enum.Enum("data_type", "NOT_SET FLOAT HALF BFLOAT16")
heur_mode = enum.Enum("heur_mode", "A FALLBACK")
diagonal_alignment = enum.Enum("diagonal_alignment", "TOP_LEFT BOTTOM_RIGHT")
DTYPES = {data_type.FLOAT: np.float32, data_type.HALF: np.float16, data_type.BFLOAT16: ml_dtypes.bfloat16}
WORKSPACE = 1000
_streams, _handles = {}, itertools.count(1)  # by handle


class cudnnGraphNotSupportedError(RuntimeError):
    """As the frontend's."""


def backend_version():
    return 91900


def backend_version_string():
    return "9.19.0"


def create_handle():
    handle = next(_handles)
    _streams[handle] = 0
    return handle


def destroy_handle(handle):
    del _streams[handle]


def set_stream(handle, stream):
    _streams[handle] = stream


class tensor:
    def __init__(self, dim=None, stride=None, data_type=None, uid=-1):
        self.dim, self.stride, self.type, self.uid, self.is_output = dim, stride, data_type, uid, False

    def set_output(self, is_output):
        self.is_output = is_output
        return self

    def set_uid(self, uid):
        self.uid = uid
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, data_type):
        self.type = data_type
        return self

    def at(self, pointer):
        """The memory at an address as this tensor, (batch, heads, tokens, columns)."""
        dtype = np.dtype(DTYPES[self.type])
        size = 1 + sum((count - 1) * step for count, step in zip(self.dim, self.stride))
        memory = fake_cupy._at(pointer, size * dtype.itemsize).view(dtype)
        strides = [step * dtype.itemsize for step in self.stride]
        return np.lib.stride_tricks.as_strided(memory, self.dim, strides)


class pygraph:
    def __init__(self, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert intermediate_data_type == compute_data_type == data_type.FLOAT
        self._type, self._handle, self._built = io_data_type, handle, []

    def tensor(self, dim, stride, data_type=data_type.NOT_SET, name="", uid=-1):
        given = data_type is not type(data_type).NOT_SET
        return tensor(dim, stride, data_type if given else self._type, uid)

    def sdpa(
        self,
        q,
        k,
        v,
        attn_scale=None,
        diagonal_alignment=diagonal_alignment.TOP_LEFT,
        diagonal_band_right_bound=None,
        name="",
        generate_stats=None,
    ):
        assert generate_stats
        self._mask(diagonal_alignment, diagonal_band_right_bound)
        self._inputs, self._outputs, self._scale = (q, k, v), (tensor(), tensor()), attn_scale
        self._compute = self._forward
        return self._outputs

    def sdpa_backward(
        self,
        q,
        k,
        v,
        o,
        dO,
        stats,
        attn_scale=None,
        diagonal_alignment=diagonal_alignment.TOP_LEFT,
        diagonal_band_right_bound=None,
        use_deterministic_algorithm=False,
        name="",
    ):
        assert not use_deterministic_algorithm
        self._mask(diagonal_alignment, diagonal_band_right_bound)
        self._inputs, self._outputs, self._scale = (q, k, v, o, dO, stats), (tensor(), tensor(), tensor()), attn_scale
        self._compute = self._backward
        return self._outputs

    def _mask(self, alignment, right):
        assert alignment is diagonal_alignment.TOP_LEFT and (right is None or right >= 0)
        self._right = right

    def validate(self):
        for each in (*self._inputs, *self._outputs):
            if each.type is None:
                each.type = self._type
            assert len(each.dim) == len(each.stride) == 4 and each.stride[3] == 1 and each.uid >= 0
        q, k, v = (each.dim for each in self._inputs[:3])
        if q[3] % 8 or v[3] % 8:
            raise cudnnGraphNotSupportedError("hidden_dim should be multiple of 8")
        assert q[3] == k[3] and k[:3] == v[:3] and q[1] % k[1] == 0
        assert all(each.is_output for each in self._outputs)
        assert len({each.uid for each in (*self._inputs, *self._outputs)}) == len(self._inputs + self._outputs)
        self._built.append("validate")

    def build_operation_graph(self):
        self._built.append("operations")

    def create_execution_plans(self, modes):
        assert modes == [heur_mode.A, heur_mode.FALLBACK]
        self._built.append("plans")

    def check_support(self):
        self._built.append("support")

    def build_plans(self):
        assert self._built == ["validate", "operations", "plans", "support"]
        self._built.append("built")

    def get_workspace_size(self):
        return WORKSPACE

    def execute(self, tensor_to_device_buffer, workspace, handle=None):
        assert self._built[-1] == "built" and handle == self._handle
        every = (*self._inputs, *self._outputs)
        assert set(tensor_to_device_buffer) == {each.uid for each in every}
        assert all(type(pointer) is int and pointer % 16 == 0 for pointer in tensor_to_device_buffer.values())
        arrays = [each.at(tensor_to_device_buffer[each.uid]) for each in every]
        scratch = fake_cupy._at(workspace, WORKSPACE)

        def run():
            scratch.fill(0xFF)
            inputs, outputs = arrays[: len(self._inputs)], arrays[len(self._inputs) :]
            with np.errstate(all="ignore"):
                results = self._compute(*(array[0].astype(np.float64) for array in inputs))
                for to, result in zip(outputs, results):
                    to[0] = result

        fake_cupy._streams[_streams[handle]].put(run)

    # Of (heads, tokens, columns), in float64

    def _scores(self, q, k):
        scores = np.einsum("hid,hjd->hij", q, np.repeat(k, len(q) // len(k), 0)) * self._scale
        i, j = np.ogrid[: q.shape[1], : k.shape[1]]
        return scores if self._right is None else np.where(j <= i + self._right, scores, -np.inf)

    def _forward(self, q, k, v):
        scores = self._scores(q, k)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        return np.einsum("hij,hjd->hid", weights / total, np.repeat(v, len(q) // len(v), 0)), top + np.log(total)

    def _backward(self, q, k, v, o, dout, stats):
        packed = len(q) // len(k)
        weights = np.exp(self._scores(q, k) - stats)
        dweights = np.einsum("hid,hjd->hij", dout, np.repeat(v, packed, 0))
        dscores = weights * (dweights - (dout * o).sum(-1, keepdims=True)) * self._scale
        dk, dv = (np.einsum("hij,hid->hjd", *pair) for pair in ((dscores, q), (weights, dout)))
        summed = [each.reshape(len(k), packed, *each.shape[1:]).sum(1) for each in (dk, dv)]
        return np.einsum("hij,hjd->hid", dscores, np.repeat(k, packed, 0)), *summed


@contextmanager
def install(least=2):
    """Have `import cupy` and `import cudnn` find the made-up ones; runs of `least` rows and keys are long enough."""
    from mpiattn.backends.cuda import cudnn_library, row_runs

    before, usual = sys.modules.get("cudnn"), row_runs.LEAST
    cudnn_library.load.cache_clear()
    sys.modules["cudnn"], row_runs.LEAST = sys.modules[__name__], least
    try:
        with fake_cupy.install():
            yield
    finally:
        cudnn_library.load.cache_clear()
        row_runs.LEAST = usual
        del sys.modules["cudnn"]
        if before is not None:
            sys.modules["cudnn"] = before
