"""What the masks leave to do: which blocks have work, and so which chunks and partials have to travel.

Pure functions of masks, layouts and documents that both ends of a transfer evaluate alike: a chunk that no query of
the receiver's tile sees is not sent, and a partial to which nothing was added neither.
"""

from functools import cache

import numpy as np

from ..problem.mask import local_interval
from .kinds import IN_COLUMNS, extent_of
from .route import leg_of
from .travels import in_column, in_group, in_row


def _union(lo, hi):
    """Disjoint increasing intervals that cover the same keys as the intervals [lo, hi)."""
    kept = lo < hi
    lo, hi = lo[kept], hi[kept]
    if not len(lo):
        return ()
    order = np.argsort(lo, kind="stable")
    lo, hi = lo[order], np.maximum.accumulate(hi[order])
    starts = np.concatenate([[True], lo[1:] > hi[:-1]])
    return tuple(zip(lo[starts].tolist(), hi[np.concatenate([np.flatnonzero(starts)[1:] - 1, [-1]])].tolist()))


class Activity:
    """Which blocks of one call have work, on a mesh of b rows x a columns.

    documents: of this call (`mpiattn.problem.documents`), or None.
    """

    def __init__(self, mask, q_layout, k_layout, a, b, documents=None):
        self.mask, self.q_layout, self.k_layout = mask, q_layout, k_layout
        self.a, self.b, self.documents = a, b, documents
        self.seen = cache(self._seen)
        self.block = cache(self._block)
        self.kept = {}                     # row intervals of blocks, where `mpiattn.engine.executor` launches read them
        self.needs = cache(self._needs)
        self.sends, self.receives = cache(self._sends), cache(self._receives)       # asked again by every call

    def interval(self, chunk):
        """First and one past the last key that each query of a chunk sees: (lo, hi), (groups, tokens)."""
        return self.mask.key_interval(self.q_layout.positions(chunk), self.documents)

    def _seen(self, chunk):
        """The keys that any query of a chunk sees, as disjoint intervals."""
        lo, hi = self.interval(chunk)
        return _union(lo.ravel(), hi.ravel())

    def _block(self, i, j):
        """Whether any query of chunk i sees any key of chunk j."""
        for tokens in self.k_layout.ranges(j):
            for lo, hi in self.seen(i):
                first = max(-(-(lo - tokens.start) // tokens.step), 0)     # of the range's tokens, that is not below lo
                if first < len(tokens) and tokens[first] < hi:
                    return True
        return False

    def work(self, rank):
        """Pairs (query, key) that a rank's tile attends to, summed over the groups of documents."""
        total = 0
        for chunk in (in_row(rank, self.a, u) for u in range(self.a)):
            interval = self.interval(chunk)
            for other in (in_column(rank, self.a, self.b, w) for w in range(self.b)):
                if self.block(chunk, other):
                    begin, end = local_interval(*interval, self.k_layout.positions(other))
                    total += int((end - begin).sum(dtype=np.int64))
        return total

    def back(self, kind, rank, hop):
        """The rank `hop` hops back in the group of a kind."""
        return in_group(kind, rank, self.a, self.b, hop)

    def _needs(self, in_columns, chunk, rank):
        """Whether the tile of `rank` has work on a chunk of queries, or of keys with `in_columns`."""
        if in_columns:
            return any(self.block(in_row(rank, self.a, u), chunk) for u in range(self.a))
        return any(self.block(chunk, in_column(rank, self.a, self.b, w)) for w in range(self.b))

    def _sends(self, kind, rank, hop, route="direct", collective=False):
        """Whether a rank sends in the transfer of a kind over a hop."""
        _, leaves, _, users = leg_of(kind, hop, extent_of(kind, self.a, self.b), route, collective)
        owner = self.back(kind, rank, leaves)
        return any(self.needs(kind in IN_COLUMNS, owner, self.back(kind, owner, -ahead)) for ahead in users)

    def _receives(self, kind, rank, hop, route="direct"):
        """Whether a rank receives in the transfer of a kind over a hop: its sender's `sends`."""
        sender = self.back(kind, rank, leg_of(kind, hop, extent_of(kind, self.a, self.b), route).ahead)
        return self.sends(kind, sender, hop, route)
