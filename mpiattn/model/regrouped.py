"""What ranks send and pack in regrouping, of many ranks at once and without a look at every part.

`schedule.regroup` gives the same for one rank, part by part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..schedule.kinds import K, Q
from ..schedule.regroup import of_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..problem.layout import Layout
    from ..schedule.kinds import Array
    from ..schedule.regroup import Regrouping


def in_common(layout: Layout, some: NDArray[np.int64], other: Layout) -> tuple[NDArray[np.int64], bool]:
    """Tokens that some chunks share with those of another layout, pair of runs by pair: int64 (pairs, some, chunks).

    The step of one layout divides that of the other.  Also returns whether these tokens are apart in `layout`'s chunk.
    """
    (starts, lengths, step), (other_starts, other_lengths, other_step) = layout.all_ranges(), other.all_ranges()
    start, stop = (bound[:, None, some, None] for bound in (starts, starts + lengths * step))
    other_start, other_stop = (bound[:, None] for bound in (other_starts, other_starts + other_lengths * other_step))
    period, phase = (step, start) if step > other_step else (other_step, other_start)
    low, high = np.maximum(start, other_start), np.minimum(stop, other_stop)
    tokens = ((low - phase) // -period - (high - phase) // -period).clip(0)  # both rounded up
    tokens *= (start - other_start) % min(step, other_step) == 0
    return tokens.reshape(-1, *tokens.shape[2:]), period > step


class Regrouped:
    """The exchange of some ranks of a mesh.

    nodes: of every rank of the mesh.
    """

    def __init__(self, regrouping: Regrouping, some: Sequence[int], nodes: NDArray[np.int64]) -> None:
        self._regrouping, self._some = regrouping, np.array(some)
        self._crossing = nodes != nodes[self._some, None]
        self._exchanged = {
            (of_keys(array), given): self._in_tokens(array, given) for array in (Q, K) for given in (False, True)
        }

    def of_array(self, array: Array, given: bool) -> NDArray[np.int64]:
        """By rank: bytes sent inside its node, to others, messages inside, to others, bytes packed: int64 (5, some).

        given: whether the array is a result.
        """
        nbytes = self._regrouping.token_bytes(array, given)
        return self._exchanged[of_keys(array), given] * np.array([[nbytes], [nbytes], [1], [1], [nbytes]])

    def _in_tokens(self, array: Array, given: bool) -> NDArray[np.int64]:
        """As `of_array`, with tokens for bytes; the same for all arrays with the heads and the tokens of this one."""
        keys, planes, sharing = of_keys(array), self._regrouping.tile.h, self._regrouping.sharing(array)
        outer, inner = self._regrouping.outer[keys], self._regrouping.inner[keys]
        numbers, (_, chunks) = np.arange(len(self._some)), self._regrouping.place(self._some)
        outward, _ = in_common(outer, self._some, inner)
        inward, apart = in_common(inner, chunks, outer)
        # once for every plane, or for every part of the heads; what stays on its rank only if it is added to
        copies, own = planes if given else planes // sharing, outward[:, numbers, chunks].sum(axis=0)
        packed = copies * outward.sum(axis=(0, 2)) - (own if sharing == 1 else 0)
        inward[:, numbers, self._some] = 0
        if apart:
            packed += inward.sum(axis=(0, 2))
        sent = inward
        if not given:
            sent = np.tile(outward, planes)
            sent[:, numbers, self._some] = 0
        of_links = [np.where(self._crossing == between, sent, 0) for between in (False, True)]
        tokens = [of_link.sum(axis=(0, 2)) for of_link in of_links]
        messages = [np.count_nonzero(of_link, axis=(0, 2)) for of_link in of_links]
        return np.stack([*tokens, *messages, packed])
