"""Work arrays whose memory is reused from call to call."""

import math


class Kept:
    """Work arrays by name.

    empty: empty(shape, dtype) allocates.  It is called when a name has no memory of that dtype, or too little.
    """

    def __init__(self, empty):
        self._empty, self._memory = empty, {}

    def __call__(self, name, shape, dtype):
        """A contiguous, uninitialized array, valid until the next request for that name and dtype."""
        size = math.prod(shape)
        return self.memory(name, size, dtype)[:size].reshape(shape)

    def memory(self, name, size, dtype):
        """The same as a flat array of `size` elements or more; making views takes longer than a short launch."""
        held = self._memory.get((name, dtype))
        if held is None or held.size < size:
            held = self._memory[name, dtype] = self._empty((size,), dtype)
        return held

    def names(self):
        """The names that have memory."""
        return {name for name, _ in self._memory}

    def arrays(self, names=None):
        """The memory held, one flat array per name and dtype.  names: which names; None for all."""
        return [held for (name, _), held in self._memory.items() if names is None or name in names]

    def nbytes(self, names=None):
        """Total bytes of `arrays(names)`."""
        return sum(held.nbytes for held in self.arrays(names))

    def clear(self):
        """Free the memory."""
        self._memory.clear()
