"""Layouts: which tokens each rank's chunk holds.  Pure Python and NumPy; no MPI.

Under every layout the positions of a chunk increase, so a row's keys are one interval of local
columns (see `mpiattn.problem.mask`).  Each chunk is a few arithmetic progressions of tokens, so tokens are
moved by slicing and no index array of the whole sequence is ever made.

    12 tokens on 3 ranks        rank 0        rank 1        rank 2
    contiguous                  0 1 2 3       4 5 6 7       8 9 10 11
    striped                     0 3 6 9       1 4 7 10      2 5 8 11      (Striped Attention)
    zigzag                      0 1 10 11     2 3 8 9       4 5 6 7
"""

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from ..errors import ArgumentError

KINDS = ("contiguous", "striped", "zigzag")


def even_part(total, parts, i):
    """The i-th of `parts` consecutive ranges of `total` things, whose lengths differ by one at most."""
    size, extra = divmod(total, parts)
    start = i * size + min(i, extra)
    return range(start, start + size + (i < extra))


def within(tokens, start, stop):
    """Indices i0, i1 such that tokens[i0:i1] are the members of the range that lie in [start, stop)."""
    def first_from(position):
        return min(max(-(-(position - tokens.start) // tokens.step), 0), len(tokens))
    return first_from(start), max(first_from(start), first_from(stop))


@dataclass(frozen=True)
class Layout:
    """The cut of `seqlen` tokens into `chunks` chunks, one a rank; lengths may be uneven or zero.

    Parameters
    ----------
    kind : str
        "contiguous": consecutive pieces in order of rank.  "striped": rank r holds the tokens r, r + chunks, and so on.
        "zigzag": of 2 * chunks consecutive pieces, rank r holds the r-th and the r-th from the end.
    seqlen : int
        Tokens of the sequence, from 0.
    chunks : int
        How many chunks, from 1.
    sizes : sequence of int, default the even split
        For "contiguous" only, the tokens of every chunk.
    order : tuple of int, default (0, 1, ...)
        The number in this cut of the chunk that each rank holds: a plan gives its chunks to ranks node by node.  The
        methods then go by rank.

    Raises
    ------
    ArgumentError
        On this rank alone.

    Examples
    --------
    >>> from mpiattn import Layout
    >>> Layout("zigzag", 8, 2).positions(0)
    array([0, 1, 6, 7])
    >>> Layout("contiguous", 8, 3, sizes=(5, 0, 3)).lengths
    (5, 0, 3)
    """

    kind: str
    seqlen: int
    chunks: int
    sizes: tuple = None
    order: tuple = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ArgumentError(f"layout is {self.kind!r}; it may be {', '.join(KINDS)}")
        for name, value, least in (("seqlen", self.seqlen, 0), ("chunks", self.chunks, 1)):
            if not isinstance(value, Integral) or value < least:
                raise ArgumentError(f"{name} is {value!r}; it must be a whole number, at least {least}")
        if self.sizes is None:
            return
        if not (isinstance(self.sizes, Iterable) and all(isinstance(size, Integral) for size in self.sizes)):
            raise ArgumentError(f"sizes is {self.sizes!r}; it must be whole numbers, one a chunk")
        object.__setattr__(self, "sizes", tuple(map(int, self.sizes)))
        if self.kind != "contiguous":
            raise ArgumentError(f"sizes are given with layout {self.kind!r}; only 'contiguous' takes them")
        if len(self.sizes) != self.chunks or sum(self.sizes) != self.seqlen or min(self.sizes) < 0:
            raise ArgumentError(f"sizes {self.sizes} do not cut {self.seqlen} tokens into {self.chunks} chunks")

    def ranges(self, chunk):
        """The tokens of a chunk as a tuple of Python ranges, in increasing order."""
        chunk = chunk if self.order is None else self.order[chunk]
        if self.kind == "striped":
            return (range(chunk, max(chunk, self.seqlen), self.chunks),)
        if self.kind == "zigzag":
            pieces = 2 * self.chunks
            return tuple(even_part(self.seqlen, pieces, i) for i in (chunk, pieces - 1 - chunk))
        if self.sizes is None:
            return (even_part(self.seqlen, self.chunks, chunk),)
        start = sum(self.sizes[:chunk])
        return (range(start, start + self.sizes[chunk]),)

    def between(self, chunk, start, stop):
        """How many tokens of a chunk lie before `start`, and those in [start, stop) as ranges, none of them empty."""
        before, parts = 0, []
        for tokens in self.ranges(chunk):
            first, last = within(tokens, start, stop)
            before += first
            if first < last:
                parts.append(tokens[first:last])
        return before, parts

    def owner(self, positions):
        """The chunk that holds each of some positions: int64 of their shape.  Raises ArgumentError."""
        positions = np.asarray(positions)
        if positions.dtype.kind not in "iu" and positions.size:
            raise ArgumentError(f"positions have dtype {positions.dtype}; they must be whole numbers")
        if positions.size and not (positions.min() >= 0 and positions.max() < self.seqlen):
            raise ArgumentError(f"positions are from {positions.min()} to {positions.max()}; they must be from 0 to "
                                f"{self.seqlen - 1}")
        positions = positions.astype(np.int64)
        if self.kind == "striped":
            chunk = positions % self.chunks
        else:
            pieces = self.chunks * (1 + (self.kind == "zigzag"))
            sizes = self.sizes or [len(even_part(self.seqlen, pieces, i)) for i in range(pieces)]
            chunk = np.searchsorted(np.cumsum(sizes), positions, side="right")
            if self.kind == "zigzag":
                chunk = np.minimum(chunk, pieces - 1 - chunk)
        return chunk if self.order is None else np.argsort(self.order)[chunk]

    def length(self, chunk):
        """Number of tokens in a chunk."""
        return sum(len(tokens) for tokens in self.ranges(chunk))

    @property
    def lengths(self):
        """Number of tokens in every chunk."""
        return tuple(self.length(chunk) for chunk in range(self.chunks))

    def positions(self, chunk):
        """Global positions of a chunk's tokens: int64, increasing."""
        return np.concatenate([np.arange(t.start, t.stop, t.step, dtype=np.int64) for t in self.ranges(chunk)])
