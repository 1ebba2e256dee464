"""The attended (query, key) pairs of every chunk of queries and chunk of keys.  No MPI.

They are counted in closed form, independent of the sequence length, if the layouts of queries and keys have the same
step.  Otherwise, and with `causal_block` or documents, they are counted query by query.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..problem.mask import PackedMask

PIECE = 2**18  # queries counted at a time
SAMPLED = 2**20  # queries looked at with documents
GOLDEN = 5**0.5 / 2 - 0.5  # irrational, so that no number of stripes is in step with its multiples
TABLE_PIECE = 2**14  # numbers of a table counted at a time
FEW = 2**10  # numbers of a table that are counted together even if only some are asked for


def _below(m, length):
    """The sum of clip(x, 0, length) over all integers x < m."""
    m = np.maximum(m, 0)
    ramp = np.minimum(m, length + 1)
    return ramp * (ramp - 1) // 2 + (m - ramp) * length


class _Ranges(NamedTuple):
    """One range of tokens of every chunk: int64 arrays (chunks,) and a common step."""

    starts: np.ndarray
    lengths: np.ndarray
    step: int

    @classmethod
    def of(cls, layout):
        """A list of `_Ranges` of a layout, as many as a chunk has ranges."""
        starts, lengths, step = layout.all_ranges()
        return [cls(*ranges, step) for ranges in zip(starts, lengths)]

    def before(self, positions):
        """Number of tokens of every chunk's range before each position: int64 (positions, chunks)."""
        return (-(-(np.asarray(positions)[:, None] - self.starts) // self.step)).clip(0, self.lengths)

    def between(self, start, stop):
        """The ranges cut to [start, stop)."""
        first, last = self.before([start, max(start, stop)])
        return _Ranges(self.starts + self.step * first, last - first, self.step)


def _seen(queries, keys, shift, at):
    """Number of keys before i + shift, summed over the queries i of a chunk; both ranges have the same step.

    at: the chunks, of queries and of keys: two int64 arrays; the result has the shape of both.
    """
    q, k = at
    first = -(-(queries.starts[q] + shift - keys.starts[k]) // keys.step)
    # each query sees one key more than the query before it
    return _below(first + queries.lengths[q], keys.lengths[k]) - _below(first, keys.lengths[k])


def _seen_to_the_right(mask, queries, keys, at):
    """Number of keys before the end of a query's interval, summed over the queries of a chunk; shape as `_seen`."""
    diagonal, right = mask.seqlen_k - mask.seqlen, mask.window[1]
    q, k = at
    if not mask.causal:
        if right is None:
            return queries.lengths[q] * keys.lengths[k]
        return _seen(queries, keys, diagonal + right + 1, at)
    # Queries before `full` see the part of the prefix inside the window.  Those from `full` to `own` see the whole
    # prefix.  Later ones see up to the diagonal.
    own = mask.prefix - diagonal - 1
    full = 0 if right is None else max(own - right, 0)
    total = _seen(queries.between(max(own, 0), mask.seqlen) if own > 0 else queries, keys, diagonal + 1, at)
    if own > 0:
        total += queries.between(full, own).lengths[q] * keys.before([mask.prefix])[0][k]
    if full:
        total += _seen(queries.between(0, full), keys, diagonal + right + 1, at)
    return total


def _by_query(mask, q_layout, k_layout):
    """The pairs of `block_pairs` of all chunks, of any mask and layouts: int64 (chunks, chunks).

    Of more than SAMPLED queries with documents they are estimated from so many, one of each of as many equal parts of
    the sequence.
    """
    apart = max(1, -(-mask.seqlen // SAMPLED)) if isinstance(mask, PackedMask) else 1
    looked_at = -(-mask.seqlen // apart)
    total = np.zeros((q_layout.chunks, k_layout.chunks), np.int64)
    for start in range(0, looked_at, PIECE):
        part = np.arange(start, min(start + PIECE, looked_at))
        queries = np.minimum(part * apart + (part * GOLDEN % 1 * apart).astype(np.int64), mask.seqlen - 1)
        (lo,), (hi,) = mask.key_interval(queries)
        some = lo < hi
        total += _in_chunks(q_layout.owner(queries[some]), lo[some], hi[some], q_layout.chunks, k_layout)
    return total if apart == 1 else np.rint(total * (mask.seqlen / looked_at)).astype(np.int64)


def _in_chunks(owners, lo, hi, rows, k_layout):
    """Number of keys of every chunk in the intervals [lo, hi), which are not empty, summed by their owner."""

    def covered(first, stop, columns):
        """How many of the owner's intervals [first, stop) have each of some columns: (owners, columns)."""
        begun, ended = (
            np.bincount(owners * (columns + 1) + end, minlength=rows * (columns + 1)) for end in (first, stop)
        )
        return (begun - ended).reshape(rows, columns + 1)[:, :-1].cumsum(axis=1)

    if k_layout.kind == "striped":
        rounds, rest = np.divmod(hi - lo, k_layout.chunks)
        first = lo % k_layout.chunks
        twice = covered(first, first + rest, 2 * k_layout.chunks)  # the second half are the first stripes again
        whole = np.rint(np.bincount(owners, rounds, rows)).astype(np.int64)
        seen = twice.reshape(rows, 2, -1).sum(axis=1) + whole[:, None]
        return seen if k_layout.order is None else seen[:, k_layout.order]
    numbers, lengths = k_layout.pieces
    stops = np.cumsum(lengths)
    first, last = np.searchsorted(stops, lo, "right"), np.searchsorted(stops, hi - 1, "right")
    seen = covered(first, last + 1, lengths.size) * lengths
    for piece, unseen in ((first, lo - (stops - lengths)[first]), (last, stops[last] - hi)):
        part = np.bincount(owners * lengths.size + piece, unseen, seen.size)  # sums below 2 ** 53 are exact in float64
        seen -= np.rint(part).astype(np.int64).reshape(seen.shape)
    return seen[:, numbers].sum(axis=1)


def block_pairs(mask, queries, keys, at):
    """Number of attended (query, key) pairs of chunks of queries and of keys: int64, of the shape that both have.

    In closed form: without documents and causal_block, and of layouts with the same step.
    queries, keys: the `_Ranges` of two layouts.  at: the chunks, of queries and of keys: two int64 arrays.
    """
    left, diagonal = mask.window[0], mask.seqlen_k - mask.seqlen
    pairs = np.zeros(np.broadcast_shapes(*map(np.shape, at)), np.int64)
    for of_queries in queries:
        for of_keys in keys:
            pairs += _seen_to_the_right(mask, of_queries, of_keys, at)
            if left is not None:
                pairs -= _seen(of_queries, of_keys, diagonal - left, at)
    return pairs


class Pairs:
    """Counts the attended (query, key) pairs of chunks of two layouts."""

    def __init__(self, mask, q_layout, k_layout):
        self.mask, self.layouts, self.ranges = mask, (q_layout, k_layout), (_Ranges.of(q_layout), _Ranges.of(k_layout))
        steps = {ranges.step for of_side in self.ranges for ranges in of_side}
        self.packed = isinstance(mask, PackedMask)
        self.closed = len(steps) == 1 and not mask.causal_block and not self.packed  # without a look at queries
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

    def any(self):
        """Whether there is any pair."""
        lo, hi = self.mask.key_interval(np.array(self.mask.unpadded[:1], np.int64))
        if (lo < hi).any():
            return True
        return bool(self.table.any())
