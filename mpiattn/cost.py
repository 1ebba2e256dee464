"""A model of what a tile costs in time and memory, and the choice that follows.  Pure arithmetic.

A step takes the longer of its transfers and its blocks (Mesh-Attention, arXiv 2512.20968, section 3: the
selection loop over every factorisation of n).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from .collective import collective
from .errors import ArgumentError
from .greedy import greedy
from .schedule import GATHERED, IN_COLUMNS, ROUTES, Costs, arena_of
from .tiling import tiles
from .traffic import mean_sent, token_bytes

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


class Choice(NamedTuple):
    """A tile and a schedule kind with what they are predicted to need."""

    a: int
    b: int
    schedule: str
    seconds: float
    nbytes: int


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


def predicted_seconds(schedule, problem, ranks, machine):
    """Seconds a schedule is predicted to take: the sum over its steps."""
    hop, block = (of(problem, ranks, machine, schedule.direction) for of in (transfer_seconds, block_seconds))
    total = 0.0
    for step in schedule.steps:
        moving = sum(len(t.hops) * hop[t.kind] for t in step.transfers)
        launches = 1 if step.fused else len(step.blocks)
        computing = len(step.blocks) * (block - machine.launch) + launches * machine.launch
        total += max(moving, computing)
    return total


def build(kind, a, b, route, problem, machine=Machine(), direction="forward"):
    """The schedule of a kind, "greedy" or "collective", for a tile."""
    if kind not in SCHEDULES:
        raise ArgumentError(f"schedule is {kind!r}; it may be {', '.join(SCHEDULES)} or auto")
    if kind == "collective":
        return collective(a, b, route, direction)
    return greedy(a, b, transfer_costs(problem, a * b, machine, direction), route, direction)


def buffer_bytes(schedule, problem, q_tokens, k_tokens, layout):
    """Bytes of a plan's buffers for a pass whose chunks hold up to q_tokens and k_tokens tokens.

    The slots of the schedule, one accumulator #0 of each reduced kind and, for a fused launch, the chunk's own place
    in the arenas and, unless the layout is contiguous, what columns move once more in order of position.
    """
    slots, fused = schedule.slots, any(step.fused for step in schedule.steps)
    travelling = token_bytes(problem, schedule.direction)
    total = 0
    for kind, nbytes in token_bytes(replace(problem, wire_dtype=None), schedule.direction).items():
        tokens, sorted_again = (k_tokens, fused and layout != "contiguous" and slots["KV"]) if kind in IN_COLUMNS else (
            q_tokens, False)
        if kind in GATHERED:
            places, received, cast = slots[kind] and slots[kind] + fused, 0, 0
        else:
            places, received = 1 + slots[kind], slots[arena_of(kind)]
            cast = (places if fused else 1) if received and problem.wire_dtype != problem.partial_dtype else 0
        total += tokens * (nbytes * places * (2 if sorted_again else 1) + travelling[kind] * (received + cast))
    return total


def chunk_bytes(problem, q_tokens, k_tokens):
    """Bytes of a rank's own q, k, v and its result, and of q, k, v once more where a batch is folded into heads."""
    inputs = q_tokens * problem.q_bytes + k_tokens * problem.kv_bytes
    return inputs * (1 if problem.batch == 1 else 2) + q_tokens * problem.out_bytes


def gradient_bytes(problem, q_tokens, k_tokens):
    """Bytes that a backward pass needs besides its buffers: dout, delta, dq, dk, dv, and the copies of a batch."""
    queries = q_tokens * problem.batch * problem.heads * (
        problem.itemsize * (problem.head_dim + problem.value_dim) + problem.partial_itemsize)
    folded = q_tokens * (problem.q_bytes + 2 * problem.out_bytes) + k_tokens * problem.kv_bytes
    return queries + k_tokens * problem.kv_bytes + (folded if problem.batch > 1 else 0)


def longest(tokens, ranks):
    """Tokens of the longest chunk of an even cut."""
    return -(-tokens // ranks)


def auto_layout(problem):
    """The layout that "auto" means: contiguous, or for causal attention zigzag, which balances the work."""
    return "zigzag" if problem.causal else "contiguous"


def evaluate(problem, ranks, route="direct", kinds=SCHEDULES, shapes=None, layout=None, machine=Machine()):
    """Every tile (or those of `shapes`) with every schedule kind as a Choice, best first.

    layout: kind of it; default what "auto" means.

    Best is the least predicted time; where times agree to three digits, the least traffic, then memory.
    """
    if route not in ROUTES:
        raise ArgumentError(f"route is {route!r}; it may be {', '.join(ROUTES)}")
    q_tokens, k_tokens = longest(problem.seqlen, ranks), longest(problem.seqlen_k, ranks)
    choices = []
    for a, b in shapes or tiles(ranks):
        for kind in kinds:
            schedule = build(kind, a, b, route, problem, machine)
            choices.append(Choice(a, b, kind, predicted_seconds(schedule, problem, ranks, machine),
                                  chunk_bytes(problem, q_tokens, k_tokens)
                                  + buffer_bytes(schedule, problem, q_tokens, k_tokens,
                                                 layout or auto_layout(problem))))
    return sorted(choices, key=lambda c: (float(f"{c.seconds:.3g}"), mean_sent(problem, ranks, c.a, c.b), c.nbytes))
