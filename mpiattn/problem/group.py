"""The documents of a sequence, and some of its queries, as the rule of a mask takes them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    IntArray = NDArray[np.integer]


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


class Queries:
    """Queries of one group of documents, as a rule sees them; padding is not among them.

    positions: increasing.  counts: how many of them each document of the group has.
    """

    def __init__(self, positions: IntArray, group: Group, counts: IntArray):
        self.group, self._positions, self._counts = group, positions, counts

    def each(self, of_documents: IntArray) -> IntArray:
        """What holds for a document, for each of its queries: from (documents,) to (queries,)."""
        return np.repeat(of_documents, self._counts)

    @cached_property
    def diagonal(self) -> IntArray:
        """The key on the diagonal of each query, which may lie outside its document: int64 (queries,)."""
        diagonal = self.each(self.group.k_cuts[1:] - self.group.q_cuts[1:])
        diagonal += self._positions
        return diagonal
