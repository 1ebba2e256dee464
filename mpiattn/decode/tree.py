"""Decoding over a KV cache that is spread over the ranks (Tree Attention, arXiv 2408.04093): `tree_decode`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..arguments.untraced import untraced
from ..comm.refusal import refusing
from ..schedule.reduction import ALGORITHMS
from .call import DecodeCall, checked_cache, refused
from .options import DecodeArguments

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from ..backends.base import Array
    from ..masks.interval_mask import IntervalMask
    from .cache import KVCache


@untraced
@refusing("tree_decode", refused("tree_decode"))
def tree_decode(
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
    mask: IntervalMask | None = None,
    algorithm: str = "auto",
    root: int | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    check: bool = True,
) -> tuple[Array, Array]:
    """Attention of the last queries of every sequence over all its tokens in the cache; collective.

    Every rank computes attention over its own keys, and the partial results (out, lse) are combined.  The bytes sent do
    not depend on the number of keys.

    Parameters
    ----------
    q : array, (len(sequences), queries, heads, head_dim)
        In the cache's dtype, the same on every rank; the cache's kv_heads divide heads.  The queries are those of the
        last tokens of each sequence, whose keys are already in the cache: in a sequence of n tokens, query i is at
        position n - queries + i.  If n < queries, the first are before the sequence's first token, and with causal or
        a mask see no key.  No query of a sequence without tokens sees one; it is an error if no sequence of the call
        has tokens.
    cache : KVCache
        The keys and values.
    sequences : sequence of int, default all
        Numbers of sequences in the cache.
    causal : bool, default True
        Whether a query sees only keys up to its own position.
    window : (int or None, int or None), default (None, None)
        Number of keys before and after its own that a query sees; None or -1 for all.
    softcap : float, default None
        A score s becomes softcap * tanh(s / softcap); None or 0 for none.
    scale : float, default 1/sqrt(head_dim)
        Factor of the scores; it has no default for a cache with shared_kv.
    sinks : array, (heads,), default None
        Attention sinks in lse's dtype, the same on every rank: one more score for every query of a head, with
        value 0.
    alibi_slopes : array, (heads,), default None
        ALiBi, in lse's dtype, the same on every rank: -slope * (distance of key and query in their sequence) is added
        to a score, after scale and softcap.
    relative_bias : array, (heads or 1, 2 R + 1), default None
        In lse's dtype, the same on every rank: a number for each distance, key's position - query's position, from -R
        to R; farther keys have that of -R or R.  It is added to the scores, to alibi_slopes too; -inf hides a key.
        There is no `relative_grid`: a sequence that grows fills no grid.
    mask : mask of `mpiattn.masks`, default None
        Hides more keys, such as `tree` with the tokens that a draft model proposes, or `global_tokens(4) | window(512,
        0)`.  Its positions are those of each sequence; it must fit the length of every sequence of the call.
    algorithm : str, default "auto"
        Algorithm that combines the partial results.  "allreduce": two MPI Allreduces, as in the paper.  "butterfly":
        messages between pairs of ranks, in half as many rounds; all ranks get the same bits.  "levels": first within
        nodes, then between nodes, then within nodes again.  "auto": the fastest by the times that the cache's machine
        predicts, from `mpiattn tune` where it has been run.
    root : int, default None
        The only rank that gets the results; None for all ranks.
    out, lse : array, default None
        Memory for the results, either or both: arrays of their shapes and dtypes, of the cache's back end, with any
        strides.  They are written and returned; None for new arrays.  They must be writable and share no memory with q,
        sinks or each other.  If root is another rank they are checked but not written.  Their contents are undefined
        if the call raises.
    check : bool, default True
        Verify by a small allreduce that the arguments are valid and, but for numbers in q, the same on all ranks.
        Without it an invalid argument raises ArgumentError on its own rank only, and PeerFailure on the others.

    Returns
    -------
    out : array, (len(sequences), queries, heads, value_dim)
        In the cache's dtype, a tensor if q is one.  0 for a query that sees no key.  None if root is another rank.
    lse : array, (len(sequences), heads, queries)
        Natural logarithms of the rows' sums of exponentials, float32 (float64 for float64).  -inf for a query that
        sees no key.  None if root is another rank.

    Raises
    ------
    ArgumentError
        The same on every rank.  Also where the cache's back end computes without biases and one is given.
    CallError, PeerFailure, MpiattnError
        As in `KVCache`; with check=False no CallError.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> import mpiattn
    >>> rng = np.random.default_rng(0)
    >>> with mpiattn.KVCache(MPI.COMM_WORLD, capacity=100, kv_heads=2, head_dim=16) as cache:
    ...     cache.append(*rng.standard_normal((2, 1, 50, 2, 16), np.float32))
    ...     out, lse = mpiattn.tree_decode(rng.standard_normal((1, 1, 8, 16), np.float32), cache)
    >>> out.shape, lse.shape
    ((1, 1, 8, 16), (1, 8, 1))
    """
    with checked_cache(cache).call("tree_decode") as collective:
        of_rings = sequences, causal, window, softcap, scale, sinks, alibi_slopes, relative_bias, out, lse, check
        call = DecodeCall(collective, cache, q, DecodeArguments(*of_rings, mask, algorithm, root), ALGORITHMS)
        if algorithm == "auto":
            algorithm = cache.algorithm(*call.partial_bytes, root)
        partial, spare = call.partial(name="partial"), call.partial(name="spare")
        with call.transfers():
            call.attend(partial)
            whole = cache.combiner.run(algorithm, partial, spare, root)
            return call.result(whole) if root in (None, cache.rank) else (None, None)
