"""The memory that the ranks will need for a plan, before it is allocated, and which plan would fit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..comm.room import check_room, spread
from ..model.search import survey, times_as_long
from ..system.words import byte_option, size
from .settle import space_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ..backends.base import Backend
    from ..comm.mesh import Home
    from ..comm.peers import Peers
    from ..comm.room import Room
    from ..model.prediction import Choice
    from .decision import Decision
    from .options import Asked

TRIED = 8  # choices that are tried with the max_memory that they need


def own_bytes(decision: Decision) -> NDArray[np.int64]:
    """Bytes that a plan allocates on every rank besides the caller's arrays, at least: (ranks,)."""
    c, needs = decision.choice, np.empty(decision.choice.tile.ranks, np.int64)
    of_mesh = np.tile(np.resize(c.own, c.tile.chunks), c.tile.h)
    needs[slice(None) if decision.mesh_order is None else list(decision.mesh_order)] = of_mesh
    return needs


def check_memory(
    home: Home,
    peers: Peers,
    backend: Backend,
    asked: Asked,
    decision: Decision,
    beside: Callable[[Decision], NDArray[np.int64] | int],
    words: tuple[str, str],
) -> None:
    """Raise MemoryShortage on every rank if nodes, cgroups or GPUs have too little memory for a plan; collective.

    A max_memory is the caller's word, with which nothing is compared.
    beside(decision): bytes of every rank that are allocated together with those of the plan.
    words: for the message: what needs the memory, and how to give max_memory, with {} for its value.
    """
    if asked.options.max_memory is not None:
        return
    what, how = words

    def needs(choice: Choice) -> NDArray[np.int64]:
        of_choice = decision if choice is decision.choice else replace(decision, choice=choice)
        return own_bytes(of_choice) + np.asarray(beside(of_choice), np.int64)

    needed = needs(decision.choice)
    check_room(peers, home, backend, needed, what, lambda room: _advice(room, asked, decision, needs, how))


def _advice(
    room: Room, asked: Asked, decision: Decision, needs: Callable[[Choice], NDArray[np.int64]], how: str
) -> str:
    """Which choice would fit, and the max_memory with which it is made; else what the smallest takes."""
    checked = asked.options.checked(decision.problem, len(decision.nodes))
    space = space_of(decision.problem, checked, decision.machine, decision.order, decision.nodes)
    lacking = max(max(0, of.lacking(needs(decision.choice))) / len(of.ranks) for of in room.shared)
    limit, every = max(1, decision.choice.nbytes - math.ceil(lacking)), []
    for most in dict.fromkeys((limit, 1)):  # fewer transfers ahead of their step, then as few as there can be
        choices, _ = survey(replace(space, max_memory=most), "choice")
        fitting = [choice for choice in choices if room.shortage(needs(choice)) is None]
        for choice in sorted(fitting, key=lambda choice: choice.seconds)[:TRIED]:
            option = byte_option(choice.nbytes)
            chosen = survey(replace(space, max_memory=option), None)[0][0]  # by a plan that is given this
            if room.shortage(needs(chosen)) is None:
                slower = times_as_long(chosen.seconds, decision.choice.seconds)
                return (
                    f"a plan with {how.format(option)} fits: {_in_words(chosen)}, {size(int(needs(chosen).max()))} a "
                    f"rank, predicted to take {slower:.3g} times as long"
                )
        every += choices
    smallest = min(every, key=lambda choice: int(needs(choice).max()))
    return (
        f"no plan fits, the smallest ({_in_words(smallest)}) needs {size(int(needs(smallest).max()))} a rank; "
        f"{spread(room, needs(smallest))}"
    )


def _in_words(choice: Choice) -> str:
    return f"tile {choice.tile}, {choice.schedule} schedule, {choice.route} route"
