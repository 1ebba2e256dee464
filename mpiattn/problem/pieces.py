"""A sequence cut into pieces of consecutive tokens, each held by a chunk.  Pure Python and NumPy; no MPI.

Any division of the tokens into increasing ranges is one: blocks of a grid in C order, or whatever a caller lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..system.values import is_list, is_whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    IntArray = NDArray[np.int64]

SHOWN = 12  # ranges that a repr lists; of more it gives their number and a digest


class ByChunk(NamedTuple):
    """Pieces one chunk after another, those of a chunk in order of position.

    starts, stops: of every piece.  before: number of the chunk's tokens before it.
    first: the first piece of every chunk, and at last the number of all pieces.
    """

    starts: IntArray
    stops: IntArray
    before: IntArray
    first: IntArray


class Pieces:
    """The pieces of a sequence and the chunk of each.

    cuts: where the pieces begin, and at last where the sequence ends: int64 (pieces + 1,), increasing.
    owners: the chunk of each: int64 (pieces,).  Neighbours have different ones: pieces are as long as can be.
    Of no tokens there is one piece, an empty one of chunk 0.
    """

    def __init__(self, cuts: IntArray, owners: IntArray, chunks: int) -> None:
        if not len(owners):
            cuts, owners = np.zeros(2, np.int64), np.zeros(1, np.int64)
        begins = np.ones(len(owners), bool)
        begins[1:] = owners[1:] != owners[:-1]
        self.cuts, self.owners, self.chunks = np.append(cuts[:-1][begins], cuts[-1:]), owners[begins], chunks

    @classmethod
    def of_blocks(cls, sizes: Sequence[Sequence[int]]) -> Pieces:
        """Those of the blocks of a grid in C order; sizes: by axis, the lengths of the blocks, from 0."""
        shape, dims = [sum(of_axis) for of_axis in sizes], [len(of_axis) for of_axis in sizes]
        divided = max([axis for axis, parts in enumerate(dims) if parts > 1], default=0)
        row = int(np.prod(shape[divided + 1 :], dtype=np.int64))  # tokens at each place of the last axis that is cut
        owners = np.zeros(1, np.int64)
        for of_axis in sizes[:divided]:
            block = np.repeat(np.arange(len(of_axis)), of_axis)
            owners = (owners[:, None] * len(of_axis) + block).ravel()
        lengths = np.array(sizes[divided], np.int64)
        some = np.flatnonzero(lengths)
        ends = (np.cumsum(lengths) * row)[some]
        starts = np.arange(len(owners))[:, None] * (shape[divided] * row) + (ends - lengths[some] * row)
        owners = owners[:, None] * len(lengths) + some
        if 0 in shape:
            starts, owners = starts[:0], owners[:0]
        return cls(np.append(starts, int(np.prod(shape, dtype=np.int64))), owners.ravel(), int(np.prod(dims)))

    @classmethod
    def of_ranges(cls, parts: Any) -> Pieces:
        """Those that `Layout.of_ranges` is given; raises ArgumentError."""
        if not isinstance(parts, Sequence) or isinstance(parts, str) or not parts:
            raise ArgumentError(f"parts is {parts!r}; it must be a tuple or list, with the ranges of every rank")
        ends, owners = [], []
        for rank, of_rank in enumerate(parts):
            before = 0
            for start, stop in _pairs(of_rank, rank):
                if start < before:
                    raise ArgumentError(
                        f"parts has ranges of rank {rank} that do not increase: ({start}, {stop}) comes after a range "
                        f"that ends at {before}"
                    )
                before = stop
                if start < stop:
                    ends.append((start, stop))
                    owners.append(rank)
        starts, stops = np.array(ends, np.int64).reshape(-1, 2).T
        order = np.argsort(starts, kind="stable")
        starts, stops, by_start = starts[order], stops[order], np.array(owners, np.int64)[order]
        expected = np.concatenate([[0], stops[:-1]])[: len(starts)]
        wrong = np.flatnonzero(starts != expected)
        if len(wrong):
            i = int(wrong[0])
            rank, token = int(by_start[i]), int(min(starts[i], expected[i]))
            if starts[i] > expected[i]:
                raise ArgumentError(f"parts leaves out token {token}; each must be on one rank")
            other = int(by_start[i - 1])
            raise ArgumentError(
                f"parts has token {token} on rank {other} and again on rank {rank}; each must be on one rank"
            )
        return cls(np.append(starts, stops[-1:] if len(stops) else 0), by_start, len(parts))

    def in_order(self, order: Sequence[int] | None) -> Pieces:
        """The same with chunk order[i] as chunk i."""
        return self if order is None else Pieces(self.cuts, np.argsort(order)[self.owners], self.chunks)

    @property
    def seqlen(self) -> int:
        """Number of tokens."""
        return int(self.cuts[-1])

    @cached_property
    def by_chunk(self) -> ByChunk:
        """The pieces of every chunk."""
        order = np.argsort(self.owners, kind="stable")
        starts, stops = self.cuts[:-1][order], self.cuts[1:][order]
        first = np.searchsorted(self.owners[order], np.arange(self.chunks + 1))
        before = np.cumsum(stops - starts) - (stops - starts)
        of_chunk = np.append(before, self.seqlen)[first[:-1]]
        return ByChunk(starts, stops, before - np.repeat(of_chunk, np.diff(first)), first)

    @cached_property
    def most(self) -> int:
        """The most pieces of a chunk."""
        return int(np.diff(self.by_chunk.first).max())

    @cached_property
    def padded(self) -> tuple[IntArray, IntArray]:
        """First token and number of tokens of every piece of every chunk: int64 (most pieces of a chunk, chunks).

        A chunk of fewer pieces has empty ones, where its last one ends.
        """
        starts, stops, _, first = self.by_chunk
        many = np.diff(first)
        at = np.arange(max(self.most, 1))[:, None]
        there = at < many
        last = np.where(many > 0, np.append(stops, 0)[first[1:] - 1], 0)
        index = np.where(there, first[:-1] + at, 0)
        begins = np.where(there, np.append(starts, 0)[index], last)
        return begins, np.where(there, np.append(stops, 0)[index] - begins, 0)

    def ranges(self, chunk: int) -> tuple[range, ...]:
        """The tokens of a chunk; at least one range, which is empty if the chunk is."""
        starts, stops, _, first = self.by_chunk
        some = slice(first[chunk], first[chunk + 1])
        return tuple(map(range, starts[some].tolist(), stops[some].tolist())) or (range(0),)

    def between(self, chunk: int, start: int, stop: int) -> tuple[int, list[range]]:
        """As `Layout.between`."""
        starts, stops, before, first = self.by_chunk
        some = slice(first[chunk], first[chunk + 1])
        starts, stops, before = starts[some], stops[some], before[some]
        if not len(starts):
            return 0, []
        at, end = int(stops.searchsorted(start, "right")), int(starts.searchsorted(stop, "left"))
        if at == len(stops):
            return int(before[-1] + stops[-1] - starts[-1]), []
        begun = int(before[at]) + max(start - int(starts[at]), 0)
        lows, highs = starts[at:end].clip(min=start), stops[at:end].clip(max=stop)
        return begun, [range(low, high) for low, high in zip(lows.tolist(), highs.tolist()) if low < high]

    def below(self, chunk: int, positions: IntArray) -> IntArray:
        """As `Layout.below`."""
        starts, stops, before, first = self.by_chunk
        some = slice(first[chunk], first[chunk + 1])
        starts, ends = starts[some], np.append((before + stops - starts)[some], 0)
        at = starts.searchsorted(positions, "left") - 1  # the last piece that begins before
        return np.minimum(np.append(before[some], 0)[at] + positions - np.append(starts, 0)[at], ends[at]) * (at >= 0)

    def positions(self, chunk: int) -> IntArray:
        """The tokens of a chunk, as `Layout.positions`."""
        starts, stops, before, first = self.by_chunk
        some = slice(first[chunk], first[chunk + 1])
        apart, lengths = (starts - before)[some], (stops - starts)[some]
        return np.repeat(apart, lengths) + np.arange(lengths.sum())

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of every chunk."""
        starts, stops, _, first = self.by_chunk
        return tuple(np.diff(np.concatenate([[0], np.cumsum(stops - starts)])[first]).tolist())

    @cached_property
    def _digest(self) -> bytes:
        return sha256(self.cuts.tobytes() + self.owners.tobytes() + bytes(str(self.chunks), "ascii")).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pieces) and (self is other or self._digest == other._digest)

    def __hash__(self) -> int:
        return hash(self._digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return Pieces, (self.cuts, self.owners, self.chunks)

    def __repr__(self) -> str:
        if len(self.owners) + self.chunks <= SHOWN:
            return repr(tuple(tuple((t.start, t.stop) for t in self.ranges(i) if t) for i in range(self.chunks)))
        return f"<{len(self.owners)} ranges, SHA-256 {self._digest[:8].hex()}>"


def _pairs(of_rank: Any, rank: int) -> list[tuple[int, int]]:
    """The ranges of one rank as pairs; raises ArgumentError."""
    if isinstance(of_rank, range):
        of_rank = (of_rank,)
    pairs = []
    for tokens in of_rank if is_list(of_rank) else (of_rank,):
        if isinstance(tokens, range) and tokens.step == 1:
            pair: Any = tokens.start, max(tokens.start, tokens.stop)
        else:
            pair = tuple(tokens) if is_list(tokens) and not isinstance(tokens, range) else ()
        whole = all(is_whole(end, 0) for end in pair)
        if len(pair) != 2 or not whole or pair[0] > pair[1]:
            raise ArgumentError(
                f"parts has {tokens!r} on rank {rank}; it must be a range of step 1, or a pair: the first token "
                "and the one after the last"
            )
        pairs.append((int(pair[0]), int(pair[1])))
    return pairs
