"""Rectangles of queries and keys, each full or cut along a diagonal, as MagiAttention's slices."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError
from ..system.choices import one_of
from .interval_mask import IntervalMask, disjoint, without_empty
from .pieces import all_cuts
from .values import digest, explained, whole_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from .interval_mask import Intervals

    IntArray = NDArray[np.int64]

KINDS = "full", "causal", "inverse_causal", "bidirectional_causal"  # bit 1: causal, bit 2: inverse causal
ALSO = {"inv_causal": "inverse_causal", "bi_causal": "bidirectional_causal"}  # as MagiAttention spells them
SHOWN = 4  # entries up to which a mask's text names all


@dataclass(frozen=True)
class Ranges(IntervalMask):
    """See `ranges`; entries are (q0, q1, k0, k1, kind), in order."""

    count: int
    digest: str
    entries: tuple[tuple[int, int, int, int, str], ...] = field(repr=False, compare=False)

    def __str__(self) -> str:
        if self.count <= SHOWN:
            return f"ranges {','.join(':'.join(map(str, entry)) for entry in self.entries)}"
        return f"ranges, {self.count} of them"

    def check(self, seqlen: int, seqlen_k: int) -> None:
        for number, (_, q1, _, k1, _) in enumerate(self.entries):
            for of, end, tokens in (("queries", q1, seqlen), ("keys", k1, seqlen_k)):
                if end > tokens:
                    raise ArgumentError(
                        f"mask is {self}, whose entry {number} ends with {end} {of}; there are {tokens} {of}"
                    )

    @cached_property
    def _lists(self) -> list[IntArray]:
        """The entries dealt out to as few lists as possible, so that those of a list share no query.

        Each list is an array (5, entries) with the queries increasing; the last row is the number of the kind.
        """
        lists: list[list[tuple[int, ...]]] = []
        ends: list[tuple[int, int]] = []  # where each list ends, and its number: the one that ends first comes first
        for q0, q1, k0, k1, kind in self.entries:
            entry = q0, q1, k0, k1, KINDS.index(kind)
            if ends and ends[0][0] <= q0:
                number = heapq.heapreplace(ends, (q1, ends[0][1]))[1]
                lists[number].append(entry)
            else:
                heapq.heappush(ends, (q1, len(lists)))
                lists.append([entry])
        return [np.array(entries, np.int64).T for entries in lists]

    def intervals(self, queries: IntArray, seqlen: int, seqlen_k: int) -> Intervals:
        begin, end = np.zeros((2, len(self._lists), len(queries)), np.int64)
        for row, entries in enumerate(self._lists):
            number = np.searchsorted(entries[0], queries, "right") - 1
            q0, q1, k0, k1, kind = entries[:, number]  # of the last entry, where a query comes before all
            inside = (q0 <= queries) & (queries < q1)
            last = np.where(kind & 1, k1 - (q1 - 1 - queries), k1)
            begin[row] = np.where(inside, k0 + np.where(kind & 2, queries - q0, 0), 0)
            end[row] = np.where(inside, last, 0)
        return disjoint(*without_empty(begin, end))

    def cuts(self, seqlen: int, seqlen_k: int) -> IntArray:
        return all_cuts(self, seqlen, seqlen_k)


@explained
def ranges(entries: Iterable[Sequence[Any]]) -> Ranges:
    """Rectangles of queries and keys, as the slices (q_range, k_range, type) of MagiAttention.

    A query sees the keys that some rectangle shows it; rectangles may overlap.  The kinds, of 3 queries and 5 keys::

        full            causal          inverse_causal  bidirectional_causal
        1 1 1 1 1       1 1 1 0 0       1 1 1 1 1       1 1 1 0 0
        1 1 1 1 1       1 1 1 1 0       0 1 1 1 1       0 1 1 1 0
        1 1 1 1 1       1 1 1 1 1       0 0 1 1 1       0 0 1 1 1

    Causal is aligned with the rectangle's bottom right, inverse causal with its top left; the last is what both show.

    Parameters
    ----------
    entries : sequence of (q0, q1, k0, k1, kind)
        Queries [q0, q1) and keys [k0, k1), and a kind: "full", "causal", "inverse_causal" or "bidirectional_causal";
        MagiAttention's "inv_causal" and "bi_causal" are taken too.

    Raises
    ------
    ArgumentError
        If an entry is not of that form, or a range ends before it begins.

    Examples
    --------
    A sliding window of 3 on 10 tokens, the first of which are seen as far as there are any:

    >>> from mpiattn import masks
    >>> print(masks.ranges([(0, 3, 0, 3, "causal"), (3, 10, 1, 10, "bidirectional_causal")]))
    ranges 0:3:0:3:causal,3:10:1:10:bidirectional_causal
    """
    try:
        given = [tuple(entry) for entry in entries]
    except TypeError:
        raise ArgumentError(f"entries is {entries!r}; it must be a list of (q0, q1, k0, k1, kind)") from None
    checked = []
    for number, entry in enumerate(given):
        if len(entry) != 5:
            raise ArgumentError(f"entries[{number}] is {entry!r}; it must be (q0, q1, k0, k1, kind)")
        q0, q1, k0, k1 = whole_numbers(f"entries[{number}]", entry[:4], 0, "(0, 10, 0, 10)")
        kind = ALSO.get(entry[4], entry[4]) if isinstance(entry[4], str) else entry[4]
        one_of(f"kind of entries[{number}]", kind, KINDS)
        if q0 > q1 or k0 > k1:
            raise ArgumentError(f"entries[{number}] is {entry!r}; a range must not end before it begins")
        if q0 < q1 and k0 < k1:
            checked.append((q0, q1, k0, k1, kind))
    kept = tuple(sorted(set(checked)))
    numbers = np.array([(*entry[:4], KINDS.index(entry[4])) for entry in kept], np.int64)
    return Ranges(len(kept), digest(numbers), kept)
