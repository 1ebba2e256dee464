"""The KV cache of a batch of sequences, spread over the ranks: `KVCache`."""

from contextlib import contextmanager
from numbers import Integral

import numpy as np

from ..backends.pages import Pages, stretches
from ..comm.agreement import agree_on, agreement, everywhere
from ..comm.collective_calls import Collective
from ..comm.exchange import MAX_MESSAGE, Exchange, check_max_message
from ..comm.mesh import Home
from ..comm.peers import check_timeout, time_limit
from ..comm.transport import check_transport, make_backend
from ..engine.folding import checked
from ..errors import ArgumentError
from ..model.tuned import machine_for
from ..problem.layout import Layout
from ..problem.problem import Problem
from ..problem.tensors import as_array
from ..schedule import reduction
from .combine import Combiner
from .token_owners import Ledger


def cache_pages(capacity, ranks, sequences, page_size):
    """Pages that a rank needs for its share of `capacity` tokens; each sequence may fill one page only in part."""
    return -(-capacity // (ranks * page_size)) + sequences - 1


class KVCache(Collective):
    """Keys and values of `sequences` sequences whose tokens are spread over the ranks of a communicator.

    Every rank has a pool of pages, and every sequence has pages on each rank for its tokens there (their rule is in
    `decode.token_owners`).  Keys and values are never sent between ranks.  Making a cache, `append`, `truncate`,
    `free`, `save`, `load` and `close` are collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks; it stays the caller's.
    capacity : int
        Total tokens of all sequences on all ranks.  Their memory is allocated at once: `nbytes`.
    kv_heads, head_dim, value_dim : int, value_dim by default head_dim
        Heads of keys and values, elements of a key, elements of a value.
    sequences : int, default 1
        Number of sequences; each begins empty.
    dtype : str or dtype, default "float32"
        Of keys, values and queries, as in `MeshAttention`.
    page_size : int, default 64
        Tokens per page.  It hardly affects speed, since a sequence gets consecutive pages where possible.
    machine : Machine or str, default None
        Its predicted times choose how results are combined, as in `MeshAttention`.  The attribute is a `Machine`.
    backend, transport, max_message, timeout
        As in `MeshAttention`.

    Raises
    ------
    ArgumentError
        The same on every rank, here and from all collective methods; from `positions` on this rank only.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> import mpiattn
    >>> with mpiattn.KVCache(MPI.COMM_WORLD, capacity=100, kv_heads=2, head_dim=16) as cache:
    ...     cache.append(*np.ones((2, 1, 50, 2, 16), np.float32))
    ...     cache.lengths
    (50,)
    """

    KIND = "cache"

    def __init__(self, comm, *, capacity, kv_heads, head_dim, value_dim=None, sequences=1, dtype="float32",
                 page_size=64, backend="auto", transport="auto", machine=None, max_message=MAX_MESSAGE, timeout=None):
        home = Home.enter(comm, time_limit(timeout))
        with self._making(home):
            peers = home.peers(time_limit(timeout))
            with agreement(peers, call="making a cache"):
                check_timeout(timeout)
                problem = Problem(seqlen=0, heads=kv_heads, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
                for name, value in (("capacity", capacity), ("sequences", sequences), ("page_size", page_size)):
                    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                        raise ArgumentError(f"{name} is {value!r}; it must be a whole number, at least 1")
                check_max_message(max_message)
                check_transport(backend, transport)
            agree_on(peers, {"capacity": capacity, "kv_heads": problem.kv_heads, "head_dim": problem.head_dim,
                             "value_dim": problem.value_dim, "sequences": sequences, "dtype": problem.dtype,
                             "page_size": page_size, "backend": backend, "transport": transport,
                             "machine": machine, "max_message": max_message, "timeout": timeout})
            self._backend = make_backend(peers, home.nodes, backend, transport)
            peers.idle = self._backend.idle
            self.rank, self.ranks = peers.rank, peers.size
            self.kv_heads, self.head_dim, self.value_dim = problem.kv_heads, problem.head_dim, problem.value_dim
            self.dtype, self.partial_dtype = problem.dtype, problem.partial_dtype
            self.capacity, self.sequences, self.page_size = capacity, sequences, page_size
            self.pages = cache_pages(capacity, self.ranks, sequences, page_size)
            # ledgers, pools and combiner: used by the modules of this package only
            self.ledgers = [Ledger(self.ranks, first) for first in range(sequences)]
            self._pages = Pages(self.pages, page_size, sequences)
            self._in_use = np.zeros(self.ranks, np.int64)                # pages in use on every rank
            chosen = None
            with agreement(peers, only=0):            # files of `mpiattn tune` may differ between hosts
                if peers.rank == 0:
                    chosen = machine_for(home.nodes, self._backend, head_dim, machine)
            self.machine = peers.allgather(chosen)[0]
            slots = self.pages * page_size
            with agreement(peers):                    # out of memory on one rank must not hang the others
                # reject unsupported head dims now: ranks without keys never launch, and would wait for the others
                self._backend.scratch_bytes(self.head_dim, self.value_dim, self.dtype)
                self.pools = tuple(self._backend.empty((self.kv_heads, slots, dim), self.dtype)
                                    for dim in (self.head_dim, self.value_dim))
            self._exchange = Exchange(peers, max_message)
            self.nodes = home.nodes
            self.combiner = Combiner(self._exchange, self._backend, self.nodes)
            self._ways = {}
            self._join(home, peers)

    def __repr__(self):
        if "combiner" not in self.__dict__:
            return f"{type(self).__name__}(not made)"
        dims = f"{self.head_dim}" + (f" ({self.value_dim} of values)" if self.value_dim != self.head_dim else "")
        return (f"{type(self).__name__}({self.sequences} sequences, {sum(self.lengths)} of {self.capacity} tokens, "
                f"{self.kv_heads} KV heads x {dims}, {self.dtype}; {self.ranks} ranks, pages of {self.page_size}, "
                f"{self.backend}; {'closed' if self._home is None else 'open'})")

    @property
    def backend(self):
        """Name of the back end."""
        return self._backend.name

    @property
    def nbytes(self):
        """Bytes of this rank's pool of pages and of the buffers that decoding keeps for partial results."""
        return sum(pool.nbytes for pool in self.pools) + self.combiner.kept.nbytes()

    @property
    def lengths(self):
        """Number of tokens of every sequence."""
        return tuple(ledger.seqlen for ledger in self.ledgers)

    @property
    def local_lengths(self):
        """Number of tokens of every sequence on this rank."""
        return tuple(ledger.length(self.rank) for ledger in self.ledgers)

    def positions(self, sequence):
        """Positions of this rank's tokens of a sequence.

        Parameters
        ----------
        sequence : int

        Returns
        -------
        int64 array, (tokens,), increasing
        """
        return self.ledgers[self.sequence_numbers([sequence])[0]].positions(self.rank)

    @property
    def free_pages(self):
        """Number of pages of this rank that no sequence uses."""
        return self._pages.free

    @property
    def sent(self):
        """Totals that decoding with this cache has sent from this rank so far: (bytes, messages)."""
        return self._exchange.sent_bytes, self._exchange.sent_messages

    def append(self, k, v, *, sequences=None, counts=None, layout=None, check=True):
        """Append tokens to sequences; collective.

        Parameters
        ----------
        k, v : array, (len(sequences), tokens, kv_heads, head_dim or value_dim)
            In the cache's dtype.  Without a layout, the same tokens on every rank: each token is stored on a rank that
            then has the fewest of its sequence.  With a layout, this rank's chunk only, stored on this rank.
        sequences, counts : sequence of int, default all and all tokens
            Numbers of sequences, and of tokens for each (of the whole if there is a layout); the rest are padding.
        layout : Layout, default None
            Chunks of the ranks, as after a prefill: append(k, v, layout=plan.k_layout).
        check : bool, default True
            Verify by a small allreduce that the arguments are valid and the same on all ranks.

        Raises
        ------
        ArgumentError
            The same on every rank, also if the cache is full on any rank.  The cache is then unchanged.
        """
        with self.call("append") as call:
            with call.agreement(check) as same:
                sequences = self.sequence_numbers(sequences)
                k, v, tokens = self._check_tokens(k, v, sequences, layout)
                counts = self._counts(counts, sequences, tokens)
                same |= {"sequences": sequences, "counts": counts, "tokens": tokens, "layout": layout}
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
                self._pages.resize(sequence, int(counts[self.rank]))
            raise

    def store(self, sequences, before, k, v, local):
        """Store the tokens added to sequences since `before`; local: k and v hold only this rank's tokens."""
        in_use = self._in_use + sum(self._pages.needed(self.ledgers[sequence].counts) - self._pages.needed(counts)
                                    for sequence, (_, counts) in zip(sequences, before))
        if (in_use > self.pages).any():
            full = int(np.argmax(in_use))
            error = ArgumentError(f"the cache is full: rank {full} would need {in_use[full]} pages of {self.page_size} "
                                  f"tokens and has {self.pages}; capacity is {self.capacity} tokens in all")
            raise everywhere(error, self._peers)        # every rank computes the same counts
        self._backend.begin()
        for i, (sequence, (length, counts)) in enumerate(zip(sequences, before)):
            self._write(sequence, length, int(counts[self.rank]), k[i], v[i], local)
        self._backend.finish()                          # the caller may change k and v after this
        self._in_use = in_use

    def _write(self, sequence, length, at, k, v, local):
        """Launch copies into pages of the tokens from position `length` on; this rank had `at` tokens before them."""
        ledger = self.ledgers[sequence]
        self._pages.resize(sequence, ledger.length(self.rank))
        table = self._pages.table(sequence)
        done = 0
        for new in ledger.ranges(self.rank, length):
            rows = range(done, done + len(new)) if local else range(new.start - length, new.stop - length, new.step)
            for first, last in stretches(table, self.page_size, at + done, at + done + len(new)):
                part, rows = rows[:last - first], rows[last - first:]
                for pool, source in zip(self.pools, (k, v)):
                    self._backend.copy(pool[:, first:last], source[part.start:part.stop:part.step].swapaxes(0, 1))
            done += len(new)

    def truncate(self, lengths, *, sequences=None, check=True):
        """Keep the first tokens of sequences and free the pages of the others; collective.

        Parameters
        ----------
        lengths : int or sequence of int
            Tokens to keep, for all or for each of the sequences, at most their current lengths.
        sequences : sequence of int, default all
        check : bool, default True
            As in `append`.
        """
        with self.call("truncate") as call:
            with call.agreement(check) as same:
                sequences = self.sequence_numbers(sequences)
                lengths = [lengths] * len(sequences) if isinstance(lengths, Integral) else list(
                    as_array("lengths", lengths))
                if len(lengths) != len(sequences) or not all(
                        isinstance(length, Integral) and 0 <= length <= self.ledgers[sequence].seqlen
                        for sequence, length in zip(sequences, lengths)):
                    held = [self.ledgers[sequence].seqlen for sequence in sequences]
                    raise ArgumentError(f"lengths is {lengths!r}; it must be a number of tokens for each of the "
                                        f"sequences, which have {held}")
                same |= {"sequences": sequences, "lengths": lengths}
            for sequence, length in zip(sequences, lengths):
                ledger = self.ledgers[sequence]
                self._in_use = self._in_use - self._pages.needed(ledger.counts)
                ledger.truncate(length)
                self._in_use = self._in_use + self._pages.needed(ledger.counts)
                self._pages.resize(sequence, ledger.length(self.rank))

    def free(self, sequences=None, *, check=True):
        """Remove all tokens of sequences; arguments and errors as in `truncate`; collective."""
        self.truncate(0, sequences=sequences, check=check)

    def table(self, sequence):
        """This rank's block table of a sequence: its page numbers in order, int32."""
        return self._pages.table(sequence)

    def local(self, sequence):
        """Copies of this rank's keys and values of a sequence, (tokens, kv_heads, dim), in position order."""
        self._check_open()
        count = self.ledgers[sequence].length(self.rank)
        copies = [self._backend.result((count, self.kv_heads, pool.shape[2]), self.dtype) for pool in self.pools]
        self._backend.begin()
        self.copy_out(sequence, [copy.swapaxes(0, 1) for copy in copies])
        self._backend.finish()
        return copies

    def copy_out(self, sequence, arrays):
        """Launch copies of this rank's keys and values into arrays (kv_heads, tokens, dim); returns the last event."""
        done, event = 0, None
        count = self.ledgers[sequence].length(self.rank)
        for first, last in stretches(self.table(sequence), self.page_size, 0, count):
            for array, pool in zip(arrays, self.pools):
                event = self._backend.copy(array[:, done:done + last - first], pool[:, first:last])
            done += last - first
        return event

    def way(self, nbytes, lse_bytes, root=None):
        """The one of `schedule.reduction.WAYS` with the shortest predicted time for a partial of this size."""
        key = nbytes, lse_bytes, root
        if key not in self._ways:
            links = self.machine.inside, self.machine.between
            self._ways[key] = reduction.choose(nbytes, lse_bytes, self.nodes, *links, root, self.machine.combining)
        return self._ways[key]

    def save(self, path):
        """Write all sequences to an HDF5 file, which appears whole or not at all; collective.

        Parameters
        ----------
        path : str or path
            File for `load`, the same on every rank.

        Raises
        ------
        ArgumentError, FileError
            The same on every rank.
        """
        from .cache_file import save
        with self.call("save") as call:
            with call.agreement():
                pass
            save(self, path)

    @classmethod
    def load(cls, comm, path, **options):
        """A cache with the sequences of an HDF5 file, on any number of ranks; collective.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
        path : str or path
            File of `save`, or any with k and v (batch, seqlen, kv_heads, dim).  Its sequences are the batch entries,
            or the documents of a dataset cu_seqlens.
        **options
            As in `KVCache`, without those that the file fixes; capacity is by default the file's number of tokens.

        Returns
        -------
        KVCache

        Raises
        ------
        ArgumentError, FileError
            The same on every rank.
        """
        from .cache_file import load
        return load(cls, comm, path, options)

    def sequence_numbers(self, sequences):
        """The checked numbers of sequences as a list."""
        if sequences is None:
            return list(range(self.sequences))
        sequences = as_array("sequences", sequences)
        try:
            numbers = [int(sequence) for sequence in sequences if isinstance(sequence, Integral)]
            wrong = len(numbers) != len(sequences)
        except TypeError:
            wrong = True
        if wrong or len(set(numbers)) < len(numbers) or not all(0 <= n < self.sequences for n in numbers):
            raise ArgumentError(f"sequences is {sequences!r}; it must be different numbers from 0 to "
                                f"{self.sequences - 1}")
        return numbers

    def _check_tokens(self, k, v, sequences, layout):
        """k and v as arrays of the back end, and the number of tokens over all ranks."""
        if layout is not None and not (isinstance(layout, Layout) and layout.chunks == self.ranks):
            raise ArgumentError(f"layout is {layout!r}; it must be a Layout of {self.ranks} chunks, one a rank")
        tokens = None if layout is None else layout.length(self.rank)
        k = checked(self._backend, "k", k, (len(sequences), tokens, self.kv_heads, self.head_dim), self.dtype)
        v = checked(self._backend, "v", v, (len(sequences), k.shape[1], self.kv_heads, self.value_dim), self.dtype)
        return k, v, k.shape[1] if layout is None else layout.seqlen

    @staticmethod
    def _counts(counts, sequences, tokens):
        if counts is None:
            return [tokens] * len(sequences)
        counts = list(as_array("counts", counts))
        if len(counts) != len(sequences) or not all(isinstance(n, Integral) and 0 <= n <= tokens for n in counts):
            raise ArgumentError(f"counts is {counts!r}; it must be a number from 0 to {tokens} for each of "
                                f"{len(sequences)} sequences")
        return list(map(int, counts))

    def close(self):
        """Free the memory and, with the communicator's last user, mpiattn's state for it; collective."""
        if self._home is not None:
            with self._leaving():
                self._backend.close()
                self._exchange.close()
            self.pools = self.combiner = None
