"""A schedule is data: which transfer moves when, and which blocks hide it.  No MPI, no NumPy.

Everything is in rank-relative hop coordinates (Mesh-Attention, arXiv 2512.20968, section 3), so that
one schedule serves every rank of a mesh of b rows x a columns: Q#u and O#u are the chunk u hops back in
my row, KV#w the chunk w hops back in my column, #0 is my own.  Block (u, w) is Q#u against KV#w.

What travels are the kinds of `mpiattn.schedule.kinds`.  A reduced kind X has two arenas: "X" of accumulators and "+X"
of partials received.
What a route means is in `mpiattn.schedule.route`.
"""

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import ceil
from typing import NamedTuple

from ..errors import ArgumentError
from .kinds import GATHERED, REDUCED, arena_of, extent_of, hop_of
from .route import ROUTES, leg_of


class Block(NamedTuple):
    """The product of query chunk Q#u and key-value chunk KV#w."""

    u: int
    w: int


class Costs(NamedTuple):
    """How many blocks it takes to hide one transfer of each kind, in the order of `KINDS`.

    o is of O forward and of dQ backward, dkv is of dKV and backward only.
    """

    q: float = 1.0
    kv: float = 1.0
    o: float = 1.0
    dkv: float = 1.0


@dataclass(frozen=True)
class Transfer:
    """One movement, posted before the blocks of its step at the latest and completed after them.

    kind: of a gathered kind, chunks `hops` arrive; of a reduced kind, my partials `hops` leave, and as many
        partials of others arrive and are merged.
    slots: the buffer slot that each arrival takes, in the arena `arena_of(kind)`.
    collective: one MPI collective over the group instead of messages between pairs.
    after: number of the first step in which it may be posted: what it needs is there, and its slots are free.
    """

    kind: str
    hops: tuple
    slots: tuple
    collective: bool = False
    after: int = 0

    def __str__(self):
        verb = "recv" if self.kind in GATHERED else "send"
        moved = ", ".join(f"{self.kind}#{hop} -> {arena_of(self.kind)}[{slot}]"
                          for hop, slot in zip(self.hops, self.slots))
        return f"{'all ' if self.collective else ''}{verb} {moved} from {self.after}"


@dataclass(frozen=True)
class Step:
    """Transfers, and the blocks that run meanwhile; `fused` blocks are one launch over whole arenas."""

    transfers: tuple = ()
    blocks: tuple = ()
    fused: bool = False

    def __str__(self):
        blocks = " ".join(f"({u},{w})" for u, w in self.blocks)
        moves = "; ".join(map(str, self.transfers)) or "-"
        return f"{moves:<28}  {'as one: ' if self.fused else ''}{blocks or '-'}"


@dataclass(frozen=True)
class Schedule:
    """The steps of one rank's tile of a x b blocks, and the buffers they need.

    direction: "forward" or "backward", which says what is reduced.
    accumulators: by reduced kind, the slot of each accumulator #1, #2, ...; #0 is the result.
    slots: number of slots of every arena.
    ahead: how many steps before the one that needs it a transfer may be posted, where all else allows.
    """

    name: str
    direction: str
    a: int
    b: int
    route: str
    steps: tuple
    accumulators: dict
    slots: dict
    ahead: int = 0

    @property
    def collective(self):
        """Whether MPI's collectives move anything."""
        return any(t.collective for step in self.steps for t in step.transfers)

    def extent(self, kind):
        """Number of hops of a kind, #0 included."""
        return extent_of(kind, self.a, self.b)

    def __str__(self):
        slots = ", ".join(f"{count} {kind}" for kind, count in self.slots.items())
        head = (f"{self.name} {self.a}x{self.b}, {self.direction}, {self.route} route, up to {self.ahead} "
                f"steps ahead: {len(self.steps)} steps; slots: {slots}\n"
                f"step  {'transfer, from which step on':<28}  blocks (Q#u,KV#w) that hide it")
        return "\n".join([head] + [f"{i:4}  {step}" for i, step in enumerate(self.steps)])


