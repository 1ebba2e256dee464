"""Which rank holds which token of many sequences: a `Ledger` of each, and their numbers together as arrays.

While tokens go to ranks in turn, how many a rank holds follows from the length of the sequence alone.  So tokens of
many sequences are dealt, taken back or counted in a few array operations; only where a piece of a sequence begins or
ends does its ledger do it.
"""

import numpy as np

from .token_owners import Ledger, dealt

NEVER = 2**62  # tokens that no sequence has


def _deal_up_to(ledger, length):
    ledger.deal(length - ledger.seqlen)


class Ledgers:
    """The tokens of `sequences` sequences on `ranks` ranks.

    lengths: tokens of every sequence, int64 (sequences,).  counts: and of every rank, int64 (sequences, ranks).  Both
    are not to be written to.  In methods, `some` are different numbers of sequences, int64, or a slice of all.
    """

    def __init__(self, ranks, sequences):
        self.lengths, self.counts = np.zeros(sequences, np.int64), np.zeros((sequences, ranks), np.int64)
        self._each = [Ledger(ranks, s, self.lengths[s : s + 1], self.counts[s]) for s in range(sequences)]
        self._numbers = np.arange(sequences)
        # If the last piece of a sequence is dealt one by one, a rank has (length - from) // step + before tokens while
        # the length is from the start to the end of the piece.  If it is not, the end is 0.  An example: two ranks hold
        # 3 and 2 of 5 tokens, and the next goes to rank 1: from is 5 and 4, step 2, before 3 and 2.
        self._start, self._end = np.zeros((2, sequences), np.int64)
        self._from, self._before = np.zeros((2, sequences, ranks), np.int64)
        self._step = np.full((sequences, ranks), NEVER)
        self._run, self._in_runs = 1, np.zeros(sequences, np.int64)  # the first tokens of a sequence, dealt in runs

    def __getitem__(self, sequence):
        """The ledger of a sequence.  It is to be changed by methods of this class only."""
        return self._each[sequence]

    def __iter__(self):
        return iter(self._each)

    def deal(self, some, counts):
        """`Ledger.deal` of so many tokens of each of some sequences."""
        before = self.lengths[some]
        lengths = before + counts
        inside = lengths <= self._end[some]
        if np.count_nonzero(inside) < len(inside):  # takes less time than all()
            held = self.counts[some]
            self._begin(self._numbers[some][~inside & (held.min(axis=1) == held.max(axis=1))])
            inside = lengths <= self._end[some]
        self._resize(some, lengths, inside, _deal_up_to)

    def deal_runs(self, counts, run):
        """Deal tokens of all sequences, which are empty, in turn: `run` at a time while every rank gets as many.

        The tokens that are left are dealt one by one.  counts: tokens of every sequence.
        """
        ranks = self.counts.shape[1]
        in_runs = counts - counts % (run * ranks)
        if ranks == 1 or run == 1:  # as one by one
            in_runs[:] = 0
        for sequence in np.flatnonzero(in_runs).tolist():
            self._each[sequence].begin(run)
        self.lengths[:], self.counts[:] = in_runs, in_runs[:, None] // ranks
        self._run, self._in_runs[:] = run, in_runs
        self.deal(slice(None), counts - in_runs)

    def truncate(self, some, lengths):
        """`Ledger.truncate` of each of some sequences, none of which is shorter."""
        inside = (self._start[some] < lengths) & (lengths <= self._end[some])
        self._resize(some, lengths, inside, Ledger.truncate)
        self._in_runs[some] = np.minimum(self._in_runs[some], lengths)

    def place(self, sequence, layout, count):
        """`Ledger.place` of the first `count` tokens of a layout."""
        ledger = self._each[sequence]
        start = ledger.seqlen
        ledger.place(layout)
        ledger.truncate(start + count)
        self._look(sequence)

    def below(self, some, rank, positions):
        """Number of a rank's tokens before positions (some, any) of the sequences: int64 of that shape."""
        end = self.lengths[some][:, None]
        positions = np.minimum(positions, end)
        total = np.where(positions == end, self.counts[some, rank][:, None], 0)
        inside = (positions > 0) & (positions < end)
        if self._run > 1:
            in_runs = inside & (positions <= self._in_runs[some][:, None])
            total = np.where(in_runs, self._counts_in_runs(some, positions, rank), total)
            inside &= ~in_runs
        if np.count_nonzero(inside):  # takes less time than any()
            in_last = inside & (positions >= self._start[some][:, None]) & (end <= self._end[some][:, None])
            total = np.where(in_last, self._counts(some, positions, [rank]), total)
            for i in np.flatnonzero((inside & ~in_last).any(axis=1)).tolist():
                total[i] = self._each[self._numbers[some][i]].below(rank, positions[i])
        return total

    def next_turn(self, some, rank, positions):
        """A rank's first token from a position on, and from each of its tokens to the next: two int64 (some,).

        The first is -1 if not all tokens from there on are dealt in one piece.
        """
        step = self._step[some, rank]
        first = positions + (self._from[some, rank] - 1 - positions) % step
        return np.where((self._start[some] <= positions) & (self._end[some] > 0), first, -1), step

    def _counts(self, some, lengths, ranks=slice(None)):
        """Tokens of ranks if the sequences had these lengths (some, any), inside their last pieces."""
        return (lengths - self._from[some][:, ranks]) // self._step[some][:, ranks] + self._before[some][:, ranks]

    def _counts_in_runs(self, some, lengths, rank):
        """Tokens of a rank if the sequences had these lengths (some, any), no more than were dealt in runs."""
        ranks = self.counts.shape[1]
        turn = (rank - self._numbers[some][:, None]) % ranks  # of sequence s, rank s is first
        return dealt(lengths, turn, ranks, self._run)

    def _resize(self, some, lengths, inside, otherwise):
        """Move the ends of sequences `inside` their last pieces; otherwise(ledger, length) does it for the others."""
        if np.count_nonzero(inside) < len(inside):  # takes less time than all()
            numbers = self._numbers[some]
            for sequence, length in zip(numbers[~inside].tolist(), lengths[~inside].tolist()):
                otherwise(self._each[sequence], length)
                self._look(sequence)
            some, lengths = numbers[inside], lengths[inside]
        self.lengths[some] = lengths
        self.counts[some] = self._counts(some, lengths[:, None])

    def _begin(self, level):
        """Begin a piece of sequences of which all ranks have equally many tokens: the next go to all ranks in turn.

        level: int64 (any,), numbers of such sequences.
        """
        ranks = self.counts.shape[1]
        for sequence in level.tolist():
            self._each[sequence].begin()
        start = self.lengths[level]
        self._start[level], self._end[level] = start, NEVER
        turn = (np.arange(ranks) - level[:, None]) % ranks  # of sequence s, rank s is first
        self._from[level] = start[:, None] + 1 - ranks + turn
        self._step[level], self._before[level] = ranks, self.counts[level]

    def _look(self, sequence):
        """Note the last piece of a sequence whose pieces may have changed."""
        start, end, members = self._each[sequence].turns() or (0, 0, ())
        self._start[sequence], self._end[sequence] = start, NEVER if end is None else end
        self._from[sequence], self._step[sequence], self._before[sequence] = 0, NEVER, 0
        in_turn = list(members)
        self._from[sequence, in_turn] = start + 1 - len(in_turn) + np.arange(len(in_turn))
        self._step[sequence, in_turn] = len(in_turn)
        entry = slice(sequence, sequence + 1)
        self._before[sequence] = self.counts[sequence] - self._counts(entry, self.lengths[entry, None])[0]
