"""Keys of cyclic rows as intervals of a field that is stored row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .interval_mask import Intervals

    IntArray = NDArray[np.int64]


def of_cyclic_rows(first: IntArray, length: IntArray, begin: IntArray, end: IntArray) -> Intervals:
    """The columns [begin, end) of rows that are cyclic, as intervals of keys; arrays (lists, queries).

    first, length: the first key of the row that a list has for a query, and the keys in it; length 0: no row.
    begin, end: columns, at most as many as the row has; some may be before the row or after its end, where it wraps:
        begin is at most the length, end at least 1.  One row (queries,) stands for all lists.

    Columns before the row are the last ones of the same row.  In memory the next row follows on these, and is mostly in
    the next list.  Where the two touch they become one interval, of that list; columns after the row likewise.  So a
    query near the end of its row has only one interval more than one in the middle.

    Returns three times as many lists: the rows, and what is left of the columns before and after them, mostly nothing.
    """
    some, stop = (begin < end) & (length > 0), first + length
    lo, hi = first + np.maximum(begin, 0), first + np.minimum(end, length)
    before = np.where(some & (begin < 0), stop + begin, stop)  # [before, stop), at the end of the row
    after = np.where(some & (end > length), first + end - length, first)  # [first, after), at its beginning
    lo, hi = np.where(some, lo, first), np.where(some, hi, first)
    next_ = some[:-1] & some[1:] & (stop[:-1] == first[1:])
    joins = next_ & (before[:-1] < stop[:-1]) & (lo[1:] == first[1:])
    joined = next_ & (after[1:] > first[1:]) & (hi[:-1] == stop[:-1])
    lo[1:] = np.where(joins, before[:-1], lo[1:])
    hi[:-1] = np.where(joined, after[1:], hi[:-1])
    before[:-1] = np.where(joins, stop[:-1], before[:-1])
    after[1:] = np.where(joined, first[1:], after[1:])
    return np.concatenate([lo, before, first]), np.concatenate([hi, stop, after])
