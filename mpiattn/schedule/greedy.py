"""The greedy schedules of Mesh-Attention (arXiv 2512.20968): Algorithm 2 forward, and backward.

Three rules: choose the transfer that unlocks the most blocks per cost; start only as many blocks as hide it; run row 0
(backward, column 0 too) last, because its accumulators are never sent.  On the tile 1xN it is Ring-Attention.

Backward, dQ of a row can be sent once the row is complete, and dKV of a column once the column is.  Let n_dQ (n_dKV)
blocks be missing from the next such row (column).  The next block is along the row if c_dQ / n_dQ > c_dKV / n_dKV, else
along the column.  Rows and columns are thus finished one after another.  (The paper's listing, Algorithm 3, was not
available to us.  Sending complete partials while chunks still arrive is our addition.)

Where a window opens to both sides, the neighbour ahead is so many hops back as there are others, and would come last.
So on the direct route, where any order of hops is right, chunks of both sides come in turn, the nearest first.
"""

from dataclasses import replace
from heapq import heappop, heappush

from ..errors import ArgumentError
from .kinds import GATHERED, IN_COLUMNS, KINDS, REDUCED
from .route import passed_on
from .steps import Block, Costs, Step, Transfer, blocks_to_hide, with_slots


class _Blocks:
    """The blocks of a tile: which have run, which can run, and in which order they do."""

    def __init__(self, tile, costs, direction):
        self.tile = tile
        self.cost = dict(zip(KINDS[direction], costs))
        self.here = dict.fromkeys(GATHERED, 0)  # hops that have arrived
        self.unsent = {kind: list(range(1, tile.extent(kind))) for kind in REDUCED[direction]}
        self.backward = direction == "backward"
        self.done, self.heap = set(), []
        self.missing = {**{("row", u): tile.b for u in range(tile.a)}, **{("column", w): tile.a for w in range(tile.b)}}
        self._add(0, 0)

    def _add(self, u, w):
        heappush(self.heap, (*self._order(u, w), u, w))

    def _order(self, u, w):
        return u or self.tile.a, (w or self.tile.b) if self.backward else w

    def arrive(self, kind):
        """Record the arrival of the next hop of Q or KV, which unlocks its blocks with the chunks that are here."""
        self.here[kind] += 1
        hop = self.here[kind]
        for other in range(self.here["KV" if kind == "Q" else "Q"] + 1):
            self._add(*((hop, other) if kind == "Q" else (other, hop)))

    def unlocks(self, kind):
        """Number of blocks that the next hop of Q or KV would unlock."""
        if self.here[kind] == self.tile.extent(kind) - 1:
            return 0
        return self.here["KV" if kind == "Q" else "Q"] + 1

    def lacks(self, kind, hop):
        """Number of blocks that have to run before a partial can be sent."""
        return self.missing["column" if kind in IN_COLUMNS else "row", hop]

    def targets(self):
        """The next partial of each kind to send, highest cost per missing block first."""
        targets = [(kind, hops[0]) for kind, hops in self.unsent.items() if hops]
        if len(targets) == 2:
            gains = [self.cost[kind] / (self.lacks(kind, hop) or 1e-9) for kind, hop in targets]
            if gains[0] <= gains[1]:
                targets.reverse()
        return targets

    def _along(self, kind, hop):
        """The next runnable block of a row or column, #0 last; None if there is none."""
        in_column = kind in IN_COLUMNS
        if hop > self.here["KV" if in_column else "Q"]:
            return None
        others = self.here["Q" if in_column else "KV"] + 1
        blocks = ((other, hop) if in_column else (hop, other) for other in (*range(1, others), 0))
        return next((block for block in blocks if block not in self.done), None)

    def _next(self):
        if self.backward:
            for target in self.targets():
                if block := self._along(*target):
                    return block
        while self.heap:  # row by row
            *_, u, w = heappop(self.heap)
            if (u, w) not in self.done:
                return u, w
        return None

    def take(self, count):
        """The next blocks to run, at most `count`."""
        blocks = []
        while len(blocks) < count and (block := self._next()):
            self.done.add(block)
            self.missing["row", block[0]] -= 1
            self.missing["column", block[1]] -= 1
            blocks.append(Block(*block))
        return tuple(blocks)


def _in_turn(extent):
    """The hops 0, 1, extent - 1, 2, extent - 2, ..."""
    return sorted(range(extent), key=lambda hop: min(2 * hop - 1, 2 * (extent - hop)) if hop else -1)


def _renamed(tile, steps):
    """The same steps with other chunks: those of both sides in turn in place of hops 1, 2, 3, ..."""
    rows, columns = _in_turn(tile.a), _in_turn(tile.b)
    return [
        Step(
            tuple(
                replace(t, hops=tuple((columns if t.kind in IN_COLUMNS else rows)[hop] for hop in t.hops))
                for t in step.transfers
            ),
            tuple(Block(rows[u], columns[w]) for u, w in step.blocks),
        )
        for step in steps
    ]


def greedy(tile, costs=(1, 1, 1, 1), route="direct", direction="forward", ahead=0, both_sides=False):
    """Schedule of a tile in which blocks hide every transfer.

    costs: c_Q, c_KV, c_O (or c_dQ) and c_dKV: number of blocks that hide one transfer of the kind, positive.
    ahead: how many steps before its own a transfer may be posted.
    both_sides: whether chunks come from both sides in turn.  The ring route cannot do that.
    Raises ArgumentError.
    """
    costs = Costs(*costs)
    if min(costs) <= 0:
        raise ArgumentError(f"costs are {tuple(costs)}; each must be positive")
    blocks, steps = _Blocks(tile, costs, direction), []

    def move(*moved):
        for kind, hop in moved:
            if kind in blocks.unsent:
                blocks.unsent[kind].remove(hop)
        hidden_by = blocks.take(blocks_to_hide(sum(blocks.cost[kind] for kind, _ in moved)))
        steps.append(Step(tuple(Transfer(kind, (hop,), ()) for kind, hop in moved), hidden_by))

    while blocks.unlocks("Q") or blocks.unlocks("KV"):
        kind = "Q" if blocks.unlocks("Q") / costs.q > blocks.unlocks("KV") / costs.kv else "KV"
        complete = [target for target in blocks.targets() if blocks.backward and not blocks.lacks(*target)]
        move((kind, blocks.here[kind] + 1), *complete)  # sending complete partials now frees their slots
        blocks.arrive(kind)
    while targets := blocks.targets():
        if blocks.lacks(*targets[0]):
            steps.append(Step((), blocks.take(1)))
        else:
            move(targets[0])
    rest = blocks.take(tile.a * tile.b)
    if rest:
        steps.append(Step((), rest))
    if both_sides and not passed_on(route):
        steps = _renamed(tile, steps)
    return with_slots("greedy", direction, tile, route, steps, ahead)
