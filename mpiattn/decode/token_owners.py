"""Which rank holds which token of a sequence that grows and shrinks: a rule that every rank evaluates by itself.

Tokens are added in three ways.  Chunks that ranks already hold, for example after a prefill, stay there; a `Layout`
gives their positions.  Further tokens go in turn to the ranks with the fewest tokens, until all have equally many:

    ranks 0 and 1 were given 5 and 3 tokens, rank 2 none; then the next 10 go to    2 2 2 1 2 1 2 0 1 2

Tokens of a file go in turn too, but several at a time, a run, as long as every rank gets a run; then one by one:

    10 tokens in runs of 2 go to ranks    0 0 1 1 2 2 0 1 2 0

A sequence is a list of pieces: one for each layout, and one for each set of ranks that got tokens in turn.  Memory does
not grow with the tokens of a piece, and a lookup reads only the pieces that hold its answer.  The positions of a rank
increase.
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from ..errors import ArgumentError
from ..problem.layout import Layout


def dealt(tokens, turn, ranks, run):
    """How many of the first `tokens` tokens go to the rank whose turn is number `turn` of `ranks`, `run` at a time.

    Elementwise for arrays.
    """
    whole, rest = np.divmod(tokens, run * ranks)
    return run * whole + np.clip(rest - run * turn, 0, run)


@dataclass(frozen=True)
class _Placed:
    """Positions from `start` on, split by a layout; truncation may leave only the first of the layout's tokens."""

    start: int
    layout: Layout

    def ranges(self, rank, first, stop):
        """Positions of a rank's tokens in [first, stop), as ranges in increasing order."""
        first, stop = first - self.start, stop - self.start
        _, cut = self.layout.between(rank, first, stop)
        return [range(t.start + self.start, t.stop + self.start, t.step) for t in cut]

    def before(self, rank, stop):
        """Number of a rank's tokens below `stop`; elementwise for arrays."""
        return self.layout.below(rank, np.asarray(stop, np.int64) - self.start)

    def numbered(self, rank, first, last):
        """Positions of a rank's tokens of this piece number `first` to `last`, without the last: int64."""
        parts = [np.empty(0, np.int64)]
        for tokens in self.layout.ranges(rank):
            part = tokens[max(first, 0) : max(last, 0)]
            parts.append(np.arange(part.start, part.stop, part.step) + self.start)
            first, last = first - len(tokens), last - len(tokens)
        return np.concatenate(parts)

    def counts(self, ranks, stop):
        """Number of tokens below `stop` on every rank: int64 (ranks,)."""
        return np.array([self.before(rank, stop) for rank in range(ranks)], np.int64)

    def room(self, stop):
        """Number of tokens that this piece can take from `stop` on; None for no limit."""
        return 0


