"""A model of the time that a schedule takes: in every step, the longer of its transfers and its blocks.

(Mesh-Attention, arXiv 2512.20968, section 3.)  What every rank has to do follows from the masks; the slowest counts.
"""

from dataclasses import dataclass

import numpy as np

from .collective import collective
from .errors import ArgumentError
from .greedy import greedy
from .schedule import IN_COLUMNS, Costs
from .traffic import token_bytes

SCHEDULES = ("greedy", "collective")


@dataclass(frozen=True)
class Machine:
    """What one rank can do; the defaults are one core and its share of a 100 Gb/s link.

    flops: floating-point operations a second of block attention in float32.
    bandwidth: bytes a second that one rank sends while it receives as much.
    latency: seconds a message takes besides its bytes.
    launch: seconds a block takes besides its work.
    """

    flops: float = 60e9
    bandwidth: float = 3e9
    latency: float = 10e-6
    launch: float = 50e-6

    def transfer(self, nbytes, messages=1):
        """Seconds of a transfer."""
        return messages * self.latency + nbytes / self.bandwidth

    def compute(self, flops, dtype):
        """Seconds of blocks with that many operations in all."""
        return flops / self.flops * (2 if dtype == "float64" else 1)


DEFAULT_MACHINE = Machine()

# Matrix products of a block, of which a forward pass takes two and a backward pass five.
PRODUCTS = {"forward": 1.0, "backward": 2.5}
# Messages of one hop: one an array.
MESSAGES = {"forward": {"Q": 1, "KV": 2, "O": 2}, "backward": {"Q": 4, "KV": 2, "dQ": 1, "dKV": 2}}


def block_seconds(problem, ranks, machine, direction="forward"):
    """Seconds of one block of an even mesh, the work of the mask spread evenly over the blocks."""
    return machine.launch + machine.compute(PRODUCTS[direction] * problem.flops / ranks ** 2, problem.dtype)


def transfer_seconds(problem, ranks, machine, direction="forward"):
    """Seconds of one hop, by kind."""
    q_tokens, k_tokens = problem.seqlen / ranks, problem.seqlen_k / ranks
    return {kind: machine.transfer((k_tokens if kind in IN_COLUMNS else q_tokens) * nbytes, MESSAGES[direction][kind])
            for kind, nbytes in token_bytes(problem, direction).items()}


def transfer_costs(problem, ranks, machine, direction="forward"):
    """The costs c of Algorithm 2: how many blocks hide one transfer of each kind."""
    hop, block = (of(problem, ranks, machine, direction) for of in (transfer_seconds, block_seconds))
    return Costs(*(seconds / block for seconds in hop.values()))


def predicted_seconds(schedule, problem, load, machine):
    """Seconds that a schedule is predicted to take: those of the slowest rank, the sum over its steps.

    load: of the schedule's mesh, see `mpiattn.load`.
    """
    hops = {}
    for kind, nbytes in token_bytes(problem, schedule.direction).items():
        moved = load.moved(kind, schedule.route, schedule.collective)
        seconds = machine.transfer(moved * nbytes, MESSAGES[schedule.direction][kind])
        hops[kind] = np.where(moved > 0, seconds, 0)
    blocks = machine.compute(PRODUCTS[schedule.direction] * problem.flops_per_pair * load.pairs, problem.dtype)
    launches = np.where(load.pairs > 0, machine.launch, 0)
    total = np.zeros(load.pairs.shape[2])
    for step in schedule.steps:
        moving = sum(hops[t.kind][list(t.hops)].sum(axis=0) for t in step.transfers)
        if step.fused:
            computing = blocks.sum(axis=(0, 1)) + launches.max(axis=(0, 1))
        else:
            computing = sum(blocks[block] + launches[block] for block in step.blocks)
        total += np.maximum(moving, computing)
    return float(total.max())


def build(kind, a, b, route, problem, machine=DEFAULT_MACHINE, direction="forward"):
    """The schedule of a kind, "greedy" or "collective", for a tile."""
    if kind not in SCHEDULES:
        raise ArgumentError(f"schedule is {kind!r}; it may be {', '.join(SCHEDULES)} or auto")
    if kind == "collective":
        return collective(a, b, route, direction)
    return greedy(a, b, transfer_costs(problem, a * b, machine, direction), route, direction)
