"""The first step of making a plan: ranks agree on the problem and choose tile, layout, schedule and route."""

from __future__ import annotations

import functools
import pickle
from collections import OrderedDict
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..comm.agreement import agreement, from_rank_0
from ..comm.exchange import MAX_MESSAGE, check_max_message
from ..comm.peers import check_timeout
from ..comm.transport import check_transport, make_backend, one_of
from ..model import cost, search
from ..model.machine import DEFAULT, Machine
from ..model.simulate import simulate
from ..model.tuned import machine_for
from ..model.workload import Load, block_pairs
from ..problem.problem import Problem
from ..schedule.tile import parse_tile

REMEMBERED = 64  # choices of a process, and plans made from them

if TYPE_CHECKING:
    from ..backends.base import Backend
    from ..comm.mesh import Home
    from ..comm.peers import Peers
    from ..problem.layout import Layout
    from ..schedule.steps import Schedule
    from ..schedule.timeline import Timeline


@dataclass(frozen=True)
class Options:
    """Options of `MeshAttention` other than the problem, as documented there."""

    tile: Any = "auto"
    layout: Any = "auto"
    schedule: str = "auto"
    route: str = "auto"
    direction: str = "forward"
    backend: str = "auto"
    transport: str = "auto"
    max_message: int = MAX_MESSAGE
    max_memory: int | None = None
    machine: Machine | str | None = None
    overlap: bool = True
    timeout: float | None = None

    def checked(self, problem: Problem, ranks: int) -> Options:
        """A copy with tile and layout parsed into values; raises ArgumentError."""
        check_timeout(self.timeout)
        one_of("direction", self.direction, tuple(search.DIRECTIONS))
        one_of("schedule", self.schedule, (*cost.SCHEDULES, "auto"))
        one_of("overlap", self.overlap, (True, False))
        check_transport(self.backend, self.transport)
        search.routes(self.route, problem, DEFAULT)
        check_max_message(self.max_message)
        return replace(
            self,
            tile=parse_tile(self.tile, ranks),
            layout=search.layouts(self.layout, problem, ranks),
            max_memory=search.memory_limit(self.max_memory),
        )


@dataclass(frozen=True)
class Decision:
    """The choices for a `MeshAttention`, which the docs call a plan; the same on every rank.

    order: ranks of the caller's communicator in mesh order, None for their own order.
    nodes: node of every rank of the mesh.
    fastest: predicted seconds of the best choice without a memory limit.
    """

    problem: Problem
    choice: search.Choice
    machine: Machine
    order: tuple[int, ...] | None
    nodes: list[int]
    fastest: float
    overlap: bool

    def schedule(self, direction: str = "forward") -> Schedule:
        """The schedule of a pass, made once."""
        if direction not in self._schedules:
            self._schedules[direction] = self._schedule(direction)
        return self._schedules[direction]

    @functools.cached_property
    def _schedules(self) -> dict[str, Schedule]:
        return {}

    def _schedule(self, direction: str) -> Schedule:
        c = self.choice
        return cost.build(
            c.schedule, c.tile, c.route, self.problem, self.machine, direction, self.nodes, c.ahead, self.overlap
        )

    def predicted(self, direction: str = "forward") -> Timeline:
        """The predicted `mpiattn.schedule.timeline.Timeline` of a pass, for all ranks of the mesh."""
        c = self.choice
        q_layout, k_layout = c.layouts
        load = Load(block_pairs(self.problem.mask, q_layout, k_layout), q_layout.lengths, k_layout.lengths, c.tile)
        return simulate(self.schedule(direction), self.problem, load, self.machine, self.nodes)

    def layouts_by_rank(self) -> tuple[Layout, Layout]:
        """Layouts of queries and of keys, indexed by rank in the caller's communicator."""
        if self.order is None:
            return self.choice.layouts
        place = tuple(self.order.index(rank) for rank in range(len(self.order)))
        return tuple(replace(layout, order=place) for layout in self.choice.layouts)


def settle(home: Home, peers: Peers, shape: dict[str, Any], options: dict[str, Any]) -> tuple[Decision, Backend]:
    """The Decision and the back end for a problem; collective.

    shape: keywords of `Problem`.  options: keywords of `Options`.
    Raises ArgumentError, the same on every rank.
    """
    ranks = peers.size
    with agreement(peers, call="making a plan") as same:
        problem, asked = Problem(**shape), Options(**options)
        checked = asked.checked(problem, ranks)
        same |= {**asdict(problem), **{name: getattr(checked, name) for name in options}}
    backend = make_backend(peers, home.nodes, asked.backend, asked.transport)
    # with a Layout of the caller the data is already in place; otherwise the mesh follows the nodes
    order = home.order if isinstance(asked.layout, str) else None
    nodes = [home.nodes[rank] for rank in order or range(ranks)]

    def choose() -> bytes:
        machine = machine_for(home.nodes, backend, problem.head_dim, asked.machine)
        if backend.emulated_flops:
            machine = machine.paced(backend.emulated_flops)
        return _chosen(problem, checked, machine, order, nodes)

    # on rank 0 only: time and memory grow with the square of the ranks
    return _decision_of(from_rank_0(peers, choose)), backend


_CHOSEN: OrderedDict[str, bytes] = OrderedDict()  # pickled plans by what they were chosen for, the oldest first


def _chosen(
    problem: Problem, checked: Options, machine: Machine, order: tuple[int, ...] | None, nodes: list[int]
) -> bytes:
    """The Decision of `_choose`, pickled; remembered, since programs make the same plan again."""
    asked_for = repr((problem, replace(checked, timeout=None), machine, order, nodes))
    chosen = _CHOSEN.get(asked_for)
    if chosen is None:
        chosen = _CHOSEN[asked_for] = pickle.dumps(_choose(problem, checked, machine, order, nodes))
        if len(_CHOSEN) > REMEMBERED:
            _CHOSEN.popitem(last=False)
    return chosen


@functools.lru_cache(REMEMBERED)
def _decision_of(pickled: bytes) -> Decision:
    """The same Decision for the same bytes, so that its schedules are built once."""
    return pickle.loads(pickled)


def _choose(
    problem: Problem, checked: Options, machine: Machine, order: tuple[int, ...] | None, nodes: list[int]
) -> Decision:
    """The fastest Decision that the checked options allow."""
    evaluate = functools.partial(
        search.evaluate,
        problem,
        len(nodes),
        checked.route,
        pairs=checked.layout,
        direction=checked.direction,
        kinds=cost.SCHEDULES if checked.schedule == "auto" else (checked.schedule,),
        machine=machine,
        nodes=nodes,
        shapes=checked.tile and [checked.tile],
        overlap=checked.overlap,
    )
    free = evaluate()
    choices = free if checked.max_memory is None else evaluate(max_memory=checked.max_memory)
    search.check_memory(choices, checked.max_memory)
    return Decision(problem, choices[0], machine, order, nodes, min(choice.seconds for choice in free), checked.overlap)


def resized(plan: Decision, shape: dict[str, Any], options: dict[str, Any]) -> Decision:
    """A Decision with the same choices for another `shape`, without a search; not collective.

    Arguments as for `settle`.  Raises ArgumentError.
    """
    problem, chosen = Problem(**shape), plan.choice
    layouts = tuple(
        replace(layout, seqlen=tokens) for layout, tokens in zip(chosen.layouts, (problem.seqlen, problem.seqlen_k))
    )
    checked = replace(
        Options(**options), tile=chosen.tile, layout=[layouts], schedule=chosen.schedule, route=chosen.route
    )
    return _choose(problem, checked, plan.machine, plan.order, plan.nodes)
