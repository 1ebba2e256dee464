"""Checks a schedule against the rules of the algorithm by playing it, with no knowledge of how it was made.

Since a schedule is the same on every rank, playing one rank is playing all: what arrives as Q#u is what a
neighbour holds as Q#(u-1) at the same step, and a partial that arrives was made by the same steps.
"""

from .errors import ScheduleError


class _Play:
    def __init__(self, schedule):
        self.s = schedule
        self.have = {("Q", 0): None, ("KV", 0): None}      # chunk -> slot, once it has arrived
        self.arena = {}                                    # (arena, slot) -> what was last written there
        self.done = set()                                  # blocks run
        self.held = [set() for _ in range(schedule.a)]     # contributions merged into O#u, as hops to its owner
        self.alive = {}                                    # accumulator slot -> row
        self.sent = set()

    def fail(self, step, what):
        raise ScheduleError(f"{self.s.name} {self.s.a}x{self.s.b}, step {step}: {what}")

    def write(self, i, arena, slot, name):
        if not 0 <= slot < self.s.slots[arena]:
            self.fail(i, f"slot {arena}[{slot}] does not exist")
        self.arena[arena, slot] = name

    def read(self, i, kind, hop):
        if (kind, hop) not in self.have:
            self.fail(i, f"{kind}#{hop} is used before it has arrived")
        if hop and self.arena[kind, self.have[kind, hop]] != hop:
            self.fail(i, f"{kind}#{hop} was overwritten while still in use")

    def accumulate(self, i, u):
        if not u:
            return
        if u in self.sent:
            self.fail(i, f"O#{u} changes after it was sent")
        slot = self.s.rows[u - 1]
        if not 0 <= slot < self.s.slots["O"]:
            self.fail(i, f"slot O[{slot}] does not exist")
        if self.alive.setdefault(slot, u) != u:
            self.fail(i, f"accumulator O[{slot}] of O#{self.alive[slot]} is taken by O#{u}")

    def post(self, i, t):
        if len(t.slots) != len(t.hops):
            self.fail(i, f"{t} has {len(t.hops)} hops but {len(t.slots)} slots")
        for hop, slot in zip(t.hops, t.slots):
            limit = self.s.b if t.kind == "KV" else self.s.a
            if not 0 < hop < limit:
                self.fail(i, f"{t.kind}#{hop} does not exist")
            if t.kind == "O":
                self.accumulate(i, hop)
                if {(hop, w) for w in range(self.s.b)} - self.done:
                    self.fail(i, f"O#{hop} is sent before its row is complete")
                self.write(i, "P", slot, (i, hop))
            else:
                if (t.kind, hop) in self.have:
                    self.fail(i, f"{t.kind}#{hop} is received twice")
                self.write(i, t.kind, slot, hop)

    def passes_on(self, t):
        return self.s.route == "ring" and not t.collective

    def complete(self, i, t):
        arrived = []
        for hop, slot in zip(t.hops, t.slots):
            if t.kind != "O":
                if self.passes_on(t):
                    self.read(i, t.kind, hop - 1)
                self.have[t.kind, hop] = slot
                continue
            if self.arena["P", slot] != (i, hop):
                self.fail(i, f"the partial in P[{slot}] was overwritten before it was merged")
            target = (hop + 1) % self.s.a if self.passes_on(t) else 0
            self.accumulate(i, target)
            arrived.append((target, self.held[hop] | {hop}))
            self.sent.add(hop)
            self.alive.pop(self.s.rows[hop - 1], None)
        for target, contributions in arrived:
            if self.held[target] & contributions:
                self.fail(i, f"O#{target} receives a contribution twice")
            self.held[target] |= contributions

    def step(self, i, step):
        for t in step.transfers:
            self.post(i, t)
        for block in step.blocks:
            u, w = block
            if block in self.done:
                self.fail(i, f"block {tuple(block)} runs twice")
            self.read(i, "Q", u)
            self.read(i, "KV", w)
            self.accumulate(i, u)
            self.done.add((u, w))
        for t in step.transfers:
            self.complete(i, t)

    def finish(self):
        missing = {(u, w) for u in range(self.s.a) for w in range(self.s.b)} ^ self.done
        if missing:
            self.fail("end", f"blocks never run, or not in the tile: {sorted(missing)}")
        if self.held[0] != set(range(1, self.s.a)):
            self.fail("end", f"O#0 lacks the partials of hops {sorted(set(range(1, self.s.a)) - self.held[0])}")


def validate(schedule):
    """Raise ScheduleError unless the schedule is right; return the most slots ever in use, by arena.

    Right means: every block of the tile once, nothing used before it arrived, no slot overwritten while
    in use, every contribution at its owner exactly once.
    """
    play = _Play(schedule)
    for i, step in enumerate(schedule.steps):
        play.step(i, step)
    play.finish()
    used = {kind: set() for kind in schedule.slots}
    for arena, slot in play.arena:
        used[arena].add(slot)
    used["O"] = set(schedule.rows)
    return {kind: len(slots) for kind, slots in used.items()}
