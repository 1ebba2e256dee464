"""Memory that the passes of a plan share: they never run at the same time."""

import math
from itertools import accumulate
from weakref import WeakSet

import numpy as np

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

    def arrays(self, user, wanted):
        """Uninitialized arrays for `user`, which the other users' arrays overlap; {name: tuple of arrays}.

        wanted: {name: [(shape, dtype) of each array, or None for no array]}.
        user: its method `drop` is called when the memory is replaced; it must keep no array then.
        """
        each = [array and (array[0], np.dtype(array[1])) for arrays in wanted.values() for array in arrays]
        sizes = [math.prod(array[0]) * array[1].itemsize if array else 0 for array in each]
        starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        if self._memory is None or self.nbytes < starts[-1]:
            self._replace(starts[-1])
        self._users.add(user)
        cut = iter(
            array and self._memory[start : start + size].view(array[1]).reshape(array[0])
            for array, start, size in zip(each, starts, sizes)
        )
        return {name: tuple([next(cut) for _ in arrays]) for name, arrays in wanted.items()}

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
