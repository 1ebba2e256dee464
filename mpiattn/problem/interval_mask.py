"""Masks of several intervals: what a caller may say of each query besides `causal`, `window` and documents.

A query sees a few intervals of keys, disjoint, in any order.  A block is launched once for each interval list: list k
holds the k-th interval of every query, empty where a query has fewer.  `mpiattn.masks` has the masks that are built in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    IntArray = NDArray[np.int64]
    Intervals: TypeAlias = "tuple[IntArray, IntArray]"  # begins and ends, each (lists, queries)


class IntervalMask:
    """The keys that each query of a sequence sees, as disjoint intervals.

    Positions are those of the whole sequence, whatever its documents.  Subclasses are frozen dataclasses of numbers,
    text and tuples, so that equal masks have equal reprs: ranks compare them so.  `a & b` shows the keys that both
    show, `a | b` those that either shows.
    """

    def check(self, seqlen: int, seqlen_k: int) -> None:
        """Raise ArgumentError unless the mask fits a sequence of so many queries and keys."""

    def intervals(self, queries: IntArray, seqlen: int, seqlen_k: int) -> Intervals:
        """The keys [begin, end) of every list that each query sees: two int64 arrays (lists, queries).

        queries: positions, increasing, or the same twice.
        They may lie outside [0, seqlen_k), where there are no keys.  An end at or before its begin stands for no key.
        There are as many lists as these queries need; other queries may have more.
        """
        raise NotImplementedError

    def cuts(self, seqlen: int, seqlen_k: int) -> IntArray | None:
        """Where pieces of the queries begin, increasing from 0; None if every query is a piece of its own.

        Between two queries of a piece, of each list, neither end decreases and no key is left out between the two, and
        either all queries see keys or none does.  So the first and the last tell what all of them see together.
        """
        return None

    def __and__(self, other: IntervalMask) -> IntervalMask:
        return Both(self, other) if isinstance(other, IntervalMask) else NotImplemented

    def __or__(self, other: IntervalMask) -> IntervalMask:
        return Either(self, other) if isinstance(other, IntervalMask) else NotImplemented


class Both(IntervalMask):
    """To be written."""


class Either(IntervalMask):
    """To be written."""
