"""Many queries a piece at a time; where the pieces of `IntervalMask.cuts` begin, found by asking the mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .interval_mask import PIECE, IntervalMask

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .interval_mask import Intervals

    IntArray = NDArray[np.int64]


def in_pieces(lists: Callable[[slice], Intervals], queries: int) -> Intervals:
    """What `lists` says of so many queries, asked for a piece at a time, without the lists that are empty for all.

    It has the same lists for every piece.  begin and end are 0 where a query has no key.
    """
    pieces = []
    for start in range(0, queries, PIECE):
        some = slice(start, min(start + PIECE, queries))
        begin, end = lists(some)
        seen = begin < end
        rows = np.flatnonzero(seen.any(axis=1))
        pieces.append((some, rows, np.where(seen[rows], begin[rows], 0), np.where(seen[rows], end[rows], 0)))
    if len(pieces) == 1:
        return pieces[0][2:]
    needed = np.unique(np.concatenate([np.zeros(0, np.int64), *(rows for _, rows, _, _ in pieces)]))
    begin, end = np.zeros((2, len(needed), queries), np.int64)
    for some, rows, *sides in pieces:
        numbers = np.searchsorted(needed, rows)
        begin[numbers, some], end[numbers, some] = sides
    return begin, end


def all_cuts(mask: IntervalMask, seqlen: int, seqlen_k: int) -> IntArray:
    """The fewest cuts, by a look at all queries."""
    cuts = [np.zeros(min(1, seqlen), np.int64)]
    for start in range(1, seqlen, PIECE):
        queries = np.arange(start - 1, min(start + PIECE, seqlen))
        begin, end = mask.intervals(queries, seqlen, seqlen_k)
        cuts.append(queries[1:][_breaks((begin[:, :-1], end[:, :-1]), (begin[:, 1:], end[:, 1:]))])
    return np.concatenate(cuts)


def needed_cuts(mask: IntervalMask, candidates: IntArray, seqlen: int, seqlen_k: int) -> IntArray:
    """Of the places where a piece may have to begin, 0 and those where one has to."""
    candidates = np.unique(candidates[(candidates > 0) & (candidates < seqlen)])
    begin, end = mask.intervals(np.stack([candidates - 1, candidates], axis=1).ravel(), seqlen, seqlen_k)
    breaks = _breaks((begin[:, ::2], end[:, ::2]), (begin[:, 1::2], end[:, 1::2]))
    return np.concatenate([np.zeros(min(1, seqlen), np.int64), candidates[breaks]])


def _breaks(before: Intervals, after: Intervals) -> NDArray[np.bool_]:
    """Whether no piece may hold two queries that follow each other, for every such pair: bool (pairs,)."""
    (begin, end), (next_begin, next_end) = before, after
    some, next_some = begin < end, next_begin < next_end
    steps_back = (next_begin < begin) | (next_end < end)
    return ((some != next_some) | (some & (steps_back | (next_begin > end)))).any(axis=0)
