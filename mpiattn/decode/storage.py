"""The tokens of a cache: on which ranks they are, and on this rank in which slots of its memory.

Every rank changes its storage alike, so that all compute the same numbers of tokens and pages for every rank.
"""

import numpy as np

from ..backends.pages import Pages, stretches
from ..comm.agreement import everywhere
from ..errors import ArgumentError
from .ledgers import Ledgers

FEW = 16  # tokens of a sequence, of which each is copied by itself, together with those of other sequences


def cache_pages(capacity, ranks, sequences, page_size):
    """Pages that a rank needs for its share of `capacity` tokens; each sequence may fill one page only in part."""
    return -(-capacity // (ranks * page_size)) + sequences - 1


class Storage:
    """Keys and values of sequences in a pool of pages on every rank.

    dims: elements of a row of each array: of a key and of a value, or of a key alone if it holds the value.
    ledgers: `Ledgers`: which rank holds which token, of every sequence.
    pools: for each of dims an array (kv_heads, slots, dim) of this rank; None once the cache is closed.
    """

    def __init__(self, peers, backend, capacity, sequences, page_size, kv_heads, dims, dtype):
        self.pages, self.page_size = cache_pages(capacity, peers.size, sequences, page_size), page_size
        self.ledgers = Ledgers(peers.size, sequences)
        self._peers, self._backend, self._capacity = peers, backend, capacity
        self._pages = Pages(self.pages, page_size, sequences)
        self._numbers = np.arange(sequences)
        self._in_use = np.zeros(peers.size, np.int64)  # pages in use on every rank
        self._room = np.zeros((sequences, peers.size), np.int64)  # tokens for which a sequence has pages on every rank
        self.pools = tuple(backend.empty((kv_heads, self.pages * page_size, dim), dtype) for dim in dims)

    @property
    def free_pages(self):
        """Number of pages of this rank that no sequence uses."""
        return self._pages.free

    @property
    def lengths(self):
        """Number of tokens of every sequence."""
        return tuple(self.ledgers.lengths.tolist())

    def tables(self, sequences):
        """This rank's block tables of sequences: their page numbers in order, int32."""
        return self._pages.tables(sequences)

    def append(self, sequences, counts, arrays, layout):
        """Append tokens; arguments as of `KVCache.append`, checked.  Raises ArgumentError, and changes nothing then.

        arrays: k and v, or what there is of them, one for each pool.
        """
        some = self.index_of(sequences)
        before = self.ledgers.lengths[some].copy(), self.ledgers.counts[some].copy()
        try:
            if layout is None:
                self.ledgers.deal(some, np.array(counts, np.int64))
            else:
                for sequence, count in zip(sequences, counts):
                    self.ledgers.place(sequence, layout, count)
            self.store(some, before, arrays, layout is not None)
        except BaseException:
            lengths, counts = before
            self.ledgers.truncate(some, lengths)
            self.take_pages(some, counts)
            raise

    def index_of(self, sequences):
        """Sequences as an index of arrays, int64; all, a range in `sequence_numbers`, as a slice, which costs less."""
        return slice(None) if isinstance(sequences, range) else np.array(sequences, np.int64)

    def take_pages(self, some, counts, spread=False):
        """Give sequences pages for so many tokens of every rank; ArgumentError, and no change, if one has too few.

        spread: these are all sequences, and have no pages yet: each gets consecutive ones.
        """
        room = self._pages.needed(counts) * self.page_size
        in_use = self._in_use + (room - self._room[some]).sum(axis=0) // self.page_size
        if (in_use > self.pages).any():
            full = int(np.argmax(in_use))
            error = ArgumentError(
                f"the cache is full: rank {full} would need {in_use[full]} pages of {self.page_size} "
                f"tokens and has {self.pages}; capacity is {self._capacity} tokens in all, and there would be "
                f"{self.ledgers.lengths.sum()}"
            )
            raise everywhere(error, self._peers)  # every rank computes the same counts
        if spread:
            self._pages.spread(counts[:, self._peers.rank])
        else:
            self._pages.resize_each(self._numbers[some], counts[:, self._peers.rank])
        self._room[some], self._in_use = room, in_use

    def store(self, some, before, arrays, local):
        """Store the tokens added to sequences since `before`, which are their lengths and tokens per rank then.

        local: the arrays hold only this rank's tokens.
        """
        lengths, held = before
        counts = self.ledgers.counts[some]
        if np.count_nonzero(counts > self._room[some]):  # takes less time than any()
            self.take_pages(some, counts)
        held = held[:, self._peers.rank]
        new = counts[:, self._peers.rank] - held
        self._backend.begin()
        for i in new.nonzero()[0].tolist() if local else self._scatter(some, lengths, held, new, arrays):
            of_sequence = [array[i] for array in arrays]
            self._write(self._numbers[some][i].item(), lengths[i].item(), held[i].item(), of_sequence, local)
        self._backend.finish()  # the caller may change the arrays after this

    def _scatter(self, some, lengths, held, new, arrays):
        """Launch copies of the new tokens of all sequences that have few, in their last pages; returns the others.

        lengths: of the sequences before.  held, new: tokens of this rank before, and since.
        """
        at, rows, others = new.nonzero()[0], 0, ()
        slots = self._pages.shift[some] + held
        if arrays[0].shape[1] > 1:
            first, step = self.ledgers.next_turn(some, self._peers.rank, lengths)
            few = (new <= FEW) & (held >= self._pages.in_last[some]) & (first >= 0)
            at, others = np.flatnonzero(few), np.flatnonzero(~few & (new > 0)).tolist()
            ends = np.cumsum(new[at])
            number = np.arange(ends[-1] if len(at) else 0) - np.repeat(ends - new[at], new[at])
            at = np.repeat(at, new[at])  # from here on an entry is a token
            slots, rows = slots[at] + number, first[at] - lengths[at] + number * step[at]
        else:
            slots = slots[at]
        if len(at):
            for pool, source in zip(self.pools, arrays):
                self._backend.scatter(pool, slots, source, at, rows)
        return others

    def _write(self, sequence, length, held, arrays, local):
        """Launch copies into pages of the tokens from position `length` on; this rank held `held` tokens before."""
        ledger, rank = self.ledgers[sequence], self._peers.rank
        table = self._pages.table(sequence)
        done, added = 0, [range(ledger.length(rank) - held)] if local else ledger.ranges(rank, length)
        for new in added:
            rows = new if local else range(new.start - length, new.stop - length, new.step)
            for first, last in stretches(table, self.page_size, held + done, held + done + len(new)):
                part, rows = rows[: last - first], rows[last - first :]
                for pool, source in zip(self.pools, arrays):
                    self._backend.copy(pool[:, first:last], source[part.start : part.stop : part.step].swapaxes(0, 1))
            done += len(new)

    def truncate(self, sequences, lengths):
        """Keep the first tokens of sequences and free the pages of the others."""
        some = self.index_of(sequences)
        self.ledgers.truncate(some, np.array(lengths, np.int64))
        self.take_pages(some, self.ledgers.counts[some])

    def places(self, sequence):
        """This rank's tokens of a sequence where they are: for each pool a NumPy array (tokens, kv_heads, dim).

        None where they are on a GPU or not in consecutive slots.
        """
        count = self.ledgers[sequence].length(self._peers.rank)
        slots = stretches(self._pages.table(sequence), self.page_size, 0, count) or [(0, 0)]
        if len(slots) > 1 or not all(isinstance(pool, np.ndarray) for pool in self.pools):
            return None
        ((first, last),) = slots
        return tuple(pool[:, first:last].swapaxes(0, 1) for pool in self.pools)

    def copy_out(self, sequence, arrays):
        """Launch copies of this rank's tokens of a sequence into arrays (kv_heads, tokens, dim), one for each pool.

        Returns the last event.
        """
        done, event = 0, None
        count = self.ledgers[sequence].length(self._peers.rank)
        for first, last in stretches(self._pages.table(sequence), self.page_size, 0, count):
            for array, pool in zip(arrays, self.pools):
                event = self._backend.copy(array[:, done : done + last - first], pool[:, first:last])
            done += last - first
        return event
