"""Memory that the passes of a plan share: they never run at the same time."""

import math
from weakref import WeakSet

import numpy as np

from ..schedule.sharing import stack

ALIGNMENT = 256  # bytes; of every array, as of CUDA's own allocations


class Pool:
    """One piece of a back end's memory, in which each user's arrays begin at the same first byte.

    It grows to what the largest user needs.  It then takes their arrays from all users: see `arrays`.
    """

    def __init__(self, backend):
        self.backend, self._memory, self._users = backend, None, WeakSet()

    @property
    def nbytes(self):
        """Bytes that the pool has."""
        return 0 if self._memory is None else self._memory.nbytes

    def arrays(self, user, wanted, below):
        """Uninitialized arrays for `user`, which the other users' arrays overlap.

        Returns {name: tuple of arrays}, and {name: the bytes [start, stop) of the pool in which they lie}.

        wanted: {name: [(shape, dtype) of each array, or None for no array]}.
        below: {name: the names whose arrays lie below those of this one}, every name after those below it.  Arrays of
            other names may share memory.
        user: its method `drop` is called when the memory is replaced; it must keep no array then.
        """
        each = {
            name: [array and (array[0], np.dtype(array[1]), _aligned(*array)) for array in arrays]
            for name, arrays in wanted.items()
        }
        sizes = {name: sum(array[2] for array in of if array) for name, of in each.items()}
        starts, end = stack(below, sizes)
        if self._memory is None or self.nbytes < end:
            self._replace(int(end))
        self._users.add(user)
        arrays = {name: tuple(self._cut(of, int(starts[name]))) for name, of in each.items()}
        return arrays, {name: (start, start + sizes[name]) for name, start in starts.items()}

    def _cut(self, arrays, start):
        """Arrays one after another from a byte on."""
        for array in arrays:
            if array is None:
                yield None
                continue
            shape, dtype, size = array
            yield self._memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            start += size

    def forget(self):
        """Tell the back end that no array's contents are needed any more."""
        if self._memory is not None:
            self.backend.forget(self._memory)

    def _replace(self, nbytes):
        """Free the memory, then take as much; what no longer is needed is not held beside it."""
        if self._memory is not None:
            self.backend.drain()  # launches of the call before may still use it
        for user in self._users:
            user.drop()
        self._memory = None
        self._memory = self.backend.empty((nbytes,), np.uint8)


def _aligned(shape, dtype):
    """Bytes of an array and of the gap behind it."""
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
