"""A schedule as data: when each transfer moves, and which blocks hide it.  No MPI, no NumPy.

Coordinates are hops relative to the rank (Mesh-Attention, arXiv 2512.20968, section 3), so one schedule serves every
rank of a mesh of b rows x a columns.  Q#u and O#u belong to the chunk u hops back in this rank's row, KV#w is the chunk
w hops back in its column, and #0 is its own.  Block (u, w) is Q#u against KV#w.

`mpiattn.schedule.kinds` lists the kinds that travel, `mpiattn.schedule.route` explains the routes.  A reduced kind X
has two arenas: "X" holds accumulators, "+X" received partials.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..system.choices import one_of
from .kinds import GATHERED, REDUCED, arena_of, chunk_of
from .route import ROUTES, leg_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .route import Leg
    from .tile import Tile

Buffer: TypeAlias = "tuple[str, int]"  # arena, hop
Life: TypeAlias = "tuple[tuple[int, int], ...]"  # (first step, last step) of what lies in a slot, one after another


class Block(NamedTuple):
    """The product of query chunk Q#u and key-value chunk KV#w."""

    u: int
    w: int


class Costs(NamedTuple):
    """Number of blocks that hide one transfer of each kind, in the order of `KINDS`.

    o: O forward, dQ backward.
    dkv: dKV, backward only.
    """

    q: float = 1.0
    kv: float = 1.0
    o: float = 1.0
    dkv: float = 1.0


@dataclass(frozen=True)
class Transfer:
    """One transfer, posted before the blocks of its step at the latest and completed after them.

    kind: if gathered, the chunks `hops` arrive; if reduced, this rank's partials `hops` leave, and as many partials
        of other ranks arrive and are merged.
    slots: the buffer slot of each arrival, in the arena `arena_of(kind)`.
    collective: True for one MPI collective over the group instead of messages between pairs.
    earliest: the first step in which it may be posted, because its data are complete and its slots free by then.
    """

    kind: str
    hops: tuple[int, ...]
    slots: tuple[int, ...]
    collective: bool = False
    earliest: int = 0

    def __str__(self) -> str:
        verb = "recv" if self.kind in GATHERED else "send"
        moved = ", ".join(
            f"{self.kind}#{hop} -> {arena_of(self.kind)}[{slot}]" for hop, slot in zip(self.hops, self.slots)
        )
        return f"{'all ' if self.collective else ''}{verb} {moved} from {self.earliest}"


@dataclass(frozen=True)
class Step:
    """Transfers, and the blocks that run during them.

    fused: `blocks` are all blocks of the tile, and run as one launch over whole arenas.
    """

    transfers: tuple[Transfer, ...] = ()
    blocks: tuple[Block, ...] = ()
    fused: bool = False

    def __str__(self) -> str:
        blocks = " ".join(f"({u},{w})" for u, w in self.blocks)
        moves = "; ".join(map(str, self.transfers)) or "-"
        return f"{moves:<28}  {'as one: ' if self.fused else ''}{blocks or '-'}"


@dataclass(frozen=True)
class Schedule:
    """The steps of one rank's tile, and the buffers they need.

    direction: "forward" or "backward", which determines the reduced kinds.
    accumulators: by reduced kind, the slot of each accumulator #1, #2, ...; #0 is the result and has none.
    slots: number of slots of every arena.
    lives: by arena, of each slot, (first step, last step) of all that lie there one after another.
    ahead: how many steps before its own a transfer may be posted, if its data and slots allow.
    """

    name: str
    direction: str
    tile: Tile
    route: str
    steps: tuple[Step, ...]
    accumulators: dict[str, tuple[int, ...]]
    slots: dict[str, int]
    lives: dict[str, tuple[Life, ...]]
    ahead: int = 0

    @cached_property
    def collective(self) -> bool:
        """Whether any transfer is an MPI collective."""
        return any(t.collective for step in self.steps for t in step.transfers)

    @cached_property
    def packed(self) -> bool:
        """Whether arenas are packed, as one launch of all blocks needs: chunks of the whole group one after another."""
        return any(step.fused for step in self.steps)

    @cached_property
    def kept(self) -> dict[Any, Any]:
        """What other modules have computed from this schedule alone, by a key of theirs."""
        return {}

    def __str__(self) -> str:
        slots = ", ".join(f"{count} {kind}" for kind, count in self.slots.items())
        head = (
            f"{self.name} {self.tile}, {self.direction}, {self.route} route, up to {self.ahead} "
            f"steps ahead: {len(self.steps)} steps; slots: {slots}\n"
            f"step  {'transfer, from which step on':<28}  blocks (Q#u,KV#w) that hide it"
        )
        return "\n".join([head] + [f"{i:4}  {step}" for i, step in enumerate(self.steps)])


