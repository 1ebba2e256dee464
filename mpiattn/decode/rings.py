"""Baselines for tree decoding: decoding that passes keys and values, or queries, around a ring.

The first is the baseline of Tree Attention (arXiv 2408.04093, section 6).  Results are those of `mpiattn.tree_decode`.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments.untraced import untraced
from ..comm.refusal import refusing
from ..problem.layout import Layout
from .call import DecodeCall, checked_cache, refused
from .options import DecodeArguments

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from ..backends.base import Array
    from ..comm.exchange import Exchange, Posted
    from .cache import KVCache
    from .combine import Partial


class _Keys:
    """Keys and values of one rank for the sequences of a call, each (kv_heads, tokens, dim), in one array."""

    def __init__(self, call: DecodeCall, rank: int, array: Array) -> None:
        cache = call.cache
        self.rank = rank
        counts = cache.storage.ledgers.counts[call.index][:, rank]
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        tokens = int(self.starts[-1])
        cuts = np.cumsum([0, *(cache.kv_heads * tokens * dim for dim in cache.dims)]).tolist()
        self.packed = array[: cuts[-1]]
        self.parts = tuple(
            self.packed[first:last].reshape(cache.kv_heads, tokens, dim)
            for (first, last), dim in zip(pairwise(cuts), cache.dims)
        )

    def of_sequences(self) -> tuple[Any, ...]:
        """The pools, tables of pages and page size, as attention takes them; a page is one token."""
        return self.parts, [np.arange(*ends, dtype=np.int32) for ends in pairwise(self.starts)], 1


@untraced
@refusing("ring_decode", refused("ring_decode"))
def ring_decode(
    q: Array,
    cache: KVCache,
    *,
    sequences: ArrayLike | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    relative_bias: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    check: bool = True,
) -> tuple[Array, Array]:
    """`tree_decode` by passing every rank's keys and values around a ring, with results on all ranks; collective.

    Each transfer overlaps with attention to the keys of the previous hop.  Traffic and memory grow with the number of
    keys: there are two buffers, each for the most keys that any rank holds.

    Parameters
    ----------
    q, cache, sequences, causal, window, softcap, scale, sinks, alibi_slopes, relative_bias, out, lse, check
        As in `tree_decode`.

    Returns
    -------
    out, lse : array
        As in `tree_decode`, on all ranks, whose bits differ: each adds up the parts in another order.

    Raises
    ------
    ArgumentError
        The same on every rank.
    PeerFailure
        Another rank failed during the call, or did not call in time.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> import mpiattn
    >>> rng = np.random.default_rng(0)
    >>> with mpiattn.KVCache(MPI.COMM_WORLD, capacity=100, kv_heads=2, head_dim=16) as cache:
    ...     cache.append(*rng.standard_normal((2, 1, 50, 2, 16), np.float32))
    ...     out, lse = mpiattn.ring_decode(rng.standard_normal((1, 1, 8, 16), np.float32), cache)
    >>> out.shape, lse.shape
    ((1, 1, 8, 16), (1, 8, 1))
    """
    with checked_cache(cache).call("ring_decode") as collective:
        biases = alibi_slopes, relative_bias
        given = DecodeArguments(sequences, causal, window, softcap, scale, sinks, *biases, out, lse, check)
        return _pass_keys(DecodeCall(collective, cache, q, given))


def _pass_keys(call: DecodeCall) -> tuple[Array, Array]:
    cache = call.cache
    combiner, backend, ranks, rank = cache.combiner, call.backend, cache.ranks, cache.rank
    row = cache.kv_heads * sum(cache.dims)
    most = int(cache.storage.ledgers.counts[call.index].sum(axis=0).max())
    held, spare = (backend.empty((most * row,), cache.dtype) for _ in range(2))
    call.buffers = held, spare
    whole, part = call.partial(), call.partial()
    with call.transfers():
        keys = _Keys(call, rank, held)
        ready = tuple(
            cache.storage.copy_out(sequence, [array[:, start:stop] for array in keys.parts])
            for sequence, start, stop in zip(call.sequences, keys.starts, keys.starts[1:])
        )
        for hop in range(ranks):
            arriving = posted = meanwhile = None
            if hop < ranks - 1:
                arriving = _Keys(call, (rank - hop - 1) % ranks, spare)
                posted = combiner.post(
                    (rank + 1) % ranks, [(keys.packed, ready)], (rank - 1) % ranks, [(arriving.packed, whole.ready)]
                )
                meanwhile = partial(_move_messages, combiner.exchange, posted[0])
            target = part if hop else whole
            call.attend_to(keys.of_sequences(), keys.rank, target, call.q, range(call.rows), ready, meanwhile)
            if hop:
                whole.absorb(backend, part)
            if arriving is not None:
                ready = combiner.finish(posted, f"in hop {hop + 1} of {ranks - 1} of keys and values")
                keys, held, spare = arriving, spare, held
        return call.result(whole)


def _move_messages(exchange: Exchange, posted: list[Posted], share: float) -> None:
    """Progress function, called while a launch computes."""
    if exchange.due():
        exchange.complete(posted)


@untraced
@refusing("query_ring_decode", refused("query_ring_decode"))
def query_ring_decode(
    q: Array,
    cache: KVCache,
    *,
    sequences: ArrayLike | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    relative_bias: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    check: bool = True,
) -> tuple[Array, Array]:
    """`tree_decode` by passing queries and partial results around a ring, with results on all ranks; collective.

    Rows (queries of all sequences) are split into one chunk per rank.  Each chunk visits all ranks in turn and returns
    to its owner.  Finally every rank gathers all chunks.

    Parameters
    ----------
    q, cache, sequences, causal, window, softcap, scale, sinks, alibi_slopes, relative_bias, out, lse, check
        As in `tree_decode`.

    Returns
    -------
    out, lse : array
        As in `tree_decode`, on all ranks.

    Raises
    ------
    ArgumentError
        The same on every rank.
    PeerFailure
        Another rank failed during the call, or did not call in time.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> import mpiattn
    >>> rng = np.random.default_rng(0)
    >>> with mpiattn.KVCache(MPI.COMM_WORLD, capacity=100, kv_heads=2, head_dim=16) as cache:
    ...     cache.append(*rng.standard_normal((2, 1, 50, 2, 16), np.float32))
    ...     out, lse = mpiattn.query_ring_decode(rng.standard_normal((1, 1, 8, 16), np.float32), cache)
    >>> out.shape, lse.shape
    ((1, 1, 8, 16), (1, 8, 1))
    """
    with checked_cache(cache).call("query_ring_decode") as collective:
        biases = alibi_slopes, relative_bias
        given = DecodeArguments(sequences, causal, window, softcap, scale, sinks, *biases, out, lse, check)
        return _pass_queries(DecodeCall(collective, cache, q, given))


def _pass_queries(call: DecodeCall) -> tuple[Array, Array]:
    cache = call.cache
    combiner, backend, ranks, rank = cache.combiner, call.backend, cache.ranks, cache.rank
    chunks = [Layout("contiguous", call.rows, ranks).ranges(chunk)[0] for chunk in range(ranks)]

    def empty(chunk: int) -> tuple[Partial, Array]:
        rows = len(chunks[chunk])
        return call.partial(rows), backend.empty((rows, call.heads, cache.head_dim), cache.dtype)

    (whole, queries), number = empty(rank), rank
    with call.transfers():
        queries_ready = (backend.copy(queries, call.q[chunks[rank].start : chunks[rank].stop]),)
        call.attend(whole, queries, chunks[rank])
        for hop in range(1, ranks + 1 if ranks > 1 else 1):
            number = (rank - hop) % ranks
            arriving, arriving_q = empty(number)
            last = hop == ranks  # back at its owner, which needs only the result
            leaving = [(whole.packed, whole.ready), (queries, queries_ready)][: 2 - last]
            call.buffers = whole.packed, queries, arriving.packed, arriving_q
            so_far = *whole.ready, *queries_ready  # new memory may still be in use by earlier launches
            posted = combiner.post(
                (rank + 1) % ranks,
                leaving,
                (rank - 1) % ranks,
                [(arriving.packed, so_far), (arriving_q, so_far)][: 2 - last],
            )
            arriving.ready = arrived = combiner.finish(posted, f"in hop {hop} of {ranks} of queries")
            if not last:
                part = call.partial(len(chunks[number]))
                call.attend(part, arriving_q, chunks[number], after=arrived)
                arriving.absorb(backend, part, arrived)
            whole, queries, queries_ready = arriving, arriving_q, arrived
        return call.result(_gather(call, whole, chunks))


def _gather(call: DecodeCall, own: Partial, chunks: list[range]) -> Partial:
    """Allgather the chunks of rows into one partial of all rows."""
    exchange, backend, comm = call.cache.combiner.exchange, call.backend, call.cache.combiner.peers.comm
    row = call.heads * (call.cache.value_dim + 1)
    arena, whole = backend.empty((call.rows * row,), call.cache.partial_dtype), call.partial()
    call.buffers = own.packed, arena
    so_far = (backend.clear(whole.out, whole.lse),)  # earlier launches may still use the arena's memory
    posted = exchange.allgather(
        comm,
        backend.outgoing(own.packed, own.ready, collective=True),
        backend.incoming(arena, so_far, collective=True),
        [len(rows) for rows in chunks],
        [rows.start for rows in chunks],
        row * arena.dtype.itemsize,
    )
    exchange.wait(posted, "gathering results")
    backend.sent(own.packed)
    backend.wait(backend.arrived(arena))
    for rows in chunks:
        part = arena[rows.start * row : rows.stop * row]
        cut = len(rows) * call.heads * call.cache.value_dim
        tokens = slice(rows.start, rows.stop)
        backend.copy(whole.out[tokens], part[:cut].reshape(whole.out[tokens].shape))
        whole.ready = (backend.copy(whole.lse[tokens], part[cut:].reshape(whole.lse[tokens].shape)),)
    return whole
