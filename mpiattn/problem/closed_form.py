"""Pairs of ranges of queries and of keys, and the queries that see some keys, in closed form, whatever their lengths.

Here `Mask.rule` is written down again, because plans are made in milliseconds: of millions of tokens on thousands of
ranks.  It holds for masks with values in KNOWN alone, and a test compares it with what the rule says of every query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    IntArray = NDArray[np.integer]
    At = tuple[IntArray, IntArray]

KNOWN = ("seqlen", "seqlen_k", "causal", "window", "prefix")  # fields of `Mask`


def _below(m: IntArray, length: IntArray) -> IntArray:
    """The sum of clip(x, 0, length) over all integers x < m, in closed form."""
    m = np.maximum(m, 0)
    ramp = np.minimum(m, length + 1)
    return ramp * (ramp - 1) // 2 + (m - ramp) * length


class Ranges(NamedTuple):
    """One range of tokens of every chunk: int64 arrays (chunks,) and a common step."""

    starts: IntArray
    lengths: IntArray
    step: int

    def before(self, positions: ArrayLike) -> IntArray:
        """Number of tokens of every chunk's range before each position: int64 (positions, chunks)."""
        return (-(-(np.asarray(positions)[:, None] - self.starts) // self.step)).clip(0, self.lengths)

    def between(self, start: int, stop: int) -> Ranges:
        """The ranges cut to [start, stop)."""
        first, last = self.before([start, max(start, stop)])
        return Ranges(self.starts + self.step * first, last - first, self.step)


def _seen(queries: Ranges, keys: Ranges, shift: int, at: At) -> IntArray:
    """Number of keys before i + shift, summed over the queries i of a chunk; both ranges have the same step.

    at: the chunks, of queries and of keys: two int64 arrays; the result has the shape of both.
    """
    q, k = at
    first = -(-(queries.starts[q] + shift - keys.starts[k]) // keys.step)
    # each query sees one key more than the query before it
    return _below(first + queries.lengths[q], keys.lengths[k]) - _below(first, keys.lengths[k])


def _seen_to_the_right(mask: Any, queries: Ranges, keys: Ranges, at: At) -> IntArray:
    """Number of keys before the end of a query's interval, summed over the queries of a chunk; shape as `_seen`."""
    diagonal, right = mask.seqlen_k - mask.seqlen, mask.window[1]
    q, k = at
    if not mask.causal:
        if right is None:
            return queries.lengths[q] * keys.lengths[k]
        return _seen(queries, keys, diagonal + right + 1, at)
    # Queries before `whole` see the part of the prefix inside the window.  Those from `whole` to `past` see the whole
    # prefix.  Those from `past` on see up to the diagonal.
    past = mask.prefix - diagonal - 1
    whole = 0 if right is None else max(past - right, 0)
    total = _seen(queries.between(max(past, 0), mask.seqlen) if past > 0 else queries, keys, diagonal + 1, at)
    if past > 0:
        total += queries.between(whole, past).lengths[q] * keys.before([mask.prefix])[0][k]
    if whole:
        total += _seen(queries.between(0, whole), keys, diagonal + right + 1, at)
    return total


def queries_seeing(mask: Any, starts: IntArray, stops: IntArray) -> tuple[IntArray, IntArray]:
    """As `Mask.queries_seeing`."""
    diagonal, (left, right) = mask.seqlen_k - mask.seqlen, mask.window
    first, end = np.zeros_like(starts), np.full_like(stops, mask.seqlen)
    if mask.causal:
        first = np.where(starts < mask.prefix, 0, starts - diagonal)
    if right is not None:
        first = np.maximum(first, starts - right - diagonal)
    if left is not None:
        end = stops + left - diagonal
    return first.clip(0, mask.seqlen), end.clip(0, mask.seqlen)


def block_pairs(mask: Any, queries: Sequence[Ranges], keys: Sequence[Ranges], at: At) -> IntArray:
    """Number of attended (query, key) pairs of chunks of queries and of keys: int64, of the shape that both have.

    mask: a `Mask`.  queries, keys: of the chunks of two layouts, all with the same step.  at: the chunks, of queries
        and of keys, each int64.
    """
    left, diagonal = mask.window[0], mask.seqlen_k - mask.seqlen
    pairs = np.zeros(np.broadcast_shapes(*map(np.shape, at)), keys[0].lengths.dtype)
    for of_queries in queries:
        for of_keys in keys:
            pairs += _seen_to_the_right(mask, of_queries, of_keys, at)
            if left is not None:
                pairs -= _seen(of_queries, of_keys, diagonal - left, at)
    return pairs
