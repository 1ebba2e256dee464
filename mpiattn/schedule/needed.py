"""Which blocks have work under a mask, and therefore which chunks and partials have to travel.

A chunk is not sent if no query of the receiver's tile sees it.  A partial is not sent if nothing was added to it.
These are pure functions of masks, layouts and documents, so both ends of a transfer come to the same answer.
"""

from functools import cache, cached_property

import numpy as np

from ..problem.mask import PIECE, local_interval
from .kinds import IN_COLUMNS
from .route import leg_of


def _union(lo, hi):
    """Disjoint increasing intervals that cover the same keys as the intervals [lo, hi)."""
    kept = lo < hi
    lo, hi = lo[kept], hi[kept]
    if not len(lo):
        return ()
    if (lo[1:] < lo[:-1]).any():
        order = np.argsort(lo, kind="stable")
        lo, hi = lo[order], hi[order]
    hi = np.maximum.accumulate(hi)
    starts = np.concatenate([[True], lo[1:] > hi[:-1]])
    return tuple(zip(lo[starts].tolist(), hi[np.concatenate([np.flatnonzero(starts)[1:] - 1, [-1]])].tolist()))


class Activity:
    """The blocks of one call that have work.

    documents: the documents of this call (`mpiattn.problem.documents`), or None.
    """

    def __init__(self, mask, q_layout, k_layout, tile, documents=None):
        self.mask, self.q_layout, self.k_layout = mask, q_layout, k_layout
        self.tile, self.documents = tile, documents
        self.seen = cache(self._seen)
        self.block = cache(self._block)
        self.kept = {}  # row intervals of blocks on the device, filled by `mpiattn.engine.executor`
        self.needs = cache(self._needs)
        self.sends, self.receives = cache(self._sends), cache(self._receives)  # every call asks again

    @cached_property
    def as_lists(self):
        """The documents as tuples of lists, which can be compared with ==; None without documents."""
        return self.documents and tuple(group.as_lists() for group in self.documents)

    @property
    def kept_bytes(self):
        """Bytes of the row intervals that are kept."""
        return sum(bound.nbytes for pair in self.kept.values() for bound in pair)

    def interval(self, chunk):
        """Keys [lo, hi) that each query of a chunk sees: two int64 arrays (groups, tokens)."""
        return self.mask.key_interval(self.q_layout.positions(chunk), self.documents)

    def columns(self, chunk, keys):
        """The columns [begin, end) of `keys` that each query of a chunk sees: two int32 arrays (groups, tokens).

        keys: as for `local_interval`.
        """
        positions, groups = self.q_layout.positions(chunk), len(self.documents or (None,))
        begin, end = (np.empty((groups, len(positions)), np.int32) for _ in range(2))
        for start in range(0, len(positions), PIECE):
            part = slice(start, start + PIECE)
            bounds = self.mask.key_interval(positions[part], self.documents)
            begin[:, part], end[:, part] = local_interval(*bounds, keys)
        return begin, end

    def _seen(self, chunk):
        """The union of the keys that the queries of a chunk see, as disjoint intervals."""
        ranges = self.q_layout.ranges(chunk)
        if any(tokens.step > 1 for tokens in ranges):
            lo, hi = self.interval(chunk)
        else:
            lo, hi = (np.concatenate(ends) for ends in zip(*(self.mask.reach(t, self.documents) for t in ranges)))
        return _union(lo.ravel(), hi.ravel())

    def _block(self, i, j):
        """Whether any query of chunk i sees any key of chunk j."""
        for tokens in self.k_layout.ranges(j):
            for lo, hi in self.seen(i):
                first = max(-(-(lo - tokens.start) // tokens.step), 0)  # index of the first token from lo on
                if first < len(tokens) and tokens[first] < hi:
                    return True
        return False

    def work(self, rank):
        """Number of attended (query, key) pairs in a rank's tile, summed over the groups of documents."""
        total = 0
        for chunk in self.tile.row(rank):
            for other in self.tile.column(rank):
                if self.block(chunk, other):
                    begin, end = self.columns(chunk, self.k_layout.ranges(other))
                    total += int((end - begin).sum(dtype=np.int64))
        return total

    def _needs(self, in_columns, chunk, rank):
        """Whether the tile of `rank` has work on a chunk of queries, or on a chunk of keys with `in_columns`."""
        if in_columns:
            return any(self.block(i, chunk) for i in self.tile.row(rank))
        return any(self.block(chunk, j) for j in self.tile.column(rank))

    def _sends(self, kind, rank, hop, route="direct", collective=False):
        """Whether a rank sends in the transfer of one hop of a kind."""
        _, leaves, _, users = leg_of(kind, hop, self.tile.extent(kind), route, collective)
        owner = self.tile.in_group(kind, rank, leaves)
        return any(self.needs(kind in IN_COLUMNS, owner, self.tile.in_group(kind, owner, -ahead)) for ahead in users)

    def _receives(self, kind, rank, hop, route="direct", collective=False):
        """Whether a rank receives in the transfer of one hop of a kind: the answer of `sends` for its sender."""
        ahead = leg_of(kind, hop, self.tile.extent(kind), route, collective).ahead
        return self.sends(kind, self.tile.in_group(kind, rank, ahead), hop, route, collective)
