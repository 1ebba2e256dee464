"""Masks of several intervals: what a caller may say of each query besides `causal`, `window` and documents.

A query sees a few intervals of keys, disjoint, in any order.  A block is launched once for each interval list: list k
holds the k-th interval of every query, empty where a query has fewer.  `mpiattn.masks` has the masks that are built in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from ..errors import ArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .places import Places

    IntArray = NDArray[np.int64]
    Intervals: TypeAlias = "tuple[IntArray, IntArray]"  # begins and ends, each (lists, queries)

ROWS = 64  # queries of a kernel's tile: it looks at all keys from the first to the last that some of them see
PIECE = 2**13  # queries looked at at a time: their intervals stay in cache
NEVER = np.iinfo(np.int64).max
OF_ARRAYS = (
    "masks.intervals and masks.function make a mask of the intervals of keys that each query sees, masks.blocks of a "
    "bool matrix of blocks"
)


class IntervalMask:
    """The keys that each query of a sequence sees, as disjoint intervals.

    Positions are those of the whole sequence, whatever its documents.  Subclasses are frozen dataclasses of numbers,
    text and tuples, so that equal masks have equal reprs: ranks compare them so.  `a & b` shows the keys that both
    show, `a | b` those that either shows.
    """

    by_distance = False  # whether a query sees keys by how far they are from it: beside a mask with places, by these

    def places(self, seqlen_k: int) -> Places | None:
        """The `Places` of the keys; None where they are the positions."""
        return None

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

    def __getstate__(self) -> dict[str, object]:
        """The fields alone, so that equal masks are pickled alike, whatever they were asked."""
        return {name: self.__dict__[name] for name in getattr(self, "__dataclass_fields__", self.__dict__)}

    __array_ufunc__ = None  # so that `array & mask` is asked of the mask, not of it with each element

    def __and__(self, other: IntervalMask) -> IntervalMask:
        return Both(self, other) if isinstance(other, IntervalMask) else self._no("&", other)

    def __or__(self, other: IntervalMask) -> IntervalMask:
        return Either(self, other) if isinstance(other, IntervalMask) else self._no("|", other)

    def __rand__(self, other: object) -> NoReturn:
        self._no("&", other)

    def __ror__(self, other: object) -> NoReturn:
        self._no("|", other)

    def __sub__(self, other: object) -> NoReturn:
        self._no("-", other)

    def __xor__(self, other: object) -> NoReturn:
        self._no("^", other)

    def __invert__(self) -> NoReturn:
        raise ArgumentError(
            f"~ is not defined for masks; say what queries see in place of what {self} hides: {OF_ARRAYS}"
        )

    def _no(self, sign: str, other: object) -> NoReturn:
        """Raise ArgumentError: a mask is combined with something else, or by another sign."""
        what = f"{self} {sign} {type(other).__name__}"
        raise ArgumentError(f"{what} is not defined: & and | combine two masks of mpiattn.masks; {OF_ARRAYS}")

    def __bool__(self) -> NoReturn:
        """Raise ArgumentError: `a and b`, which looks like `a & b`, would be b alone."""
        raise ArgumentError(
            f"{type(self).__name__} is a mask, which is neither true nor false; combine masks with & and |, not with "
            "`and`, `or` and `not`; `mask is None` tells whether there is a mask"
        )


def checked_mask(mask: Any) -> IntervalMask:
    """The argument mask, if it is one; else raises ArgumentError."""
    if not isinstance(mask, IntervalMask):
        raise ArgumentError(
            f"mask is a {type(mask).__name__}; it must be a mask of mpiattn.masks, or None (no masks are arrays here)"
        )
    try:
        hash(mask)
        nameless = type(mask).__repr__ is object.__repr__
    except TypeError:
        nameless = True
    if nameless:
        raise ArgumentError(
            f"mask is a {type(mask).__name__}, which ranks cannot compare; its class must be a frozen dataclass of "
            "numbers, text, tuples and other masks"
        )
    return mask


def check_fits(mask: IntervalMask, seqlen: int, seqlen_k: int) -> None:
    """Raise ArgumentError unless a mask fits so many queries and keys, and, of a caller's class, says so as it must."""
    mask.check(seqlen, seqlen_k)
    for part in _of_callers(mask):
        _check_said(part, np.arange(min(seqlen, ROWS)), seqlen, seqlen_k)


def _of_callers(mask: IntervalMask) -> list[IntervalMask]:
    """The masks in this one whose classes are none of this package."""
    if isinstance(mask, _Pair):
        return _of_callers(mask.a) + _of_callers(mask.b)
    return [] if type(mask).__module__.partition(".")[0] == __name__.partition(".")[0] else [mask]


