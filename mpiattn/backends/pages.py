"""Pages of one rank's pool: which are free, and the block table of every sequence.

A page is `size` consecutive slots of the pool; a slot holds one token.  A sequence that grows gets the page after its
last one if that is free, so that its keys stay contiguous in memory for any page size.  A new sequence starts in the
middle of the longest free range, so that the sequence before it can grow as well.  Sequences whose lengths are known
together are spread over the pool.
"""

from functools import cached_property
from itertools import accumulate

import numpy as np

from ..errors import ArgumentError


class Tables(list):
    """The block tables of some sequences, int32 each.  It is not to be changed: what back ends make of it is kept."""

    _kept = None

    @classmethod
    def of(cls, pages):
        """Of the argument `pages` of `Backend.attend_pages`."""
        return pages if isinstance(pages, cls) else cls(pages if isinstance(pages, list) else [pages])

    @cached_property
    def joined(self):
        """All tables one after another, int32, and where each begins and the last ends, int64."""
        starts = np.fromiter(accumulate(map(len, self), initial=0), np.int64)  # takes less time than cumsum()
        return np.ascontiguousarray(self[0] if len(self) == 1 else np.concatenate(self), np.int32), starts

    def kept(self, copy):
        """copy(self) of the first call: the tables in the memory of a back end."""
        if self._kept is None:
            self._kept = copy(self)
        return self._kept


class Pages:
    """`count` pages of `size` slots, shared by `sequences` sequences; free: number of those that none has."""

    def __init__(self, count, size, sequences):
        self.count, self.size, self.free = count, size, count
        self._free = np.ones(count, bool)
        self._tables = [np.empty(0, np.int32) for _ in range(sequences)]
        self._used = np.zeros(sequences, np.int64)  # number of pages
        self._all = None  # `Tables` of all sequences; None if pages have changed since
        # Of every sequence the first token in its last page, and its slot less its number
        self.in_last, self.shift = np.zeros((2, sequences), np.int64)

    def table(self, sequence):
        """The block table: the numbers of a sequence's pages in order, int32.  A view; do not modify it."""
        return self._tables[sequence][: self._used[sequence]]

    def needed(self, tokens):
        """Number of pages for `tokens` tokens of one sequence; elementwise for arrays."""
        return -(-tokens // self.size)

    def resize(self, sequence, tokens):
        """Give a sequence the pages for exactly `tokens` tokens; ArgumentError, and no change, if too few are free."""
        used, wanted = self._used[sequence].item(), self.needed(tokens)
        if wanted - used > self.free:
            raise ArgumentError(f"the cache has {self.free} free pages on this rank; {wanted - used} more are needed")
        if wanted < used:
            self._free[self._tables[sequence][wanted:used]] = True
        elif wanted > used:
            table = self._tables[sequence]
            if wanted > len(table):  # doubled: growth by single pages then costs amortized O(1)
                table = np.empty(max(wanted, 2 * len(table)), np.int32)
                table[:used] = self._tables[sequence][:used]
                self._tables[sequence] = table
            while used < wanted:
                last = int(table[used - 1]) if used else None
                first, count = self._stretch(last, wanted - used)
                table[used : used + count] = np.arange(first, first + count)
                self._free[first : first + count] = False
                used += count
        self._note(sequence, wanted)

    def spread(self, tokens):
        """Give every sequence consecutive pages for so many tokens, with equal room behind each.

        tokens: int64 (sequences,).  No sequence has any pages yet, and there are enough.
        """
        wanted = self.needed(tokens)
        room = (self.count - int(wanted.sum())) // len(wanted)
        firsts = np.cumsum(wanted + room) - wanted - room
        for sequence, (first, count) in enumerate(zip(firsts.tolist(), wanted.tolist())):
            self._tables[sequence] = np.arange(first, first + count, dtype=np.int32)
            self._free[first : first + count] = False
            self._note(sequence, count)

    def _note(self, sequence, count):
        """Note the number of pages of a sequence, and its last one."""
        self._all = None
        before, last = (count - 1, self._tables[sequence][count - 1].item()) if count else (0, 0)
        self.free += self._used[sequence].item() - count
        self._used[sequence] = count
        self.in_last[sequence], self.shift[sequence] = before * self.size, (last - before) * self.size

    def resize_each(self, sequences, tokens):
        """`resize` of each of the sequences; both int64 (sequences,)."""
        for i in np.flatnonzero(self.needed(tokens) != self._used[sequences]).tolist():
            self.resize(sequences[i], tokens[i].item())

    def tables(self, sequences):
        """`table` of each of some sequences; the same `Tables` of all until pages change.

        sequences: a list of their numbers; a range stands for all, whatever its ends.
        """
        every = isinstance(sequences, range)
        if every and self._all is not None:
            return self._all
        used = self._used.tolist()
        tables = Tables(self._tables[sequence][: used[sequence]] for sequence in sequences)
        if every:
            self._all = tables
        return tables

    def _stretch(self, last, wanted):
        """(first page, count) of at most `wanted` consecutive free pages, directly after page `last` if possible."""
        at = None if last is None else last + 1
        if at is None or at == self.count or not self._free[at]:
            edges = np.flatnonzero(np.diff(self._free, prepend=False, append=False)).reshape(-1, 2)
            begin, end = edges[np.argmax(edges[:, 1] - edges[:, 0])].tolist()
            middle = (begin + end) // 2
            at = middle if begin and middle + wanted <= end else begin
        after = self._free[at : at + wanted]
        taken = after.argmin()
        return at, len(after) if after[taken] else int(taken)


def stretches(pages, size, start, stop):
    """The slots of the tokens [start, stop) of a block table, as (first, end) pairs of consecutive slots."""
    if start >= stop:
        return []
    first = start // size
    pages = pages[first : -(-stop // size)]
    cuts = np.flatnonzero(pages[1:] - pages[:-1] != 1) + 1
    if not len(cuts):  # most often, and at less cost
        before = (pages[0].item() - first) * size
        return [(before + start, before + stop)]
    begins, ends = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(pages)]]) - 1
    slots = np.stack([pages[begins], pages[ends] + 1], axis=1).astype(np.int64) * size
    slots[0, 0] += start - first * size
    slots[-1, 1] -= (first + len(pages)) * size - stop
    return [tuple(pair) for pair in slots.tolist()]
