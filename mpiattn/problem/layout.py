"""Layouts: the tokens that each rank's chunk holds.  Pure Python and NumPy; no MPI.

Positions within a chunk increase under every layout, so the keys that a query sees are one interval of local columns
(see `mpiattn.problem.mask`).  A chunk consists of a few arithmetic progressions of tokens.  Tokens are therefore moved
by slicing, without an index array of the whole sequence.

    12 tokens on 3 ranks        rank 0        rank 1        rank 2
    contiguous                  0 1 2 3       4 5 6 7       8 9 10 11
    striped                     0 3 6 9       1 4 7 10      2 5 8 11      (Striped Attention)
    zigzag                      0 1 10 11     2 3 8 9       4 5 6 7
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import ArgumentError
from ..system.choices import one_of
from ..system.values import UNLIMITED, is_list, is_whole, whole_number
from .grid import Cart, checked_blocks, of_grid
from .pieces import Pieces

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

LAYOUTS = ("contiguous", "striped", "zigzag")
GRID, RANGES = "grid", "ranges"  # kinds that are more than a name: made by `Layout.grid` and `Layout.of_ranges`


def even_part(total: int, parts: int, i: int) -> range:
    """The i-th of `parts` consecutive ranges that cover range(total), with lengths that differ by at most 1."""
    size, extra = divmod(total, parts)
    start = i * size + min(i, extra)
    return range(start, start + size + (i < extra))


def within(tokens: range, start: int, stop: int) -> tuple[int, int]:
    """Indices i0, i1 such that tokens[i0:i1] are the members of the range `tokens` in [start, stop)."""

    def first_from(position: int) -> int:
        return min(max(-(-(position - tokens.start) // tokens.step), 0), len(tokens))

    return first_from(start), max(first_from(start), first_from(stop))


@dataclass(frozen=True)
class Layout:
    """The division of `seqlen` tokens into `chunks` chunks, one per rank; lengths may differ or be zero.

    Parameters
    ----------
    kind : str
        "contiguous": consecutive pieces in order of rank.  "striped": rank r holds the tokens r, r + chunks, and so on.
        "zigzag": of 2 * chunks consecutive pieces, rank r holds the r-th and the r-th from the end.
        "grid", "ranges": what `Layout.grid` and `Layout.of_ranges` make.
    seqlen : int
        Number of tokens in the sequence, at least 0.
    chunks : int
        Number of chunks, at least 1.
    sizes : sequence of int, default the even split
        Number of tokens in every chunk, of "contiguous".  Of "grid", by axis the lengths of the blocks along it.
    order : tuple of int, default (0, 1, ...)
        For every rank, the number of its chunk in this division.  Plans set it to assign chunks node by node, and
        stripes so that neighbours together hold a chunk of a plane.  The methods then take ranks as `chunk`.
    pieces : Pieces
        Of "ranges": the ranges of every chunk.
    cart : Cart
        Of "grid": what is known of the communicator that it was made of, which plans compare with theirs.

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
    sizes: Sequence[Any] | None = None
    order: tuple[int, ...] | None = None
    pieces: Pieces | None = None
    cart: Cart | None = field(default=None, repr=False, compare=False)
    _ranges: dict[int, tuple[range, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        one_of("layout", self.kind, (*LAYOUTS, GRID, RANGES))
        for name, value, least in (("seqlen", self.seqlen, 0), ("chunks", self.chunks, 1)):
            object.__setattr__(self, name, whole_number(name, value, least))  # ranks compare layouts by their repr
        if self.kind == GRID:
            object.__setattr__(self, "sizes", checked_blocks(self.sizes, self.seqlen, self.chunks))
        elif self.sizes is not None:
            self._check_sizes()
        of_pieces = self.pieces and (self.pieces.seqlen, self.pieces.chunks)
        if of_pieces != ((self.seqlen, self.chunks) if self.kind == RANGES else None):
            raise ArgumentError(
                f"layout is {self.kind!r} of {self.seqlen} tokens on {self.chunks} ranks, with pieces {self.pieces}; "
                "only one of ranges has pieces, of its tokens: Layout.of_ranges makes it"
            )

    def _check_sizes(self) -> None:
        sizes = self.sizes
        if not (is_list(sizes) and all(isinstance(size, Integral) for size in sizes)):
            raise ArgumentError(f"sizes is {sizes!r}; it must be whole numbers, one a chunk")
        sizes = self.__dict__["sizes"] = tuple(map(int, sizes))
        if self.kind != "contiguous":
            raise ArgumentError(f"sizes are given with layout {self.kind!r}; only 'contiguous' and 'grid' take them")
        if len(sizes) != self.chunks or sum(sizes) != self.seqlen or min(sizes) < 0:
            raise ArgumentError(
                f"sizes is {sizes}, {len(sizes)} numbers whose sum is {sum(sizes)}; it must be "
                f"{self.chunks} numbers from 0, one a chunk, whose sum is seqlen, {self.seqlen}"
            )

    @staticmethod
    def of_ranges(parts: Sequence[Any]) -> Layout:
        """Any division of the tokens: every rank holds some ranges of them.

        Parameters
        ----------
        parts : sequence, one element a rank
            The ranges of every rank, none or more of them, increasing: each a `range` of step 1 or a pair (first token,
            one after the last).  All together hold every token from 0 on once.

        Returns
        -------
        Layout

        Raises
        ------
        ArgumentError
            On this rank alone: ranges of a rank do not increase, or a token is left out or held twice.

        Examples
        --------
        >>> from mpiattn import Layout
        >>> Layout.of_ranges([[(0, 2), (5, 8)], [], [range(2, 5)]]).positions(0)
        array([0, 1, 5, 6, 7])
        """
        pieces = Pieces.of_ranges(parts)
        return Layout(RANGES, pieces.seqlen, pieces.chunks, pieces=pieces)

    @staticmethod
    def grid(
        shape: Sequence[int], cart: Any, sizes: Sequence[Sequence[int] | None] | None = None, order: str = "c"
    ) -> Layout:
        """A grid in blocks: every rank holds one, and its block as it lies in memory is its chunk.

        Parameters
        ----------
        shape : tuple of int
            Number of points along every axis.
        cart : mpi4py.MPI.Cartcomm or tuple of int
            The Cartesian communicator of the plan, with any order of ranks, or its dims with ranks in C order.  Of
            fewer dims than axes, the last axes are not divided.
        sizes : sequence, one element an axis, default the even split
            The lengths of the blocks along each axis, 0 or more points each, or None for the even split, in which the
            first blocks have one point more than the last if the number of points does not divide.
        order : {"c", "fortran"}, default "c"
            Which axis is consecutive in memory: the last, or the first as in Fortran's f(nx, ny).  With "fortran" shape
            is (nx, ny), cart has the dims (px, py), and without a communicator the ranks along x are consecutive too.

        Returns
        -------
        Layout

        Raises
        ------
        ArgumentError
            On this rank alone.

        Examples
        --------
        >>> from mpiattn import Layout
        >>> Layout.grid((3, 4), (1, 2)).positions(1)
        array([ 2,  3,  6,  7, 10, 11])
        >>> Layout.grid((4, 3), (2, 1), order="fortran").positions(1)
        array([ 2,  3,  6,  7, 10, 11])
        """
        lengths, numbers, remembered = of_grid(shape, cart, sizes, order)
        seqlen, chunks = (math.prod(map(count, lengths)) for count in (sum, len))
        return Layout(GRID, seqlen, chunks, lengths, numbers, cart=remembered)

    @cached_property
    def _pieces(self) -> Pieces | None:
        """The `Pieces` of a grid or of ranges; None of the other kinds, which have few ranges a chunk."""
        if self.kind == GRID:
            return Pieces.of_blocks(self.sizes or ()).in_order(self.order)
        return self.pieces and self.pieces.in_order(self.order)

    @property
    def striped(self) -> bool:
        """Whether the tokens of a chunk alternate with those of the others; else they are runs of consecutive tokens.

        Returns
        -------
        bool
        """
        return self.kind == "striped"

    @cached_property
    def many(self) -> bool:
        """Whether a chunk may have more ranges than the two of zigzag: a bool."""
        return self._pieces is not None and self._pieces.most > 2

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.seqlen, self.chunks, self.sizes, self.order, self.pieces))

    def __repr__(self) -> str:
        names = "kind", "seqlen", "chunks", "sizes", "order", *(("pieces",) if self.pieces else ())
        return f"Layout({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone, without ranges, which can be made again, and without what is of this process."""
        return {**{name: self.__dict__[name] for name in self.__dataclass_fields__}, "_ranges": {}, "cart": None}

    def ranges(self, chunk: int) -> tuple[range, ...]:
        """The tokens of a chunk as ranges.

        Parameters
        ----------
        chunk : int
            Number of the chunk, from 0.

        Returns
        -------
        tuple of range
            In increasing order; ranges may be empty.
        """
        ranges = self._ranges.get(chunk)  # every call asks for the same ones many times
        if ranges is None:
            if not 0 <= chunk < self.chunks:
                raise ArgumentError(f"chunk is {chunk!r}; it must be from 0 to {self.chunks - 1}")
            if self._pieces is None:
                ranges = self._of_number(chunk if self.order is None else self.order[chunk])
            else:
                ranges = self._pieces.ranges(chunk)
            self._ranges[chunk] = ranges
        return ranges

    def _of_number(self, chunk: int) -> tuple[range, ...]:
        """The tokens of the chunk of this number, before `order`."""
        if self.striped:
            return (range(chunk, max(chunk, self.seqlen), self.chunks),)
        if self.kind == "zigzag":
            pieces = 2 * self.chunks
            return tuple(even_part(self.seqlen, pieces, i) for i in (chunk, pieces - 1 - chunk))
        if self.sizes is None:
            return (even_part(self.seqlen, self.chunks, chunk),)
        start = sum(self.sizes[:chunk])
        return (range(start, start + self.sizes[chunk]),)

    def all_ranges(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """The ranges of all chunks at once.

        Returns
        -------
        starts, lengths : ndarray of int64, shape (most ranges of a chunk, chunks)
            First token and number of tokens of every range, as in `ranges`; chunks of fewer have empty ones at the end.
        step : int
            The step of all of them.
        """
        return self._all_ranges

    @cached_property
    def _all_ranges(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        chunks = np.arange(self.chunks) if self.order is None else np.array(self.order)
        if self.striped:
            return chunks[None], -(-(self.seqlen - chunks[None]).clip(0) // self.chunks), self.chunks
        if self._pieces is not None:
            return (*self._pieces.padded, 1)
        lengths = self._few_lengths
        numbers = np.stack([chunks, len(lengths) - 1 - chunks][: len(lengths) // self.chunks])
        return (np.cumsum(lengths) - lengths)[numbers], lengths[numbers], 1

    @property
    def _few_lengths(self) -> NDArray[np.int64]:
        """Number of tokens of every piece of the sequence, one a chunk or two in zigzag."""
        pieces = self.chunks * (1 + (self.kind == "zigzag"))
        size, extra = divmod(self.seqlen, pieces)
        return size + (np.arange(pieces) < extra) if self.sizes is None else np.array(self.sizes)

    @cached_property
    def owners(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the consecutive pieces begin and the last ends, and the chunk of each, unless they are striped.

        Returns
        -------
        cuts : ndarray of int64, shape (pieces + 1,)
            Positions in the sequence.
        chunks : ndarray of int64, shape (pieces,)
        """
        if self._pieces is not None:
            return self._pieces.cuts, self._pieces.owners
        lengths = self._few_lengths
        numbers = np.arange(self.chunks) if self.order is None else np.argsort(self.order)
        chunks = numbers if len(lengths) == self.chunks else np.concatenate([numbers, numbers[::-1]])
        return np.concatenate([[0], np.cumsum(lengths)]), chunks

    def between(self, chunk: int, start: int, stop: int) -> tuple[int, list[range]]:
        """The tokens of a chunk in [start, stop).

        Parameters
        ----------
        chunk : int
            Number of the chunk, from 0.
        start, stop : int
            Positions in the sequence.

        Returns
        -------
        before : int
            Number of the chunk's tokens before `start`.
        parts : list of range
            The tokens in [start, stop); no range is empty.
        """
        if self._pieces is not None:
            return self._pieces.between(chunk, start, stop)
        before, parts = 0, []
        for tokens in self.ranges(chunk):
            first, last = within(tokens, start, stop)
            before += first
            if first < last:
                parts.append(tokens[first:last])
        return before, parts

    def owner(self, positions: ArrayLike) -> NDArray[np.int64]:
        """The chunk that holds each position.

        Parameters
        ----------
        positions : array_like of int
            Positions in the sequence, from 0 to seqlen - 1.

        Returns
        -------
        ndarray of int64, shape of positions

        Raises
        ------
        ArgumentError
            On this rank alone.
        """
        positions = np.asarray(positions)
        if positions.dtype.kind not in "iu" and positions.size:
            raise ArgumentError(f"positions have dtype {positions.dtype}; they must be whole numbers")
        if positions.size and not (positions.min() >= 0 and positions.max() < self.seqlen):
            raise ArgumentError(
                f"positions are from {positions.min()} to {positions.max()}; they must be from 0 to {self.seqlen - 1}"
            )
        positions = positions.astype(np.int64)
        if not self.striped:
            cuts, chunks = self.owners
            return chunks[np.searchsorted(cuts[1:], positions, side="right")]
        chunk = positions % self.chunks
        return chunk if self.order is None else np.argsort(self.order)[chunk]

    def below(self, chunk: int, positions: ArrayLike) -> NDArray[np.int64]:
        """The number of a chunk's tokens before each position.

        Parameters
        ----------
        chunk : int
            Number of the chunk, from 0.
        positions : array_like of int
            Positions in the sequence, or past it.

        Returns
        -------
        ndarray of int64, shape of positions
        """
        positions = np.asarray(positions, np.int64)
        if self._pieces is not None:
            return self._pieces.below(chunk, positions)
        before = np.zeros_like(positions)
        for tokens in self.ranges(chunk):
            before += (-(-(positions - tokens.start) // tokens.step)).clip(0, len(tokens))
        return before

    def length(self, chunk: int) -> int:
        """The number of tokens in a chunk.

        Parameters
        ----------
        chunk : int
            Number of the chunk, from 0.

        Returns
        -------
        int
        """
        return sum(map(len, self.ranges(chunk))) if self._pieces is None else self.lengths[chunk]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens in every chunk.

        Returns
        -------
        tuple of int, length chunks
        """
        if self._pieces is not None:
            return self._pieces.lengths
        _, lengths, _ = self.all_ranges()
        return tuple(lengths.sum(axis=0).tolist())

    def positions(self, chunk: int) -> NDArray[np.int64]:
        """The positions of a chunk's tokens in the sequence.

        Parameters
        ----------
        chunk : int
            Number of the chunk, from 0.

        Returns
        -------
        ndarray of int64, shape (tokens,)
            Increasing.
        """
        if self._pieces is not None:
            return self._pieces.positions(chunk)
        return np.concatenate([np.arange(t.start, t.stop, t.step, dtype=np.int64) for t in self.ranges(chunk)])


Chunks: TypeAlias = "Layout | Sequence[int]"  # a layout, or the sizes of contiguous chunks
AnyLayout: TypeAlias = "str | Chunks | tuple[Chunks, Chunks]"  # or a kind, or those of queries and of keys


def of_sizes(given: Any, chunks: int, name: str = "layout") -> Any:
    """The contiguous `Layout` of chunks of these sizes; what is no tuple or list of whole numbers, as it is.

    Raises ArgumentError, which names the argument, unless there are `chunks` sizes, none below 0.
    """
    if not isinstance(given, tuple | list) or not all(is_whole(n, -UNLIMITED, UNLIMITED) for n in given):
        return given
    if len(given) != chunks or min(given) < 0:
        raise ArgumentError(f"{name} is {given!r}; as sizes of chunks it must be {chunks} numbers from 0, one a rank")
    return Layout("contiguous", int(sum(given)), chunks, given)
