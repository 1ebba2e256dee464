"""Decoding over a KV cache that is spread over the ranks (Tree Attention, arXiv 2408.04093): `tree_decode`."""

from ..schedule.reduction import WAYS
from .call import Call


def tree_decode(q, cache, *, sequences=None, causal=True, window=None, softcap=None, scale=None, sinks=None, way="auto",
                root=None, check=True):
    """Attention of the last queries of every sequence over all its tokens in the cache; collective.

    Every rank attends to the keys that it holds, and the partial results (out, lse) are combined.  What a rank sends
    does not depend on the number of keys.

    q (len(sequences), queries, heads, head_dim), in the cache's dtype, the same on every rank; the cache's kv_heads
        divide heads.  The queries are those of the last tokens of each sequence, whose keys have been appended: of a
        sequence of n tokens, query i stands at position n - queries + i.
    sequences: their numbers in the cache; None for all.
    causal: a query sees no token after its own.  window, softcap, scale: as of `MeshAttention`.
    sinks: as of `MeshAttention.forward`, the same on every rank.
    way: how partial results are combined: "allreduce", the paper's, by two of MPI's Allreduce; "butterfly", by messages
        between pairs, in half as many rounds, after which all ranks have the same bits; "levels", inside nodes, between
        them, and inside again; "auto" is the shortest time that the cache's machine predicts, as
        `mpiattn tune` measured them if it did.
    root: the one rank that gets the result; None for all.
    check: let ranks agree that their arguments are right and the same, by a small allreduce; without it a wrong
        argument raises on its own rank only, and PeerFailure on the others.

    Returns out (len(sequences), queries, heads, value_dim) in the cache's dtype and lse (len(sequences), heads,
    queries), float32 (float64 for float64); (None, None) where root is another rank.  A query that sees no key has
    out 0 and lse -inf.  Raises ArgumentError, the same on every rank.
    """
    with cache._call("tree_decode") as turn:
        call = Call(turn, cache, q, sequences, causal, window, softcap, scale, sinks, way, WAYS, root, check)
        if way == "auto":
            way = cache.way(*call.partial_bytes, root)
        partial, spare = call.partial(), call.partial()
        turn.kept += partial, spare
        with call.transfers():
            call.attend(partial)
            whole = cache._combiner.run(way, partial, spare, root)
            return call.result(whole) if root in (None, cache.rank) else (None, None)
