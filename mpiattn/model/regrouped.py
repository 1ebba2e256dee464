"""What ranks send, pack and copy in regrouping, of many ranks at once and without a look at every part.

`schedule.regroup` gives the same for one rank, part by part.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..problem.layout import Layout
from ..schedule.kinds import K, Q
from ..schedule.regroup import Regrouping, arrays_of
from ..schedule.remembered import Remembered
from ..schedule.tile import Tile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..problem.problem import Problem


def in_common(layout: Layout, some: NDArray[np.int64], other: Layout) -> tuple[NDArray[np.int64], bool]:
    """Tokens that some chunks of a layout share with each chunk of another: int64 (pairs, some, chunks).

    Every run of one is counted with every run of the other, a pair.  The step of one layout divides that of the other.
    Of chunks that may have many runs all are one pair, since they are one message.
    Also returns whether the shared tokens are apart in `layout`'s chunk, not consecutive, or other runs are.
    """
    if layout.many or other.many:
        return _of_many(layout, other)[None, some], True
    (starts, lengths, step), (other_starts, other_lengths, other_step) = layout.all_ranges(), other.all_ranges()
    start, stop = (bound[:, None, some, None] for bound in (starts, starts + lengths * step))
    other_start, other_stop = (bound[:, None] for bound in (other_starts, other_starts + other_lengths * other_step))
    period, phase = (step, start) if step > other_step else (other_step, other_start)
    low, high = np.maximum(start, other_start), np.minimum(stop, other_stop)
    if period > 1:
        low, high = (-((phase - bound) // period) for bound in (low, high))  # in periods, rounded up
    tokens = np.maximum(high - low, 0)
    if min(step, other_step) > 1:
        tokens *= (start - other_start) % min(step, other_step) == 0
    return tokens.reshape(-1, *tokens.shape[2:]), period > step


def _of_many(layout: Layout, other: Layout) -> NDArray[np.int64]:
    """Tokens that each chunk of a layout shares with each of another, from the cuts of both: int64 (chunks, chunks)."""
    if layout.striped:
        return _of_many(other, layout).T
    cuts, owners = layout.owners
    shape = layout.chunks, other.chunks

    def by_owner(numbers: NDArray[np.int64], weights: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.rint(np.bincount(numbers, weights, shape[0] * shape[1])).astype(np.int64).reshape(shape)

    if not other.striped:
        other_cuts, other_owners = other.owners
        both = np.union1d(cuts, other_cuts)
        of_one, of_other = (
            of[ends.searchsorted(both[:-1], "right") - 1] for ends, of in ((cuts, owners), (other_cuts, other_owners))
        )
        return by_owner(of_one * shape[1] + of_other, np.diff(both))
    # before position q * chunks + r come q tokens of each stripe, and one more of those below r
    q, r = np.divmod(cuts, shape[1])
    ones = np.ones_like(owners)
    more = by_owner(owners * shape[1] + r[1:], ones) - by_owner(owners * shape[1] + r[:-1], ones)
    tokens = more[:, ::-1].cumsum(axis=1)[:, ::-1] - more + by_owner(owners * shape[1], np.diff(q))[:, :1]
    return tokens if other.order is None else tokens[:, other.order]


class OfToken(NamedTuple):
    """What a token takes.

    exchanged: before (False) and after a pass (True), of queries and of keys, what is to be multiplied with the numbers
        of `Regrouped`: int64 (2, 2, 6, 1).
    widened: bytes by which results are longer on the mesh than on the caller's ranks, of queries and of keys.
    """

    exchanged: NDArray[np.int64]
    widened: tuple[int, ...]


def of_token(problem: Problem, planes: int, direction: str) -> OfToken:
    """The `OfToken` of a pass."""
    return _of_token(problem.without_tokens, planes, direction)


@lru_cache(64)
def _of_token(problem: Problem, planes: int, direction: str) -> OfToken:
    nothing = Layout("contiguous", 0, 1)
    regrouping = Regrouping(problem, Tile(planes, 1, 1), (nothing, nothing), (nothing, nothing))
    exchanged, widened = [], [0, 0]
    for given in (False, True):
        nbytes: tuple[list[int], list[int]] = [], []
        for array in arrays_of(problem, direction, given):
            nbytes[array.keys].append(regrouping.token_bytes(array, given))
            widened[array.keys] += regrouping.widened_bytes(array) if given else 0
        exchanged.append([[sum(of), sum(of), len(of), len(of), sum(of), sum(of)] for of in nbytes])
    return OfToken(np.array(exchanged)[..., None], tuple(widened))


class Regrouped:
    """The exchange of some ranks of a mesh.

    nodes: of every rank of the mesh.
    """

    def __init__(self, regrouping: Regrouping, some: Sequence[int], nodes: NDArray[np.int64]) -> None:
        self._regrouping, self._some, self._numbers = regrouping, np.array(some), np.arange(len(some))
        self._crossing = nodes != nodes[self._some, None]
        in_tokens = Remembered(self._in_tokens)  # often the same of queries and of keys
        self._exchanged = np.stack(
            [
                in_tokens(outer, inner, regrouping.sharing(array), regrouping.has_all(array))
                for outer, inner, array in zip(regrouping.outer, regrouping.inner, (Q, K))
            ],
            axis=1,
        )

    def of_pass(self, direction: str) -> NDArray[np.int64]:
        """What ranks exchange before and after a pass: int64 (6, some).

        By rank: bytes sent inside its node, to others, messages inside, to others, bytes of memory in which messages
        are packed, bytes copied: those packed where they do not lie as in the message, and those of its own.
        """
        weights = of_token(self._regrouping.problem, self._regrouping.tile.h, direction).exchanged
        return (weights * self._exchanged).sum(axis=(0, 1))

    def _in_tokens(self, outer: Layout, inner: Layout, sharing: int, all_heads: bool) -> NDArray[np.int64]:
        """As `of_pass`, with tokens for bytes: of one array that the pass takes, and of a result: int64 (2, 6, some).

        sharing: number of planes that compute each of its heads.  all_heads: whether each of them computes all.
        """
        planes, chunks = self._regrouping.tile.h, self._some % self._regrouping.tile.chunks
        outward, scattered = in_common(outer, self._some, inner)
        inward, apart = in_common(inner, chunks, outer)
        all_outward = outward.sum(axis=(0, 2))
        # what stays on its rank is packed only if planes share it
        own = outward[:, self._numbers, chunks].sum(axis=0)
        staying = own if sharing == 1 else 0 * own
        moved = np.stack([np.tile(outward, planes) if planes > 1 else outward, inward])
        moved[:, :, self._numbers, self._some] = 0
        counted = np.stack([moved, moved > 0], axis=1)  # (2, tokens and messages, pairs, some, ranks)
        between = (counted * self._crossing).sum(axis=(2, 4))
        inside = counted.sum(axis=(2, 4)) - between
        landing = (inside + between)[1, 0] if apart or self._regrouping.by_sequence else 0
        # planes with the same heads take the same rows, but each gives its own
        packed = np.stack([copies * all_outward - staying + landing for copies in (planes // sharing, planes)])
        # what lies in the caller's array as in the message is not packed there: consecutive tokens of one sequence, and
        # of several all tokens
        lone, several = self._regrouping.split[0] == self._regrouping.problem.batch, self._regrouping.by_sequence
        in_place = np.full((2, len(self._some)), all_heads and not scattered and (lone or several))
        in_place[1] &= sharing == 1  # else results are added up first
        if several:
            in_place &= np.count_nonzero(outward, axis=(0, 2)) == 1
        copied = np.stack([own, staying]) + np.where(in_place, landing, packed)
        return np.stack([inside[:, 0], between[:, 0], inside[:, 1], between[:, 1], packed, copied], axis=1)
