"""Intervals that the caller gives, as arrays or by a function."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError
from ..system.values import as_int64, whole_number
from .interval_mask import NEVER, PIECE, IntervalMask, without_empty
from .pieces import all_cuts
from .values import digest, explained

MOST = 2**31 - 1  # queries of a function, which is asked about all of them: 32 GiB of intervals

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .interval_mask import Intervals

    IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Given(IntervalMask):
    """See `intervals`: begin and end, read-only int64 arrays (lists, queries)."""

    lists: int
    queries: int
    keys: int
    digest: str
    begin: IntArray = field(repr=False, compare=False)
    end: IntArray = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.lists} given interval{'s' * (self.lists != 1)} a query"

    def check(self, seqlen: int, seqlen_k: int) -> None:
        if self.queries != seqlen or self.keys > seqlen_k:
            raise ArgumentError(
                f"mask has {self}, of {self.queries} queries, and {self.keys} is the last end; it must be of seqlen "
                f"{seqlen} queries, and an end may be at most seqlen_k {seqlen_k}"
            )

    def intervals(self, queries: IntArray, seqlen: int, seqlen_k: int) -> Intervals:
        return without_empty(self.begin[:, queries], self.end[:, queries])

    def cuts(self, seqlen: int, seqlen_k: int) -> IntArray:
        return all_cuts(self, seqlen, seqlen_k)


def _checked(said: str, begin: Any, end: Any, queries: int | None = None, first: int = 0) -> Intervals:
    """The two as int64 arrays (lists, queries), 0 where an interval is empty.

    said: by whom, for the errors.  queries: how many there must be, None for any.  first: the number of the first.
    """
    sides = []
    for side, value in zip(("begin", "end"), (begin, end)):
        try:
            array = np.asarray(value)
        except ValueError:
            raise ArgumentError(f"{side}{said} has lists of several lengths; it must be (lists, queries)") from None
        right = array.ndim == 2 and (array.dtype.kind in "iu" or not array.size)
        if not right or queries not in (None, array.shape[1]):
            raise ArgumentError(
                f"{side}{said} has shape {array.shape} and dtype {array.dtype}; it must be whole numbers of shape "
                f"(lists, {'queries' if queries is None else queries})"
            )
        sides.append(as_int64(array))
    if sides[0].shape != sides[1].shape:
        raise ArgumentError(f"end{said} has shape {sides[1].shape}; it must have that of begin, {sides[0].shape}")
    some = sides[0] < sides[1]
    begin, end = (np.where(some, side, 0) for side in sides)
    order = np.argsort(np.where(some, begin, NEVER), axis=0, kind="stable")
    in_order, ends, follows = (np.take_along_axis(array, order, 0) for array in (begin, end, some))
    overlap = (follows[1:] & (in_order[1:] < ends[:-1])).any(axis=0)
    for wrong, why in (((begin < 0).any(axis=0), "must not begin before key 0"), (overlap, "must not overlap")):
        if wrong.any():
            query = int(np.flatnonzero(wrong)[0])
            seen = [(int(i), int(j)) for i, j in zip(begin[:, query], end[:, query]) if i < j]
            raise ArgumentError(f"begin and end{said} are {seen} for query {first + query}; intervals {why}")
    return begin, end


def _given(begin: IntArray, end: IntArray) -> Given:
    needed = (begin < end).any(axis=1)
    begin, end = begin[needed], end[needed]
    for side in (begin, end):
        side.flags.writeable = False
    lists, queries = begin.shape
    return Given(lists, queries, int(end.max(initial=0)), digest(begin, end), begin, end)


@explained
def intervals(begin: Any, end: Any) -> Given:
    """A mask given as arrays: query i sees the keys begin[k, i] <= j < end[k, i] of every list k.

    A block is launched once for each list in which it has keys, and kernels look at all keys that a tile of
    neighbouring queries sees in a list: keep intervals of neighbouring queries in the same list if they are near.

    Parameters
    ----------
    begin, end : (lists, seqlen) whole numbers
        Keys counted from 0; an end at or before its begin stands for no key.  The intervals of a query must not
        overlap, and may have any order.  The arrays are copied, 16 bytes for each list and query.

    Raises
    ------
    ArgumentError
        If the arrays have another shape or dtype, if an interval begins before key 0, or if those of a query overlap.

    Examples
    --------
    Every token sees itself and the first:

    >>> import numpy as np
    >>> from mpiattn import masks
    >>> own = np.arange(8)
    >>> print(masks.intervals([own, own * 0], [own + 1, own.clip(0, 1)]))
    2 given intervals a query
    """
    return _given(*_checked("", begin, end))


def _check_one_argument(f: Callable[..., Any]) -> None:
    """Raise ArgumentError if a function cannot be called with positions alone."""
    try:
        parameters = signature(f)
    except (TypeError, ValueError):  # of some written in C, Python knows no signature
        return
    try:
        parameters.bind(None)
    except TypeError:
        raise ArgumentError(
            f"f takes {parameters}; it must take the positions of queries alone and return (begin, end), the keys that "
            "they see as intervals: a function of pairs, as the mask_mod of FlexAttention, is none"
        ) from None


@explained
def function(f: Callable[[IntArray], tuple[Any, Any]], seqlen: int) -> Given:
    """A mask given as a function from positions of queries to the intervals of keys that they see.

    Parameters
    ----------
    f : callable
        Takes positions, an int64 array (n,) that increases, and returns begin and end as `intervals` has them:
        (lists, n) each, with as many lists as it likes from call to call.  It is asked once, here, about all queries,
        some thousands at a time, so that ranks can compare what it said; it has to say the same on every rank.
    seqlen : int
        Number of queries.

    Raises
    ------
    ArgumentError
        If f is not callable, or returns anything else.

    Examples
    --------
    The 4 keys that end with the query's own, and every 100th:

    >>> import numpy as np
    >>> from mpiattn import masks
    >>> def keys(i):
    ...     recent, every = np.maximum(i - 3, 0), np.arange(0, 1000, 100)[:, None]
    ...     return np.vstack([recent, every + 0 * i]), np.vstack([i + 1, np.where(every < recent, every + 1, 0)])
    >>> print(masks.function(keys, 1000))
    11 given intervals a query
    """
    seqlen = whole_number("seqlen", seqlen, 0, most=MOST)
    if not callable(f):
        raise ArgumentError(f"f is {f!r}; it must be a function from positions to (begin, end)")
    _check_one_argument(f)
    pieces = []
    for start in range(0, seqlen, PIECE):
        stop = min(start + PIECE, seqlen)
        said = f(np.arange(start, stop))
        if not isinstance(said, tuple | list) or len(said) != 2:
            raise ArgumentError(f"f returns {type(said).__name__}; it must return (begin, end)")
        pieces.append((start, stop, *_checked(" of f", *said, stop - start, start)))
    lists = max((len(begin) for _, _, begin, _ in pieces), default=0)
    begin, end = np.zeros((2, lists, seqlen), np.int64)
    for start, stop, *sides in pieces:
        begin[: len(sides[0]), start:stop], end[: len(sides[1]), start:stop] = sides
    return _given(begin, end)
