"""Plans whose scores are divided into pieces: their predicted time, bytes and memory.  Pure arithmetic.

A rank computes its pieces while their tokens arrive, portion by portion (`mpiattn.schedule.piece_steps`).  So a pass
takes the longest of what it computes, receives and sends, and besides what nothing hides: the first portions and the
last partials.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..problem.group import Group
from ..schedule.bands import bands
from ..schedule.dealing import Costs, dealt
from ..schedule.division import needs_of, parts_of
from ..schedule.kinds import GATHERED, IN_COLUMNS, KINDS
from ..schedule.piece_steps import LEAST, MERGING, PORTIONS
from ..schedule.ranges import total
from ..schedule.travels import size_of, token_bytes
from . import memory
from .lower_bounds import ROUNDING
from .pairs import Pairs
from .prediction import Choice
from .workload import PACKING, balance

PIECES = "pieces"  # the name of the schedule


class GroupBytes(NamedTuple):
    """Bytes of a row and of a key of one KV head, with all that moves for a piece that needs it."""

    row: int
    key: int


def group_bytes(problem, direction):
    """The `GroupBytes` of a pass."""
    groups = problem.batch * problem.kv_heads
    of_sides = [0, 0]
    for kind, nbytes in token_bytes(problem, direction).items():
        of_sides[kind in IN_COLUMNS] += nbytes // groups
    return GroupBytes(*of_sides)


def divide(tile, problem, mask, layouts, direction, documents=None, machine=None):
    """The division of a `Divided` tile for a pass.

    mask: what queries are expected to see.  layouts: of the ranks' queries and keys.
    documents: of a call, or None.  machine: by whose times they are dealt.
    """
    if not (mask.seqlen and mask.seqlen_k):
        return ((),) * tile.ranks
    each = group_bytes(problem, direction)
    groups = problem.batch * problem.kv_heads
    owned = tuple(map(_in_a_row, layouts))
    if any(cuts is None for cuts in owned):
        owned = None
    if tile.kind == "dealt" and documents is not None and owned is not None:
        costs = _costs(problem, machine, direction)
        return dealt(problem.whole_mask, documents, problem.batch, problem.kv_heads, owned, costs)
    return bands(mask, tile.ranks, groups, each.row, each.key, owned)


def _costs(problem, machine, direction):
    """The `Costs` that `dealt` goes by, in femtoseconds.

    The slowest link counts: documents that fit on a node seldom have to leave it.
    """
    groups = problem.batch * problem.kv_heads
    rate = min(machine.inside.bandwidth, machine.between.bandwidth)
    moving = {kind: nbytes / groups / rate for kind, nbytes in token_bytes(problem, direction).items()}
    row = sum(seconds for kind, seconds in moving.items() if kind not in IN_COLUMNS and kind in GATHERED)
    partial = sum(seconds for kind, seconds in moving.items() if kind not in IN_COLUMNS and kind not in GATHERED)
    key = sum(seconds for kind, seconds in moving.items() if kind in IN_COLUMNS)
    pair = float(machine.compute(problem.flops_per_pair / groups, problem.dtype, direction))
    return Costs(*(max(1, round(seconds * 1e15)) for seconds in (pair, row, partial, key)))


def _in_a_row(layout):
    """Where the tokens of each rank begin, and the last end, if consecutive ranks have consecutive ones; else None."""
    if layout.kind != "contiguous":
        return None
    cuts, owners = layout.owners
    return cuts if (owners[1:] > owners[:-1]).all() else None


def tokens_between(needs, layout, column):
    """Tokens that every rank takes of every rank's chunk, counted once a KV head: int64 (ranks that need, owners).

    needs: of every rank, as of `needs_of`.  column: whether of keys.
    """
    ranks = len(needs)
    tokens = np.zeros((ranks, ranks), np.int64)
    for rank, of_rank in enumerate(needs):
        ends = np.array([ends for need in of_rank for ends in need.of(column)], np.int64).reshape(-1, 2)
        if layout.striped:
            starts, lengths, step = layout.all_ranges()
            before = (-(-(ends[..., None] - starts[0]) // step)).clip(0, lengths[0])
            tokens[rank] = (before[:, 1] - before[:, 0]).sum(axis=0)
            continue
        cuts, owners = layout.owners
        shared = np.minimum(ends[:, 1:], cuts[1:]) - np.maximum(ends[:, :1], cuts[:-1])
        of_runs = np.maximum(shared, 0).sum(axis=0)
        np.add.at(tokens[rank], owners, of_runs)
    return tokens


def pairs_of(division, mask):
    """The visible pairs of every rank's pieces: int64 (ranks,)."""
    pieces = np.array([piece for of_rank in division for piece in of_rank], np.int64).reshape(-1, 5)
    pairs = np.zeros(len(division), np.int64)
    if not len(pieces):
        return pairs
    rows = np.unique(np.append(pieces[:, 1:3], (0, mask.seqlen)))
    keys = np.unique(np.append(pieces[:, 3:5], (0, mask.seqlen_k)))
    counts = Pairs(mask, *parts_of(rows, keys)).table[: max(len(rows) - 1, 0), : max(len(keys) - 1, 0)]
    before = np.zeros((len(rows), len(keys)), np.int64)
    before[1:, 1:] = counts.cumsum(axis=0).cumsum(axis=1)
    (top, bottom), (left, right) = (
        (of_side.searchsorted(ends[:, 0]), of_side.searchsorted(ends[:, 1]))
        for of_side, ends in ((rows, pieces[:, 1:3]), (keys, pieces[:, 3:5]))
    )
    of_pieces = before[bottom, right] - before[top, right] - before[bottom, left] + before[top, left]
    ranks = np.repeat(np.arange(len(division)), [len(of_rank) for of_rank in division])
    np.add.at(pairs, ranks, of_pieces)
    return pairs


