"""Small arrays sent to the GPU at each call, such as which keys the queries of a decoding call see.

CuPy takes new pinned memory for each copy whose turn has not come yet, which takes longer than a decoding launch.  Here
a copy takes the next bytes of a ring: pinned memory, and as much on the GPU.
"""

import numpy as np

from .pinned import Block

LENGTH = 2**17  # numbers in each half of the ring
STEP = 64  # numbers; so that arrays begin at multiples of 256 bytes


class Uploads:
    """A ring of two halves.  A half is written again when all that was launched before it was left has been done.

    gpu: the back end; copies are launched on its stream, as is what uses them.
    """

    def __init__(self, gpu):
        self.gpu, self._next = gpu, 0
        self._pinned = self._numbers = self._memory = None
        self._left = [None, None]  # by half, an event after everything that uses it

    def __call__(self, array):
        """A flat int32 NumPy array on the GPU, for launches that follow at once; None if it is too long."""
        length = -(-len(array) // STEP) * STEP
        if length > LENGTH // 8:
            return None
        if self._pinned is None:
            with self.gpu.cupy.cuda.Device(self.gpu.device):
                self._pinned = Block(self.gpu.cupy, 2 * LENGTH * 4)
            self._numbers = self._pinned.bytes.view(np.int32)
            self._memory = self.gpu.empty((2 * LENGTH,), np.int32)
        half, used = divmod(self._next, LENGTH)
        if used + length > LENGTH or not used:  # this half is full, or the next one begins
            self._enter(half if not used else 1 - half)
        start, stop = self._next, self._next + len(array)
        self._next = (start + length) % (2 * LENGTH)
        self._numbers[start:stop] = array
        memory, runtime = self._memory[start:stop], self.gpu.cupy.cuda.runtime
        runtime.memcpyAsync(
            memory.data.ptr,
            self._pinned.pointer + 4 * start,
            array.nbytes,
            runtime.memcpyHostToDevice,
            self.gpu.stream.ptr,
        )
        return memory

    def _enter(self, half):
        """Go on at the beginning of a half, after all that uses it."""
        self._left[1 - half] = self.gpu.event(self.gpu.stream)
        self.gpu.wait(self._left[half])
        self._next = half * LENGTH
