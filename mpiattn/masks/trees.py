"""Trees of drafted tokens, as speculative decoding verifies them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ArgumentError
from .interval_mask import IntervalMask, disjoint, without_empty
from .pieces import needed_cuts
from .places import Places
from .values import digest, explained, whole_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .interval_mask import Intervals

    IntArray = NDArray[np.int64]

SHOWN = 16  # drafted tokens up to which a mask's text names all


@dataclass(frozen=True)
class Tree(IntervalMask):
    """See `tree`."""

    drafted: int
    digest: str
    parents: tuple[int, ...] = field(repr=False, compare=False)

    def __str__(self) -> str:
        if self.drafted <= SHOWN:
            return f"tree {','.join(map(str, self.parents))}"
        return f"tree of {self.drafted} tokens"

    def check(self, seqlen: int, seqlen_k: int) -> None:
        if self.drafted > min(seqlen, seqlen_k):
            raise ArgumentError(
                f"mask is {self}, of {self.drafted} tokens, which are the last; there are {seqlen} queries and "
                f"{seqlen_k} keys"
            )

    @cached_property
    def _runs(self) -> Intervals:
        """Of every drafted token, the runs of drafted tokens that it sees: (lists, drafted) each, counted from 0."""
        runs: list[list[tuple[int, int]]] = []
        for token, parent in enumerate(self.parents):
            above = runs[parent] if parent >= 0 else []
            grows = above and above[-1][1] == token
            runs.append([*above[:-1], (above[-1][0], token + 1)] if grows else [*above, (token, token + 1)])
        begin, end = np.zeros((2, max(map(len, runs), default=0), len(runs)), np.int64)
        for token, seen in enumerate(runs):
            begin[: len(seen), token], end[: len(seen), token] = np.array(seen).T
        return begin, end

    @cached_property
    def _depths(self) -> IntArray:
        """Of every drafted token, how many drafted tokens it follows."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return np.array(depths, np.int64)

    def places(self, seqlen_k: int) -> Places:
        """Drafts that follow the same token have the same place."""
        numbers = np.arange(self.drafted)
        return Places(np.append(0, seqlen_k - self.drafted + numbers), np.append(0, self._depths - numbers))

    def intervals(self, queries: IntArray, seqlen: int, seqlen_k: int) -> Intervals:
        context, drafted = seqlen_k - self.drafted, queries - (seqlen - self.drafted)
        begin, end = self._runs
        none = np.zeros((len(begin), 1), np.int64)  # what tokens of the context see of the draft
        begin, end = (np.concatenate([none, side], axis=1)[:, np.maximum(drafted, -1) + 1] for side in (begin, end))
        of_context = np.minimum(queries + (seqlen_k - seqlen) + 1, context)[None]
        begin = np.concatenate([np.zeros_like(of_context), context + begin])
        return disjoint(*without_empty(begin, np.concatenate([of_context, context + end])))

    def cuts(self, seqlen: int, seqlen_k: int) -> IntArray:
        first = np.array([seqlen - seqlen_k])  # queries before it, if there are more than keys, see none
        return needed_cuts(self, np.append(np.arange(seqlen - self.drafted, seqlen), first), seqlen, seqlen_k)


@explained
def tree(parents: Sequence[int]) -> Tree:
    """Speculative decoding: the last tokens are drafts, of which each sees the context, its ancestors and itself.

    The tokens before are the context.  Its queries, if any are asked, are causal.  Windows, chunks and biases by
    distance count steps along the path of a draft, so that it gets what it would get if it were decoded alone.  A tree
    where drafts 0 and 3 follow the context, 1 and 2 follow 0; [-1, 0, 0, -1] after a context of one token::

        1 . . . .
        1 1 . . .
        1 1 1 . .
        1 1 . 1 .
        1 . . . 1

    Parameters
    ----------
    parents : sequence of int
        For each draft the number of the draft that it follows, counted from 0; -1 for the context.  Parents come before
        their children.

    Raises
    ------
    ArgumentError
        If a parent is no such number, or not before its child.

    Examples
    --------
    >>> from mpiattn import masks
    >>> print(masks.tree([-1, 0, 0, -1]))
    tree -1,0,0,-1
    """
    numbers = whole_numbers("parents", parents, -1, "[-1, 0, 0, 1]")
    for token, parent in enumerate(numbers):
        if parent >= token:
            raise ArgumentError(
                f"parents[{token}] is {parent}; it must be -1, for the context, or the number of a draft before {token}"
            )
    return Tree(len(numbers), digest(np.array(numbers, np.int64)), numbers)
