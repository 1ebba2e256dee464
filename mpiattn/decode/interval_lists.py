"""What the queries of a decoding call see under a mask of several intervals: a list of intervals after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..masks.interval_mask import IntervalMask

    IntArray = NDArray[np.int64]


def interval_lists(mask: IntervalMask, lengths: IntArray, ends: IntArray, sequences: Sequence[int]) -> list[IntArray]:
    """The intervals of `ends`, cut to those that a mask shows: a list for each launch, at least one.

    lengths: tokens of every sequence, whose last tokens are those of the queries.
    ends: positions of the first key that each query sees besides, and then past the last: (sequences, 2 * queries).
    sequences: their numbers, for errors.
    Raises ArgumentError if the mask does not fit a sequence.
    """
    queries = ends.shape[1] // 2
    lists = np.zeros((1, *ends.shape), np.int64)
    for sequence, length in enumerate(lengths.tolist()):
        try:
            mask.check(length, length)
        except ArgumentError as error:
            raise ArgumentError(f"{error}: sequence {sequences[sequence]} of the cache has {length} tokens") from None
        positions = np.arange(length - queries, length)
        there = positions >= 0
        first, last = ends[sequence].reshape(2, queries)[:, there]
        begin, end = mask.intervals(positions[there], length, length)
        if len(begin) > len(lists):
            lists = np.concatenate([lists, np.zeros((len(begin) - len(lists), *ends.shape), np.int64)])
        begin = np.minimum(np.maximum(begin, first), last)
        of_sequence = lists[: len(begin), sequence].reshape(len(begin), 2, queries)
        of_sequence[:, 0, there], of_sequence[:, 1, there] = begin, np.maximum(np.minimum(end, last), begin)
    return list(lists)