def _check_said(mask: IntervalMask, queries: IntArray, seqlen: int, seqlen_k: int) -> None:
    """Raise ArgumentError unless `intervals` returns disjoint intervals of these queries, in the form that it must."""
    said: Any = mask.intervals(queries, seqlen, seqlen_k)
    method = f"{type(mask).__name__}.intervals"
    if not (isinstance(said, tuple | list) and len(said) == 2 and all(isinstance(side, np.ndarray) for side in said)):
        raise ArgumentError(f"{method} returns a {type(said).__name__}; it must return two arrays, begin and end")
    for side in said:
        if side.ndim != 2 or side.shape != (len(said[0]), len(queries)) or not np.can_cast(side.dtype, np.int64):
            raise ArgumentError(
                f"{method} returns an array of shape {side.shape} and dtype {side.dtype} for {len(queries)} queries; "
                f"begin and end must be int64 (lists, {len(queries)})"
            )
    _, begin, end = _sorted(*(side.clip(0, seqlen_k) for side in said))
    overlap = (begin[1:] < end[:-1]).any(axis=0)
    if overlap.any():
        raise ArgumentError(f"{method} returns intervals that overlap for query {int(np.argmax(overlap))}; none may")


@dataclass(frozen=True)
class _Pair(IntervalMask):
    """Two masks as one."""

    a: IntervalMask
    b: IntervalMask

    def check(self, seqlen: int, seqlen_k: int) -> None:
        self.a.check(seqlen, seqlen_k)
        self.b.check(seqlen, seqlen_k)
        if self.by_distance:
            self.places(seqlen_k)

    @property
    def by_distance(self) -> bool:  # type: ignore[override]
        """Whether a part goes by distance."""
        return self.a.by_distance or self.b.by_distance

    def places(self, seqlen_k: int) -> Places | None:
        first, second = self.a.places(seqlen_k), self.b.places(seqlen_k)
        if first is not None and second is not None and first != second:
            raise ArgumentError(
                f"mask is {self}: {self.a} and {self.b} give tokens other places, by which distances go; only one of "
                "two such masks may be in it"
            )
        return second if first is None else first

    def _parts(self, seqlen_k: int) -> tuple[IntervalMask, IntervalMask]:
        """The two masks; what goes by distance goes by the places that either has."""
        places = self.places(seqlen_k) if self.by_distance else None
        return (self.a, self.b) if places is None else (by_places(self.a, places), by_places(self.b, places))


@dataclass(frozen=True)
class Both(_Pair):
    """The keys that both masks show: `a & b`."""

    def __str__(self) -> str:
        return " & ".join(f"({mask})" if isinstance(mask, Either) else str(mask) for mask in (self.a, self.b))

    def intervals(self, queries: IntArray, seqlen: int, seqlen_k: int) -> Intervals:
        a, b = self._parts(seqlen_k)
        begin, end = a.intervals(queries, seqlen, seqlen_k)
        begin_b, end_b = b.intervals(queries, seqlen, seqlen_k)
        lists = [  # one list of `a` at a time: most of the pairs are empty
            without_empty(np.maximum(first, begin_b), np.minimum(last, end_b)) for first, last in zip(begin, end)
        ]
        return packed(*_joined(lists, len(queries)))


@dataclass(frozen=True)
class Either(_Pair):
    """The keys that either of two masks shows: `a | b`."""

    def __str__(self) -> str:
        return f"{self.a} | {self.b}"

    def intervals(self, queries: IntArray, seqlen: int, seqlen_k: int) -> Intervals:
        lists = [mask.intervals(queries, seqlen, seqlen_k) for mask in self._parts(seqlen_k)]
        begin, end = _joined(lists, len(queries))
        return packed(*disjoint(begin.clip(0, seqlen_k), end.clip(0, seqlen_k)))


@dataclass(frozen=True)
class ByPlaces(IntervalMask):
    """A mask that goes by distance, with places instead of positions."""

    mask: IntervalMask
    of_keys: Places

    def intervals(self, queries: IntArray, seqlen: int, seqlen_k: int) -> Intervals:
        own = self.of_keys.of(queries + (seqlen_k - seqlen))
        begin, end = self.mask.intervals(own, seqlen_k, seqlen_k)
        stops = np.append(self.of_keys.starts[1:], seqlen_k)
        runs = zip(self.of_keys.starts.tolist(), stops.tolist(), self.of_keys.shifts.tolist())
        lists = [  # a run at a time: in it, keys follow one another as their places do
            without_empty(np.maximum(begin - shift, start), np.minimum(end - shift, stop))
            for start, stop, shift in runs
        ]
        return _joined(lists, len(queries))


