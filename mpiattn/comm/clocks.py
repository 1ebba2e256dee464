"""How far the ranks' clocks are apart, by short messages that rank 0 exchanges with each of them.

Half the time from a question to its answer bounds the error: the rank has looked at its clock in between.  The fastest
of several answers counts.
"""

from __future__ import annotations

from time import perf_counter as clock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .peers import keeping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .peers import Peers

ROUNDS = 16  # questions to each rank; the first ones also make the connection
TAG = 30000  # of these messages only, on a communicator that plans and caches do not use for theirs


class Clock(NamedTuple):
    """A rank's clock: seconds by which it is ahead of that of rank 0, and the largest error of this number."""

    ahead: float
    bound: float


def clocks(peers: Peers, nodes: Sequence[int]) -> list[Clock] | None:
    """The `Clock` of every rank, on rank 0 alone; collective.

    nodes: of every rank; the ranks of a node are taken to have one clock, unless what they answer forbids it.
    """
    if peers.rank:
        _answer(peers)
        return None
    return of_nodes([Clock(0.0, 0.0), *(_ask(peers, rank) for rank in range(1, peers.size))], nodes)


def _ask(peers: Peers, rank: int) -> Clock:
    question, answer, best = np.zeros(1), np.zeros(1), Clock(0.0, np.inf)
    for _ in range(ROUNDS):
        with keeping(question, answer):
            asked = clock()
            requests = [peers.comm.Irecv(answer, rank, TAG), peers.comm.Isend(question, rank, TAG)]
            peers.wait(requests, lambda: f"for the clock of rank {rank}")
            answered = clock()
        bound = (answered - asked) / 2
        if bound < best.bound:
            best = Clock(float(answer[0]) - (asked + answered) / 2, bound)
    return best


def _answer(peers: Peers) -> None:
    question, answer = np.zeros(1), np.zeros(1)
    for _ in range(ROUNDS):
        with keeping(question, answer):
            peers.wait([peers.comm.Irecv(question, 0, TAG)], lambda: "to be asked for its clock by rank 0")
            answer[0] = clock()
            peers.wait([peers.comm.Isend(answer, 0, TAG)], lambda: "to tell rank 0 its clock")


def of_nodes(measured: Sequence[Clock], nodes: Sequence[int]) -> list[Clock]:
    """The same, of ranks of a node the one clock that all their answers allow, if there is one.

    measured: of each rank by itself.
    """
    shared = {}
    for node in set(nodes):
        answers = [each for each, on in zip(measured, nodes) if on == node]
        low = max(each.ahead - each.bound for each in answers)
        high = min(each.ahead + each.bound for each in answers)
        if low <= high:
            shared[node] = Clock((low + high) / 2, (high - low) / 2)
    return [shared.get(node, each) for each, node in zip(measured, nodes)]
