"""The first step of making a plan: ranks agree on the problem and choose tile, layout, schedule and route."""

from __future__ import annotations

import functools
import pickle
from collections import OrderedDict
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ..comm.agreement import AsGiven, agreement, from_rank_0
from ..comm.exchange import MAX_MESSAGE, message_limit
from ..comm.peers import check_timeout
from ..comm.transport import check_transport, make_backend
from ..model import cost, planes, search
from ..model.machine import DEFAULT, Machine
from ..model.space import DIRECTIONS, SearchSpace, layouts, memory_limit, routes
from ..model.tuned import machine_for
from ..problem.choices import one_of
from ..problem.documents import expected_cuts
from ..problem.layout import LAYOUTS
from ..problem.problem import Problem
from ..schedule.tile import parse_tile
from .decision import Decision

REMEMBERED = 64  # choices of a process, and plans made from them
OF_PROBLEM = tuple(field.name for field in fields(Problem))
NO_CHOICE = ("backend", "transport", "max_message", "machine", "timeout")  # options on which the choice does not depend

if TYPE_CHECKING:
    from ..backends.base import Backend
    from ..comm.mesh import Home
    from ..comm.peers import Peers
    from ..problem.layout import Layout


@dataclass(frozen=True)
class Options:
    """Options of `MeshAttention` other than the problem, as documented there."""

    tile: Any = "auto"
    layout: Any = "auto"
    mesh_layout: Any = "auto"
    schedule: str = "auto"
    route: str = "auto"
    direction: str = "forward"
    backend: str = "auto"
    transport: str = "auto"
    max_message: int | str = MAX_MESSAGE
    max_memory: int | str | None = None
    machine: Machine | str | None = None
    overlap: bool = True
    timeout: float | None = None
    expected_cu_seqlens: Any = None
    fixed: bool = False  # whether the caller says which rank holds which chunk

    def checked(self, problem: Problem, ranks: int) -> Options:
        """A copy with tile and layout parsed into values; raises ArgumentError."""
        check_timeout(self.timeout)
        one_of("direction", self.direction, tuple(DIRECTIONS))
        one_of("schedule", self.schedule, (*cost.SCHEDULES, "auto"))
        one_of("overlap", self.overlap, (True, False))
        check_transport(self.backend, self.transport)
        routes(self.route, problem, DEFAULT)
        one_of("mesh_layout", self.mesh_layout, (*LAYOUTS, "auto"))
        tile = parse_tile(self.tile, ranks)
        planes.check_heads(tile, problem)
        cuts = expected_cuts(problem, self.expected_cu_seqlens)
        return replace(
            self,
            tile=tile,
            expected_cu_seqlens=cuts,
            layout=layouts(self.layout, problem, ranks, problem.mask_of(cuts)),
            fixed=not isinstance(self.layout, str),
            max_message=message_limit(self.max_message),
            max_memory=memory_limit(self.max_memory),
        )


def settle(home: Home, peers: Peers, shape: dict[str, Any], options: dict[str, Any]) -> tuple[Decision, Backend]:
    """The Decision and the back end for a problem; collective.

    shape: keywords of `Problem`.  options: keywords of `Options`.
    Raises ArgumentError, the same on every rank.
    """
    ranks = peers.size
    with agreement(peers, call="making a plan") as same:
        problem, asked = Problem(**shape), Options(**options)
        checked = asked.checked(problem, ranks)
        same |= {name: getattr(problem, name) for name in OF_PROBLEM}
        same |= {name: getattr(checked, name) for name in options}
        same |= {name: AsGiven(same[name], options[name]) for name in ("tile", "layout", "expected_cu_seqlens")}
    backend = make_backend(peers, home.nodes, asked.backend, asked.transport, home.known)
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
    options = [value for name, value in vars(checked).items() if name not in NO_CHOICE]
    asked_for = repr((problem, options, machine, order, nodes))
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
    mask = problem.mask_of(checked.expected_cu_seqlens)
    space = SearchSpace(
        problem,
        len(nodes),
        machine,
        route=checked.route,
        kinds=cost.SCHEDULES if checked.schedule == "auto" else (checked.schedule,),
        shapes=checked.tile and [checked.tile],
        pairs=checked.layout,
        fixed=checked.fixed,
        mesh_layout=checked.mesh_layout,
        direction=checked.direction,
        nodes=nodes,
        overlap=checked.overlap,
        max_memory=checked.max_memory,
        mask=mask,
    )
    (best, *_), _, fastest = search.within_memory(space)
    longest = best.seconds
    if mask != problem.mask:  # any call may have other documents, or none
        longest = max(longest, search.without_documents(space, best))
    return Decision(problem, best, machine, order, nodes, fastest, checked.overlap, mask, longest)


def resized(plan: Decision, shape: dict[str, Any], options: dict[str, Any]) -> Decision:
    """A Decision with the same choices for another `shape`, without a search; not collective.

    Arguments as for `settle`.  Raises ArgumentError.
    """
    problem, chosen = Problem(**shape), plan.choice

    def longer(layouts: tuple[Layout, Layout]) -> tuple[Layout, ...]:
        return tuple(
            replace(layout, seqlen=tokens) for layout, tokens in zip(layouts, (problem.seqlen, problem.seqlen_k))
        )

    checked = replace(
        Options(**options),
        tile=chosen.tile,
        layout=[longer(chosen.layouts)],
        mesh_layout=longer(chosen.mesh_layouts),
        fixed=True,
        schedule=chosen.schedule,
        route=chosen.route,
        expected_cu_seqlens=None,
    )
    return _choose(problem, checked, plan.machine, plan.order, plan.nodes)
