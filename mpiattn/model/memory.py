"""Bytes of memory that a plan needs on a rank, for calls without documents.  Pure arithmetic."""

from functools import lru_cache

import numpy as np

from ..schedule.kinds import (
    DELTA,
    DOUT,
    GATHERED,
    IN_COLUMNS,
    KEY_BIAS,
    KINDS,
    LSE,
    OUT,
    REDUCED,
    K,
    Q,
    V,
    arena_of,
    shapes,
)
from ..schedule.route import leg_of, passed_on
from ..schedule.sharing import below, stack
from ..schedule.travels import held_bytes, size_of

OF_KEYS = K, V, KEY_BIAS


def buffer_bytes(schedule, problem, load):
    """Bytes of a plan's buffers for a pass, of every rank: int64 (ranks,).

    load: the `Load` of the mesh.
    Counted are the slots of the schedule, each for the most tokens that come, the own accumulators that are not results
    themselves, the copies of partials that are cast for the wire, and those of tokens in many ranges.  What no step
    needs together lies in the same memory (`mpiattn.schedule.sharing`).  A fused launch needs places for the chunks of
    the whole group.  Unless the keys of consecutive chunks follow one another, it also holds the arrays that move in
    columns a second time, sorted by position.
    """
    kinds, fused = KINDS[schedule.direction], schedule.packed
    of_arenas, of_own, of_cast = _of_token(problem.without_tokens, schedule.direction)
    own, rows, token_bytes = 0, {}, {}
    for kind in kinds:
        column = kind in IN_COLUMNS
        held = load.held(kind, schedule.route, fused, schedule.collective)
        rows["arena", kind] = load.lengths[column] + held.sum(axis=0) if fused else held.max(axis=0)
        if kind in GATHERED:
            if load.many_ranges and not (fused or schedule.collective or passed_on(schedule.route)):
                own = own + _sent(load, kind) * of_arenas["arena", kind]
            continue
        arriving = arena_of(kind)
        if not fused:
            own = own + load.lengths[column] * of_own[kind]
        rows["arena", arriving] = _most(schedule, load, kind) * (schedule.slots[arriving] if fused else 1)
        if of_cast[kind] and schedule.slots[arriving]:
            token_bytes["wire", kind], rows["wire", kind] = of_cast[kind], rows["arena", kind if fused else arriving]
    token_bytes |= of_arenas
    ordered = ()
    if fused and not load.ordered and schedule.slots["KV"]:
        ordered = [kind for kind in kinds if kind in IN_COLUMNS]
    order = below(schedule, token_bytes, ordered)
    sizes = {}
    for role, kind, slot in order:
        of = ("arena" if role == "ordered" else role, kind)
        sizes[role, kind, slot] = rows[of] * token_bytes[of]
    return own + stack(order, sizes)[1]


@lru_cache(64)
def _of_token(problem, direction):
    """Bytes of a token: in every arena; of own accumulators that are not results, and of what is cast, by kind."""
    arrays, kinds = shapes(problem, direction), {name: KINDS[direction][name] for name in REDUCED[direction]}
    own = {
        name: size_of(array.held(problem) for array in kind.arrays_of(problem) if not array.in_result(problem))
        for name, kind in kinds.items()
    }
    cast = {
        name: size_of(wire for wire, held in zip(arrays[arena_of(name)], arrays[name]) if wire != held)
        for name in kinds
    }
    return {("arena", arena): size_of(of) for arena, of in arrays.items()}, own, cast


def _sent(load, kind):
    """Tokens of its own chunk that every rank sends to others: (ranks,)."""
    moved, chunks = load.moved(kind), load.chunks[kind in IN_COLUMNS]
    return sum((moved[hop][chunks[-hop]] for hop in range(1, len(chunks))), np.zeros_like(moved[0]))


def _most(schedule, load, kind):
    """The most tokens of a partial that every rank sends or receives: (ranks,)."""
    how, extent = (schedule.route, schedule.collective), schedule.tile.extent(kind)
    moved, chunks = load.moved(kind, *how), load.chunks[kind in IN_COLUMNS]
    landing = [moved[hop][chunks[leg_of(kind, hop, extent, *how).ahead % extent]] for hop in range(1, extent)]
    return np.max([*moved, *landing], axis=0)


def chunk_bytes(problem, q_tokens, k_tokens, staying=()):
    """Bytes of a rank's own q, k, v and its result; q, k, v count twice if a batch is folded into the heads.

    staying: kinds of which a batch is read where it lies.
    """
    queries, keys = (1 if problem.batch == 1 or kind in staying else 2 for kind in GATHERED)
    inputs = q_tokens * held_bytes(problem, Q) * queries + k_tokens * held_bytes(problem, *OF_KEYS) * keys
    return inputs + q_tokens * held_bytes(problem, OUT, LSE)


def own_bytes(problem, lengths, backward, regrouped):
    """Bytes that a plan allocates on every rank besides buffers and the caller's arrays, at least: int64 (ranks,).

    lengths: numbers of tokens of queries and of keys, arrays.  regrouped: whether the mesh has chunks of its own.
    Not counted are rows in which messages are packed: most travel from where they lie.
    """
    q_tokens, k_tokens = lengths
    nbytes = q_tokens * (held_bytes(problem, DELTA, LSE) if backward else 0)
    if not regrouped:
        return nbytes
    nbytes = nbytes + q_tokens * held_bytes(problem, Q, OUT, LSE) + k_tokens * held_bytes(problem, *OF_KEYS)
    if backward:
        nbytes = nbytes + q_tokens * held_bytes(problem, DOUT, Q) + k_tokens * held_bytes(problem, *OF_KEYS)
    return nbytes


def outer_bytes(problem, tokens, backward=False, strided=False):
    """Bytes of a caller's q, k, v, out and lse, and backward dout, dq, dk and dv, where the mesh has chunks of its own.

    tokens: numbers of the caller's query tokens and key tokens.  Backward counts delta too and, with a batch above 1,
    the folded copies of dout and out.  strided: whether these are read where they lie.
    """
    q_tokens, k_tokens = tokens
    nbytes = q_tokens * held_bytes(problem, Q, OUT, LSE) + k_tokens * held_bytes(problem, *OF_KEYS)
    if backward:
        folded = held_bytes(problem, OUT, DOUT) if problem.batch > 1 and not strided else 0
        nbytes = (
            nbytes
            + q_tokens * (held_bytes(problem, DOUT, Q, DELTA) + folded)
            + k_tokens * held_bytes(problem, *OF_KEYS)
        )
    return nbytes


def gradient_bytes(problem, q_tokens, k_tokens, staying=(), out_stays=False):
    """Bytes that a backward pass needs besides its buffers: dout, dq, dk, dv, and the copies that the plan keeps.

    The copies are delta, lse and dlse with tokens first and, with a batch above 1, dout and out folded.
    staying: as for `chunk_bytes`.  out_stays: whether a batch of out is read where it lies.
    """
    folded = [DOUT] * ("Q" not in staying) + [OUT] * (not out_stays)
    copies = held_bytes(problem, *folded) if problem.batch > 1 else 0
    return q_tokens * (held_bytes(problem, DOUT, Q, DELTA, LSE, LSE) + copies) + k_tokens * held_bytes(
        problem, K, V, KEY_BIAS
    )
