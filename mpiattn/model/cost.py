"""Costs for the greedy algorithm: number of blocks that hide one transfer (arXiv 2512.20968, section 3)."""

import numpy as np

from ..schedule.collective import collective
from ..schedule.greedy import greedy
from ..schedule.kinds import KINDS
from ..schedule.steps import Costs, apart
from ..schedule.travels import token_bytes
from ..system.choices import one_of
from .machine import DEFAULT
from .simulate import nodes_of

SCHEDULES = ("greedy", "collective")
# Steps by which a transfer may be posted ahead of its own.  More gain nothing while the link is busy, and every step
# ahead takes a buffer.
AHEAD = 2
SHORTEST = 1e-15  # seconds of a block or a hop, at least, so that costs are positive where there is nothing to do


def block_seconds(problem, ranks, machine, direction="forward"):
    """Mean seconds of one block: even chunks, and the work of the mask spread evenly over all blocks."""
    return machine.launch + machine.compute(problem.flops / ranks**2, problem.dtype, direction)


def transfer_seconds(problem, tile, machine, direction="forward", nodes=None):
    """Seconds of one hop, by kind.  The link between nodes is used if any row (or column) spans several nodes."""
    nodes = np.reshape(nodes_of(tile.ranks, machine) if nodes is None else nodes, (tile.b, tile.a))
    spans = {True: (nodes != nodes[:1]).any(), False: (nodes != nodes[:, :1]).any()}
    tokens = {True: problem.seqlen_k / tile.ranks, False: problem.seqlen / tile.ranks}
    seconds = {}
    for name, nbytes in token_bytes(problem, direction).items():
        kind = KINDS[direction][name]
        link = machine.between if spans[kind.column] else machine.inside
        seconds[name] = link.seconds(tokens[kind.column] * nbytes, len(kind.arrays_of(problem)))
    return seconds


def transfer_costs(problem, tile, machine, direction="forward", nodes=None):
    """The costs c of Algorithm 2: number of blocks that hide one transfer of each kind."""
    block = max(block_seconds(problem, tile.ranks, machine, direction), SHORTEST)
    hops = transfer_seconds(problem, tile, machine, direction, nodes).values()
    return Costs(*(max(seconds, SHORTEST) / block for seconds in hops))


def build(kind, tile, route, problem, machine=DEFAULT, direction="forward", nodes=None, ahead=AHEAD):
    """The schedule of a kind, "greedy" or "collective", for a tile.

    nodes: the node of every rank of the mesh; default as in `model.simulate`.
    ahead: how many steps before its own a transfer may be posted; None if no step may have both transfers and blocks.
    Raises ArgumentError.
    """
    one_of("schedule", kind, (*SCHEDULES, "auto"))
    if kind == "collective":
        return collective(tile, route, direction)
    costs = transfer_costs(problem, tile, machine, direction, nodes)
    schedule = greedy(tile, costs, route, direction, ahead or 0, problem.whole_mask.opens_ahead)
    return apart(schedule) if ahead is None else schedule
