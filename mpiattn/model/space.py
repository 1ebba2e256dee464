"""What a search may choose: the arguments of a plan, checked, and the record that a search takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ArgumentError
from ..problem.byte_counts import byte_count
from ..problem.layout import LAYOUTS, Layout, of_sizes
from ..schedule.regroup import every_tile
from ..schedule.route import ROUTES, passed_on
from ..schedule.tile import DIVISIONS, divided
from ..system.choices import one_of
from ..system.words import span
from .cost import SCHEDULES
from .machine import DEFAULT, Machine
from .simulate import nodes_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ..problem.mask import Mask
    from ..problem.problem import Problem
    from ..schedule.tile import Tile

    Pair = tuple[Layout, Layout]

# The passes that a plan is optimised for.
DIRECTIONS = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}
# Layouts in which a mesh may compute, simplest first: the earlier wins a tie.
AUTO_LAYOUTS = ("contiguous", "zigzag", "striped")
LOOKED_AT = 64  # queries of a part of the sequence, to see how many keys queries see there
EVEN = 1.1  # most work of a part over the mean, up to which other layouts cannot pay


def auto_kinds(mask: Mask, chunks: int) -> tuple[str, ...]:
    """The kinds of layout that are considered for a mesh.

    Without a mask, with one chunk, or if consecutive chunks have as much work, all balance equally well; then only the
    simplest.
    """
    return AUTO_LAYOUTS[:1] if mask.full or chunks == 1 or _even(mask, chunks) else AUTO_LAYOUTS


@lru_cache(256)
def _even(mask: Mask, chunks: int) -> bool:
    """Whether queries of a mask of several intervals see as many keys in all of so many parts of the sequence."""
    if mask.mask is None:
        return False
    queries = np.unique(np.linspace(0, mask.seqlen - 1, LOOKED_AT * chunks).astype(np.int64))
    lo, hi = mask.key_intervals(queries)
    pairs = np.bincount(queries * chunks // mask.seqlen, (hi - lo).sum(axis=(0, 1)))
    return bool(pairs.max() <= EVEN * pairs.mean())


def pair_of(kinds: Sequence[str], problem: Problem, chunks: int) -> Pair:
    """Layouts of queries and of keys, of two kinds; the same object if they are equal, since it keeps its ranges."""
    queries, keys = (Layout(kind, tokens, chunks) for kind, tokens in zip(kinds, (problem.seqlen, problem.seqlen_k)))
    return queries, queries if queries == keys else keys


def layouts(argument: Any, problem: Problem, ranks: int) -> list[Pair]:
    """The pairs of layouts, (of queries, of keys), that an argument allows.  Raises ArgumentError.

    argument: a kind, "auto", a `Layout`, sizes of chunks, or a pair of these two.  "auto" is "contiguous", so that all
        plans of a program have the same positions; a mask is balanced by the division, or inside a mesh.
    """
    if isinstance(argument, str):
        one_of("layout", argument, (*LAYOUTS, "auto"))
        kind = LAYOUTS[0] if argument == "auto" else argument
        return [pair_of((kind, kind), problem, ranks)]
    pair = of_sizes(argument, ranks)
    if isinstance(pair, Layout):
        pair = pair, pair
    elif isinstance(pair, tuple):
        pair = tuple(of_sizes(layout, ranks) for layout in pair)
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(layout, Layout) for layout in pair)):
        raise ArgumentError(
            f"layout is {argument!r}; it may be auto, {', '.join(LAYOUTS)}, a Layout, a tuple of the ranks' numbers of "
            "tokens, or a pair of these two"
        )
    q, k = pair
    if (q.seqlen, k.seqlen, q.chunks, k.chunks) != (problem.seqlen, problem.seqlen_k, ranks, ranks):
        raise ArgumentError(
            f"layout is {argument!r}, of {q.seqlen} queries and {k.seqlen} keys on {span((q.chunks, k.chunks))} ranks; "
            f"it must be of {problem.seqlen} queries and {problem.seqlen_k} keys on {ranks} ranks"
        )
    return [pair]


def routes(route: str, problem: Problem, machine: Machine) -> list[str]:
    """The routes that an argument allows.  Raises ArgumentError.

    "auto" considers the ring route only if the ranks of a node share its card: neighbours cross nodes less often.
    Otherwise both routes cost the same.  Partials that are rounded for the wire cannot take the ring route.
    """
    one_of("route", route, (*ROUTES, "auto"))
    lowered = problem.wire_dtype != problem.partial_dtype
    if lowered and passed_on(route):
        raise ArgumentError(
            f"wire_dtype is {problem.wire_dtype!r}; on the ring route, where partials are rounded at "
            f"every hop, it must be {problem.partial_dtype!r}"
        )
    if route != "auto":
        return [route]
    if problem.mask is not None:  # many ranges are one message on the direct route only
        return ["direct"]
    return [name for name in ROUTES if not passed_on(name) or not (lowered or machine.node_bandwidth is None)]


def allowed_schedules(schedule: str) -> tuple[str, ...]:
    """The schedules that an argument allows, which is checked."""
    return SCHEDULES if schedule == "auto" else (schedule,)


def memory_limit(value: Any) -> int | None:
    """max_memory as an int, or None; raises ArgumentError."""
    return None if value is None else byte_count("max_memory", value)


@dataclass(frozen=True)
class SearchSpace:
    """A problem on the ranks of a machine, and the choices among which a search takes the best.

    route: of ROUTES, or "auto".  schedules: of SCHEDULES.
    tiles: None for all whose planes can split the problem.  meshes: whether these are meshes only.
    layout_pairs: layouts (of queries, of keys) of the caller's ranks; None for those that "auto" allows.
    fixed: whether the caller has said which rank holds which chunk of these layouts.  Else stripes may be dealt out so
        that the ranks of a chunk exchange among themselves.
    mesh_layout: kind of layout in which the mesh computes, a pair of layouts, or "auto": the caller's or, if that is
        given, also others that may balance the mask better.
    direction: a key of DIRECTIONS.
    nodes: the node of every rank; None as in `model.simulate`.
    overlap: whether transfers may run beside blocks.
    max_memory: bytes a rank.  Choices that need more come last.  Transfers are posted ahead only as far as it allows.
    mask: that of the documents to expect, for times and bytes; None for the problem's, by which memory always goes.
    """

    problem: Problem
    ranks: int
    machine: Machine = DEFAULT
    route: str = "direct"
    schedules: Sequence[str] = SCHEDULES
    tiles: Sequence[Tile] | None = None
    layout_pairs: Sequence[Pair] | None = None
    fixed: bool = False
    mesh_layout: str | Pair = "auto"
    direction: str = "forward"
    nodes: Any = None
    overlap: bool = True
    max_memory: int | str | None = None
    mask: Mask | None = None
    meshes: bool = False

    def completed(self) -> SearchSpace:
        """The same with values in place of None, but for max_memory; raises ArgumentError."""
        p, nodes = self.problem, self.nodes
        return replace(
            self,
            tiles=self.tiles or self._tiles(),
            layout_pairs=self.layout_pairs or layouts("auto", p, self.ranks),
            nodes=nodes_of(self.ranks, self.machine) if nodes is None else np.asarray(nodes),
            max_memory=memory_limit(self.max_memory),
            mask=self.mask or p.whole_mask,
        )

    def _tiles(self) -> list[Tile]:
        """The tiles that "auto" considers: all meshes, and divisions where no option asks for what only meshes have."""
        p = self.problem
        tiles: list[Tile] = every_tile(self.ranks, p.heads, p.kv_heads, p.batch)
        free = self.schedules == SCHEDULES and self.mesh_layout == "auto" and not passed_on(self.route)
        if free and not self.meshes and self.ranks > 1:
            documents = self.mask is not None and self.mask.cuts is not None
            tiles = [*tiles, *(divided(kind, self.ranks) for kind in DIVISIONS if documents or kind != "dealt")]
        return tiles

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes that are predicted."""
        return DIRECTIONS[self.direction]

    @property
    def routes(self) -> list[str]:
        """The routes that are considered; raises ArgumentError."""
        return routes(self.route, self.problem, self.machine)
