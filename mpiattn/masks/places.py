"""Places of tokens: how far apart they are in the sequences that a mask packs into one.

The drafts of a tree that follow the same token stand at the same place, and every answer follows on the question.  What
goes by distance (windows, chunks, ALiBi, tables of relative positions) goes by places, so that a token gets what it
would get alone, after those that it sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Places:
    """The places of the keys of a sequence; a query has that of the key on its diagonal.

    starts: where runs of keys begin whose places follow one another: int64 (runs,), from 0 on, never decreasing.
    shifts: from a key of the run to its place: int64 (runs,).
    """

    starts: IntArray
    shifts: IntArray

    def __eq__(self, other: object) -> bool:
        """Whether all keys have the same places."""
        if not isinstance(other, Places):
            return NotImplemented
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.shifts, other.shifts)

    def of(self, keys: Any) -> Any:
        """The places of keys at some positions; before the first key, those that it goes on from."""
        return keys + self.shifts[np.maximum(np.searchsorted(self.starts, keys, "right") - 1, 0)]
