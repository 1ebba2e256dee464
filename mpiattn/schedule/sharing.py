"""Which buffers of a pass lie in the same memory: those that no step needs together.  No MPI.

A buffer is (role, kind, slot).  Of role "arena" it is a slot of an arena; of "wire", the cast copies of the partials
that leave while their slot of "+X" is filled; of "ordered", a packed arena in order of position.  A packed arena is one
buffer, and so are its wire arrays.

Sizes differ by rank and by call.  What lies below what is decided once, by bytes of a token, so that it does not: then
a buffer begins where the last of those below it ends.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .kinds import GATHERED, REDUCED, arena_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .steps import Life, Schedule

BufferName: TypeAlias = "tuple[str, str, int]"  # role, kind, slot


def _steps(life: Life) -> int:
    """The steps of a life as bits."""
    steps = 0
    for first, last in life:
        steps |= (1 << last + 1) - (1 << first)
    return steps


def lives_of(schedule: Schedule, wires: Iterable[str] = (), ordered: Iterable[str] = ()) -> dict[BufferName, Life]:
    """The life of every buffer.  wires, ordered: kinds that have such arrays.

    With a fused launch it counts in thirds of a step.  Those of the launch's own step are: keys are put in order of
    position, all blocks run, what was accumulated in that order is put back.
    """
    fused = [number for number, step in enumerate(schedule.steps) if step.fused]
    lives = schedule.lives
    if fused:
        sort, run, restore, end = (3 * fused[0], 3 * fused[0] + 1, 3 * fused[0] + 2, 3 * len(schedule.steps) - 1)
        lives = {
            arena: (tuple((3 * first, 3 * last + 2) for life in of_slots for first, last in life),)
            for arena, of_slots in lives.items()
            if of_slots
        }
        lives |= {kind: (((0, sort if kind in ordered else run),),) for kind in GATHERED if kind in lives}
        lives |= {kind: (((restore if kind in ordered else run, end),),) for kind in REDUCED[schedule.direction]}
    buffers = [("arena", arena, of_slots) for arena, of_slots in lives.items()]
    buffers += [("wire", kind, lives.get(arena_of(kind), ())) for kind in wires]
    buffers += [("ordered", kind, (((sort, run) if kind in GATHERED else (run, restore),),)) for kind in ordered]
    return {(role, kind, slot): life for role, kind, of_slots in buffers for slot, life in enumerate(of_slots)}


def below(
    schedule: Schedule, token_bytes: dict[tuple[str, str], int], ordered: Iterable[str] = ()
) -> dict[BufferName, list[BufferName]]:
    """Of every buffer, from the lowest to the highest, those that lie next below it.

    token_bytes: by role, "arena" or "wire", and kind, for every arena and every kind with wire arrays.

    Placed in order of size and life, or in order of time, whichever takes less.
    """
    key = (*token_bytes.items(), *ordered)
    if key not in schedule.kept:
        schedule.kept[key] = _below(schedule, token_bytes, ordered)
    return schedule.kept[key]


def _below(
    schedule: Schedule, token_bytes: dict[tuple[str, str], int], ordered: Iterable[str]
) -> dict[BufferName, list[BufferName]]:
    lives = lives_of(schedule, (kind for role, kind in token_bytes if role == "wire"), ordered)

    def chunks(kind: str) -> int:
        if not schedule.packed:
            return 1
        return schedule.slots[kind] if kind.startswith("+") else schedule.tile.extent(kind)

    sizes = {
        (role, kind, slot): chunks(kind) * token_bytes["arena" if role == "ordered" else role, kind]
        for role, kind, slot in lives
    }
    steps = {name: _steps(life) for name, life in lives.items()}
    by_size = sorted(lives, key=lambda name: -sizes[name] * steps[name].bit_count())
    by_time = sorted(lives, key=lambda name: (steps[name] & -steps[name], -sizes[name]))
    placed = [_first_fit(names, sizes, steps) for names in (by_size, by_time)]
    starts = min(placed, key=lambda starts: max((start + sizes[name] for name, start in starts.items()), default=0))
    order = sorted(starts, key=starts.__getitem__)
    below: dict[BufferName, list[BufferName]] = {}
    reaching: list[int] = []  # as bits, all that a buffer lies above, and itself
    for i, name in enumerate(order):
        below[name], reached = [], 0
        for j in range(i - 1, -1, -1):
            if steps[name] & steps[order[j]] and not reached >> j & 1:
                below[name].append(order[j])
                reached |= reaching[j]
        reaching.append(reached | 1 << i)
    return below


def _first_fit(
    names: list[BufferName], sizes: dict[BufferName, int], steps: dict[BufferName, int]
) -> dict[BufferName, int]:
    """Where buffers begin, each in the lowest gap that those before it leave free for its whole life."""
    starts: dict[BufferName, int] = {}
    for name in names:
        start, size, own = 0, sizes[name], steps[name]
        for begin, end in sorted((at, at + sizes[other]) for other, at in starts.items() if own & steps[other]):
            if begin - start >= size:
                break
            start = max(start, end)
        starts[name] = start
    return starts


def stack(below: dict[Any, list[Any]], sizes: dict[Any, Any]) -> tuple[dict[Any, Any], Any]:
    """Where each buffer begins, and where the last one ends.  sizes: numbers, or arrays of one shape."""
    starts: dict[Any, Any] = {}
    ends: dict[Any, Any] = {}
    for name, others in below.items():
        starts[name] = reduce(np.maximum, (ends[other] for other in others)) if others else 0
        ends[name] = starts[name] + sizes[name]
    return starts, reduce(np.maximum, ends.values()) if ends else 0
