"""Pinned host memory for copies to and from a GPU.  Allocation takes milliseconds, so blocks are reused."""

import numpy as np

GRAIN = 2**16  # bytes to which sizes are rounded up, so that requests of similar size share blocks


class Block:
    """A block of pinned memory.

    bytes: flat uint8 array.  pointer: its address.  busy: the event of the last copy from it; None if it is free.
    """

    def __init__(self, cupy, size):
        memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(size), 0)
        self.bytes, self.pointer, self.busy = np.frombuffer(memory, np.uint8, size), memory.ptr, None


class PinnedBlocks:
    """A pool of pinned blocks.  nbytes: bytes of all allocated blocks."""

    def __init__(self, cupy):
        self.cupy, self.nbytes, self._free = cupy, 0, []

    def take(self, nbytes):
        """A free block of at least `nbytes` bytes, newly allocated if there is none."""
        free = [block for block in self._free if len(block.bytes) >= nbytes and (block.busy is None or block.busy.done)]
        if free:
            block = min(free, key=lambda block: len(block.bytes))
            self._free.remove(block)
        else:
            block = Block(self.cupy, -(-nbytes // GRAIN) * GRAIN)
            self.nbytes += len(block.bytes)
        return block

    def give(self, block, busy=None):
        """Return a block to the pool.  busy: the event after which it may be written again."""
        block.busy = busy
        self._free.append(block)

    def clear(self):
        """Free the blocks that are not in use."""
        self.nbytes -= sum(len(block.bytes) for block in self._free)
        self._free.clear()
