"""Decisions: ranks agree on the problem, and rank 0 chooses tile, layout, schedule and route for all."""

from __future__ import annotations

import functools
import pickle
from collections import OrderedDict
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ..arguments.keywords import for_record
from ..comm.agreement import agreement, from_rank_0
from ..comm.transport import make_backend
from ..model import search
from ..model.space import SearchSpace, allowed_schedules, memory_limit
from ..model.tuned import machine_for
from ..problem.documents import expected_cuts
from ..problem.problem import Problem, check_scale_given
from ..system.values import AsGiven
from .decision import Decision
from .grids import check_grids
from .options import Options

REMEMBERED = 64  # choices of a process, and plans made from them
OF_EVERY_RANK = ("problem", "mask")  # fields of a Decision; a mask may be large, or a function that cannot be pickled
# options on which the choice does not depend, or only by the machine that is found for them
NOT_CHOSEN_BY = ("backend", "transport", "max_message", "machine", "timeout")

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..backends.base import Backend
    from ..comm.mesh import Home
    from ..comm.peers import Peers
    from ..model.machine import Machine
    from ..problem.layout import Layout
    from .options import Asked, CheckedOptions


def settle(home: Home, peers: Peers, asked: Asked) -> tuple[Decision, Backend]:
    """The Decision and the back end for what is asked; collective.

    Raises ArgumentError, the same on every rank.
    """
    ranks, given = peers.size, asked.options
    with agreement(peers, call="making a plan") as same:
        problem = Problem(**asked.problem)
        check_scale_given(asked.problem["scale"], problem.shared_kv, problem.head_dim)
        checked = given.checked(problem, ranks)
        check_grids(peers.comm, problem.mask, given.layout)
        same |= for_record(Problem, vars(problem))
        same["expected_cu_seqlens"] = None  # compared before the layouts, which follow from it
        same |= for_record(Options, vars(checked))
        same |= {name: AsGiven(same[name], getattr(given, name)) for name in ("tile", "layout", "expected_cu_seqlens")}
    in_order = checked.tile is None or not checked.tile.divided
    backend = make_backend(peers, home.nodes, given.backend, given.transport, home.known, in_order)
    checked = for_transport(checked, backend)
    # with a Layout of the caller the data is already in place; otherwise the mesh follows the nodes
    order = home.order if isinstance(given.layout, str) else None
    nodes = [home.nodes[rank] for rank in order or range(ranks)]

    def choose() -> bytes:
        machine = machine_for(home.nodes, backend, problem.head_dim, given.machine)
        if backend.emulated_flops:
            machine = machine.paced(backend.emulated_flops)
        return _remembered_choice(problem, checked, machine, order, nodes)

    # on rank 0 only: time and memory grow with the square of the ranks
    return _decision_of(from_rank_0(peers, choose), problem, checked.expected_cu_seqlens), backend


def for_transport(checked: CheckedOptions, backend: Backend) -> CheckedOptions:
    """Options with which "auto" takes meshes alone where messages must be received in the order of the sends."""
    if backend.transport == "ipc":
        return replace(checked, meshes=True)
    return checked


_CHOSEN: OrderedDict[str, bytes] = OrderedDict()  # pickled plans by what they were chosen for, the oldest first


def _remembered_choice(
    problem: Problem, checked: CheckedOptions, machine: Machine, order: tuple[int, ...] | None, nodes: list[int]
) -> bytes:
    """The fields of the Decision of `_choose`, pickled, but for those that every rank has.

    They are remembered, because programs make the same plan again.
    """
    options = [value for name, value in vars(checked).items() if name not in NOT_CHOSEN_BY]
    asked_for = repr((problem, options, machine, order, nodes))
    chosen = _CHOSEN.get(asked_for)
    if chosen is None:
        decision = _choose(problem, checked, machine, order, nodes)
        chosen = _CHOSEN[asked_for] = pickle.dumps(
            {each.name: getattr(decision, each.name) for each in fields(decision) if each.name not in OF_EVERY_RANK}
        )
        if len(_CHOSEN) > REMEMBERED:
            _CHOSEN.popitem(last=False)
    return chosen


