"""Arrays in memory as programs have it: any order of axes, steps between elements, guard bytes all around."""

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

GUARD = 0xA5  # of every byte that no element has
MARGIN = 4096  # guard bytes before the first element and after the last


class Kind(NamedTuple):
    """How the elements of an array lie in memory.

    order: axes from the slowest to the fastest, counted from the end, where they are not in C order.
    steps: of the last axes: how many times as far apart neighbours are as they have to be; negative ones go backward.
    shift: bytes that the memory begins off its alignment.
    """

    order: tuple = ()
    steps: tuple = (1,)
    shift: int = 0


KINDS = {
    "plain": Kind(),
    "transposed": Kind(order=(-1, -2)),
    "heads first": Kind(order=(-2, -3, -1)),
    "fortran": Kind(order=(-1, -2, -3, -4)),
    "every second": Kind(steps=(2,)),
    "reversed": Kind(steps=(-1,)),
    "all reversed": Kind(steps=(-1, -1, -1, -1)),
    "gaps": Kind(steps=(1, 3, 2, 1)),
    "backward in gaps": Kind(steps=(2, -2, 1, -3)),
    "far apart": Kind(steps=(1, 1, 257, 1)),
    "columns far apart": Kind(order=(-1, -2), steps=(31, 1)),
    "misaligned": Kind(shift=1),
}


class Memory:
    """An array of some kind of memory between guard bytes."""

    def __init__(self, kind, shape, dtype):
        dtype, axes = np.dtype(dtype), len(shape)
        order = [axis + axes for axis in kind.order if axis + axes >= 0]
        order = [axis for axis in range(axes) if axis not in order] + order
        steps = ([1] * axes + list(kind.steps))[-axes:] if axes else []
        strides, extent = [0] * axes, dtype.itemsize
        for axis in reversed(order):
            strides[axis] = extent * steps[axis]
            extent = abs(strides[axis]) * max(shape[axis], 1)
        start = MARGIN + kind.shift - sum(min(0, (n - 1) * stride) for n, stride in zip(shape, strides) if n)
        self._bytes = np.full(extent + 2 * MARGIN + kind.shift, GUARD, np.uint8)
        self._outside = np.ones(len(self._bytes), bool)
        self.array = np.ndarray(shape, dtype, self._bytes, start, strides)
        if self.array.size:
            as_strided(self._outside[start:], (*shape, dtype.itemsize), (*strides, 1))[...] = False

    @classmethod
    def of(cls, kind, array):
        """The memory of such an array with the elements of another."""
        memory = cls(kind, array.shape, array.dtype)
        memory.array[...] = array
        return memory

    @property
    def intact(self):
        """Whether nothing was written outside of the array."""
        return bool((self._bytes[self._outside] == GUARD).all())


def repeated(array, axis):
    """The first numbers along an axis for all of it: read-only, with a stride of 0."""
    return np.broadcast_to(array.take([0], axis), array.shape)