@dataclass(frozen=True)
class _Dealt:
    """Positions from `start` to `limit` (None for no limit), dealt to `members` in turn, `run` at a time."""

    start: int
    members: tuple
    limit: int | None
    run: int = 1

    def ranges(self, rank, first, stop):
        """As in `_Placed`."""
        if rank not in self.members:
            return []
        step = self.run * len(self.members)
        start = self.start + self.run * self.members.index(rank)
        start += max(0, (first - start) // step) * step  # the last run that begins up to `first`, if there is one
        if self.run == 1:
            tokens = range(start if start >= first else start + step, stop, step)
            return [tokens] if tokens else []
        runs = (range(max(begin, first), min(begin + self.run, stop)) for begin in range(start, stop, step))
        return [tokens for tokens in runs if tokens]

    def before(self, rank, stop):
        """As in `_Placed`."""
        if rank not in self.members:
            return np.zeros_like(stop)
        tokens = np.maximum(stop - self.start, 0)
        return dealt(tokens, self.members.index(rank), len(self.members), self.run)

    def numbered(self, rank, first, last):
        """As in `_Placed`."""
        run, inside = np.divmod(np.arange(first, last), self.run)
        return self.start + self.run * (run * len(self.members) + self.members.index(rank)) + inside

    def counts(self, ranks, stop):
        """As in `_Placed`."""
        counts = np.zeros(ranks, np.int64)
        turns = np.arange(len(self.members))
        counts[list(self.members)] = dealt(stop - self.start, turns, len(self.members), self.run)
        return counts

    def room(self, stop):
        """As in `_Placed`."""
        if self.run > 1:  # tokens behind those that truncation has left are dealt one by one
            return 0
        return None if self.limit is None else self.limit - stop


class Ledger:
    """The tokens of one sequence on `ranks` ranks.  If all have equally many, rank `first` gets the next token.

    length (1,), counts (ranks,): int64 memory, all 0, for its length and the tokens of every rank; None for its own.
    """

    def __init__(self, ranks, first=0, length=None, counts=None):
        self.chunks, self.first = ranks, first % ranks
        self._length = np.zeros(1, np.int64) if length is None else length
        self.counts = np.zeros(ranks, np.int64) if counts is None else counts
        self._pieces, self._starts = [], []  # a piece ends where the next starts, the last at seqlen
        self._before = {}  # by rank: its number of tokens before each piece, cached

    # These members are also those of a layout, so that a ledger can be used as one.

    @property
    def seqlen(self):
        """Number of tokens."""
        return self._length.item()

    @property
    def lengths(self):
        """Number of tokens of every rank."""
        return tuple(self.counts.tolist())

    def length(self, rank):
        """Number of tokens of a rank."""
        return int(self.counts[rank])

    def ranges(self, rank, start=0, stop=None):
        """The positions of a rank's tokens in [start, stop), as a tuple of ranges in increasing order."""
        stop = self.seqlen if stop is None else min(stop, self.seqlen)
        if start >= stop:
            return ()
        return tuple(
            part
            for number in range(self._piece_of(start), self._piece_of(stop - 1) + 1)
            for part in self._pieces[number].ranges(rank, start, min(stop, self._end(number)))
        )

    def between(self, rank, start, stop):
        """As `Layout.between`."""
        return int(self.below(rank, start)) if start else 0, self.ranges(rank, start, stop)

    def positions(self, rank):
        """Positions of a rank's tokens: int64, increasing."""
        parts = [np.arange(t.start, t.stop, t.step, dtype=np.int64) for t in self.ranges(rank)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def below(self, rank, positions):
        """Number of a rank's tokens before each of the given positions: int64 of their shape."""
        positions = np.minimum(np.asarray(positions, np.int64), self.seqlen)
        if not positions.size or (positions == self.seqlen).all():
            return np.full(positions.shape, self.counts[rank])
        first, last = (self._piece_of(position) for position in (positions.min(), positions.max()))
        pieces = first + np.searchsorted(self._starts[first + 1 : last + 1], positions, side="right")
        total = np.empty(positions.shape, np.int64)
        for number in np.unique(pieces).tolist():  # those between two positions do not matter
            inside = pieces == number
            total[inside] = self._tokens_before(number, rank) + self._pieces[number].before(rank, positions[inside])
        return total

    def numbered(self, rank, first, last):
        """Positions of a rank's tokens number `first` to `last`, without the last: int64."""
        parts = [np.empty(0, np.int64)]
        if first < last:
            self._tokens_before(len(self._pieces) - 1, rank)
            ends = [*self._before[rank][1:], self.counts[rank].item()]
            for number in range(bisect_right(ends, first), len(ends)):
                start = self._before[rank][number]
                part = max(first - start, 0), min(last, ends[number]) - start
                if part[0] < part[1]:
                    parts.append(self._pieces[number].numbered(rank, *part))
                if last <= ends[number]:
                    break
        return np.concatenate(parts)

    def _piece_of(self, position):
        return bisect_right(self._starts, position) - 1

    def _end(self, number):
        return self._starts[number + 1] if number + 1 < len(self._starts) else self.seqlen

    def _tokens_before(self, number, rank):
        """Number of a rank's tokens before a piece, cached."""
        before = self._before.setdefault(rank, [0])
        for each in range(len(before) - 1, number):
            before.append(before[each] + int(self._pieces[each].before(rank, self._end(each))))
        return before[number]

    def turns(self):
        """(start, limit, members) of the last piece, as of `_Dealt`; None unless its tokens are dealt one by one."""
        piece = self._pieces[-1] if self._pieces else None
        one_by_one = isinstance(piece, _Dealt) and piece.run == 1
        return (piece.start, piece.limit, piece.members) if one_by_one else None

    # Changes

    def place(self, layout):
        """Append tokens that ranks already hold, in a layout of one chunk per rank.  Raises ArgumentError."""
        if layout.chunks != self.chunks:
            raise ArgumentError(f"layout has {layout.chunks} chunks; it must have one a rank, {self.chunks}")
        if layout.seqlen:
            self._add(_Placed(self.seqlen, layout))
            self._resize(self.seqlen + layout.seqlen)

    def begin(self, run=1):
        """Begin a piece whose tokens go to all ranks in turn, `run` at a time, where all have equally many."""
        self._add(_Dealt(self.seqlen, self._in_turn(), None, run))

    def deal(self, count):
        """Append tokens, each to a rank that has the fewest at that point; returns the first position."""
        start = self.seqlen
        while self.seqlen < start + count:
            room = self._pieces[-1].room(self.seqlen) if self._pieces else 0
            if room == 0:
                self._add(self._next_piece())
            else:
                left = start + count - self.seqlen
                self._resize(self.seqlen + (left if room is None else min(left, room)))
        return start

    def truncate(self, length):
        """Keep the first `length` tokens; this undoes appends exactly."""
        while self._pieces and self._starts[-1] >= length:
            self._resize(self._starts[-1])
            del self._pieces[-1], self._starts[-1]
        self._resize(min(length, self.seqlen))
        for before in self._before.values():
            del before[max(len(self._pieces), 1) :]

    def _add(self, piece):
        self._pieces.append(piece)
        self._starts.append(piece.start)

    def _resize(self, seqlen):
        """Move the end of the last piece, and of the sequence, to `seqlen`."""
        if seqlen != self.seqlen:
            piece = self._pieces[-1]
            self.counts += piece.counts(self.chunks, seqlen) - piece.counts(self.chunks, self.seqlen)
            self._length[0] = seqlen

    def _in_turn(self):
        """All ranks, in the order in which they get tokens if they have equally many."""
        return tuple((self.first + i) % self.chunks for i in range(self.chunks))

    def _next_piece(self):
        """A piece for the ranks with the fewest tokens, until they have as many as the rank with the next fewest."""
        fewest, *more = np.unique(self.counts).tolist()
        members = tuple(rank for rank in self._in_turn() if self.counts[rank] == fewest)
        return _Dealt(self.seqlen, members, self.seqlen + len(members) * (more[0] - fewest) if more else None)
