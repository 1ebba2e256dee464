"""The arrays that a call's results are written into: the caller's, where he gives some, or new ones."""

from types import SimpleNamespace

import numpy as np

from ..errors import ArgumentError
from ..problem.tensors import as_given
from .folding import checked


class Results:
    """Results by name, each in the caller's memory or in new memory of a back end.

    asked: by name what the caller gave, None for nothing, and the shape and the dtype of the result.
    inputs: by name the arrays that the call reads, None for one that was not given.

    Raises ArgumentError where what the caller gave cannot be written into: another kind of array, shape or dtype,
    read-only, strides of broken elements, or memory that it shares with an input, with another result, or with itself.
    """

    def __init__(self, backend, asked, inputs):
        self._backend, self._asked, self._arrays = backend, asked, {}
        for name, (thing, shape, dtype) in asked.items():
            if thing is not None:
                array = checked(backend, name, thing, shape, dtype, writable=True)
                _check_own_memory(name, array, {**inputs, **self._arrays})
                self._arrays[name] = array

    def arrays(self):
        """The arrays in the order of their names, those that the caller did not give made at the first call."""
        for name, (_, shape, dtype) in self._asked.items():
            if name not in self._arrays:
                self._arrays[name] = self._backend.result(shape, dtype)
        return tuple(self._arrays[name] for name in self._asked)

    def returned(self, given):
        """What the call returns: what the caller gave, and new ones as tensors where `given`, an argument, is one."""
        return tuple(as_given(given, array)[0] if thing is None else thing
                     for array, (thing, *_) in zip(self.arrays(), self._asked.values()))


def _check_own_memory(name, array, others):
    """Raise ArgumentError unless every element of an array is a place of its own, and none of the others', by name."""
    if any(stride % array.itemsize for stride in array.strides):
        raise ArgumentError(f"{name} has strides {array.strides}; they must be multiples of its elements' "
                            f"{array.itemsize} bytes")
    if any(count > 1 and not stride for count, stride in zip(array.shape, array.strides)):
        raise ArgumentError(f"{name} has strides {array.strides}, so that some of its elements are one and the same; "
                            "each must have memory of its own")
    for other, held in others.items():
        if held is not None and _overlap(array, held):
            raise ArgumentError(f"{name} shares memory with {other}; it must be memory that nothing else of the call "
                                "uses")


def _overlap(array, other):
    """Whether two arrays, of any devices, have a byte in common."""
    first, second = map(_addresses, (array, other))
    if not np.may_share_memory(first, second):
        return False
    try:
        return np.shares_memory(first, second, max_work=10 ** 6)
    except np.exceptions.TooHardError:
        return True


def _addresses(array):
    """An array that lies where another one does, maybe on a device: to ask where that is, never to be read."""
    if isinstance(array, np.ndarray) or not array.size:
        return np.asarray(array) if isinstance(array, np.ndarray) else np.empty(0)
    interface = array.__cuda_array_interface__
    return np.asarray(SimpleNamespace(__array_interface__={
        "shape": array.shape, "strides": array.strides, "typestr": f"|V{array.itemsize}", "data": interface["data"],
        "version": 3}))
