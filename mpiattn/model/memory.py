"""Bytes of memory that a plan needs on a rank.  Pure arithmetic."""

from dataclasses import replace

from ..schedule.steps import GATHERED, IN_COLUMNS, arena_of
from ..schedule.travels import token_bytes


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
        received = cast = 0
        if kind in GATHERED:
            places = slots[kind] and slots[kind] + fused
        else:
            places, received = 1 + slots[kind], slots[arena_of(kind)] * travelling[kind]
            if received and problem.wire_dtype != problem.partial_dtype:
                lse = problem.batch * problem.heads * problem.partial_itemsize if kind == "O" else 0
                cast = (places if fused else slots[arena_of(kind)]) * (travelling[kind] - lse)
        total += tokens * (nbytes * places * (2 if sorted_again else 1) + received + cast)
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
