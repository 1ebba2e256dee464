"""What the library uses of PyTorch with CUDA, on the made-up CuPy's device: tensors, and streams as late as its own.

Torch has a current stream of its own, which CuPy does not know.  `install` puts it in PyTorch's place.
"""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import fake_cupy
import numpy as np

_current = []  # torch's current streams, the last one counts; without any, the null stream


def _stream():
    return _current[-1] if _current else fake_cupy.Stream.null


class Tensor:
    """A tensor on the device, or in host memory if the array is NumPy's."""

    def __init__(self, array, requires_grad=False):
        self.array, self.requires_grad = array, requires_grad
        self.is_cuda = isinstance(array, fake_cupy.ndarray)
        self.device = SimpleNamespace(
            type="cuda" if self.is_cuda else "cpu", index=array.device.id if self.is_cuda else None
        )
        self.shape, self.dtype, self.ndim = array.shape, f"torch.{array.dtype.name}", array.ndim

    def __len__(self):
        return len(self.array)

    def detach(self):
        return Tensor(self.array)

    def cpu(self):
        return self if not self.is_cuda else Tensor(self.array.get(stream=_stream()), self.requires_grad)

    def numpy(self):
        assert not self.is_cuda, "torch would refuse this"
        return self.array

    def to(self, device):
        assert device == f"cuda:{fake_cupy.runtime.getDevice()}", device
        return tensor(self.array)

    def fill_(self, value):
        with _stream():
            self.array.fill(value)

    def clone(self):
        with _stream():
            copy = fake_cupy.empty(self.shape, self.array.dtype)
            source, target = self.array.values, copy.values
            fake_cupy._later(lambda: np.copyto(target, source))
        return Tensor(copy)

    def __dlpack_device__(self):
        return (2, self.device.index) if self.is_cuda else (1, 0)

    def __dlpack__(self, *, stream=None, **options):
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        taker = fake_cupy._streams[0 if stream == 1 else stream]
        if taker is not _stream():
            taker.wait_event(_stream().record())
        return self.array


def tensor(values):
    """A tensor of these numbers on the device, as soon as torch's current stream comes to that."""
    with _stream():
        return Tensor(fake_cupy.asarray(np.ascontiguousarray(values)))


def empty(size, *, dtype, device):
    with _stream():
        assert device == f"cuda:{fake_cupy.runtime.getDevice()}", device
        return Tensor(fake_cupy.empty(tuple(size), dtype))


def from_numpy(array):
    return Tensor(array)


def is_grad_enabled():
    return True


float16, float32, float64, int32, int64 = np.float16, np.float32, np.float64, np.int32, np.int64
bfloat16 = "bfloat16"
version = SimpleNamespace(cuda="13.0")


@contextmanager
def _on(stream):
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


def _current_stream(device=None):
    return SimpleNamespace(cuda_stream=_stream().ptr)


cuda = SimpleNamespace(stream=_on, current_stream=_current_stream)


@contextmanager
def install():
    """Have `import torch` find this."""
    before = sys.modules.get("torch")
    sys.modules["torch"] = sys.modules[__name__]
    try:
        yield
    finally:
        del sys.modules["torch"]
        if before is not None:
            sys.modules["torch"] = before
