"""The bytes of arrays, as MPI sends and receives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

if TYPE_CHECKING:
    from numpy.typing import NDArray


BLOCK_BYTES = 2**10  # of the shortest blocks that MPI sends, many in a message, as fast as they are copied


class Blocks(NamedTuple):
    """Blocks of bytes that lie equally far apart in memory.

    number: of blocks.  nbytes: of each block.  stride: bytes from the start of a block to that of the next.
    """

    number: int
    nbytes: int
    stride: int


class Pieces(NamedTuple):
    """Tokens of an array by rank: lengths[j] of them at offsets[j].  array: of `Backend.outgoing` or `incoming`."""

    array: Any
    lengths: list[int]
    offsets: list[int]


def blocks_of(array: Any) -> Blocks | None:
    """The blocks in which the elements of an array lie, in their order; None if they do not lie so."""
    nbytes, axes = array.itemsize, [axis for axis in zip(array.shape, array.strides) if axis[0] != 1]
    while axes and axes[-1][1] == nbytes:
        nbytes *= axes.pop()[0]
    count, stride = axes.pop() if axes else (1, nbytes)
    for size, outer_stride in reversed(axes):
        if outer_stride != count * stride:
            return None
        count *= size
    return Blocks(count, nbytes, stride) if stride >= nbytes else None


def in_place(array: Any, max_message: int) -> bool:
    """Whether MPI sends or receives an array where it lies as fast as it is copied: in a piece, or in long blocks.

    max_message: bytes of the longest message; an array in blocks is sent as one.
    """
    if array.flags.c_contiguous:
        return True
    blocks = blocks_of(array) if array.size and array.nbytes <= max_message else None
    return blocks is not None and blocks.nbytes >= BLOCK_BYTES


class WireBytes(NamedTuple):
    """The bytes that MPI sends or receives for an array: a flat uint8 array, in memory that MPI can access.

    by_peer: by_peer(rank) returns the `WireBytes` of a message to or from that rank of the plan, where they depend on
        the rank; the other fields then mean nothing.  Not for collective calls.
    blocks: where in the array the bytes of the message lie; None if it is all of the array.
    ready: ready(start, stop) begins to make these bytes ready; it returns a function that says whether MPI may use them
        now.  None if MPI may use all bytes at once.
    taken: taken(start, stop) is called as soon as MPI has received these bytes; None if no call is needed.
    piece: maximum bytes of a message, the same on every rank.  It lets one piece travel while the next is made ready.
        None for no maximum.
    over: over(start, stop) is called, once MPI has sent or received these bytes and `taken` has returned, until it
        returns true: the transfer is not complete before.  None if no call is needed.
    stands_for: bytes of the message that the array stands for, if its own bytes only say where they are.
    """

    array: Any
    ready: Callable[[int, int], Callable[[], bool]] | None = None
    taken: Callable[[int, int], object] | None = None
    piece: int | None = None
    blocks: Blocks | None = None
    over: Callable[[int, int], bool] | None = None
    stands_for: int | None = None
    by_peer: Callable[[int], WireBytes] | None = None

    @property
    def nbytes(self) -> int:
        """Length of the messages."""
        if self.stands_for is not None:
            return self.stands_for
        return len(self.array) if self.blocks is None else self.blocks.number * self.blocks.nbytes


def flat(array: NDArray) -> NDArray[np.uint8]:
    """The bytes of a contiguous array as a flat uint8 view."""
    return array.reshape(-1).view(np.uint8)


def in_memory(array: NDArray) -> WireBytes:
    """`WireBytes` of an array in host memory, which is contiguous or lies in blocks."""
    if array.flags.c_contiguous:
        return WireBytes(flat(array))
    blocks = blocks_of(array)
    if blocks is None:
        raise ValueError("an array to send or receive must be contiguous or lie in blocks")
    span = (blocks.number - 1) * blocks.stride + blocks.nbytes
    first = as_strided(array, (1,), (array.itemsize,)).view(np.uint8)
    return WireBytes(as_strided(first, (span,), (1,)), blocks=blocks)
