"""The choice of a tile with planes, and of the layout of the mesh: what regrouping costs and what it saves.

Every number of planes leaves a smaller problem on fewer ranks, for which `mpiattn.model.search` chooses.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..problem.layout import Layout
from ..schedule.regroup import Regrouping, every_tile, plane_problem, splits
from ..schedule.tile import Tile
from . import cost, memory, search
from .machine import DEFAULT
from .needed import SECONDS, SENT
from .regrouped import Regrouped, of_token
from .simulate import nodes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..problem.problem import Problem
    from .machine import Machine

LOOKED_AT = 8  # ranks whose regrouping is timed


def check_heads(tile: Tile | None, problem: Problem) -> None:
    """Raise ArgumentError unless a tile's planes can split the heads."""
    if tile is not None and not splits(problem.heads, problem.kv_heads, tile.h):
        raise ArgumentError(
            f"tile is {tile}; {tile.h} planes cannot split {problem.heads} heads and {problem.kv_heads} KV heads: the "
            "number of planes must divide the heads, and it must divide the KV heads or be a multiple of them"
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


class _Cost:
    """What regrouping adds to the passes of a direction: seconds, bytes sent by pass, bytes of memory."""

    def __init__(self, regrouping, machine, nodes, direction):
        tile, self.passes = regrouping.tile, search.DIRECTIONS[direction]
        nodes = nodes[places(tile)]  # by rank of the mesh
        ranks = sorted({i * tile.ranks // LOOKED_AT for i in range(LOOKED_AT)})  # all, of few
        lengths = [layout.lengths for layout in regrouping.outer]
        most = [of_ranks.index(max(of_ranks)) for of_ranks in lengths]
        sharing = np.bincount(nodes).max()
        rate = machine.between.bandwidth
        if machine.node_bandwidth is not None:
            rate = min(rate, machine.node_bandwidth / sharing)
        exchanged = Regrouped(regrouping, list(dict.fromkeys([*ranks, *most])), nodes)
        self.sent, self.seconds, self.nbytes = {}, 0.0, 0
        for name in self.passes:
            inside, between, near, far, packed = exchanged.of_pass(name)
            seconds = (
                inside / machine.inside.bandwidth
                + between / rate
                + far * machine.between.latency
                + near * machine.inside.latency
                + packed / machine.merging
            )
            self.sent[name] = float(np.mean((inside + between)[: len(ranks)]))
            self.seconds += float(seconds.max())
            self.nbytes += int(packed.max())
        self.nbytes += memory.outer_bytes(regrouping.problem, list(map(max, lengths)), "backward" in self.passes)
        longest = [max(layout.lengths) for layout in regrouping.inner]
        for name in self.passes:
            widened = of_token(regrouping.problem, tile.h, name).widened
            self.nbytes += sum(nbytes * tokens for nbytes, tokens in zip(widened, longest))

    @property
    def sent_bytes(self):
        """Bytes that a rank sends in all passes, mean over ranks."""
        return sum(self.sent.values())

    def added(self, sent):
        """What a rank sends in the passes of a plane, by pass and kind, and before and after them."""
        return {name: {**kinds, "regrouped": self.sent[name]} for name, kinds in sent.items()}


class _Case(NamedTuple):
    """As `search.Case`: a tile with planes.  inner: the layouts with which a plane computes."""

    tile: Tile
    kind: str
    route: str
    pair: tuple
    inner: tuple

    @property
    def of_plane(self):
        """The case of a plane."""
        return search.Case(self.tile.plane, self.kind, self.route, self.inner)


class _Model:
    """As `search.Model`, of cases with any number of planes."""

    def __init__(self, problem, shapes, machine, direction, nodes, overlap, max_memory, mask):
        self.problem, self.shapes, self.machine, self.direction, self.nodes = problem, shapes, machine, direction, nodes
        self.overlap, self.max_memory, self.mask = overlap, max_memory, mask
        self._costs, self._models = cache(self._cost), cache(self._model)
        self.bounds = (
            (SECONDS, self.computing),
            (SENT, self.sent_by_plane),
            (SENT, self.sent),
            (SECONDS, self.seconds),
        )

    def _cost(self, planes, chunks, pair, inner):
        """The `_Cost` of regrouping; None if there is none."""
        if planes == 1 and pair == inner:
            return None
        tile = Tile(planes, 1, chunks)  # regrouping does not depend on the shape of a plane
        outer = reordered(pair, places(tile)) if planes > 1 else pair
        return _Cost(Regrouping(self.problem, tile, outer, inner), self.machine, self.nodes, self.direction)

    def _model(self, planes, regrouped):
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

    def _of(self, case):
        """The cost of regrouping of a case, and the model of its plane."""
        added, model = self._costs(case.tile.h, case.tile.chunks, case.pair, case.inner), self._of_plane(case)
        if added is None or self.max_memory is None:
            return added, model
        return added, model.limited(max(self.max_memory - added.nbytes, 1))

    def _of_plane(self, case):
        """The model of a case's plane, without a limit for what regrouping needs."""
        return self._models(case.tile.h, case.tile.h > 1 or case.pair != case.inner)

    def computing(self, case):
        """Seconds that no choice of a case is below, of its computing alone."""
        return self._of_plane(case).computing(case.of_plane)

    def sent_by_plane(self, case):
        """Bytes that no choice of a case sends less than, without regrouping."""
        return self._of_plane(case).sent(case.of_plane)

    def sent(self, case):
        """Bytes that no choice of a case sends less than."""
        added, model = self._of(case)
        return model.sent(case.of_plane) + (0.0 if added is None else added.sent_bytes)

    def seconds(self, case):
        """Seconds that no choice of a case is below."""
        added, model = self._of(case)
        return model.seconds(case.of_plane) + (0.0 if added is None else added.seconds)

    def bound(self, cases):
        """The `search.Bound` of the cases of a tile."""
        case, _ = search.least_of(self, cases)
        added, model = self._of(case)
        bound = model.bound([case.of_plane])
        if added is None:
            return bound
        seconds = bound.seconds + added.seconds
        return bound._replace(tile=case.tile, layouts=case.pair, seconds=seconds, sent=added.added(bound.sent))

    def choice(self, case):
        """The `search.Choice` of a case."""
        added, model = self._of(case)
        choice = model.choice(case.of_plane)
        if added is None:
            return choice
        seconds = choice.seconds + added.seconds
        return choice._replace(
            tile=case.tile,
            layouts=case.pair,
            seconds=seconds,
            waiting=(choice.waiting * choice.seconds + added.seconds) / seconds if seconds else 0.0,
            sent=added.added(choice.sent),
            nbytes=choice.nbytes + added.nbytes,
        )


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
    """The choices and bounds of `search.survey` for every number of planes, best first.

    Arguments as there.  mesh_layout: kind of layout in which the mesh computes, a pair of layouts, or "auto": the
    caller's or, if that is given, also others that may balance the mask better.
    fixed: whether the caller has said which rank holds which chunk of `pairs`.  Else stripes may be dealt out so that
    the ranks of a chunk exchange among themselves.
    """
    nodes = nodes_of(ranks, machine) if nodes is None else np.asarray(nodes)
    pairs = pairs or search.layouts("auto", problem, ranks, mask)
    shapes = shapes or every_tile(ranks, problem.heads, problem.kv_heads)
    cases = [
        _Case(shape, kind, chosen_route, pair if fixed else aligned(pair, planes), inner)
        for planes in dict.fromkeys(shape.h for shape in shapes)
        for pair in pairs
        for inner in inner_layouts(problem, pair, ranks // planes, mesh_layout, len(pairs) == 1, mask)
        for shape in shapes
        if shape.h == planes
        for kind in (kinds if shape.chunks > 1 else kinds[:1])  # with one chunk there is nothing to collect
        for chosen_route in search.routes(route, problem, machine)
    ]
    return search.find(
        _Model(problem, shapes, machine, direction, nodes, overlap, search.memory_limit(max_memory), mask), cases, every
    )
