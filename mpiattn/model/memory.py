"""Bytes of memory that a plan needs on a rank, for calls without documents.  Pure arithmetic."""

import numpy as np

from ..schedule.kinds import DELTA, DOUT, GATHERED, IN_COLUMNS, KINDS, LSE, OUT, K, Q, V, arena_of, shapes
from ..schedule.route import leg_of
from ..schedule.travels import held_bytes, size_of


def buffer_bytes(schedule, problem, load, layout):
    """Bytes of a plan's buffers for a pass, of every rank: int64 (ranks,).

    load: the `Load` of the mesh.  layout: the kind of the layout of keys.
    Counted are the slots of the schedule, each for the most tokens that come, the own accumulators that are not results
    themselves, and the copies of partials that are cast for the wire.  A fused launch needs places for the chunks of
    the whole group.  Unless the layout is contiguous, it also holds the arrays that move in columns a second time,
    sorted by position.
    """
    slots, fused = schedule.slots, any(step.fused for step in schedule.steps)
    arrays, total = shapes(problem, schedule.direction), 0
    for kind in KINDS[schedule.direction]:
        column, extent = kind in IN_COLUMNS, schedule.tile.extent(kind)
        own = load.lengths[column]
        held = load.held(kind, schedule.route, fused, schedule.collective)
        slot = held.max(axis=0)
        if kind not in GATHERED and not fused:  # own accumulators
            total = total + own * size_of(
                array.held(problem)
                for array in KINDS[schedule.direction][kind].arrays_of(problem)
                if not array.in_place(problem)
            )
        rows = own + held.sum(axis=0) if fused else slots[kind] * slot
        received = cast = 0
        if kind in GATHERED:
            rows = rows * bool(slots[kind])
        else:
            moved = load.moved(kind, schedule.route, schedule.collective)
            arriving, travelling = arena_of(kind), arrays[arena_of(kind)]
            landing = [
                moved[hop][
                    load.chunks[column][leg_of(kind, hop, extent, schedule.route, schedule.collective).ahead % extent]
                ]
                for hop in range(1, extent)
            ]
            received = slots[arriving] * np.max([*moved, *landing], axis=0)
            if slots[arriving]:
                cast = size_of(wire for wire, kept in zip(travelling, arrays[kind]) if wire != kept)
                cast = cast * (rows if fused else received)
            received = received * size_of(travelling)
        sorted_again = column and fused and layout != "contiguous" and slots["KV"]
        total = total + size_of(arrays[kind]) * rows * (2 if sorted_again else 1) + received + cast
    return total


def chunk_bytes(problem, q_tokens, k_tokens, staying=()):
    """Bytes of a rank's own q, k, v and its result; q, k, v count twice if a batch is folded into the heads.

    staying: kinds of which a batch is read where it lies.
    """
    queries, keys = (1 if problem.batch == 1 or kind in staying else 2 for kind in GATHERED)
    inputs = q_tokens * held_bytes(problem, Q) * queries + k_tokens * held_bytes(problem, K, V) * keys
    return inputs + q_tokens * held_bytes(problem, OUT, LSE)


def outer_bytes(problem, tokens, backward=False):
    """Bytes of a caller's q, k, v, out and lse, and backward dout, dq, dk and dv, where the mesh has chunks of its own.

    tokens: numbers of the caller's query tokens and key tokens.  Backward counts delta too and, with a batch above 1,
    the folded copies of dout and out.
    """
    q_tokens, k_tokens = tokens
    nbytes = q_tokens * held_bytes(problem, Q, OUT, LSE) + k_tokens * held_bytes(problem, K, V)
    if backward:
        folded = held_bytes(problem, OUT, DOUT) if problem.batch > 1 else 0
        nbytes = (
            nbytes + q_tokens * (held_bytes(problem, DOUT, Q, DELTA) + folded) + k_tokens * held_bytes(problem, K, V)
        )
    return nbytes


def gradient_bytes(problem, q_tokens, k_tokens, staying=()):
    """Bytes that a backward pass needs besides its buffers: dout, dq, dk, dv, and the copies that the plan keeps.

    The copies are delta, lse and dlse with tokens first and, with a batch above 1, dout and out folded.
    staying: as for `chunk_bytes`.
    """
    copies = held_bytes(problem, OUT, DOUT) if problem.batch > 1 and "Q" not in staying else 0
    return q_tokens * (held_bytes(problem, DOUT, Q, DELTA, LSE, LSE) + copies) + k_tokens * held_bytes(problem, K, V)