def portions_for(problem, machine, direction, rows, keys):
    """The most portions in which a side of a rank's needs comes: more hide more of its messages, but take launches.

    Of n portions 1/n of the messages is not hidden, and in each launch queries take the time of some keys more.
    rows, keys: numbers of queries and of keys of all needs, numbers or arrays.
    """
    each, groups = group_bytes(problem, direction), problem.batch * problem.kv_heads
    moving = (rows * each.row + keys * each.key) / min(machine.inside.bandwidth, machine.between.bandwidth)
    extra = machine.edge_keys(problem.dtype) * PACKING * rows
    launching = machine.compute(problem.flops_per_pair / groups * extra, problem.dtype, direction) + machine.launch
    return np.sqrt(moving / launching).clip(1, PORTIONS).astype(np.int64)


def buffer_bytes(problem, needs, layouts, direction):
    """Bytes of a plan's buffers for a pass, of every rank, about: int64 (ranks,).

    Counted are the tokens of pieces and their partials, both once more where they come in many runs or in another
    dtype, own partials, own tokens as they are sent, which may lie so, and partials that arrive.

    needs: of every rank.  layouts: of the ranks' queries and keys.
    """
    groups = problem.batch * problem.kv_heads
    counts = [
        np.array([sum(total(need.of(column)) for need in of_rank) for of_rank in needs], np.int64)
        for column in (False, True)
    ]
    nbytes = np.zeros(len(needs), np.int64)
    for kind in KINDS[direction].values():
        arrays = kind.arrays_of(problem)
        held, wire = [array.held(problem) for array in arrays], [array.travelling(problem) for array in arrays]
        layout = layouts[kind.column]
        of_token, of_message = size_of(held) // groups, size_of(wire) // groups
        nbytes += counts[kind.column] * of_token
        if layout.striped or layout.many or held != wire:
            nbytes += counts[kind.column] * of_message
        own = np.array(layout.lengths)
        nbytes += own * of_token * groups
        if kind.reduced:
            nbytes += own * of_message * min(MERGING, len(needs) - 1)
    return nbytes


