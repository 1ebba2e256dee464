"""The arrays that hold the results of a call: the caller's if given, else new ones."""

from types import SimpleNamespace

import numpy as np

from ..errors import ArgumentError
from ..problem.tensors import as_given
from .arrays import checked_array


class Results:
    """The results of a call by name, each in the caller's memory or in new memory of a back end.

    asked: {name: (the caller's array or None, what it must be, a `Required`)} of every result.
    inputs: {name: array that the call reads, or None if it was not given}.

    Raises ArgumentError if a caller's array cannot take the result.  This holds for another kind of array, shape or
    dtype, a read-only array, strides that are no multiples of the itemsize, and memory shared with an input, with
    another result or among its own elements.
    """

    def __init__(self, backend, asked, inputs):
        self._backend, self._asked, self._arrays, others = backend, asked, {}, dict(inputs)
        self._new = {}  # those that the caller did not give, as they are returned
        for name, (memory, wanted) in asked.items():
            if memory is not None:
                array = checked_array(backend, name, memory, wanted, writable=True)
                check_own_memory(name, array, others)
                self._arrays[name] = others[name] = array

    @property
    def names(self):
        """The names of the results, in their order."""
        return tuple(self._asked)

    def arrays(self, given=None):
        """The arrays in the order of `asked`.  The first call makes those that the caller did not give.

        given: an argument of the call, of whose library these are.
        """
        for name, (_, wanted) in self._asked.items():
            if name not in self._arrays:
                self._new[name] = self._backend.result(wanted.shape, wanted.dtype, given)
                self._arrays[name] = self._backend.array(name, self._new[name])
        return tuple([self._arrays[name] for name in self._asked])

    def returned(self, given):
        """What the call returns, after `arrays`: the caller's arrays, and new ones of the library of `given`."""
        return tuple(
            [
                as_given(given, self._new[name])[0] if memory is None else memory
                for name, (memory, _) in self._asked.items()
            ]
        )


def check_own_memory(name, array, others):
    """Raise ArgumentError if elements of an array share memory with each other or with `others`, {name: array}."""
    if not array.flags.c_contiguous:
        _check_strides(name, array)
    for other, held in others.items():
        if held is not None and _overlap(array, held):
            raise ArgumentError(
                f"{name} shares memory with {other}; it must be memory that nothing else of the call uses"
            )


def _check_strides(name, array):
    """Raise ArgumentError if elements of an array share memory with each other."""
    if any(stride % array.itemsize for stride in array.strides):
        raise ArgumentError(
            f"{name} has strides {array.strides}; they must be multiples of its elements' {array.itemsize} bytes"
        )
    extent = array.itemsize  # bytes from the first to past the last, axis by axis
    for stride, count in sorted((abs(stride), count) for stride, count in zip(array.strides, array.shape) if count > 1):
        if stride < extent and array.size:
            raise ArgumentError(
                f"{name} has strides {array.strides}, so that its elements may share memory; "
                "each must have memory of its own"
            )
        extent += (count - 1) * stride


def _overlap(array, other):
    """Whether two arrays share a byte, on any device; True if the answer takes too long."""
    if not type(array) is type(other) is np.ndarray:
        array, other = _addresses(array), _addresses(other)
    if not np.may_share_memory(array, other):
        return False
    try:
        return np.shares_memory(array, other, max_work=10**6)
    except np.exceptions.TooHardError:
        return True


def _addresses(array):
    """A NumPy array at the addresses of another array, maybe on a device; for comparison only, never to be read."""
    if isinstance(array, np.ndarray) or not array.size:
        return np.asarray(array) if isinstance(array, np.ndarray) else np.empty(0)
    interface = array.__cuda_array_interface__
    return np.asarray(
        SimpleNamespace(
            __array_interface__={
                "shape": array.shape,
                "strides": array.strides,
                "typestr": f"|V{array.itemsize}",
                "data": interface["data"],
                "version": 3,
            }
        )
    )
