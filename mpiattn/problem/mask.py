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
chunk's local columns.  Kernels take only these two integers per row; they know neither masks nor layouts.  The more
keys come before a position, the later it is, so the limits of a document become columns once for all of its queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from .closed_form import Ranges, block_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

PIECE = 2**15  # queries looked at at a time: their intervals stay in cache
FEW = 4  # ranges of keys up to which arithmetic is faster than a search
CLOSED = 2**31  # tokens from which on products of the closed form do not fit an int64
MANY = 64  # documents from which on it pays to leave out those of other queries first

IntArray: TypeAlias = "NDArray[np.integer]"
Window: TypeAlias = tuple[int | None, int | None]
Place: TypeAlias = "Callable[[IntArray], IntArray]"


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


def _itself(positions: IntArray) -> IntArray:
    return positions


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

    @property
    def full(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and self.window == (None, None)

    @property
    def nested(self) -> bool:
        """Whether a query sees all that the queries before it see."""
        return self.window[0] is None

    @property
    def closed_form(self) -> bool:
        """Whether pairs without documents are counted without a look at every query."""
        return not self.causal_block

    @property
    def unpadded(self) -> range:
        """The queries that are not padding."""
        return range(self.seqlen)

    def key_interval(
        self, positions: IntArray, documents: Sequence[Group] | None = None, place: Place | None = None
    ) -> tuple[IntArray, IntArray]:
        """Keys [lo, hi) that the queries at `positions` see: two int64 arrays (groups, queries).

        positions: increasing, or the same twice.
        documents: the `Group`s from `mpiattn.problem.documents.documents`; None for the sequence as one document.
        place: from `columns_of`, to return columns, int32, in place of positions; None for positions.
        """
        groups = documents or self._whole
        shape = len(groups), len(positions)
        lo, hi = (np.zeros(shape, np.int32 if place else np.int64) for _ in range(2))
        for row, group in enumerate(groups):
            self._interval(positions, *group, place or _itself, lo[row], hi[row])
        return lo, hi

    def reach(self, cuts: IntArray, documents: Sequence[Group] | None = None) -> tuple[IntArray, IntArray, IntArray]:
        """Keys [lo, hi) that some query of a document and a piece of the sequence sees, and the number of the piece.

        Both ends move on from query to query by no more than a query sees, so that no key between them is left out.

        cuts: where the pieces begin, which follow one another, and where the last ends.
        Returns three arrays with an element for every document and piece that have queries in common.
        """
        ends: list[tuple[IntArray, IntArray, IntArray]] = []
        for group in documents or self._whole:
            both = np.sort(np.concatenate([cuts, group.q_cuts]))
            document = group.q_cuts.searchsorted(both[:-1], "right") - 1
            some = (both[:-1] < both[1:]) & (document >= 0) & (document < len(group.q_cuts) - 1)
            first, last, document = both[:-1][some], both[1:][some] - 1, document[some]
            queries = np.empty(2 * len(first), np.int64)
            queries[::2], queries[1::2] = first, last
            (lo,), (hi,) = self.key_interval(queries, (group,))
            # a query that sees nothing may begin later
            end = np.minimum(hi[1::2], group.k_cuts[document + 1])
            ends.append((lo[::2], end, cuts.searchsorted(first, "right") - 1))
        lo, end, piece = ends[0] if len(ends) == 1 else (np.concatenate(arrays) for arrays in zip(*ends))
        return lo, end, piece

    def _interval(
        self,
        positions: IntArray,
        q_cuts: IntArray,
        k_cuts: IntArray,
        prefixes: IntArray | None,
        causal: NDArray[np.bool_] | None,
        place: Place,
        lo: IntArray,
        hi: IntArray,
    ) -> None:
        """Write the keys that queries see to `lo` and `hi`, which are 0; padding before and after documents stays 0.

        place: turns positions into what is written, in the same order.
        """
        if len(positions) and len(q_cuts) > MANY:  # leave out documents before and after these queries
            begun, end = q_cuts.searchsorted([positions[0], positions[-1]], "right").tolist()
            begun = max(begun - 1, 0)
            q_cuts, k_cuts = q_cuts[begun : end + 1], k_cuts[begun : end + 1]
            prefixes = None if prefixes is None else prefixes[begun:end]
            causal = None if causal is None else causal[begun:end]
        begins = positions.searchsorted(q_cuts)  # of the documents, among the queries
        inside, counts = slice(begins[0], begins[-1]), np.diff(begins)

        def by_query(of_documents: IntArray) -> IntArray:
            return np.repeat(of_documents, counts)

        first, last = k_cuts[:-1], k_cuts[1:]
        lo, hi = lo[inside], hi[inside]
        lo[:], hi[:] = by_query(place(first)), by_query(place(last))
        left, right = self.window
        some_causal = self.causal if causal is None else causal.any()
        if not some_causal and left is None and right is None:
            return
        diagonal = by_query(last - q_cuts[1:])
        diagonal += positions[inside]
        if some_causal:
            end = diagonal + 1
            if self.causal_block:
                start = by_query(first)
                end = start - (start - end) // self.causal_block * self.causal_block  # round up to a block
            # what queries see all the same: a prefix or, where a document is not causal, all of it
            least = first + (self.prefix if prefixes is None else prefixes)
            if prefixes is not None or self.prefix or causal is not None:
                np.maximum(end, by_query(least if causal is None else np.where(causal, least, last)), out=end)
            np.minimum(hi, place(end), out=hi)
        if left is not None:
            np.maximum(lo, place(diagonal - left), out=lo)
        if right is not None:
            np.minimum(hi, place(diagonal + (right + 1)), out=hi)
        np.maximum(lo, hi, out=hi)

    def seeing(self, starts: IntArray, stops: IntArray) -> tuple[IntArray, IntArray] | None:
        """The first query whose keys end after each start, and the first whose keys begin at each stop or after it.

        starts, stops: of ranges of keys.
        Returns two int64 arrays of their shape; None where only a look at queries tells.
        """
        diagonal, (left, right) = self.seqlen_k - self.seqlen, self.window
        first, end = np.zeros_like(starts), np.full_like(stops, self.seqlen)
        if self.causal:
            block = starts - starts % (self.causal_block or 1)
            first = np.where(starts < self.prefix, 0, block - diagonal)
        if right is not None:
            first = np.maximum(first, starts - right - diagonal)
        if left is not None:
            end = stops + left - diagonal
        return first.clip(0, self.seqlen), end.clip(0, self.seqlen)

    def pairs(self, documents: Sequence[Group] | None = None) -> int:
        """Number of attended (query, key) pairs, summed over the groups of documents."""
        if self.closed_form and documents is None and max(self.seqlen, self.seqlen_k) < CLOSED:
            first = np.zeros(1, np.int64)
            queries, keys = (Ranges(first, np.array([count]), 1) for count in (self.seqlen, self.seqlen_k))
            return int(block_pairs(self, [queries], [keys], (first, first))[0])
        total = 0
        for start in range(0, self.seqlen, PIECE):
            lo, hi = self.key_interval(np.arange(start, min(start + PIECE, self.seqlen)), documents)
            total += int((hi - lo).sum())
        return total


@dataclass(frozen=True)
class PackedMask(Mask):
    """What queries see where documents are packed in one sequence of as many queries as keys.

    cuts: as `Group.q_cuts` and `Group.k_cuts`.
    """

    cuts: tuple[int, ...] = ()

    @cached_property
    def _whole(self) -> tuple[Group]:
        return (Group(np.array(self.cuts), np.array(self.cuts)),)

    @property
    def full(self) -> bool:
        """False, also where there is only one document."""
        return False

    @property
    def nested(self) -> bool:
        """False: a query does not see the documents before its own."""
        return False

    @property
    def closed_form(self) -> bool:
        """False: each document is counted."""
        return False

    @property
    def unpadded(self) -> range:
        """The queries that are not padding."""
        return range(self.cuts[0], self.cuts[-1])

    def seeing(self, starts: IntArray, stops: IntArray) -> None:
        """None: documents begin and end anywhere."""


def columns_of(keys: Sequence[range] | IntArray) -> Place:
    """The columns of a chunk as `place` of `Mask.key_interval`: how many of its keys come before each position, int32.

    keys: positions of the chunk's keys, increasing: an array, or ranges one after another.
    """
    if not isinstance(keys, np.ndarray) and len(keys) > FEW:
        keys = np.concatenate([np.arange(t.start, t.stop, t.step) for t in keys])

    def before(positions: IntArray) -> IntArray:
        if isinstance(keys, np.ndarray):
            return np.searchsorted(keys, positions).astype(np.int32)
        counts = []
        for tokens in keys:
            count = positions - tokens.start
            if tokens.step > 1:
                count = -(-count // tokens.step)
            np.maximum(count, 0, out=count)
            np.minimum(count, len(tokens), out=count)
            counts.append(count.astype(np.int32))
        return sum(counts[1:], counts[0]) if counts else np.zeros(positions.shape, np.int32)

    return before