class _Lifetimes:
    """The first and last step that use each buffer; slots are assigned from them."""

    def __init__(self) -> None:
        self.first: dict[Buffer, int] = {}
        self.last: dict[Buffer, int] = {}

    def use(self, name: Buffer, step: int) -> None:
        self.first.setdefault(name, step)
        self.last[name] = step

    def slots(self, arena: str) -> tuple[dict[Buffer, int], tuple[Life, ...]]:
        """The lowest slot that is free for the whole life of each buffer of an arena, and the lives in each slot."""
        free: list[int] = []  # a heap of slots
        busy: list[tuple[int, int]] = []  # a heap of (last use, slot)
        slot: dict[Buffer, int] = {}
        lives: list[Life] = []
        for name in sorted((n for n in self.first if n[0] == arena), key=self.first.__getitem__):
            while busy and busy[0][0] < self.first[name]:
                heappush(free, heappop(busy)[1])
            if not free:
                heappush(free, len(lives))
                lives.append(())
            slot[name] = heappop(free)
            lives[slot[name]] += ((self.first[name], self.last[name]),)
            heappush(busy, (self.last[name], slot[name]))
        return slot, tuple(lives)


def _first_steps(
    direction: str, legs_of: Callable[[Transfer], list[Leg]], steps: Sequence[Step], ahead: int
) -> list[list[int]]:
    """The first step in which each transfer may be posted, by step; transfers are posted in order."""
    there: dict[Buffer, int] = {}  # the first step in which a chunk or accumulator is complete
    first = 0
    by_step: list[list[int]] = []
    for i, step in enumerate(steps):
        by_step.append([])
        for t in step.transfers:
            legs = legs_of(t)
            whole = [there.get((t.kind, leg.leaves), 0) for leg in legs]
            first = max([first, i if t.collective else i - ahead, *whole])
            by_step[-1].append(first)
            there |= {(t.kind, leg.lands): i + 1 for leg in legs}
        there |= {(kind, chunk_of(kind, *block)): i + 1 for block in step.blocks for kind in REDUCED[direction]}
    return by_step


def with_slots(name: str, direction: str, tile: Tile, route: str, steps: Sequence[Step], ahead: int = 0) -> Schedule:
    """The Schedule of `steps`, with the fewest buffer slots that their uses allow.

    steps: Steps whose transfers have no slots yet.
    ahead: how many steps before its own a transfer may be posted; it holds its slot from then on.
    A slot is reused only in a step after the last one that reads it, so a receive can be posted at that step's start.
    Raises ArgumentError.
    """
    return _with_slots(name, direction, tile, route, tuple(steps), ahead)


@lru_cache(64)  # other lengths of sequences have the same steps
def _with_slots(name: str, direction: str, tile: Tile, route: str, steps: tuple[Step, ...], ahead: int) -> Schedule:
    one_of("route", route, ROUTES)
    reduced = REDUCED[direction]

    def legs_of(t: Transfer) -> list[Leg]:
        return [leg_of(t.kind, hop, tile.extent(t.kind), route, t.collective) for hop in t.hops]

    first_steps, lives = _first_steps(direction, legs_of, steps, ahead), _Lifetimes()
    for i, step in enumerate(steps):
        for t, first in zip(step.transfers, first_steps[i]):
            for hop, leg in zip(t.hops, legs_of(t)):
                lives.use((arena_of(t.kind), hop), first)
                lives.use((arena_of(t.kind), hop), i)
                for used in filter(None, (leg.leaves, leg.lands)):  # #0 takes no slot
                    lives.use((t.kind, used), i)
        for block in step.blocks:
            for kind in (*GATHERED, *reduced):
                if chunk_of(kind, *block):
                    lives.use((kind, chunk_of(kind, *block)), i)
    slot: dict[Buffer, int] = {}
    lives_of: dict[str, tuple[Life, ...]] = {}
    for arena in (*GATHERED, *reduced, *map(arena_of, reduced)):
        slots, lives_of[arena] = lives.slots(arena)
        slot |= slots
    placed = []
    for step, first_of in zip(steps, first_steps):
        transfers = tuple(
            replace(t, slots=tuple(slot[arena_of(t.kind), hop] for hop in t.hops), earliest=after)
            for t, after in zip(step.transfers, first_of)
        )
        placed.append(Step(transfers, step.blocks, step.fused))
    accumulators = {kind: tuple(slot[kind, hop] for hop in range(1, tile.extent(kind))) for kind in reduced}
    count = {arena: len(of_slots) for arena, of_slots in lives_of.items()}
    return Schedule(name, direction, tile, route, tuple(placed), accumulators, count, lives_of, ahead)


def apart(schedule: Schedule) -> Schedule:
    """The same transfers and blocks in the same order, but never both in one step, so nothing overlaps."""
    steps: list[Step] = []
    for step in schedule.steps:
        steps += [Step((), step.blocks, step.fused)] * bool(step.blocks)
        steps += [Step(step.transfers)] * bool(step.transfers)
    return with_slots(schedule.name, schedule.direction, schedule.tile, schedule.route, steps)


def blocks_to_hide(cost: float) -> int:
    """A cost rounded up to a whole number of blocks, at least 1."""
    return max(1, ceil(cost))