class _Lifetimes:
    """First and last step of every buffer's use, from which slots follow."""

    def __init__(self):
        self.first, self.last = {}, {}

    def use(self, name, step):
        self.first.setdefault(name, step)
        self.last[name] = step

    def slots(self, kind):
        """Give each buffer of a kind the lowest slot that is free over its whole life; and their number."""
        free, busy, slot, count = [], [], {}, 0          # heaps of slots and of (last use, slot)
        for name in sorted((n for n in self.first if n[0] == kind), key=self.first.get):
            while busy and busy[0][0] < self.first[name]:
                heappush(free, heappop(busy)[1])
            if not free:
                heappush(free, count)
                count += 1
            slot[name] = heappop(free)
            heappush(busy, (self.last[name], slot[name]))
        return slot, count


def _first_steps(direction, legs_of, steps, ahead):
    """By step, the first step in which each of its transfers may be posted; they are posted in order."""
    there, first, found = {}, 0, []           # there: (kind, hop) -> first step in which it is whole
    for i, step in enumerate(steps):
        found.append([])
        for t in step.transfers:
            legs = legs_of(t)
            whole = [there.get((t.kind, leg.leaves), 0) for leg in legs]
            first = max([first, i if t.collective else i - ahead, *whole])
            found[-1].append(first)
            there |= {(t.kind, leg.lands): i + 1 for leg in legs}
        there |= {(kind, hop_of(kind, *block)): i + 1 for block in step.blocks for kind in REDUCED[direction]}
    return found


def with_slots(name, direction, a, b, route, steps, ahead=0):
    """The Schedule of `steps`, with the fewest buffer slots that their uses allow.

    steps: Steps whose transfers have no slots yet.  ahead: how many steps before its own a transfer may be posted;
    each takes a slot for that long.  A slot is written again only in a step after the last one that reads it, so a
    receive can be posted at the start of that step.
    """
    if route not in ROUTES:
        raise ArgumentError(f"route is {route!r}; it may be {', '.join(ROUTES)}")
    reduced = REDUCED[direction]

    def legs_of(t):
        return [leg_of(t.kind, hop, extent_of(t.kind, a, b), route, t.collective) for hop in t.hops]
    first_steps, lives = _first_steps(direction, legs_of, steps, ahead), _Lifetimes()
    for i, step in enumerate(steps):
        for t, first in zip(step.transfers, first_steps[i]):
            for hop, leg in zip(t.hops, legs_of(t)):
                lives.use((arena_of(t.kind), hop), first)
                lives.use((arena_of(t.kind), hop), i)
                for used in filter(None, (leg.leaves, leg.lands)):       # of #0 nothing is in a slot
                    lives.use((t.kind, used), i)
        for block in step.blocks:
            for kind in (*GATHERED, *reduced):
                if hop_of(kind, *block):
                    lives.use((kind, hop_of(kind, *block)), i)
    slot, count = {}, {}
    for arena in (*GATHERED, *reduced, *map(arena_of, reduced)):
        slots, count[arena] = lives.slots(arena)
        slot |= slots
    placed = []
    for step, first in zip(steps, first_steps):
        transfers = tuple(replace(t, slots=tuple(slot[arena_of(t.kind), hop] for hop in t.hops), after=after)
                          for t, after in zip(step.transfers, first))
        placed.append(Step(transfers, step.blocks, step.fused))
    accumulators = {kind: tuple(slot[kind, hop] for hop in range(1, extent_of(kind, a, b)))
                    for kind in reduced}
    return Schedule(name, direction, a, b, route, tuple(placed), accumulators, count, ahead)


def apart(schedule):
    """The same transfers and blocks in the same order, but never both in a step, so that nothing overlaps."""
    steps = []
    for step in schedule.steps:
        steps += [Step((), step.blocks, step.fused)] * bool(step.blocks)
        steps += [Step(step.transfers)] * bool(step.transfers)
    return with_slots(schedule.name, schedule.direction, schedule.a, schedule.b, schedule.route, steps)


def blocks_to_hide(cost):
    """A cost in blocks as a whole number of them, at least one."""
    return max(1, ceil(cost))
