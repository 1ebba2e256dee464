"""Decoding over a KV cache that is spread over the ranks (Tree Attention, arXiv 2408.04093): `tree_decode`."""

from ..schedule.reduction import WAYS
from .call import Call


def tree_decode(q, cache, *, sequences=None, causal=True, window=None, softcap=None, scale=None, sinks=None, way="auto",
                root=None, out=None, lse=None, check=True):
    """Attention of the last queries of every sequence over all its tokens in the cache; collective.

    Every rank attends to the keys that it holds, and the partial results (out, lse) are combined.  What a rank sends
    does not depend on the number of keys.

    Parameters
    ----------
    q : array, (len(sequences), queries, heads, head_dim)
        In the cache's dtype, the same on every rank; the cache's kv_heads divide heads.  The queries are those of the
        last tokens of each sequence, whose keys have been appended: of a sequence of n tokens, query i stands at
        position n - queries + i.
    cache : KVCache
        The keys and values.
    sequences : sequence of int, default all
        Numbers of sequences in the cache.
    causal : bool, default True
        Whether a query sees no token after its own.
    window : (int or None, int or None), default (None, None)
        How many keys before and after its own a query sees; None or -1 for all.
    softcap : float, default None
        Scores s become softcap * tanh(s / softcap); None or 0 for none.
    scale : float, default 1/sqrt(head_dim)
        Factor of the scores.
    sinks : array, (heads,), default None
        Attention sinks in lse's dtype, the same on every rank: a score that every query of a head sees besides its
        keys, with value 0.
    way : str, default "auto"
        How partial results are combined.  "allreduce", the paper's: two of MPI's Allreduce.  "butterfly": messages
        between pairs, in half as many rounds, after which all ranks have the same bits.  "levels": inside nodes,
        between them, and inside again.  "auto": the shortest time that the cache's machine predicts, from `mpiattn
        tune` where that has been run.
    root : int, default None
        The one rank that gets the result; None for all.
    out, lse : array, default None
        The caller's memory for the results, either or both: arrays of their shapes and dtypes and of the cache's back
        end, with any strides, which are written into and returned; None for new ones.  They must be writable and share
        no memory with q, sinks or each other.  Where root is another rank they are checked and left as they are.  If
        the call raises, their contents are undefined.
    check : bool, default True
        Let ranks agree that their arguments are right and the same, by a small allreduce.  Without it a wrong argument
        raises on its own rank only, and PeerFailure on the others.

    Returns
    -------
    out : array, (len(sequences), queries, heads, value_dim)
        In the cache's dtype, a tensor where q is one.  0 for a query that sees no key.  None where root is another
        rank.
    lse : array, (len(sequences), heads, queries)
        Natural logarithms of the rows' sums of exponentials, float32 (float64 for float64).  -inf for a query that
        sees no key.  None where root is another rank.

    Raises
    ------
    ArgumentError
        The same on every rank.
    PeerFailure
        Where another rank fails in the middle, or does not come.

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
    with cache.call("tree_decode") as turn:
        call = Call(turn, cache, q, sequences, causal, window, softcap, scale, sinks, way, WAYS, root, out, lse, check)
        if way == "auto":
            way = cache.way(*call.partial_bytes, root)
        partial, spare = call.partial(name="partial"), call.partial(name="spare")
        with call.transfers():
            call.attend(partial)
            whole = cache.combiner.run(way, partial, spare, root)
            return call.result(whole) if root in (None, cache.rank) else (None, None)
