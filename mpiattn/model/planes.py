"""Planes of a mesh on the caller's ranks: which rank has which place, and what it takes to regroup heads and tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ArgumentError
from ..problem.layout import GRID, LAYOUTS, RANGES, Layout
from ..schedule.kinds import IN_COLUMNS, KINDS
from ..schedule.regroup import Regrouping, split
from ..schedule.tile import Tile
from ..schedule.travels import size_of
from . import memory
from .regrouped import Regrouped, of_token
from .simulate import COPYING
from .space import auto_kinds, pair_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..problem.problem import Problem
    from .machine import Machine

TIMED = 8  # ranks whose regrouping is timed


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


def check_mesh_layout(wanted: str, pairs: Sequence[tuple[Layout, Layout]], tile: Tile | None) -> None:
    """Raise ArgumentError if a mesh cannot compute in a layout of the caller's own kind, where that is wanted."""
    if wanted not in (GRID, RANGES):
        return
    if any(layout.kind != wanted for pair in pairs for layout in pair):
        raise ArgumentError(f"mesh_layout is {wanted!r}; layout must be of that kind too, as the mesh takes its chunks")
    if tile is not None and tile.h > 1:
        raise ArgumentError(f"mesh_layout is {wanted!r} and tile {tile}; planes have other chunks than ranks do")


def node_places(tile: Tile) -> list[int]:
    """For every rank of the mesh, its number in the order of nodes: there the ranks of a chunk are neighbours."""
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


def plane_machine(machine: Machine, nodes: Sequence[int], planes: int) -> Machine:
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
    return _of_both(lambda layout: _reordered_stripes(layout, planes) if layout.striped else layout, pair)


def _reordered_stripes(layout: Layout, planes: int) -> Layout:
    """A striped layout in the order of `aligned`."""
    order = np.arange(layout.chunks).reshape(planes, -1).T
    return replace(layout, order=tuple(order.ravel().tolist()))


def inner_layouts(space, pair, chunks):
    """The pairs of layouts, of queries and of keys, that a plane of so many ranks may compute with.

    space: a completed `SearchSpace`.  pair: one of its `layout_pairs`.
    """
    problem, wanted = space.problem, space.mesh_layout
    if not isinstance(wanted, str):
        return [wanted]
    if wanted in (GRID, RANGES):
        return [pair] if pair[0].chunks == chunks else []
    if pair[0].chunks == chunks and all(layout.kind == wanted for layout in pair):
        return [pair]  # also of chunks of any lengths: nothing has to change ranks
    if wanted != "auto":
        return [pair_of((wanted, wanted), problem, chunks)]
    own = pair
    if pair[0].chunks != chunks:  # only the kinds that are names can be had of any number of chunks
        own = pair_of([layout.kind if layout.kind in LAYOUTS else LAYOUTS[0] for layout in pair], problem, chunks)
    others = auto_kinds(space.mask, chunks) if len(space.layout_pairs) == 1 else ()
    return list(dict.fromkeys([own, *(pair_of((kind, kind), problem, chunks) for kind in others)]))


def timed_ranks(tile):
    """The ranks whose regrouping is timed: all, of few."""
    return sorted({i * tile.ranks // TIMED for i in range(TIMED)})


class _RegroupingCost:
    """What regrouping adds to the passes of a space: seconds, {pass: bytes sent}, bytes of memory."""

    def __init__(self, regrouping, space):
        tile, machine, passes = regrouping.tile, space.machine, space.passes
        nodes = space.nodes[node_places(tile)]  # by rank of the mesh
        ranks = timed_ranks(tile)
        lengths = [layout.lengths for layout in regrouping.outer]
        most = [of_ranks.index(max(of_ranks)) for of_ranks in lengths]
        rate = machine.between.bandwidth
        if machine.node_bandwidth is not None:
            rate = min(rate, machine.node_bandwidth / np.bincount(nodes).max())
        exchanged = Regrouped(regrouping, list(dict.fromkeys([*ranks, *most])), nodes)
        self.sent, self.seconds, self.nbytes = {}, 0.0, 0
        for name in passes:
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
        self.nbytes += memory.outer_bytes(regrouping.problem, list(map(max, lengths)), "backward" in passes)
        longest = [max(layout.lengths) for layout in regrouping.inner]
        for name in passes:
            widened = of_token(regrouping.problem, tile.h, name).widened
            self.nbytes += sum(nbytes * tokens for nbytes, tokens in zip(widened, longest))


class Arrangement:
    """A number of planes and the layouts of the caller's ranks and of a plane: what comes before and after the passes.

    space: a completed `SearchSpace`.  pair: the caller's layouts, inner: those with which a plane computes.
    regrouped: False where heads and tokens stay, with one plane in the caller's layouts.
    """

    def __init__(self, space, planes, pair, inner):
        self._space, self.pair, self.inner = space, pair, inner
        self.regrouped = planes > 1 or pair != inner
        self._tile = Tile(planes, 1, inner[0].chunks)  # regrouping does not depend on the shape of a plane

    @cached_property
    def _cost(self):
        """The `_RegroupingCost`; None if there is none."""
        if not self.regrouped:
            return None
        return _RegroupingCost(Regrouping(self._space.problem, self._tile, self._outer, self.inner), self._space)

    @cached_property
    def _outer(self):
        """The caller's layouts by rank of the mesh."""
        return reordered(self.pair, node_places(self._tile)) if self._tile.h > 1 else self.pair

    @cached_property
    def least_sent(self):
        """A quick lower bound on the bytes of regrouping: a rank keeps as many of its tokens as its chunk can hold."""
        if not self.regrouped:
            return 0.0
        planes, ranks, given, taken = self._tile.h, timed_ranks(self._tile), [], []
        for outer, inner in zip(self._outer, self.inner):
            own, of_mesh = (np.array(layout.lengths) for layout in (outer, inner))
            own, of_mesh = own[ranks], of_mesh[np.array(ranks) % self._tile.chunks]
            staying = np.minimum(own, of_mesh)
            given.append((planes * own - staying).sum())
            taken.append((of_mesh - staying).sum())
        tokens = np.array([given, taken])  # before a pass, and after it
        nbytes = sum(of_token(self._space.problem, planes, name).exchanged[:, :, 0, 0] for name in self._space.passes)
        return float((nbytes * tokens).sum()) / len(ranks)

    def sent(self, of_plane):
        """{pass: {kind: bytes}} that a rank sends, of those that it sends in the passes of a plane."""
        if self._cost is None:
            return of_plane
        return {name: {**kinds, "regrouped": self._cost.sent[name]} for name, kinds in of_plane.items()}

    @property
    def nbytes(self):
        """Bytes of memory for regrouping."""
        return 0 if self._cost is None else self._cost.nbytes

    def seconds(self, tile):
        """Seconds before and after the passes: of regrouping, in which ranks wait; else of folding a batch."""
        if self._cost is not None:
            return self._cost.seconds
        return sum(self._folding(tile, name) for name in self._space.passes)

    def _folding(self, tile, direction):
        """Seconds in which the longest chunks of a batch are folded into the heads, and their results unfolded.

        Chunks that no other rank needs are read where the caller has them.
        """
        problem, machine = self._space.problem, self._space.machine
        if problem.batch == 1:
            return 0.0
        longest = [max(layout.lengths) for layout in self.pair]
        nbytes = sum(
            longest[name in IN_COLUMNS] * size_of(array.held(problem) for array in kind.arrays_of(problem))
            for name, kind in KINDS[direction].items()
            if tile.extent(name) > 1
        )
        return nbytes / (COPYING * machine.merging)
