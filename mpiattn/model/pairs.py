"""The attended (query, key) pairs of every chunk of queries and chunk of keys.  No MPI.

They are counted in closed form, independent of the sequence length, if the layouts of queries and keys have the same
step and the mask a closed form.  Otherwise they are counted query by query.
"""

from functools import cached_property

import numpy as np

from ..problem.closed_form import Ranges, block_pairs

PIECE = 2**18  # queries counted at a time
SAMPLED = 2**20  # queries looked at with documents
SAMPLED_INTERVALS = 2**18  # intervals looked at with several a query
LOOKED_AT = 2**7  # queries that tell how many intervals a query has
GOLDEN = 5**0.5 / 2 - 0.5  # irrational: samples at its multiples are never in step with stripes
TABLE_PIECE = 2**14  # numbers of a table counted at a time
FEW_RANGES = 16  # of a chunk of queries by those of a chunk of keys: of more, queries are looked at sooner
FEW = 2**10  # numbers of a table that are counted together even if only some are asked for


def _ranges(layout):
    """The `Ranges` of a layout, as many as a chunk has ranges."""
    starts, lengths, step = layout.all_ranges()
    return [Ranges(*ranges, step) for ranges in zip(starts, lengths)]


def _by_query(mask, q_layout, k_layout):
    """The pairs of `block_pairs` of all chunks, of any mask and layouts: int64 (chunks, chunks).

    Of more than SAMPLED queries with documents, or SAMPLED_INTERVALS of a mask with several a query, they are estimated
    from so many, one query of each of as many equal parts of the sequence.
    """
    lists = 1
    if mask.mask is not None:
        lists = len(mask.key_intervals(np.arange(mask.seqlen)[:: max(1, mask.seqlen // LOOKED_AT)])[0])
    apart = -(-mask.seqlen // SAMPLED) if mask.cuts else 1
    apart = max(1, apart, -(-mask.seqlen * lists // SAMPLED_INTERVALS) if lists > 1 else 1)
    looked_at = -(-mask.seqlen // apart)
    total = np.zeros((q_layout.chunks, k_layout.chunks), np.int64)
    for start in range(0, looked_at, PIECE):
        queries = np.arange(start, min(start + PIECE, looked_at))
        if apart > 1:
            queries = np.minimum(queries * apart + (queries * GOLDEN % 1 * apart).astype(np.int64), mask.seqlen - 1)
        owners = q_layout.owner(queries)
        for (lo,), (hi,) in zip(*mask.key_intervals(queries)):
            some = lo < hi
            of = owners if some.all() else owners[some]
            total += _in_chunks(of, lo[some], hi[some], q_layout.chunks, k_layout)
    return total if apart == 1 else np.rint(total * (mask.seqlen / looked_at)).astype(np.int64)


def _in_chunks(owners, lo, hi, rows, k_layout):
    """Number of keys of every chunk in the intervals [lo, hi), which are not empty, summed by their owner."""

    def covered(first, stop, columns):
        """How many of the owner's intervals [first, stop) have each of some columns: (owners, columns)."""
        begun, ended = (
            np.bincount(owners * (columns + 1) + end, minlength=rows * (columns + 1)) for end in (first, stop)
        )
        return (begun - ended).reshape(rows, columns + 1)[:, :-1].cumsum(axis=1)

    if k_layout.striped:
        rounds, rest = np.divmod(hi - lo, k_layout.chunks)
        first = lo % k_layout.chunks
        twice = covered(first, first + rest, 2 * k_layout.chunks)  # the second half are the first stripes again
        whole = np.rint(np.bincount(owners, rounds, rows)).astype(np.int64)
        seen = twice.reshape(rows, 2, -1).sum(axis=1) + whole[:, None]
        return seen if k_layout.order is None else seen[:, k_layout.order]
    cuts, of_pieces = k_layout.owners
    stops, lengths = cuts[1:], np.diff(cuts)
    first, last = np.searchsorted(stops, lo, "right"), np.searchsorted(stops, hi - 1, "right")
    seen = covered(first, last + 1, lengths.size) * lengths
    for piece, unseen in ((first, lo - (stops - lengths)[first]), (last, stops[last] - hi)):
        part = np.bincount(owners * lengths.size + piece, unseen, seen.size)  # sums below 2 ** 53 are exact in float64
        seen -= np.rint(part).astype(np.int64).reshape(seen.shape)
    order = np.argsort(of_pieces, kind="stable")
    total = np.concatenate([np.zeros_like(seen[:, :1]), seen[:, order].cumsum(axis=1)], axis=1)
    first = of_pieces[order].searchsorted(np.arange(k_layout.chunks + 1))
    return total[:, first[1:]] - total[:, first[:-1]]


class Pairs:
    """Counts the attended (query, key) pairs of chunks of two layouts."""

    def __init__(self, mask, q_layout, k_layout):
        self.mask, self.layouts, self.ranges = mask, (q_layout, k_layout), (_ranges(q_layout), _ranges(k_layout))
        steps = {ranges.step for of_side in self.ranges for ranges in of_side}
        few = len(self.ranges[0]) * len(self.ranges[1]) <= FEW_RANGES
        self.closed = len(steps) == 1 and few and mask.closed_form  # without a look at queries
        self.few = q_layout.chunks * k_layout.chunks <= FEW

    def at(self, q, k):
        """The pairs of chunks of queries and chunks of keys: int64, of the shape that both have together."""
        if not self.closed or self.few:
            return self.table[q, k]
        return block_pairs(self.mask, *self.ranges, (q, k))

    @cached_property
    def table(self):
        """By chunk of queries and chunk of keys: int64 (chunks, chunks)."""
        if not self.closed:
            return _by_query(self.mask, *self.layouts)
        rows, columns = (layout.chunks for layout in self.layouts)
        q, k = np.arange(rows)[:, None], np.arange(columns)[None]
        table, piece = np.empty((rows, columns), np.int64), max(1, TABLE_PIECE // columns)
        for first in range(0, rows, piece):  # a few rows at a time, which stay in cache
            table[first : first + piece] = block_pairs(self.mask, *self.ranges, (q[first : first + piece], k))
        return table
