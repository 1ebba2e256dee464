"""Bytes of memory that a plan needs on a rank.  Pure arithmetic."""

from ..schedule.kinds import DELTA, DOUT, GATHERED, IN_COLUMNS, KINDS, LSE, OUT, K, Q, V, arena_of, shapes
from ..schedule.travels import held_bytes, size_of


def buffer_bytes(schedule, problem, q_tokens, k_tokens, layout):
    """Bytes of a plan's buffers for a pass whose chunks hold up to q_tokens and k_tokens tokens.

    Counted are the slots of the schedule, one accumulator #0 of each reduced kind, and the copies of partials that are
    cast for the wire.  A fused launch adds the rank's own chunk to each arena of gathered chunks.  Unless the layout is
    contiguous, it also holds the arrays that move in columns a second time, sorted by position.
    """
    slots, fused = schedule.slots, any(step.fused for step in schedule.steps)
    arrays, total = shapes(problem, schedule.direction), 0
    for kind in KINDS[schedule.direction]:
        tokens, sorted_again = (
            (k_tokens, fused and layout != "contiguous" and slots["KV"]) if kind in IN_COLUMNS else (q_tokens, False)
        )
        received = cast = 0
        if kind in GATHERED:
            places = slots[kind] and slots[kind] + fused
        else:
            places, arriving, travelling = 1 + slots[kind], slots[arena_of(kind)], arrays[arena_of(kind)]
            received = arriving * size_of(travelling)
            if arriving:
                cast = (places if fused else arriving) * size_of(
                    wire for wire, held in zip(travelling, arrays[kind]) if wire != held
                )
        total += tokens * (size_of(arrays[kind]) * places * (2 if sorted_again else 1) + received + cast)
    return total


def chunk_bytes(problem, q_tokens, k_tokens):
    """Bytes of a rank's own q, k, v and its result; q, k, v count twice if a batch is folded into the heads."""
    inputs = q_tokens * held_bytes(problem, Q) + k_tokens * held_bytes(problem, K, V)
    return inputs * (1 if problem.batch == 1 else 2) + q_tokens * held_bytes(problem, OUT, LSE)


def gradient_bytes(problem, q_tokens, k_tokens):
    """Bytes that a backward pass needs besides its buffers: dout, dq, dk, dv, and the copies that the plan keeps.

    The copies are delta, lse and dlse with tokens first and, with a batch above 1, dout and out folded.
    """
    folded = held_bytes(problem, OUT, DOUT) if problem.batch > 1 else 0
    return q_tokens * (held_bytes(problem, DOUT, Q, DELTA, LSE, LSE) + folded) + k_tokens * held_bytes(problem, K, V)
