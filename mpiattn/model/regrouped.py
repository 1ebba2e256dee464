"""What ranks send and pack in regrouping, of many ranks at once and without a look at every part.

`schedule.regroup` gives the same for one rank, part by part.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ..schedule.kinds import K, Q
from ..schedule.regroup import arrays_of, of_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..problem.layout import Layout
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
        self._regrouping, self._some, self._numbers = regrouping, np.array(some), np.arange(len(some))
        self._crossing = nodes != nodes[self._some, None]
        in_tokens = cache(self._in_tokens)  # often the same of queries and of keys
        self._exchanged = [
            in_tokens(outer, inner, regrouping.sharing(array))
            for outer, inner, array in zip(regrouping.outer, regrouping.inner, (Q, K))
        ]

    def of_pass(self, direction: str) -> NDArray[np.int64]:
        """By rank: bytes sent inside its node, to others, messages inside, to others, bytes packed: int64 (5, some)."""
        regrouping, total = self._regrouping, np.zeros((5, len(self._some)), np.int64)
        for given in (False, True):
            arrays = arrays_of(regrouping.problem, direction, given)
            for keys in (False, True):
                nbytes = [regrouping.token_bytes(array, given) for array in arrays if of_keys(array) == keys]
                of_token = [sum(nbytes), sum(nbytes), len(nbytes), len(nbytes), sum(nbytes)]
                total += np.array(of_token)[:, None] * self._exchanged[keys][given]
        return total

    def _in_tokens(self, outer: Layout, inner: Layout, sharing: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `of_pass`, with tokens for bytes: of one array that the pass takes, and of a result.

        sharing: number of planes that compute each of its heads.
        """
        planes, chunks = self._regrouping.tile.h, self._some % self._regrouping.tile.chunks
        outward, _ = in_common(outer, self._some, inner)
        inward, apart = in_common(inner, chunks, outer)
        all_outward = outward.sum(axis=(0, 2))
        # what stays on its rank is packed only if planes share it
        staying = outward[:, self._numbers, chunks].sum(axis=0) if sharing == 1 else 0
        outward, inward = (self._to_others(tokens) for tokens in (np.tile(outward, planes), inward))
        landing = inward.sum(axis=(0, 2)) if apart else 0
        # planes with the same heads take the same rows, but each gives its own
        packed = [copies * all_outward - staying + landing for copies in (planes // sharing, planes)]
        return self._by_link(outward, packed[0]), self._by_link(inward, packed[1])

    def _to_others(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens (pairs of runs, some, ranks) without those that stay on their rank."""
        tokens[:, self._numbers, self._some] = 0
        return tokens

    def _by_link(self, tokens: NDArray[np.int64], packed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens and messages, inside a rank's node and to others, and rows packed: (5, some)."""
        of_links = [np.where(self._crossing == between, tokens, 0) for between in (False, True)]
        counts = [np.count_nonzero(of_link, axis=(0, 2)) for of_link in of_links]
        return np.stack([*(of_link.sum(axis=(0, 2)) for of_link in of_links), *counts, packed])
