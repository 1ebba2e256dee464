"""Pinned host memory for copies to and from a GPU: made once, which takes milliseconds, and used again."""

import numpy as np

GRAIN = 2 ** 16            # bytes; blocks of nearly the same size serve each other


class Block:
    """Some pinned memory.

    bytes: flat uint8 array.  pointer: its address.  busy: the event of the last copy from it, None where it is free.
    """

    def __init__(self, cupy, size):
        memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(size), 0)
        self.bytes, self.pointer, self.busy = np.frombuffer(memory, np.uint8, size), memory.ptr, None


class PinnedBlocks:
    """Blocks of pinned memory by size.  nbytes: of all that were made."""

    def __init__(self, cupy):
        self.cupy, self.nbytes, self._free = cupy, 0, []

    def take(self, nbytes):
        """A block of at least so many bytes."""
        free = [block for block in self._free if len(block.bytes) >= nbytes and (block.busy is None or block.busy.done)]
        if free:
            block = min(free, key=lambda block: len(block.bytes))
            self._free.remove(block)
        else:
            block = Block(self.cupy, -(-nbytes // GRAIN) * GRAIN)
            self.nbytes += len(block.bytes)
        return block

    def give(self, block, busy=None):
        """Give a block back; busy: the event after which it may be written again."""
        block.busy = busy
        self._free.append(block)

    def clear(self):
        """Give up the blocks that nobody has."""
        self.nbytes -= sum(len(block.bytes) for block in self._free)
        self._free.clear()
