"""Masks as row intervals: every query attends to one interval of key positions.

`causal` and `window` are relative to a diagonal that is aligned bottom-right: the diagonal of query i is key
i + Sk - Sq, so that of the last query is the last key.  Causal, with Sq = 2, Sk = 4 and Sq = 4, Sk = 2 (1 = attends):

    1 1 1 0         0 0
    1 1 1 1         0 0      <- a query that sees no key gives out = 0, lse = -inf
                    1 0
                    1 1

A window (left, right) allows the keys from `left` before the diagonal to `right` after it.  (1, 0), Sq = Sk = 4:

    1 0 0 0
    1 1 0 0
    0 1 1 0
    0 0 1 1

Two masks extend causal.  All queries see the keys of a prefix.  With causal blocks, a query sees all keys up to the end
of the block that holds its diagonal.  Both count keys from the first of the sequence or document.  Prefix 2 and blocks
of 2, Sq = Sk = 4:

    1 1 0 0         1 1 0 0
    1 1 0 0         1 1 0 0
    1 1 1 0         1 1 1 1
    1 1 1 1         1 1 1 1

Documents packed in one sequence (`problem.documents`) see only themselves.  Each has its own diagonal, may have its own
prefix, and may be causal or not.  Tokens in no document are padding and see nothing.  A query sees the keys that all
of these masks allow, and any combination leaves one interval of keys.

Positions inside a chunk increase under every layout.  The interval is therefore one interval [begin, end) of the
chunk's local columns, found by searchsorted.  Kernels take only these two integers per row; they know neither masks
nor layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

PIECE = 2**20  # queries counted at a time

IntArray: TypeAlias = "NDArray[np.integer]"
Window: TypeAlias = tuple[int | None, int | None]


class Group(NamedTuple):
    """The documents of one batch entry, or of all entries if they are alike.

    q_cuts, k_cuts: int64 (documents + 1,).  Document d holds the queries [q_cuts[d], q_cuts[d + 1]) and the keys
        [k_cuts[d], k_cuts[d + 1]); all tokens outside are padding.
    prefixes: int64 (documents,), None for the prefix of the mask.
    causal: bool (documents,), None for `causal` of the mask.
    """

    q_cuts: IntArray
    k_cuts: IntArray
    prefixes: IntArray | None = None
    causal: NDArray[np.bool_] | None = None

    def as_lists(self) -> tuple[list[int] | None, ...]:
        """The group as a tuple of lists, which can be compared with ==."""
        return tuple(None if array is None else array.tolist() for array in self)


@dataclass(frozen=True)
class Mask:
    """The keys that the queries of one attention see, apart from documents.

    seqlen: number of queries.
    seqlen_k: number of keys.
    causal: whether keys after the diagonal are hidden.
    window: (left, right), number of keys that a query sees before and after the diagonal; None for no limit.
    prefix: number of leading keys that all queries see in spite of `causal`.
    causal_block: number of keys in a block; `causal` lets a query see to the end of its block.  None or 1: to the
        diagonal.
    """

    seqlen: int
    seqlen_k: int
    causal: bool = False
    window: Window = (None, None)
    prefix: int = 0
    causal_block: int | None = None

    def __str__(self) -> str:
        """The mask in a few words."""
        left, right = ("" if side is None else side for side in self.window)
        window = "" if self.window == (None, None) else f" in window {left},{right}"
        prefix = f" after a prefix of {self.prefix}" if self.prefix else ""
        blocks = f" by blocks of {self.causal_block}" if self.causal_block else ""
        return f"{'causal' if self.causal else 'full'}{blocks}{prefix}{window}"

    @cached_property
    def _whole(self) -> tuple[Group]:
        """The sequence as one document, the only group."""
        return (Group(np.array([0, self.seqlen]), np.array([0, self.seqlen_k])),)

    def key_interval(self, positions: IntArray, documents: Sequence[Group] | None = None) -> tuple[IntArray, IntArray]:
        """Keys [lo, hi) that the queries at `positions` see: two int64 arrays (groups, queries).

        documents: the `Group`s from `mpiattn.problem.documents.documents`; None for the sequence as one document.
        """
        rows = [self._interval(positions, *group) for group in documents or self._whole]
        return np.stack([lo for lo, _ in rows]), np.stack([hi for _, hi in rows])

    def _interval(
        self,
        positions: IntArray,
        q_cuts: IntArray,
        k_cuts: IntArray,
        prefixes: IntArray | None = None,
        causal: NDArray[np.bool_] | None = None,
    ) -> tuple[IntArray, IntArray]:
        document = np.searchsorted(q_cuts, positions, side="right")  # 0: before the first, len: padding
        inside = (document > 0) & (document < len(q_cuts))
        document = np.where(inside, document, 1)
        lo, hi = k_cuts[document - 1], k_cuts[document]
        diagonal = positions + hi - q_cuts[document]
        left, right = self.window
        if self.causal if causal is None else causal.any():
            end = self._causal_end(diagonal, lo, self.prefix if prefixes is None else prefixes[document - 1])
            hi = np.minimum(hi, end if causal is None else np.where(causal[document - 1], end, hi))
        if left is not None:
            lo = np.maximum(lo, diagonal - left)
        if right is not None:
            hi = np.minimum(hi, diagonal + right + 1)
        return np.where(inside, lo, 0), np.where(inside, np.maximum(lo, hi), 0)

    def _causal_end(self, diagonal: IntArray, first: IntArray, prefix: IntArray | int) -> IntArray:
        """End of the keys that `causal` lets queries see; `first` is the first key of their document."""
        end = diagonal + 1
        if self.causal_block:
            end = first - (first - end) // self.causal_block * self.causal_block  # round up to a block
        return np.maximum(end, first + prefix)

    def pairs(self, documents: Sequence[Group] | None = None) -> int:
        """Number of attended (query, key) pairs, summed over the groups of documents."""
        total = 0
        for start in range(0, self.seqlen, PIECE):
            lo, hi = self.key_interval(np.arange(start, min(start + PIECE, self.seqlen)), documents)
            total += int((hi - lo).sum())
        return total


def local_interval(lo: IntArray, hi: IntArray, key_positions: IntArray) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The local columns [begin, end) of a chunk for key positions [lo, hi): two int32 arrays of the shape of lo.

    key_positions: positions of the chunk's keys, increasing.
    """
    begin = np.searchsorted(key_positions, lo).astype(np.int32)
    end = np.searchsorted(key_positions, hi).astype(np.int32)
    return begin, np.maximum(begin, end)
