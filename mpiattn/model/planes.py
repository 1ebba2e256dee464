"""The choice of a tile with planes, and of the layout of the mesh: what regrouping costs and what it saves.

Every number of planes leaves a smaller problem on fewer ranks, for which `mpiattn.model.search` chooses.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..problem.layout import Layout
from ..schedule.regroup import Regrouping, every_tile, plane_problem, split
from ..schedule.remembered import Remembered
from ..schedule.tile import Tile
from . import cost, memory, search
from .branch_and_bound import SECONDS, SENT
from .folding import folding_seconds
from .launches import ROUNDING
from .machine import DEFAULT
from .regrouped import Regrouped, of_token
from .simulate import COPYING, nodes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..problem.problem import Problem
    from .machine import Machine

LOOKED_AT = 8  # ranks whose regrouping is timed


def check_heads(tile: Tile | None, problem: Problem) -> None:
    """Raise ArgumentError unless a tile's planes can split batch and heads."""
    p = problem
    if tile is None or split(tile.h, p.heads, p.kv_heads, p.batch):
        return
    heads, rule = f"{p.heads} heads and {p.kv_heads} KV heads", "their number"
    if p.batch > 1:
        heads = f"{p.batch} sequences of {heads}"
        rule = f"their number must be S * P, where S divides {p.batch}, the number of sequences, and P"
    raise ArgumentError(
        f"tile is {tile}; {tile.h} planes cannot split {heads}: {rule} must divide {p.heads}, the number of heads, and "
        f"must divide {p.kv_heads}, the number of KV heads, or be a multiple of it"
    )


def places(tile: Tile) -> list[int]:
    """For every rank of the mesh, its place among the ranks in order of nodes: the ranks of a chunk are neighbours."""
    return np.arange(tile.ranks).reshape(tile.chunks, tile.h).T.ravel().tolist()


def reordered(pair: tuple[Layout, Layout], order: Sequence[int]) -> tuple[Layout, Layout]:
    """Two layouts whose chunk i is chunk order[i] of the given ones."""
    return _of_both(
        lambda layout: replace(
            layout, order=tuple(order if layout.order is None else (layout.order[i] for i in order))
        ),
        pair,
    )


def _of_both(change: Callable[[Layout], Layout], pair: tuple[Layout, Layout]) -> tuple[Layout, Layout]:
    """Both layouts changed; one and the same if they were."""
    queries, keys = pair
    changed = change(queries)
    return changed, changed if keys is queries else change(keys)


def of_plane(machine: Machine, nodes: Sequence[int], planes: int) -> Machine:
    """The machine that one of several planes has, where the others do the same at the same time."""
    if machine.node_bandwidth is None or planes == 1:
        return machine
    sharing = min(planes, int(np.bincount(nodes).max()))
    return replace(machine, node_bandwidth=machine.node_bandwidth / sharing)


def aligned(pair: tuple[Layout, Layout], planes: int) -> tuple[Layout, Layout]:
    """Two layouts in which ranks that are neighbours in the order of nodes together hold a chunk of a plane's layout.

    Consecutive pieces do so; stripes do if rank chunk * planes + plane holds stripe plane * chunks + chunk.
    """
    if planes == 1:
        return pair
    return _of_both(lambda layout: reordered_stripes(layout, planes) if layout.kind == "striped" else layout, pair)


def reordered_stripes(layout: Layout, planes: int) -> Layout:
    """A striped layout in the order of `aligned`."""
    order = np.arange(layout.chunks).reshape(planes, -1).T
    return replace(layout, order=tuple(order.ravel().tolist()))


def inner_layouts(problem, pair, chunks, mesh_layout, others, mask):
    """The pairs of layouts, of queries and of keys, that a plane of so many ranks may compute with.

    pair: the caller's.  others: whether "auto" tries other kinds than those.  mesh_layout, mask: as for `survey`.
    """
    if not isinstance(mesh_layout, str):
        return [mesh_layout]

    if mesh_layout != "auto":
        return [search.pair_of((mesh_layout, mesh_layout), problem, chunks)]
    own = pair if pair[0].chunks == chunks else search.pair_of([layout.kind for layout in pair], problem, chunks)
    kinds = search.balancing(mask or problem.mask, chunks) if others else ()
    return list(dict.fromkeys([own, *(search.pair_of((kind, kind), problem, chunks) for kind in kinds)]))


