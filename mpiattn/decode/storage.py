"""The tokens of a cache: on which ranks they are, and on this rank in which slots of its memory.

Every rank changes its storage alike, so that all compute the same numbers of tokens and pages for every rank.
"""

from contextlib import contextmanager

import numpy as np

from ..backends.pages import Pages, stretches
from ..comm.agreement import everywhere
from ..errors import ArgumentError
from .token_owners import Ledger


def cache_pages(capacity, ranks, sequences, page_size):
    """Pages that a rank needs for its share of `capacity` tokens; each sequence may fill one page only in part."""
    return -(-capacity // (ranks * page_size)) + sequences - 1


class Storage:
    """Keys and values of sequences in a pool of pages on every rank.

    dims: elements of a key and of a value.
    ledgers: which rank holds which token, of every sequence.
    pools: keys and values of this rank, both (kv_heads, slots, dim); None once the cache is closed.
    """

    def __init__(self, peers, backend, capacity, sequences, page_size, kv_heads, dims, dtype):
        self.pages, self.page_size = cache_pages(capacity, peers.size, sequences, page_size), page_size
        self.ledgers = [Ledger(peers.size, first) for first in range(sequences)]
        self._peers, self._backend, self._capacity = peers, backend, capacity
        self._pages = Pages(self.pages, page_size, sequences)
        self._in_use = np.zeros(peers.size, np.int64)  # pages in use on every rank
        self.pools = tuple(backend.empty((kv_heads, self.pages * page_size, dim), dtype) for dim in dims)

    @property
    def free_pages(self):
        """Number of pages of this rank that no sequence uses."""
        return self._pages.free

    @property
    def lengths(self):
        """Number of tokens of every sequence."""
        return tuple(ledger.seqlen for ledger in self.ledgers)

    def table(self, sequence):
        """This rank's block table of a sequence: its page numbers in order, int32."""
        return self._pages.table(sequence)

    def append(self, sequences, counts, k, v, layout):
        """Append tokens; arguments as of `KVCache.append`, checked.  Raises ArgumentError, and changes nothing then."""
        with self.growing(sequences) as before:
            for sequence, count in zip(sequences, counts):
                ledger = self.ledgers[sequence]
                if layout is None:
                    ledger.deal(count)
                else:
                    start = ledger.seqlen
                    ledger.place(layout)
                    ledger.truncate(start + count)
            self.store(sequences, before, k, v, layout is not None)

    @contextmanager
    def growing(self, sequences):
        """Restore sequences if the body, which appends to them, raises; yields (length, tokens per rank) of each."""
        before = [(self.ledgers[sequence].seqlen, self.ledgers[sequence].counts) for sequence in sequences]
        try:
            yield before
        except BaseException:
            for sequence, (length, counts) in zip(sequences, before):
                self.ledgers[sequence].truncate(length)
                self._pages.resize(sequence, int(counts[self._peers.rank]))
            raise

    def store(self, sequences, before, k, v, local):
        """Store the tokens added to sequences since `before`; local: k and v hold only this rank's tokens."""
        in_use = self._in_use + sum(
            self._pages.needed(self.ledgers[sequence].counts) - self._pages.needed(counts)
            for sequence, (_, counts) in zip(sequences, before)
        )
        if (in_use > self.pages).any():
            full = int(np.argmax(in_use))
            error = ArgumentError(
                f"the cache is full: rank {full} would need {in_use[full]} pages of {self.page_size} "
                f"tokens and has {self.pages}; capacity is {self._capacity} tokens in all"
            )
            raise everywhere(error, self._peers)  # every rank computes the same counts
        self._backend.begin()
        for i, (sequence, (length, counts)) in enumerate(zip(sequences, before)):
            self._write(sequence, length, int(counts[self._peers.rank]), k[i], v[i], local)
        self._backend.finish()  # the caller may change k and v after this
        self._in_use = in_use

    def _write(self, sequence, length, held, k, v, local):
        """Launch copies into pages of the tokens from position `length` on; this rank held `held` tokens before."""
        ledger, rank = self.ledgers[sequence], self._peers.rank
        self._pages.resize(sequence, ledger.length(rank))
        table = self._pages.table(sequence)
        done = 0
        for new in ledger.ranges(rank, length):
            rows = range(done, done + len(new)) if local else range(new.start - length, new.stop - length, new.step)
            for first, last in stretches(table, self.page_size, held + done, held + done + len(new)):
                part, rows = rows[: last - first], rows[last - first :]
                for pool, source in zip(self.pools, (k, v)):
                    self._backend.copy(pool[:, first:last], source[part.start : part.stop : part.step].swapaxes(0, 1))
            done += len(new)

    def truncate(self, sequences, lengths):
        """Keep the first tokens of sequences and free the pages of the others."""
        for sequence, length in zip(sequences, lengths):
            ledger = self.ledgers[sequence]
            self._in_use = self._in_use - self._pages.needed(ledger.counts)
            ledger.truncate(length)
            self._in_use = self._in_use + self._pages.needed(ledger.counts)
            self._pages.resize(sequence, ledger.length(self._peers.rank))

    def copy_out(self, sequence, arrays):
        """Launch copies of this rank's keys and values into arrays (kv_heads, tokens, dim); returns the last event."""
        done, event = 0, None
        count = self.ledgers[sequence].length(self._peers.rank)
        for first, last in stretches(self.table(sequence), self.page_size, 0, count):
            for array, pool in zip(arrays, self.pools):
                event = self._backend.copy(array[:, done : done + last - first], pool[:, first:last])
            done += last - first
        return event