@functools.lru_cache(REMEMBERED)
def _decision_of(pickled: bytes, problem: Problem, cuts: tuple[int, ...] | None) -> Decision:
    """The same Decision for the same bytes and problem, so that its schedules are built once."""
    return Decision(problem=problem, mask=problem.mask_of(cuts), **pickle.loads(pickled))


def _choose(
    problem: Problem, checked: CheckedOptions, machine: Machine, order: tuple[int, ...] | None, nodes: list[int]
) -> Decision:
    """The fastest Decision that the checked options allow."""
    space = space_of(problem, checked, machine, order, nodes)
    mask = problem.mask_of(checked.expected_cu_seqlens)
    (best, *_), _, fastest = search.within_memory(space)
    longest = best.seconds
    if mask != problem.whole_mask:  # any call may have other documents, or none
        longest = max(longest, search.without_documents(space, best))
    return Decision(
        problem, best, machine, order, nodes, fastest, checked.overlap, mask, longest, memory_limit(checked.max_memory)
    )


def space_of(
    problem: Problem, checked: CheckedOptions, machine: Machine, order: tuple[int, ...] | None, nodes: list[int]
) -> SearchSpace:
    """What the checked options leave to choose from."""
    return SearchSpace(
        problem,
        len(nodes),
        machine,
        route=checked.route,
        schedules=allowed_schedules(checked.schedule),
        tiles=checked.tile and [checked.tile],
        meshes=checked.meshes,
        layout_pairs=checked.layout,
        fixed=checked.fixed,
        mesh_layout=checked.mesh_layout,
        direction=checked.direction,
        nodes=nodes,
        overlap=checked.overlap,
        max_memory=checked.max_memory,
        mask=problem.mask_of(checked.expected_cu_seqlens),
    )


def asked_like(decision: Decision, asked: Asked, changes: dict[str, Any]) -> tuple[Asked, Problem]:
    """The arguments of a plan with other arguments of the problem, and that problem; not collective.

    decision, asked: of the plan that it is like.  Raises ArgumentError.
    """
    asked, before = asked.changed(changes), decision.problem
    problem = Problem(**asked.problem)
    check_scale_given(asked.problem["scale"], problem.shared_kv, problem.head_dim)
    if (problem.seqlen, problem.seqlen_k) != (before.seqlen, before.seqlen_k):
        asked = asked.of_other_lengths(_of_lengths(decision.choice.layouts, problem))
    return asked, problem


def _of_lengths(layouts: tuple[Layout, Layout], problem: Problem) -> tuple[Layout, ...]:
    """Layouts of queries and of keys of the same kinds with the lengths of a problem.  Raises ArgumentError."""
    lengths = problem.seqlen, problem.seqlen_k
    return tuple(replace(layout, seqlen=tokens) for layout, tokens in zip(layouts, lengths))


def resized(decision: Decision, asked: Asked, problem: Problem) -> Decision:
    """A Decision with the same choices for another problem, without a search; not collective.  Raises ArgumentError."""
    chosen = decision.choice
    checked = replace(
        asked.options.unchecked(),
        tile=chosen.tile,
        layout=[_of_lengths(chosen.layouts, problem)],
        mesh_layout=_of_lengths(chosen.mesh_layouts, problem),
        fixed=True,
        schedule=chosen.schedule,
        route=chosen.route,
        expected_cu_seqlens=expected_cuts(problem, asked.options.expected_cu_seqlens),
    )
    return _choose(problem, checked, decision.machine, decision.order, decision.nodes)


def checked_for_layouts(decision: Decision, asked: Asked, problem: Problem, comm: MPI.Intracomm) -> CheckedOptions:
    """The options that are asked for, with the layouts that were decided; not collective.  Raises ArgumentError."""
    check_grids(comm, problem.mask, asked.options.layout)
    layouts = _of_lengths(decision.choice.layouts, problem)
    return replace(asked.options, layout=layouts).checked(problem, len(decision.nodes))


def searched_anew(peers: Peers, decision: Decision, problem: Problem, checked: CheckedOptions) -> Decision:
    """A Decision for another problem on the same machine and ranks; collective.

    checked: as of `checked_for_layouts`.  Raises ArgumentError, the same on every rank.
    """

    def choose() -> bytes:
        return _remembered_choice(problem, checked, decision.machine, decision.order, decision.nodes)

    return _decision_of(from_rank_0(peers, choose), problem, checked.expected_cu_seqlens)