class PassLoad:
    """The work and the transfers of every rank in a pass.

    tile: a `Divided` tile.  layouts: of the ranks' queries and keys.  mask: what queries see.
    """

    def __init__(self, tile, problem, mask, layouts, direction, machine):
        self._problem, self._layouts, self._direction = problem, layouts, direction
        documents = None
        if mask.cuts is not None:
            cuts = np.array(mask.cuts)
            documents = (Group(cuts, cuts),)
        self.division = divide(tile, problem, mask, layouts, direction, documents, machine)
        self.needs = needs_of(self.division, mask, problem.kv_heads)
        self.pairs = pairs_of(self.division, mask)
        self._groups = problem.batch * problem.kv_heads
        self._mask = mask
        rows, keys = (
            np.array([sum(total(need.of(column)) for need in of_rank) for of_rank in self.needs], np.int64)
            for column in (False, True)
        )
        self._portions = portions_for(problem, machine, direction, rows, keys)

    @cached_property
    def _tokens(self):
        """By `column`, `tokens_between`."""
        return [tokens_between(self.needs, self._layouts[column], column) for column in (False, True)]

    def moved(self, kind):
        """Bytes of a kind that go from every rank to every rank: float (from, to)."""
        of_token = token_bytes(self._problem, self._direction)[kind] / self._groups
        taken = self._tokens[kind in IN_COLUMNS] * of_token
        np.fill_diagonal(taken, 0)
        return taken.T if kind in GATHERED else taken

    def sent(self):
        """{kind: bytes that a rank sends, mean over ranks}."""
        ranks = len(self.needs)
        return {kind: float(self.moved(kind).sum()) / ranks for kind in KINDS[self._direction]}

    def buffer_bytes(self):
        """`buffer_bytes` of the pass."""
        return buffer_bytes(self._problem, self.needs, self._layouts, self._direction)

    @cached_property
    def _blocks(self):
        """The numbers of launches of every rank, and of queries in all of them: both float (ranks,)."""
        launches, queries = np.zeros(len(self.needs)), np.zeros(len(self.needs))
        for rank, of_rank in enumerate(self.needs):
            for need in of_rank:
                rows, keys = total(need.queries), total(need.keys)
                of_rows, of_keys = (max(1, min(self._portions[rank], tokens // LEAST)) for tokens in (rows, keys))
                launches[rank] += of_rows * of_keys * len(need.pieces)
                queries[rank] += rows * of_keys
        return launches, queries

    @property
    def _launches(self):
        """The number of launches of every rank, one for each list of intervals: float (ranks,)."""
        return self._mask.lists * self._blocks[0]

    @property
    def _edges(self):
        """The number of times that queries of every rank take the time of more keys than they see: float (ranks,).

        With one interval a query: once a block, of which most are not cut by the mask.  With several: once an interval.
        """
        lists, queries = self._mask.lists, self._blocks[1]
        if lists == 1:
            return PACKING * queries
        return np.minimum(self.pairs / max(self._mask.widest, 1), lists * queries)

    def seconds(self, machine, nodes, overlap):
        """Seconds of the pass of every rank, and those of them in which it waits: each float (ranks,)."""
        p, nodes = self._problem, np.asarray(nodes)
        pairs = self.pairs + machine.edge_keys(p.dtype) * self._edges
        computing = machine.compute(p.flops_per_pair / self._groups * pairs, p.dtype, self._direction)
        computing += machine.launch * self._launches
        crossing = nodes[:, None] != nodes
        into, out, unhidden, merging = (np.zeros(len(nodes)) for _ in range(4))
        for kind in KINDS[self._direction]:
            moved = self.moved(kind)
            for some, link in ((~crossing, machine.inside), (crossing, machine.between)):
                of_link = np.where(some, moved, 0)
                lasting = of_link / link.bandwidth + link.latency * (of_link > 0)
                into += lasting.sum(axis=0)
                out += lasting.sum(axis=1)
                unhidden += (1 - link.overlap) * of_link.sum(axis=0) / link.bandwidth
            if kind not in GATHERED:
                merging += moved.sum(axis=0) / machine.merging
            if machine.node_bandwidth is not None:
                of_nodes = np.where(crossing, moved, 0)
                for ends, side in ((into, of_nodes.sum(axis=0)), (out, of_nodes.sum(axis=1))):
                    of_node = np.bincount(nodes, side)[nodes] / machine.node_bandwidth
                    np.maximum(ends, of_node, out=ends)
        moving = np.maximum(into, out)
        busy = computing + unhidden + merging
        if not overlap:
            return busy + moving, moving
        seconds = np.maximum(busy, moving) + moving / self._portions
        return seconds, seconds - busy


class DividedCase:
    """A divided plan that is not predicted yet: as a `Case` of `mpiattn.model.search`.

    space: a completed `SearchSpace`.  pair: layouts of the ranks' queries and keys.
    """

    schedule, route = PIECES, "direct"

    def __init__(self, space, tile, pair):
        self.tile, self._space, self._pair = tile, space, pair

    @cached_property
    def _loads(self):
        return self._of(self._space.mask)

    def _of(self, mask):
        """The `PassLoad` of every pass under a mask."""
        space = self._space
        return [
            PassLoad(self.tile, space.problem, mask, self._pair, direction, space.machine) for direction in space.passes
        ]

    def computing(self):
        """A lower bound on the seconds, of computing alone."""
        space, p = self._space, self._space.problem
        flops = p.flops_per_pair * space.mask.pairs() / space.ranks
        return ROUNDING * sum(space.machine.compute(flops, p.dtype, direction) for direction in space.passes)

    def sent(self):
        """The bytes that a rank sends, mean over ranks."""
        return sum(sum(load.sent().values()) for load in self._loads) * ROUNDING

    def bound(self, overlap):
        """A choice of this case, which is quick to predict, in place of a bound."""
        return self.choice(None)

    def choice(self, max_memory):
        """The `Choice` of this case."""
        space, p = self._space, self._space.problem
        seconds = waiting = 0.0
        pairs = np.zeros(space.ranks, np.int64)
        for load in self._loads:
            of_ranks, waited = load.seconds(space.machine, space.nodes, space.overlap)
            seconds += float(of_ranks.max(initial=0))
            waiting += float(waited.mean())
            pairs += load.pairs
        in_memory = self._loads
        if space.mask != p.whole_mask:  # any call may have no documents
            in_memory = in_memory + self._of(p.whole_mask)
        buffers = np.max([load.buffer_bytes() for load in in_memory], axis=0)
        lengths = [np.array(layout.lengths) for layout in self._pair]
        backward = "backward" in space.passes
        own = buffers + memory.own_bytes(p, lengths, backward, False)
        nbytes = buffers + memory.outer_bytes(p, lengths, backward, strided=True)
        sent = {direction: load.sent() for direction, load in zip(space.passes, self._loads)}
        least = int(own.min())
        return Choice(
            self.tile,
            self.schedule,
            self.route,
            self._pair,
            self._pair,
            0,
            balance(pairs),
            seconds,
            waiting / seconds if seconds else 0.0,
            sent,
            int(nbytes.max()),
            (least,) if least == own.max() else tuple(own.tolist()),
        )
