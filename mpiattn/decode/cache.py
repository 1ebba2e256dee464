"""The KV cache of a batch of sequences, spread over the ranks: `KVCache`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..arguments.counts import kept_lengths, sequence_number, sequence_numbers, token_counts
from ..arguments.keywords import for_record
from ..comm.agreement import agree_on, agreement
from ..comm.collective_calls import Collective
from ..comm.exchange import MAX_MESSAGE, Exchange
from ..comm.mesh import Home
from ..comm.peers import time_limit
from ..comm.refusal import of_call, of_making, refusing
from ..comm.transport import make_backend
from ..comm.whole_arrays import check_root
from ..model.tuned import machine_for
from ..problem.layout import Layout, of_sizes
from ..problem.problem import dims_in_words, partial_dtype
from ..schedule import reduction
from ..system.words import number
from .capacity import check_capacity
from .combine import Combiner
from .options import CacheOptions, checked_tokens, tokens_name
from .storage import Storage

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import numpy as np
    from mpi4py import MPI
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self

    from ..backends.base import Array
    from ..model.machine import Machine


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
    shared_kv : bool, default False
        Whether a value is the first value_dim elements of its key (absorbed MLA): v is None, and only keys are held.
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
        Here and in all collective methods, on every rank alike: an argument is invalid on some rank, or differs between
        ranks.  In other methods on this rank only.  Also a MemoryError: there is too little memory for the capacity.
    CallError
        Here and in all collective methods, on every rank alike: ranks make different calls.  Nothing was sent.
    PeerFailure
        Here and in all collective methods: another rank failed or timed out.  Close all plans and caches on the
        communicator: none can be used again.
    MpiattnError
        On this rank alone: another call on the communicator is running, or one before it did not end.

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

    @refusing("KVCache", of_making)
    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        shared_kv: bool = False,
        sequences: int = 1,
        dtype: Any = "float32",
        page_size: int = 64,
        backend: str = "auto",
        transport: str = "auto",
        machine: Machine | str | os.PathLike[str] | None = None,
        max_message: int | str = MAX_MESSAGE,
        timeout: float | None = None,
    ) -> None:
        asked = CacheOptions(**for_record(CacheOptions, locals()))  # the arguments alone
        home = Home.enter(comm, time_limit(timeout))
        with self.making(home):
            peers = home.peers(time_limit(timeout))
            with agreement(peers, call="making a cache"):
                asked = asked.checked()
            agree_on(peers, vars(asked))
            self._backend = make_backend(peers, home.nodes, backend, transport, home.known)
            peers.idle = self._backend.idle
            self.rank, self.ranks, self.nodes = peers.rank, peers.size, home.nodes
            self.capacity, self.sequences, self.page_size = asked.capacity, asked.sequences, asked.page_size
            self.kv_heads, self.head_dim, self.value_dim = asked.kv_heads, asked.head_dim, asked.value_dim
            self.shared_kv, self.dtype, self.partial_dtype = asked.shared_kv, asked.dtype, partial_dtype(asked.dtype)
            chosen = None
            with agreement(peers, only=0):  # files of `mpiattn tune` may differ between hosts
                if peers.rank == 0:
                    chosen = machine_for(home.nodes, self._backend, self.head_dim, machine)
            self.machine = peers.allgather(chosen)[0]
            check_capacity(home, peers, self._backend, asked)
            with agreement(peers):  # out of memory on one rank must not hang the others
                # reject unsupported head dims now: ranks without keys never launch, and would wait for the others
                self._backend.scratch_bytes(self.head_dim, self.value_dim, self.dtype, shared_kv=self.shared_kv)
                sizes = self.capacity, self.sequences, self.page_size, self.kv_heads
                self.storage = Storage(peers, self._backend, *sizes, self.dims, self.dtype)
            self._exchange, self.pages = Exchange(peers, asked.max_message), self.storage.pages
            # storage, combiner and last_problem: used by the modules of this package only
            self.combiner = Combiner(self._exchange, self._backend, self.nodes)
            self.last_problem: dict[str, Any] = {}  # of the last decoding call, see `decode.call`
            self._algorithms: dict[tuple[int, int, int | None], str] = {}  # of earlier calls, see `algorithm`
            self._join(home, peers)

    @refusing("append", of_call("append"))
    def append(
        self,
        k: Array,
        v: Array | None = None,
        *,
        sequences: ArrayLike | None = None,
        counts: ArrayLike | None = None,
        layout: Layout | Sequence[int] | None = None,
        check: bool = True,
    ) -> None:
        """Append tokens to sequences; collective.

        Parameters
        ----------
        k, v : array, (len(sequences), tokens, kv_heads, head_dim or value_dim)
            In the cache's dtype.  Without a layout, the same tokens on every rank: each token is stored on a rank that
            then has the fewest of its sequence.  With a layout, this rank's chunk only, stored on this rank.  v is None
            in a cache with shared_kv.
        sequences, counts : sequence of int, default all and all tokens
            Numbers of sequences, and of tokens for each (of the whole if there is a layout); the rest are padding.
        layout : Layout or tuple of int, default None
            Chunks of the ranks, as after a prefill: append(k, v, layout=plan.k_layout).  Numbers: of tokens of every
            rank, of consecutive chunks in order of rank.
        check : bool, default True
            Verify by a small allreduce that the arguments are valid and, but for numbers in k and v, alike on ranks.

        Raises
        ------
        ArgumentError
            The same on every rank, also if the cache is full on any rank.  The cache is then unchanged.  With
            check=False an invalid argument raises it on the faulty rank only, and PeerFailure on the others.
        CallError, PeerFailure, MpiattnError
            As in `KVCache`; with check=False no CallError.
        """
        with self.call("append") as call:
            with call.agreement(check) as same:
                sequences = sequence_numbers(sequences, self.sequences)
                placed: Layout | None = of_sizes(layout, self.ranks)
                arrays, tokens = checked_tokens(self, k, v, len(sequences), placed)
                counts = token_counts(counts, len(sequences), tokens)
                same |= {"layout": placed, tokens_name(placed): tokens, "sequences": sequences, "counts": counts}
            self.storage.append(sequences, counts, arrays, placed)

    @refusing("truncate", of_call("truncate"))
    def truncate(self, lengths: ArrayLike, *, sequences: ArrayLike | None = None, check: bool = True) -> None:
        """Keep the first tokens of sequences and free the pages of the others; collective.

        Parameters
        ----------
        lengths : int or sequence of int
            Tokens to keep, for all or for each of the sequences, at most their current lengths.
        sequences : sequence of int, default all
            Numbers of sequences.
        check : bool, default True
            As in `append`.

        Raises
        ------
        ArgumentError, CallError, PeerFailure, MpiattnError
            As in `append`.  The cache is then unchanged.
        """
        with self.call("truncate") as call:
            with call.agreement(check) as same:
                sequences = sequence_numbers(sequences, self.sequences)
                lengths = kept_lengths(lengths, self.storage.ledgers.lengths[self.storage.index_of(sequences)].tolist())
                same |= {"sequences": sequences, "lengths": lengths}
            self.storage.truncate(sequences, lengths)

    @refusing("free", of_call("truncate"))
    def free(self, sequences: ArrayLike | None = None, *, check: bool = True) -> None:
        """Remove all tokens of sequences; collective.

        Parameters
        ----------
        sequences : sequence of int, default all
            Numbers of sequences.
        check : bool, default True
            As in `append`.

        Raises
        ------
        ArgumentError, CallError, PeerFailure, MpiattnError
            As in `append`.  The cache is then unchanged.
        """
        self.truncate(0, sequences=sequences, check=check)

    def local(self, sequence: int) -> tuple[Array, Array | None]:
        """Copies of this rank's keys and values of a sequence; not collective.

        Parameters
        ----------
        sequence : int
            Number of the sequence, from 0.

        Returns
        -------
        k, v : array, (tokens, kv_heads, head_dim or value_dim)
            In the cache's dtype and the order of `positions`, of the back end (CuPy with "cuda").  v is None with
            shared_kv.

        Raises
        ------
        ArgumentError, MpiattnError
            On this rank only: no such sequence, the cache is closed, or a call on its communicator did not end.
        """
        self._check_open()
        sequence = self._number(sequence)
        count = self.storage.ledgers[sequence].length(self.rank)
        self._backend.new_call()
        copies = [self._backend.result((count, self.kv_heads, dim), self.dtype) for dim in self.dims]
        self._backend.begin()
        self.storage.copy_out(sequence, [copy.swapaxes(0, 1) for copy in copies])
        self._backend.finish()
        return copies[0], None if self.shared_kv else copies[1]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all sequences to an HDF5 file, which appears whole or not at all; collective.

        Parameters
        ----------
        path : str or path
            File for `load`, the same on every rank.

        Raises
        ------
        ArgumentError, FileError
            The same on every rank.  FileError: the file cannot be written.
        CallError, PeerFailure, MpiattnError
            As in `KVCache`.
        """
        from .cache_file import save

        with self.call("save") as call:
            save(self, path, call)

    @classmethod
    def load(
        cls,
        comm: MPI.Intracomm,
        path: str | os.PathLike[str],
        *,
        axes: str | None = None,
        padding: bool = False,
        **options: Any,
    ) -> Self:
        """A cache with the sequences of an HDF5 file, on any number of ranks; collective.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            The ranks; it stays the caller's.
        path : str or path
            File of `save`, or any with k and v (batch, seqlen, kv_heads, dim).  Its sequences are the batch entries,
            or the documents of a dataset cu_seqlens, from 0 to the number of tokens.
        axes : str, default None
            Order of the dimensions in the file: "bshd", or "bhsd" for (batch, kv_heads, seqlen, dim).  None: as its
            attribute axes says, else "bshd"; an error if there would then be more heads than tokens.
        padding : bool, default False
            Whether tokens before the first document and after the last are padding, which no rank holds; else an error.
        **options
            As in `KVCache`, without those that the file fixes; capacity is by default the file's number of tokens.

        Returns
        -------
        KVCache

        Raises
        ------
        ArgumentError, FileError
            The same on every rank.  FileError: the file cannot be read, or holds no valid cache.
        CallError, PeerFailure, MpiattnError
            As in `KVCache`.
        """
        from .cache_file import load

        return load(cls, comm, path, options, axes=axes, padding=padding)

    def __repr__(self) -> str:
        if "combiner" not in self.__dict__:
            return f"{type(self).__name__}(not made)"
        dims = dims_in_words(self.head_dim, self.value_dim, self.shared_kv)
        return (
            f"{type(self).__name__}({number(self.sequences, 'sequence')}, "
            f"{sum(self.lengths)} of {number(self.capacity, 'token')}, {number(self.kv_heads, 'KV head')} x {dims}, "
            f"{self.dtype}; {number(self.ranks, 'rank')}, pages of {self.page_size}, {self.backend}; "
            f"{'closed' if self._home is None else 'open'})"
        )

    @property
    def dims(self) -> tuple[int, ...]:
        """Elements of a row of each array that is held: of a key and of a value, with shared_kv of a key alone."""
        return (self.head_dim,) if self.shared_kv else (self.head_dim, self.value_dim)

    @property
    def backend(self) -> str:
        """Name of the back end."""
        return self._backend.name

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's pool of pages and of the buffers kept for partial results; 0 if the cache is closed."""
        if self._home is None:
            return 0
        return sum(pool.nbytes for pool in self.storage.pools) + self.combiner.kept.nbytes()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of every sequence."""
        return self.storage.lengths

    @property
    def local_lengths(self) -> tuple[int, ...]:
        """Number of tokens of every sequence on this rank."""
        return tuple(self.storage.ledgers.counts[:, self.rank].tolist())

    def positions(self, sequence: int) -> NDArray[np.int64]:
        """Positions of this rank's tokens of a sequence.

        Parameters
        ----------
        sequence : int
            Number of the sequence, from 0.

        Returns
        -------
        int64 array, (tokens,), increasing

        Raises
        ------
        ArgumentError
            On this rank only: there is no such sequence.
        """
        return self.storage.ledgers[self._number(sequence)].positions(self.rank)

    @property
    def free_pages(self) -> int:
        """Number of pages of this rank that no sequence uses."""
        return self.storage.free_pages

    @property
    def sent(self) -> tuple[int, int]:
        """Totals that decoding with this cache has sent from this rank so far: (bytes, messages)."""
        return self._exchange.sent_bytes, self._exchange.sent_messages

    def table(self, sequence: int) -> NDArray[np.int32]:
        """This rank's block table of a sequence.

        Parameters
        ----------
        sequence : int
            Number of the sequence, from 0.

        Returns
        -------
        int32 array, (pages,)
            The numbers of the sequence's pages in order.  A view: it is not to be written to.

        Raises
        ------
        ArgumentError
            On this rank only: there is no such sequence.
        """
        return self.storage.tables([self._number(sequence)])[0]

    def algorithm(self, nbytes: int, lse_bytes: int, root: int | None = None) -> str:
        """The algorithm with the shortest predicted time on `machine` to combine the ranks' partial results.

        Parameters
        ----------
        nbytes, lse_bytes : int
            Bytes of a rank's partial (out, lse), and of its lse.
        root : int, default None
            The only rank that gets the result; None for all ranks.

        Returns
        -------
        str
            "allreduce" (Tree Attention, Algorithm 3), "butterfly" or "levels", as in `tree_decode`.
        """
        key = nbytes, lse_bytes, root
        if key not in self._algorithms:
            check_root(root, self.ranks)
            links = self.machine.inside, self.machine.between
            self._algorithms[key] = reduction.choose(
                nbytes, lse_bytes, self.nodes, *links, root, self.machine.combining
            )
        return self._algorithms[key]

    def _number(self, sequence: int) -> int:
        return sequence_number(sequence, self.sequences)

    def close(self) -> None:
        """Free the memory and, with the communicator's last user, mpiattn's state for it; collective.

        Closing again does nothing.  The end of a `with` block closes; after an exception, without comparing calls.

        Raises
        ------
        CallError, PeerFailure, MpiattnError
            As in `KVCache`, but none because a call before this one failed.
        """
        if self._home is not None:
            with self._leaving(self._home):
                self._backend.close()
                self._exchange.close()
            self.storage.pools = None  # MPI is never given the pools
            self.combiner = None  # type: ignore[assignment]  # only an open cache has one
