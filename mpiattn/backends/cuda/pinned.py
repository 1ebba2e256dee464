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
    """A pool of pinned blocks.  nbytes: bytes of all allocated blocks.

    device: the number of the GPU.  It is made current to allocate and to free: either opens the current GPU, which in
    another thread of the caller's may be another one.
    """

    def __init__(self, cupy, device):
        self.cupy, self.device, self.nbytes, self._free = cupy, device, 0, []

    def take(self, nbytes):
        """A free block of at least `nbytes` bytes, newly allocated if there is none."""
        free = [block for block in self._free if len(block.bytes) >= nbytes and (block.busy is None or block.busy.done)]
        if free:
            block = min(free, key=lambda block: len(block.bytes))
            self._free.remove(block)
        else:
            with self.cupy.cuda.Device(self.device):
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
        with self.cupy.cuda.Device(self.device):
            self._free.clear()
