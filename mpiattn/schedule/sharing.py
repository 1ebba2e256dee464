"""Which buffers of a pass lie in the same memory: those that no step needs together.  No MPI.

A buffer is (part, kind, slot).  Part "arena" has a slot of an arena, and "wire" the cast copies of the partials that
leave while their slot of "+X" is filled; a packed arena is one buffer, and so are its wire arrays.  Part "ordered" has
a packed arena in order of position.

Sizes differ by rank and by call.  What lies below what is decided once, by bytes of a token, so that it does not: then
a buffer begins where the last of those below it ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .kinds import GATHERED, REDUCED, arena_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .steps import Life, Schedule

BufferName: TypeAlias = "tuple[str, str, int]"


def meet(life: Life, other: Life) -> bool:
    """Whether a step belongs to both."""
    return any(first <= end and begin <= last for first, last in life for begin, end in other)


def lives_of(schedule: Schedule, wires: Iterable[str] = (), ordered: Iterable[str] = ()) -> dict[BufferName, Life]:
    """The life of every buffer.  wires, ordered: kinds that have such arrays."""
    fused = [number for number, step in enumerate(schedule.steps) if step.fused]
    lives = schedule.lives
    if fused:
        (at,), end = fused, len(schedule.steps) - 1
        lives = {arena: (sum(of_slots, ()),) for arena, of_slots in lives.items() if of_slots}
        lives |= {kind: ((*lives[kind][0], (at, at)),) for kind in GATHERED if kind in lives}
        lives |= {kind: (((at, end),),) for kind in REDUCED[schedule.direction]}
    buffers = [("arena", arena, of_slots) for arena, of_slots in lives.items()]
    buffers += [("wire", kind, lives.get(arena_of(kind), ())) for kind in wires]
    buffers += [("ordered", kind, (((at, at),),)) for kind in ordered]
    return {(part, kind, slot): life for part, kind, of_slots in buffers for slot, life in enumerate(of_slots)}


def below(
    schedule: Schedule, token_bytes: dict[tuple[str, str], int], ordered: Iterable[str] = ()
) -> dict[BufferName, list[BufferName]]:
    """Of every buffer, from the lowest to the highest, those that lie below it.

    token_bytes: by part, "arena" or "wire", and kind, for every arena and every kind with wire arrays.

    The longest and largest are placed first, each in the lowest gap that is free for its whole life.
    """
    lives = lives_of(schedule, (kind for part, kind in token_bytes if part == "wire"), ordered)
    packed = any(step.fused for step in schedule.steps)

    def chunks(kind: str) -> int:
        if not packed:
            return 1
        return schedule.slots[kind] if kind.startswith("+") else schedule.tile.extent(kind)

    sizes = {
        (part, kind, slot): chunks(kind) * token_bytes["arena" if part == "ordered" else part, kind]
        for part, kind, slot in lives
    }
    starts: dict[BufferName, int] = {}
    for name in sorted(lives, key=lambda name: -sizes[name] * sum(last - first + 1 for first, last in lives[name])):
        start = 0
        taken = ((starts[other], starts[other] + sizes[other]) for other in starts if meet(lives[name], lives[other]))
        for begin, end in sorted(taken):
            if begin - start >= sizes[name]:
                break
            start = max(start, end)
        starts[name] = start
    order = sorted(starts, key=lambda name: starts[name])
    return {name: [other for other in order[:i] if meet(lives[name], lives[other])] for i, name in enumerate(order)}


def stack(below: dict[Any, list[Any]], sizes: dict[Any, Any]) -> tuple[dict[Any, Any], Any]:
    """Where each buffer begins, and where the last one ends.  sizes: numbers, or arrays of one shape."""
    starts: dict[Any, Any] = {}
    ends: dict[Any, Any] = {}
    for name, others in below.items():
        starts[name] = np.max([ends[other] for other in others], axis=0) if others else 0
        ends[name] = starts[name] + sizes[name]
    return starts, np.max(list(ends.values()), axis=0) if ends else 0
