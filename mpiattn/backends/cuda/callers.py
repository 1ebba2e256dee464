"""Those who call the library: the streams on which their libraries work, and the memory of these for results.

A call comes after what its callers have launched so far, and before what they launch next.  An argument that is a torch
tensor means torch's current stream.  Any other array on the GPU means CuPy's current stream: DLPack orders that after
the array's own library.  A call without either means CuPy's too.
"""

import sys

import numpy as np

from ...problem.tensors import as_tensor, is_tensor
from .arrays import as_cupy, torch_stream


class Callers:
    """The libraries whose arrays a call has been given so far.  device: the number of the GPU."""

    def __init__(self, cupy, device):
        self._cupy, self._device = cupy, device
        self.new_call()

    def new_call(self):
        """Forget the arguments of the call before."""
        self._torch = self._others = False

    def array(self, name, argument):
        """As `as_cupy`, of an argument of the call."""
        array = as_cupy(self._cupy, name, argument)
        if is_tensor(argument):
            self._torch = True
        elif not isinstance(array, np.ndarray):
            self._others = True
        return array

    def streams(self):
        """The streams after which a call begins, and which go on after it, as CuPy's."""
        streams = [torch_stream(self._cupy, self._device)] if self._torch else []
        return [*streams, self._own()] if self._others or not streams else streams

    def _own(self):
        return self._cupy.cuda.get_current_stream(self._device)

    # Each library allocates results on its own current stream, where their memory is used and freed.

    def empty(self, shape, dtype, like):
        """New memory of the library of `like`, an argument of the call: of torch for a tensor, else of CuPy."""
        if _on_gpu(like):
            self._torch, torch = True, sys.modules["torch"]
            return torch.empty(shape, dtype=getattr(torch, np.dtype(dtype).name), device=f"cuda:{self._device}")
        self._others = True
        with self._own():
            return self._cupy.empty(shape, np.dtype(dtype))

    def copied(self, array, like):
        """A NumPy array in such memory."""
        if _on_gpu(like):
            return as_tensor(np.ascontiguousarray(array)).to(f"cuda:{self._device}")
        with self._own():
            return self._cupy.asarray(array)


def _on_gpu(like):
    """Whether an array is a tensor of a torch that has CUDA."""
    return is_tensor(like) and sys.modules["torch"].version.cuda is not None
