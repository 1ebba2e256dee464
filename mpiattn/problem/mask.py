"""Masks as row intervals: every query attends to a few intervals of key positions.

`causal`, `window`, prefixes, causal blocks and documents leave one interval; a `masks.interval_mask` several.

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
of these masks allow, and any combination leaves one interval of keys.  The caller's `IntervalMask` cuts it to several.

What a query sees stands in `Mask.rule` alone, and in the caller's mask.  Everything else asks these about some queries:
of long sequences only about a few, because neither end of an interval moves back from query to query.
`problem.closed_form` answers faster for some masks, and is not asked about a mask that it does not know.

An interval of keys is an interval of the columns of any chunk (`problem.columns`).  Kernels take only these integers
per row; they know neither masks nor layouts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .closed_form import KNOWN, Ranges, block_pairs, queries_seeing
from .group import Group, Queries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..masks.interval_mask import IntervalMask
    from .columns import ToColumns

PIECE = 2**15  # queries looked at at a time: their intervals stay in cache
MANY_DOCUMENTS = 64  # from which on it pays to leave out those of other queries first
SAMPLE = 2**7  # queries that stand for all
REMEMBERED = 256  # masks
SEARCH_PARTS = 8  # in which a search cuts the queries that are left

IntArray: TypeAlias = "NDArray[np.integer]"
Window: TypeAlias = tuple[int | None, int | None]


def _itself(positions: IntArray) -> IntArray:
    return positions


def _sample(start: int, stop: int) -> IntArray:
    """Queries of [start, stop), evenly spread and in order: some more than once where there are few."""
    return start + np.arange(SAMPLE if start < stop else 0) * (stop - 1 - start) // (SAMPLE - 1)


@dataclass(frozen=True)
class Mask:
    """The keys that the queries of one attention see.

    seqlen: number of queries.
    seqlen_k: number of keys.
    causal: whether keys after the diagonal are hidden.
    window: (left, right), number of keys that a query sees before and after the diagonal; None for no limit.
    prefix: number of leading keys that all queries see in spite of `causal`.
    causal_block: number of keys in a block; `causal` lets a query see to the end of its block.  None or 1: to the
        diagonal.
    mask: an `IntervalMask` of the caller, which hides more keys; None for none.
    cuts: where documents of as many queries as keys begin and the last ends; None without.  A call's own documents
        are arguments of the methods, and take their place.
    """

    seqlen: int
    seqlen_k: int
    causal: bool = False
    window: Window = (None, None)
    prefix: int = 0
    causal_block: int | None = None
    mask: IntervalMask | None = None
    cuts: tuple[int, ...] | None = None

    def __str__(self) -> str:
        """The mask in a few words."""
        left, right = ("" if side is None else side for side in self.window)
        window = "" if self.window == (None, None) else f" in window {left},{right}"
        prefix = f" after a prefix of {self.prefix}" if self.prefix else ""
        blocks = f" by blocks of {self.causal_block}" if self.causal_block else ""
        rule = f"{'causal' if self.causal else 'full'}{blocks}{prefix}{window}"
        return rule if self.mask is None else str(self.mask) if rule == "full" else f"{rule}, {self.mask}"

    def rule(self, queries: Queries) -> tuple[IntArray | None, IntArray | None]:
        """The first key that each query sees, and one past the last: each int64 (queries,), or None for no limit.

        They may lie outside the query's document, whose other keys it does not see in any case; an end before the
        beginning stands for no key.  From one query of a document to the next both ends must

        - never decrease, so that what some queries see, and who sees some keys, is known from a few queries;
        - leave out no key between the two queries' keys, so that consecutive queries together see one interval.
        """
        group, (left, right) = queries.group, self.window
        begin = end = None
        if self.causal if group.causal is None else group.causal.any():
            first, last = group.k_cuts[:-1], group.k_cuts[1:]
            end = queries.diagonal + 1
            if self.causal_block:
                start = queries.each(first)
                end = start - (start - end) // self.causal_block * self.causal_block  # round up to a block
            # what queries see all the same: a prefix or, where a document is not causal, all of it
            least = first + (self.prefix if group.prefixes is None else group.prefixes)
            if group.causal is not None:
                least = np.where(group.causal, least, last)
            if (least > first).any():
                np.maximum(end, queries.each(least), out=end)
        if left is not None:
            begin = queries.diagonal - left
        if right is not None:
            limit = queries.diagonal + (right + 1)
            end = limit if end is None else np.minimum(end, limit, out=end)
        return begin, end

    @property
    def closed_form(self) -> bool:
        """Whether `problem.closed_form` holds: it knows the rule and every field that has a value."""
        return type(self).rule is Mask.rule and all(
            field.name in KNOWN or getattr(self, field.name) == field.default for field in fields(self)
        )

    @cached_property
    def _whole(self) -> tuple[Group]:
        """The documents of `cuts`, or the sequence as one: the only group."""
        if self.cuts is None:
            return (Group(np.array([0, self.seqlen]), np.array([0, self.seqlen_k])),)
        return (Group(np.array(self.cuts), np.array(self.cuts)),)

    @property
    def unpadded(self) -> range:
        """The queries that are not padding."""
        (group,) = self._whole
        return range(int(group.q_cuts[0]), int(group.q_cuts[-1]))

    @cached_property
    def full(self) -> bool:
        """Whether every query sees every key."""
        return _full(self)

    @cached_property
    def widest(self) -> int:
        """About the most keys that an interval of a query of the second half of the sequence has.

        The first half would not tell what most queries see: a window is cut short at its begin, and a prefix lets the
        first queries see more keys than they are.
        """
        lo, hi = self.key_intervals(_sample(self.seqlen // 2, self.seqlen))
        return int((hi - lo).max(initial=0))

    @cached_property
    def lists(self) -> int:
        """About the most intervals that a query has, 1 at least."""
        if self.mask is None:
            return 1
        lo, hi = self.key_intervals(_sample(0, self.seqlen))
        return max(1, int((lo < hi).sum(axis=0).max(initial=0)))

    @cached_property
    def opens_ahead(self) -> bool:
        """Whether a window shows every query some keys after its diagonal, but not all keys.

        Such a window moves on with the query: the query whose diagonal is the last key that another one sees, sees
        further than that one.  With a prefix or causal blocks it does not.
        """
        return _opens_ahead(self)

    def key_intervals(
        self, positions: IntArray, documents: Sequence[Group] | None = None, to_columns: ToColumns | None = None
    ) -> tuple[IntArray, IntArray]:
        """Keys [lo, hi) that the queries at `positions` see: two int64 arrays (lists, groups, queries).

        There is one list, or as many as `mask` needs for these queries; the intervals of a query are disjoint.

        positions: increasing, or the same twice.
        documents: the `Group`s from `mpiattn.problem.documents.documents`; None for the sequence as one document.
        to_columns: of `columns_of`: the result is then columns of that chunk, int32.  None for positions.
        """
        if self.mask is None:
            lo, hi = self.key_interval(positions, documents, to_columns)
            return lo[None], hi[None]
        first, last = self.key_interval(positions, documents)
        at = positions.astype(np.int64, copy=False)
        begin, end = (bound[:, None] for bound in self.mask.intervals(at, self.seqlen, self.seqlen_k))
        if not len(begin):
            begin = end = np.zeros((1, 1, len(positions)), np.int64)
        lo = np.minimum(np.maximum(begin, first), last)
        hi = np.maximum(np.minimum(end, last), lo)
        return (lo, hi) if to_columns is None else (to_columns(lo), to_columns(hi))

    def key_interval(
        self, positions: IntArray, documents: Sequence[Group] | None = None, to_columns: ToColumns | None = None
    ) -> tuple[IntArray, IntArray]:
        """As `key_intervals` but for `mask`, which hides some of these keys: two arrays (groups, queries)."""
        groups = documents or self._whole
        shape = len(groups), len(positions)
        lo, hi = (np.zeros(shape, np.int32 if to_columns else np.int64) for _ in range(2))
        for row, group in enumerate(groups):
            self._interval(positions, group, to_columns or _itself, lo[row], hi[row])
        return lo, hi

    def keys_seen_by(self, queries: IntArray) -> IntArray:
        """Without `mask` and a call's documents, of queries in any order: (lo, hi), int64 (2, *shape of queries)."""
        order = np.argsort(queries, axis=None, kind="stable")  # fast where most are in order
        ends = np.empty((2, queries.size), np.int64)
        ends[:, order] = np.concatenate(self.key_interval(queries.ravel()[order]))
        return ends.reshape(2, *queries.shape)

    def pieces(self, documents: Sequence[Group] | None = None) -> IntArray | None:
        """Where pieces of the queries begin, besides documents: the first and the last query tell what all of one see.

        None if each query must be asked.
        """
        if self.mask is None:
            return np.zeros(0, np.int64)
        if documents is not None or not replace(self, mask=None).full:
            return None  # keys between those of two queries may be hidden
        return self.mask.cuts(self.seqlen, self.seqlen_k)

    def reach(
        self, cuts: IntArray, pieces: IntArray, documents: Sequence[Group] | None = None
    ) -> tuple[IntArray, IntArray, IntArray]:
        """The keys that parts of the sequence see: of every list, document, piece and part that share queries.

        By the two rules of `rule` it is one interval, from what the first of these queries sees to what the last does.

        cuts: where the parts begin, which follow one another, and where the last ends.  pieces: as of `pieces`.
        Returns lo, hi and the number of the part: three arrays.
        """
        ends: list[tuple[IntArray, IntArray, IntArray]] = []
        for group in documents or self._whole:
            both = np.sort(np.concatenate([cuts, group.q_cuts, pieces]))
            document = group.q_cuts.searchsorted(both[:-1], "right") - 1
            some = (both[:-1] < both[1:]) & (document >= 0) & (document < len(group.q_cuts) - 1)
            first, last, document = both[:-1][some], both[1:][some] - 1, document[some]
            queries = np.empty(2 * len(first), np.int64)
            queries[::2], queries[1::2] = first, last
            (lo,), (hi,) = (side.swapaxes(0, 1) for side in self.key_intervals(queries, (group,)))
            part = np.broadcast_to(cuts.searchsorted(first, "right") - 1, (len(lo), len(first)))
            # a query that sees nothing may begin later
            end = np.minimum(hi[:, 1::2], group.k_cuts[document + 1])
            ends.append((lo[:, ::2].ravel(), end.ravel(), part.ravel()))
        los, stops, parts = zip(*ends)
        return np.concatenate(los), np.concatenate(stops), np.concatenate(parts)

    def _interval(self, positions: IntArray, group: Group, convert: ToColumns, lo: IntArray, hi: IntArray) -> None:
        """Write the keys that queries see to `lo` and `hi`, which are 0; padding before and after documents stays 0.

        convert: from positions to what is written: columns, or the positions themselves.
        """
        if len(positions) and len(group.q_cuts) > MANY_DOCUMENTS:  # leave out documents before and after these queries
            first, last = group.q_cuts.searchsorted([positions[0], positions[-1]], "right").tolist()
            first = max(first - 1, 0)
            cuts, values = slice(first, last + 1), slice(first, last)
            group = Group(
                group.q_cuts[cuts],
                group.k_cuts[cuts],
                None if group.prefixes is None else group.prefixes[values],
                None if group.causal is None else group.causal[values],
            )
        begins = positions.searchsorted(group.q_cuts)  # of the documents, among the queries
        inside = slice(begins[0], begins[-1])
        queries = Queries(positions[inside], group, np.diff(begins))
        lo, hi = lo[inside], hi[inside]
        lo[:], hi[:] = (queries.each(convert(ends)) for ends in (group.k_cuts[:-1], group.k_cuts[1:]))
        begin, end = self.rule(queries)
        if begin is not None:
            np.maximum(lo, convert(begin), out=lo)
        if end is not None:
            np.minimum(hi, convert(end), out=hi)
        if begin is not None or end is not None:
            np.maximum(lo, hi, out=hi)

    def queries_seeing(self, starts: IntArray, stops: IntArray) -> tuple[IntArray, IntArray]:
        """The queries [first, end) that see a key of each range of keys [start, stop).

        `first` is the first query whose keys end after the start, `end` the first whose keys begin at the stop or after
        it; where there is none, the end of the queries that are not padding.  Queries that see no key may lie between.

        Returns two int64 arrays of the shape of starts and stops.
        """
        if self.closed_form:
            return queries_seeing(self, starts, stops)
        keys, end = np.stack([starts + 1, stops]), self.unpadded.stop
        low, high = np.zeros_like(keys), np.full_like(keys, end)
        parts = np.arange(SEARCH_PARTS).reshape(-1, *[1] * keys.ndim)
        while (low < high).any():
            queries = low + (high - low) * parts // SEARCH_PARTS  # at so many at once: a look costs a call
            lo, hi = self.keys_seen_by(np.minimum(queries, end - 1))
            reached = (np.stack([hi[:, 0], lo[:, 1]], axis=1) >= keys) | (low >= high)
            low = np.where(reached, low, queries + 1).max(axis=0)
            high = np.where(reached, queries, high).min(axis=0)
        return low[0], low[1]

    def pairs(self, documents: Sequence[Group] | None = None) -> int:
        """Number of attended (query, key) pairs, summed over the groups of documents."""
        if self.closed_form and documents is None:
            first = np.zeros(1, np.int64)
            # Python's ints in arrays, since of 2^31 tokens twice the number of pairs does not fit an int64
            queries, keys = (
                Ranges(first.astype(object), np.array([n], object), 1) for n in (self.seqlen, self.seqlen_k)
            )
            return int(block_pairs(self, [queries], [keys], (first, first))[0])
        return _pairs(self) if documents is None else _counted(self, documents)


