"""Masks as row intervals: every query may attend to one interval of key positions.

With Sq queries and Sk keys, `causal` is aligned bottom-right: the last query sees every key, query i
sees keys j <= i + Sk - Sq.  Sq = 2, Sk = 4 and Sq = 4, Sk = 2 (1 = may attend):

    1 1 1 0         0 0
    1 1 1 1         0 0      <- a row that sees nothing gives out = 0, lse = -inf
                    1 0
                    1 1

Positions inside a chunk increase under every layout, so the interval of a query is one interval
[begin, end) of a chunk's local columns, found by searchsorted.  Kernels see only these two integers
a row; they know neither masks nor layouts.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Mask:
    """What the queries of one attention may see.

    seqlen: number of queries.  seqlen_k: number of keys.  causal: bottom-right aligned, as above.
    """

    seqlen: int
    seqlen_k: int
    causal: bool = False

    def key_interval(self, positions):
        """First and one past the last key position that the queries at `positions` see: (lo, hi), int64."""
        lo = np.zeros(len(positions), np.int64)
        if not self.causal:
            return lo, np.full(len(positions), self.seqlen_k, np.int64)
        return lo, np.clip(positions + (1 + self.seqlen_k - self.seqlen), 0, self.seqlen_k)

    @property
    def pairs(self):
        """Number of (query, key) pairs that are attended to."""
        if not self.causal:
            return self.seqlen * self.seqlen_k
        blind = max(self.seqlen - self.seqlen_k, 0)   # leading queries that see nothing
        first = max(self.seqlen_k - self.seqlen, 0)   # keys that even the first query sees besides its own
        rows = self.seqlen - blind
        return rows * first + rows * (rows + 1) // 2


def local_interval(lo, hi, key_positions):
    """The interval of key positions [lo, hi) as local columns [begin, end) of a chunk: int32 each.

    key_positions: increasing positions of the chunk's keys.
    """
    begin = np.searchsorted(key_positions, lo).astype(np.int32)
    end = np.searchsorted(key_positions, hi).astype(np.int32)
    return begin, np.maximum(begin, end)
