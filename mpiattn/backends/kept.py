"""Work arrays in memory that is kept from call to call."""

import math


class Kept:
    """Work arrays by name.

    empty: empty(shape, dtype) makes new memory, which is taken where a name has none of that dtype yet, or too little.
    """

    def __init__(self, empty):
        self._empty, self._memory = empty, {}

    def __call__(self, name, shape, dtype):
        """A contiguous array with no contents yet, good until the next of that name and dtype."""
        size = math.prod(shape)
        held = self._memory.get((name, dtype))
        if held is None or held.size < size:
            held = self._memory[name, dtype] = self._empty((size,), dtype)
        return held[:size].reshape(shape)

    def arrays(self, names=None):
        """The memory held, one array a name and dtype: of some names, None for all."""
        return [held for (name, _), held in self._memory.items() if names is None or name in names]

    def nbytes(self, names=None):
        """Bytes of that memory."""
        return sum(held.nbytes for held in self.arrays(names))

    def clear(self):
        """Give up the memory."""
        self._memory.clear()
