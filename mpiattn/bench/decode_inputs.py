"""Random keys, values and queries of a decoding benchmark: each rank draws its own, and draws them again to check."""

from functools import reduce

import numpy as np

from ..console import options
from ..decode.cache import KVCache
from ..problem.layout import Layout
from ..verify import reference

PIECE = 4096  # tokens that a rank draws at a time


class Inputs:
    """Random sequences over the ranks, `args.batch` of `context` tokens each, and their last `args.queries` queries.

    q: (batch, queries, heads, head_dim), the same on every rank.
    """

    def __init__(self, peers, args, context):
        self.peers, self.args, self.context = peers, args, context
        self.kv_heads = args.kv_heads or args.heads
        self.q = self._draw(np.random.default_rng(0), args.queries, args.heads)

    def _draw(self, rng, tokens, heads):
        shape = self.args.batch, tokens, heads, self.args.head_dim
        return rng.standard_normal(shape, np.float32).astype(self.args.dtype)

    def _pieces(self):
        """Yield for each piece its first position, its layout over the ranks, and this rank's k and v of it."""
        rng, step = np.random.default_rng([1, self.peers.rank]), PIECE * self.peers.size
        for first in range(0, self.context, step):
            layout = Layout("contiguous", min(step, self.context - first), self.peers.size)
            k, v = (self._draw(rng, layout.length(self.peers.rank), self.kv_heads) for _ in range(2))
            yield first, layout, k, v

    def cache(self):
        """A `KVCache` of all tokens; collective."""
        args = self.args
        cache = KVCache(
            self.peers.comm,
            capacity=args.batch * self.context,
            sequences=args.batch,
            kv_heads=self.kv_heads,
            **options.given(args, "head-dim", "dtype", "page-size", "backend", "transport", "machine", "timeout"),
        )
        try:
            for _, layout, k, v in self._pieces():
                cache.append(k, v, layout=layout)
        except BaseException:
            cache.close()
            raise
        return cache

    def expected(self, sequence, query):
        """out (heads, head_dim) and lse (heads,) of one query, in float64 from tokens drawn again; collective."""
        entry, position = slice(sequence, sequence + 1), self.context - self.args.queries + query
        partials = []
        for first, layout, k, v in self._pieces():
            place = {"positions": [position], "keys": first + layout.positions(self.peers.rank)}
            q, lengths = self.q[entry, query : query + 1], (self.context, self.context)
            partials.append(reference.attention(q, k[entry], v[entry], True, lengths=lengths, **place))
        of_ranks = self.peers.allgather(reduce(lambda a, b: reference.merge(*a, *b), partials))
        out, lse = reduce(lambda a, b: reference.merge(*a, *b), of_ranks)
        return out[0, 0], lse[0, :, 0]
