"""Which rank holds which token of a sequence that grows and shrinks: a rule that all ranks evaluate alike.

Tokens come in two ways.  Chunks that ranks hold already, say after a prefill, are placed where they are, as a `Layout`
cuts them.  Further tokens go to the ranks that hold the fewest, in turn, until all hold equally many:

    ranks 0 and 1 were given 5 and 3 tokens, rank 2 none; then the next 10 go to    2 2 2 1 2 1 2 0 1 2

So a sequence is a few pieces, each of which is a Python range of positions on every rank; nothing grows with its
length.  A rank's own positions increase.
"""

from dataclasses import dataclass

import numpy as np

from .errors import ArgumentError
from .layout import Layout, within


@dataclass(frozen=True)
class _Piece:
    """Positions [start, stop), cut by a layout or dealt to `members` in turn; stop is None for one without end."""

    start: int
    stop: int | None
    layout: Layout = None
    members: tuple = ()

    def ranges(self, rank, stop):
        """The positions below `stop` of a rank, as ranges."""
        stop = stop if self.stop is None else min(stop, self.stop)
        if self.layout is not None:
            cut = (tokens[:within(tokens, 0, stop - self.start)[1]] for tokens in self.layout.ranges(rank))
            return [range(t.start + self.start, t.stop + self.start, t.step) for t in cut if t]
        if rank not in self.members:
            return []
        mine = range(self.start + self.members.index(rank), stop, len(self.members))
        return [mine] if mine else []

    def counts(self, ranks, stop):
        """Tokens below `stop` of every rank: int64."""
        stop = stop if self.stop is None else min(stop, self.stop)
        if self.layout is not None:
            return np.array([sum(map(len, self.ranges(rank, stop))) for rank in range(ranks)], np.int64)
        counts = np.zeros(ranks, np.int64)
        each, more = divmod(max(stop - self.start, 0), len(self.members))
        counts[list(self.members)] = each
        counts[list(self.members[:more])] += 1
        return counts


class Ledger:
    """The tokens of one sequence on `ranks` ranks; where all hold equally many, `first` takes the next one.

    seqlen: number of tokens.  counts: number of tokens of every rank, int64, not to be changed.
    """

    def __init__(self, ranks, first=0):
        self.chunks, self.first = ranks, first % ranks
        self.seqlen = 0
        self._pieces, self._dealt_from = [], None          # where the pieces begin that dealing has planned
        self.counts = np.zeros(ranks, np.int64)

    def copy(self):
        """Another with the same tokens."""
        other = Ledger(self.chunks, self.first)
        other.seqlen, other._pieces, other._dealt_from = self.seqlen, list(self._pieces), self._dealt_from
        other.counts = self.counts
        return other

    # A ledger serves as a layout where only these are asked for.

    @property
    def lengths(self):
        """Number of tokens of every rank."""
        return tuple(self.counts.tolist())

    def length(self, rank):
        """Number of tokens of a rank."""
        return int(self.counts[rank])

    def ranges(self, rank, start=0):
        """The positions of a rank's tokens, those from `start` on, as a tuple of ranges in increasing order."""
        found = (part[within(part, start, self.seqlen)[0]:] for piece in self._pieces
                 if piece.stop is None or piece.stop > start for part in piece.ranges(rank, self.seqlen))
        return tuple(part for part in found if part)

    def positions(self, rank):
        """Positions of a rank's tokens: int64, increasing."""
        parts = [np.arange(t.start, t.stop, t.step, dtype=np.int64) for t in self.ranges(rank)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def below(self, rank, positions):
        """How many of a rank's tokens lie before each of some positions: int64 of their shape."""
        positions = np.minimum(np.asarray(positions, np.int64), self.seqlen)
        if positions.size and (positions == self.seqlen).all():
            return np.full(positions.shape, self.counts[rank])
        total = np.zeros(positions.shape, np.int64)
        for t in self.ranges(rank):
            total += np.clip(-(-(positions - t.start) // t.step), 0, len(t))
        return total

    # Changes

    def place(self, layout):
        """Append tokens that the ranks hold already, as a layout of that many chunks cuts them."""
        if layout.chunks != self.chunks:
            raise ArgumentError(f"layout has {layout.chunks} chunks; it must have one a rank, {self.chunks}")
        self._end_pieces()
        self._pieces.append(_Piece(self.seqlen, self.seqlen + layout.seqlen, layout))
        self.seqlen += layout.seqlen
        self._count()

    def deal(self, count):
        """Append tokens, each to a rank that then holds the fewest; returns their first position."""
        if self._dealt_from is None:
            self._plan()
        start = self.seqlen
        self.seqlen += count
        self._count()
        return start

    def truncate(self, length):
        """Keep the first `length` tokens."""
        self.seqlen = min(length, self.seqlen)
        if self._dealt_from is None or self.seqlen < self._dealt_from:
            self._end_pieces()
        self._count()

    def _count(self):
        self.counts = sum((piece.counts(self.chunks, self.seqlen) for piece in self._pieces
                            if piece.start < self.seqlen), np.zeros(self.chunks, np.int64))

    def _end_pieces(self):
        """Forget what was planned beyond the length."""
        self._dealt_from = None
        self._pieces = [piece if piece.stop is not None and piece.stop <= self.seqlen
                        else _Piece(piece.start, self.seqlen, piece.layout, piece.members)
                        for piece in self._pieces if piece.start < self.seqlen]

    def _plan(self):
        """Pieces that raise the ranks with the fewest tokens to the next level, then those, then all for ever."""
        self._dealt_from = start = self.seqlen
        levels = np.unique(self.counts).tolist()
        in_turn = sorted(range(self.chunks), key=lambda rank: (rank - self.first) % self.chunks)
        for level, following in zip(levels, [*levels[1:], None]):
            members = tuple(rank for rank in in_turn if self.counts[rank] <= level)
            stop = None if following is None else start + len(members) * (following - level)
            self._pieces.append(_Piece(start, stop, members=members))
            start = stop