# What follows from the rule is remembered by the mask's fields: each `Problem` makes its own `Mask`, a plan several.
@lru_cache(REMEMBERED)
def _pairs(mask: Mask) -> int:
    """As `Mask.pairs` without a call's documents."""
    return _counted(mask, None)


def _counted(mask: Mask, documents: Sequence[Group] | None) -> int:
    """As `Mask.pairs`, by a look at every query."""
    total = 0
    for start in range(0, mask.seqlen, PIECE):
        lo, hi = mask.key_intervals(np.arange(start, min(start + PIECE, mask.seqlen)), documents)
        total += int((hi - lo).sum())
    return total


@lru_cache(REMEMBERED)
def _full(mask: Mask) -> bool:
    """As `Mask.full`: if the first query and the last see every key, so do all between."""
    if mask.mask is not None:
        lo, hi = mask.key_intervals(_sample(0, mask.seqlen))
        sampled = (hi - lo).sum(axis=0) == mask.seqlen_k
        return bool(sampled.all()) and mask.pairs() == mask.seqlen * mask.seqlen_k
    lo, hi = mask.key_intervals(np.array([0, mask.seqlen - 1][: mask.seqlen], np.int64))
    return not lo.any() and bool((hi == mask.seqlen_k).all())


@lru_cache(REMEMBERED)
def _opens_ahead(mask: Mask) -> bool:
    """As `Mask.opens_ahead`."""
    shift = mask.seqlen_k - mask.seqlen
    if mask.full or mask.mask is not None:
        return False
    queries = _sample(max(-shift, 0), mask.seqlen - 1)  # the last query's diagonal is the last key
    _, ((end,),) = mask.key_intervals(queries)
    inner = end[end < mask.seqlen_k]
    further = mask.key_intervals(inner - 1 - shift)[1] > inner
    return len(queries) > 0 and bool(further.all())


MASK_FIELDS = tuple(name for name in Mask.__dataclass_fields__ if name != "cuts")  # those that a `Problem` has too
