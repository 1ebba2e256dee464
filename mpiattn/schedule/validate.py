"""Checks a schedule against the rules of the algorithm by replaying it, independent of how it was made.

Every rank has the same schedule, so replaying one rank checks all: the chunk that arrives as Q#u is what the neighbour
holds as Q#(u-1) at the same step, and received partials result from the same steps.  The replay posts each transfer in
the first step that allows it and completes it in its own step.  This also proves every later posting right.
"""

from ..errors import ScheduleError
from .kinds import GATHERED, IN_COLUMNS, REDUCED, arena_of, chunk_of
from .route import leg_of, passed_on


class _Play:
    def __init__(self, schedule):
        self.s = schedule
        self.reduced = REDUCED[schedule.direction]
        self.have = dict.fromkeys((kind, 0) for kind in GATHERED)  # chunk -> slot, once it has arrived
        self.coming = set()  # chunks whose transfer was posted
        self.arena = {}  # (arena, slot) -> what was last written there
        self.lives = {}  # (arena, slot) -> the life in which it was
        self.outlived = []  # (step, fault) of uses outside of it
        self.done = set()  # blocks run
        # By reduced kind.  held: contributions in #0, #1, ..., as hops to the owner.  sent: hops.  alive: slot -> hop.
        self.held = {kind: [set() for _ in range(schedule.tile.extent(kind))] for kind in self.reduced}
        self.sent = {kind: set() for kind in self.reduced}
        self.alive = {}
        self.posts = {}  # step -> transfers that may be posted from it on
        for step in schedule.steps:
            for t in step.transfers:
                self.posts.setdefault(t.earliest, []).append(t)

    def fail(self, step, what):
        raise ScheduleError(f"{self.s.name} {self.s.tile} {self.s.direction}, step {step}: {what}")

    def check_slot(self, i, arena, slot):
        if not 0 <= slot < self.s.slots[arena]:
            self.fail(i, f"slot {arena}[{slot}] does not exist")
        return self.life(i, arena, slot)

    def life(self, i, arena, slot):
        """The life of a slot, of those that the schedule gives, that has step i; None if none has."""
        return next(((first, last) for first, last in self.s.lives[arena][slot] if first <= i <= last), None)

    def check_life(self, i, arena, slot):
        """Others may lie in the memory of a slot between two lives.  What is wrong is said if nothing else is."""
        if self.lives[arena, slot] is None or self.life(i, arena, slot) != self.lives[arena, slot]:
            lives = self.s.lives[arena][slot]
            self.outlived.append((i, f"slot {arena}[{slot}] is not used in one life; it has {lives}"))

    def read(self, i, kind, hop):
        if (kind, hop) not in self.have:
            self.fail(i, f"{kind}#{hop} is used before it has arrived")
        if hop and self.arena[kind, self.have[kind, hop]] != hop:
            self.fail(i, f"{kind}#{hop} was overwritten while still in use")
        if hop:
            self.check_life(i, kind, self.have[kind, hop])

    def accumulate(self, i, kind, hop):
        if not hop:
            return
        if hop in self.sent[kind]:
            self.fail(i, f"{kind}#{hop} changes after it was sent")
        slot = self.s.accumulators[kind][hop - 1]
        life = self.check_slot(i, kind, slot)
        if (kind, slot) not in self.alive:
            self.lives[kind, slot] = life
        if self.alive.setdefault((kind, slot), hop) != hop:
            self.fail(i, f"accumulator {kind}[{slot}] of {kind}#{self.alive[kind, slot]} is taken by {kind}#{hop}")
        self.check_life(i, kind, slot)

    def blocks_of(self, kind, hop):
        """The blocks whose sum a partial is."""
        if kind in IN_COLUMNS:
            return {(u, hop) for u in range(self.s.tile.a)}
        return {(hop, w) for w in range(self.s.tile.b)}

    def post(self, i, t):
        if len(t.slots) != len(t.hops):
            self.fail(i, f"{t} has {len(t.hops)} hops but {len(t.slots)} slots")
        if t.collective and passed_on(self.s.route):
            self.fail(i, f"{t} is a collective, which cannot take the {self.s.route} route")
        for hop, slot in zip(t.hops, t.slots):
            if t.kind not in (*GATHERED, *self.reduced) or not 0 < hop < self.s.tile.extent(t.kind):
                self.fail(i, f"{t.kind}#{hop} does not exist")
            if t.kind in self.reduced:
                self.accumulate(i, t.kind, hop)
                self.sent[t.kind].add(hop)
                if self.blocks_of(t.kind, hop) - self.done:
                    self.fail(i, f"{t.kind}#{hop} is sent before its blocks are complete")
            elif (t.kind, hop) in self.coming:
                self.fail(i, f"{t.kind}#{hop} is received twice")
            else:
                self.read(i, t.kind, self.leg(t, hop).leaves)
            self.coming.add((t.kind, hop))
            self.lives[arena_of(t.kind), slot] = self.check_slot(i, arena_of(t.kind), slot)
            self.arena[arena_of(t.kind), slot] = hop

    def leg(self, t, hop):
        return leg_of(t.kind, hop, self.s.tile.extent(t.kind), self.s.route, t.collective)

    def complete(self, i, t):
        arrived = []
        for hop, slot in zip(t.hops, t.slots):
            if t.kind in GATHERED:
                self.read(i, t.kind, self.leg(t, hop).leaves)
                self.have[t.kind, hop] = slot
                continue
            if self.arena[arena_of(t.kind), slot] != hop:
                self.fail(i, f"the partial in {arena_of(t.kind)}[{slot}] was overwritten before it was merged")
            self.check_life(i, arena_of(t.kind), slot)
            target = self.leg(t, hop).lands
            self.accumulate(i, t.kind, target)
            arrived.append((target, self.held[t.kind][hop] | {hop}))
            self.alive.pop((t.kind, self.s.accumulators[t.kind][hop - 1]), None)
        for target, contributions in arrived:
            held = self.held[t.kind]
            if held[target] & contributions:
                self.fail(i, f"{t.kind}#{target} receives a contribution twice")
            held[target] |= contributions

    def step(self, i, step):
        for t in step.transfers:
            if t.earliest > i:
                self.fail(i, f"{t} may be posted only after the step that needs it")
        for t in self.posts.get(i, ()):
            self.post(i, t)
        if step.fused and len(step.blocks) != self.s.tile.a * self.s.tile.b:
            self.fail(i, f"a fused step has {len(step.blocks)} blocks; it must have all of the tile")
        for block in step.blocks:
            if tuple(block) in self.done:
                self.fail(i, f"block {tuple(block)} runs twice")
            for kind in GATHERED:
                self.read(i, kind, chunk_of(kind, *block))
            for kind in self.reduced:
                self.accumulate(i, kind, chunk_of(kind, *block))
            self.done.add(tuple(block))
        for t in step.transfers:
            self.complete(i, t)

    def finish(self):
        missing = {(u, w) for u in range(self.s.tile.a) for w in range(self.s.tile.b)} ^ self.done
        if missing:
            self.fail("end", f"blocks never run, or not in the tile: {sorted(missing)}")
        for kind in self.reduced:
            lacking = set(range(1, self.s.tile.extent(kind))) - self.held[kind][0]
            if lacking:
                self.fail("end", f"{kind}#0 lacks the partials of hops {sorted(lacking)}")
        for step, fault in self.outlived:
            self.fail(step, fault)


def validate(schedule):
    """Raise ScheduleError unless the schedule is correct; return the number of slots used, by arena.

    Correct means: every block of the tile runs once, nothing is used before it arrives, no slot is overwritten while
    in use, and every contribution reaches its owner exactly once.
    """
    play = _Play(schedule)
    for i, step in enumerate(schedule.steps):
        play.step(i, step)
    play.finish()
    used = {kind: set() for kind in schedule.slots}
    for arena, slot in play.arena:
        used[arena].add(slot)
    for kind, slots in schedule.accumulators.items():
        used[kind] = set(slots)
    return {kind: len(slots) for kind, slots in used.items()}
