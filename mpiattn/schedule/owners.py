"""Which ranks do which kinds of work, so that they own as much as can be of what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

LOOKS = 2**18  # at two kinds whose ranks might be exchanged, at most: some ms


def kinds_of_ranks(worth: Ints, ranks_of: Ints) -> Ints:
    """The kind of work of every rank, (ranks,): near the greatest sum of what they own.  Alike wherever it is computed.

    worth: what each rank owns of the needs of each kind, in bytes, (kinds, ranks).
    ranks_of: number of ranks that each kind takes, (kinds,).
    """
    kind_of = _in_turn(worth, ranks_of)
    members = [np.flatnonzero(kind_of == kind) for kind in range(len(worth))]
    # By two kinds, the most that a rank of the first gains if it goes over to the second
    most = np.stack([_gains(worth, kind, members[kind]).max(axis=1) for kind in range(len(worth))])
    for _ in range(LOOKS // len(worth) ** 2):
        both = most + most.T
        first_kind, second_kind = divmod(int(both.argmax()), len(both))
        if both[first_kind, second_kind] <= 0:
            break
        _exchange(worth, members, first_kind, second_kind)
        for kind in (first_kind, second_kind):
            most[kind] = _gains(worth, kind, members[kind]).max(axis=1)
    for kind, ranks in enumerate(members):
        kind_of[ranks] = kind
    return kind_of


def _in_turn(worth: Ints, ranks_of: Ints) -> Ints:
    """Each kind in turn takes the ranks that own most of its needs, of those that are left."""
    kind_of = np.full(worth.shape[1], -1)
    left = np.arange(worth.shape[1])
    for kind, count in enumerate(ranks_of.tolist()):
        order = np.argsort(-worth[kind, left], kind="stable")
        kind_of[left[order[:count]]] = kind
        left = np.sort(left[order[count:]])
    return kind_of


def _gains(worth: Ints, kind: int, ranks: Ints) -> Ints:
    """The gains of some ranks of a kind if they go over to each kind: (kinds, ranks)."""
    return worth[:, ranks] - worth[kind, ranks]


def _exchange(worth: Ints, members: list[Ints], first_kind: int, second_kind: int) -> None:
    """Exchange as many ranks of two kinds as gain by it."""
    there, back = members[first_kind], members[second_kind]
    gain_there = worth[second_kind, there] - worth[first_kind, there]
    gain_back = worth[first_kind, back] - worth[second_kind, back]
    first, second = (np.argsort(-gain, kind="stable") for gain in (gain_there, gain_back))
    pairs = min(len(first), len(second))
    count = int((gain_there[first[:pairs]] + gain_back[second[:pairs]] > 0).sum())
    members[first_kind] = np.sort(np.append(there[first[count:]], back[second[:count]]))
    members[second_kind] = np.sort(np.append(back[second[count:]], there[first[:count]]))