def by_places(mask: IntervalMask, places: Places) -> IntervalMask:
    """The mask, in which all that goes by distance goes by these places."""
    if isinstance(mask, _Pair):
        return type(mask)(by_places(mask.a, places), by_places(mask.b, places))
    return ByPlaces(mask, places) if mask.by_distance else mask


def _joined(lists: list[Intervals], queries: int) -> Intervals:
    """Lists one after another, without those that are empty for all queries."""
    none = np.zeros((0, queries), np.int64)
    return without_empty(*(np.concatenate([none, *arrays]) for arrays in zip((none, none), *lists)))


def without_empty(begin: IntArray, end: IntArray) -> Intervals:
    """The lists in which some query sees a key; begin and end are 0 where a query has none."""
    some = begin < end
    needed = some.any(axis=1)
    if not needed.all():
        begin, end, some = begin[needed], end[needed], some[needed]
    return np.where(some, begin, 0), np.where(some, end, 0)


def disjoint(begin: IntArray, end: IntArray) -> Intervals:
    """Lists that show the same keys, each key once.  A list stays what it is as far as it can.

    Of intervals that touch or overlap, that which begins first takes in the others.  So a list in which neighbouring
    queries have neighbouring intervals mostly stays so.
    """
    if len(begin) < 2:
        return without_empty(begin, end)
    sides = np.empty((2, *begin.shape), np.int64)
    for some in _pieces(begin.shape[1]):
        sides[:, :, some] = _disjoint(begin[:, some], end[:, some])
    return without_empty(*sides)


def _disjoint(begin: IntArray, end: IntArray) -> IntArray:
    """As `disjoint`, of a few queries; with all lists, begins and ends as one array."""
    order, begin, end = _sorted(begin, end)
    reach = np.maximum.accumulate(end, axis=0)  # how far this interval goes and those before it
    heads = np.ones(begin.shape, bool)
    heads[1:] = begin[1:] > reach[:-1]
    # An interval that takes in others ends where the last of them does: before the next that stands alone.
    last = np.ones(begin.shape, bool)
    last[:-1] = heads[1:]
    number = np.where(last, np.arange(len(begin))[:, None], len(begin) - 1)
    number = np.minimum.accumulate(number[::-1], axis=0)[::-1]
    end = np.where(heads, np.take_along_axis(reach, number, 0), begin)
    sides = np.empty((2, *begin.shape), np.int64)
    np.put_along_axis(sides[0], order, begin, 0)
    np.put_along_axis(sides[1], order, end, 0)
    return sides


def packed(begin: IntArray, end: IntArray) -> Intervals:
    """Disjoint lists in as few lists as a query needs at most, if tiles of queries do not look at more keys for it."""
    most = int((begin < end).sum(axis=0).max(initial=0))
    if most == len(begin):
        return begin, end
    sides = np.empty((2, most, begin.shape[1]), np.int64)
    for some in _pieces(begin.shape[1]):
        _, *in_order = _sorted(begin[:, some], end[:, some])
        sides[:, :, some] = [side[:most] for side in in_order]
    begin_p, end_p = without_empty(*sides)
    return (begin_p, end_p) if _looked_at(begin_p, end_p) * 4 <= _looked_at(begin, end) * 5 else (begin, end)


def _pieces(queries: int) -> list[slice]:
    return [slice(start, min(start + PIECE, queries)) for start in range(0, queries, PIECE)]


def _sorted(begin: IntArray, end: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The order of every query's intervals by their beginnings, and the intervals in it; empty ones come last."""
    some = begin < end
    order = np.argsort(np.where(some, begin, NEVER), axis=0, kind="stable")
    begin, end = (np.take_along_axis(np.where(some, side, 0), order, 0) for side in (begin, end))
    begin[begin >= end] = NEVER
    return order, begin, np.where(begin == NEVER, 0, end)


def _looked_at(begin: IntArray, end: IntArray) -> int:
    """Keys between the first and the last that a tile of queries sees, summed over tiles and lists."""
    starts, some = np.arange(0, begin.shape[1], ROWS), begin < end
    first = np.minimum.reduceat(np.where(some, begin, NEVER), starts, axis=1)
    last = np.maximum.reduceat(np.where(some, end, 0), starts, axis=1)
    return int(np.maximum(last - first, 0).sum())