def looked_at(tile):
    """The ranks whose regrouping is timed: all, of few."""
    return sorted({i * tile.ranks // LOOKED_AT for i in range(LOOKED_AT)})


class _Cost:
    """What regrouping adds to the passes of a direction: seconds, bytes sent by pass, bytes of memory."""

    def __init__(self, regrouping, machine, nodes, direction):
        tile, self.passes = regrouping.tile, search.DIRECTIONS[direction]
        nodes = nodes[places(tile)]  # by rank of the mesh
        ranks = looked_at(tile)
        lengths = [layout.lengths for layout in regrouping.outer]
        most = [of_ranks.index(max(of_ranks)) for of_ranks in lengths]
        sharing = np.bincount(nodes).max()
        rate = machine.between.bandwidth
        if machine.node_bandwidth is not None:
            rate = min(rate, machine.node_bandwidth / sharing)
        exchanged = Regrouped(regrouping, list(dict.fromkeys([*ranks, *most])), nodes)
        self.sent, self.seconds, self.nbytes = {}, 0.0, 0
        for name in self.passes:
            inside, between, near, far, packed, copied = exchanged.of_pass(name)
            seconds = (
                inside / machine.inside.bandwidth
                + between / rate
                + far * machine.between.latency
                + near * machine.inside.latency
                + copied / (COPYING * machine.merging)
            )
            self.sent[name] = float((inside + between)[: len(ranks)].sum() / len(ranks))
            self.seconds += float(seconds.max())
            self.nbytes += int(packed.max())
        self.nbytes += memory.outer_bytes(regrouping.problem, list(map(max, lengths)), "backward" in self.passes)
        longest = [max(layout.lengths) for layout in regrouping.inner]
        for name in self.passes:
            widened = of_token(regrouping.problem, tile.h, name).widened
            self.nbytes += sum(nbytes * tokens for nbytes, tokens in zip(widened, longest))


class _Split:
    """A number of planes with layouts, pair: the caller's, and inner: those with which a plane computes.

    regrouped: False where heads and tokens stay.  model: the `search.Model` of a plane, without a limit for memory.
    alike: layouts with the same chunks as inner, the same for all kinds if there is one chunk.
    """

    def __init__(self, whole, planes, pair, inner):
        self._whole, self.pair, self.inner = whole, pair, inner
        self.regrouped = planes > 1 or pair != inner
        self.model = whole.of_plane(planes, self.regrouped)
        self.tile = Tile(planes, 1, inner[0].chunks)  # regrouping does not depend on the shape of a plane
        self.alike = inner if inner[0].chunks > 1 else whole.one_chunk

    @cached_property
    def _outer(self):
        """The caller's layouts by rank of the mesh."""
        return reordered(self.pair, places(self.tile)) if self.tile.h > 1 else self.pair

    @cached_property
    def least_sent(self):
        """Bytes that regrouping sends at least: of a rank's tokens, as many as possible are those of its own chunk."""
        if not self.regrouped:
            return 0
        planes, ranks, total = self.tile.h, looked_at(self.tile), 0
        tokens = []
        for outer, inner in zip(self._outer, self.inner):
            pairs = [(outer.lengths[rank], inner.lengths[rank % self.tile.chunks]) for rank in ranks]
            tokens.append(
                (sum(planes * own - min(own, of) for own, of in pairs), sum(of - min(own, of) for own, of in pairs))
            )
        for name in search.DIRECTIONS[self._whole.direction]:
            nbytes = of_token(self._whole.problem, planes, name).exchanged[:, :, 0, 0].tolist()
            total += sum(nbytes[given][keys] * tokens[keys][given] for given in (0, 1) for keys in (0, 1))
        return total / len(ranks)

    @cached_property
    def cost(self):
        """The `_Cost` of regrouping; None if there is none."""
        if not self.regrouped:
            return None
        whole = self._whole
        regrouping = Regrouping(whole.problem, self.tile, self._outer, self.inner)
        return _Cost(regrouping, whole.machine, whole.nodes, whole.direction)

    def added(self, sent):
        """What a rank sends in the passes of a plane, by pass and kind, and before and after them."""
        if self.cost is None:
            return sent
        return {name: {**kinds, "regrouped": self.cost.sent[name]} for name, kinds in sent.items()}

    @cached_property
    def limited(self):
        """The model of a plane that has the memory that regrouping leaves."""
        if self.cost is None or self._whole.max_memory is None:
            return self.model
        return self.model.limited(max(self._whole.max_memory - self.cost.nbytes, 1))


class _Case(NamedTuple):
    """As `search.Case`: a tile with planes.  of_plane: the case of a plane."""

    tile: Tile
    split: _Split
    of_plane: search.Case

    @property
    def kind(self):
        """Of the schedule."""
        return self.of_plane.kind


class _Model:
    """As `search.Model`, of cases with any number of planes."""

    def __init__(self, problem, shapes, machine, direction, nodes, overlap, max_memory, mask):
        self.problem, self.shapes, self.machine, self.direction, self.nodes = problem, shapes, machine, direction, nodes
        self.overlap, self.max_memory, self.mask = overlap, max_memory, mask
        self.of_plane = Remembered(self._of_plane)
        self.one_chunk = search.pair_of(("contiguous", "contiguous"), problem, 1)
        self.lower_bounds = (
            (SECONDS, self.computing),
            (SENT, self.least_sent),
            (SENT, self.sent),
            (SECONDS, self.seconds),
        )

    def _of_plane(self, planes, regrouped):
        """The `search.Model` of a plane.  regrouped: False where heads and tokens stay, and a batch is one."""
        return search.Model(
            plane_problem(self.problem, planes) if regrouped else self.problem,
            [shape.plane for shape in self.shapes if shape.h == planes],
            of_plane(self.machine, self.nodes, planes),
            self.direction,
            self.nodes[::planes],
            self.overlap,
            self.max_memory,
            self.mask,
        )

    def computing(self, case):
        """Seconds that no choice of a case is below, of its computing alone."""
        return case.split.model.computing(case.of_plane)

    def least_sent(self, case):
        """Bytes that no choice of a case sends less than, without a look at what is regrouped."""
        return (case.split.model.sent(case.of_plane) + case.split.least_sent) * ROUNDING

    def sent(self, case):
        """Bytes that no choice of a case sends less than."""
        return search.sent_bytes(case.split.added(case.split.model.sent_by_pass(case.of_plane)))

    def _added(self, case):
        """Seconds before and after the passes of a plane."""
        if case.split.cost is not None:
            return case.split.cost.seconds
        passes, how = search.DIRECTIONS[self.direction], (self.problem, case.tile, case.split.pair, self.machine)
        return sum(folding_seconds(*how, name) for name in passes)

    def seconds(self, case):
        """Seconds that no choice of a case is below."""
        return case.split.model.seconds(case.of_plane) + self._added(case)

    def lower_bound(self, cases):
        """The `search.LowerBound` of the cases of a tile."""
        case, _ = search.least_of(self, cases)
        bound = case.split.model.lower_bound([case.of_plane])
        seconds = bound.seconds + self._added(case)
        bound = bound._replace(tile=case.tile, layouts=case.split.pair, seconds=seconds)
        return bound._replace(sent=case.split.added(bound.sent))

    def choice(self, case):
        """The `search.Choice` of a case."""
        added, choice = case.split.cost, case.split.limited.choice(case.of_plane)
        seconds, waiting = choice.seconds + self._added(case), choice.waiting * choice.seconds
        choice = choice._replace(
            tile=case.tile, layouts=case.split.pair, mesh_layouts=case.split.inner, seconds=seconds
        )
        if added is not None:
            waiting += added.seconds
            choice = choice._replace(sent=case.split.added(choice.sent), nbytes=choice.nbytes + added.nbytes)
        return choice._replace(waiting=waiting / seconds if seconds else 0.0)


def survey(
    problem,
    ranks,
    route="direct",
    kinds=cost.SCHEDULES,
    shapes=None,
    pairs=None,
    mesh_layout="auto",
    fixed=False,
    machine=DEFAULT,
    direction="forward",
    nodes=None,
    overlap=True,
    max_memory=None,
    every="choice",
    mask=None,
):
    """The choices and lower bounds of `search.survey` for every number of planes, best first.

    Arguments as there.  mesh_layout: kind of layout in which the mesh computes, a pair of layouts, or "auto": the
    caller's or, if that is given, also others that may balance the mask better.
    fixed: whether the caller has said which rank holds which chunk of `pairs`.  Else stripes may be dealt out so that
    the ranks of a chunk exchange among themselves.
    """
    nodes = nodes_of(ranks, machine) if nodes is None else np.asarray(nodes)
    pairs = pairs or search.layouts("auto", problem, ranks, mask)
    shapes = shapes or every_tile(ranks, problem.heads, problem.kv_heads, problem.batch)
    model = _Model(problem, shapes, machine, direction, nodes, overlap, search.memory_limit(max_memory), mask)
    ways = [
        _Split(model, planes, own, inner)
        for planes in dict.fromkeys(shape.h for shape in shapes)
        for pair in pairs
        for own in [pair if fixed else aligned(pair, planes)]
        for inner in inner_layouts(problem, pair, ranks // planes, mesh_layout, len(pairs) == 1, mask)
    ]
    chosen_routes = search.routes(route, problem, machine)
    cases = [
        _Case(shape, split, search.Case(shape.plane, kind, chosen_route, split.alike))
        for split in ways
        for shape in shapes
        if shape.h == split.tile.h
        for kind in (kinds if shape.chunks > 1 else kinds[:1])  # with one chunk there is nothing to collect
        for chosen_route in chosen_routes
    ]
    return search.find(model, cases, every)
