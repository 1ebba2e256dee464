"""What the ranks of a plan will need, and the advice where they have less, for any number of ranks."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mpiattn.comm.room import Room, Shared
from mpiattn.model.machine import DEFAULT
from mpiattn.plan.foresight import _advice, own_bytes
from mpiattn.plan.options import Asked, Options
from mpiattn.plan.settle import _choose
from mpiattn.problem.problem import Problem

SHAPE = {"seqlen": 4096, "heads": 4, "head_dim": 16, "kv_heads": 4}
NEEDS = "a plan with ([^ ]*) fits"


def asked_for(**how):
    """What a caller asks for, with the defaults of `MeshAttention`."""
    problem = {name: how.pop(name) for name in [*how] if name in Problem.__dataclass_fields__}
    return Asked({**SHAPE, **problem}, Options(**how))


def decided(ranks, asked, nodes=None):
    """The decision for ranks that follow one another on their nodes."""
    problem = Problem(**asked.problem)
    return _choose(problem, asked.options.checked(problem, ranks), DEFAULT, None, nodes or [0] * ranks)


def advice(room, asked, decision):
    return _advice(room, asked, decision, lambda choice: own_bytes(replace(decision, choice=choice)), "{}")


def made_with(option, asked, ranks):
    """The decision for a caller who does as the advice says."""
    return decided(ranks, asked._replace(options=replace(asked.options, max_memory=option)))


def test_who_needs_what():
    """By rank of the caller's communicator: the places of a mesh of two planes and two nodes, whose ranks alternate."""
    tile = SimpleNamespace(ranks=4, chunks=2, h=2)
    decision = SimpleNamespace(choice=SimpleNamespace(own=(10, 20), tile=tile), mesh_order=None)
    assert own_bytes(decision).tolist() == [10, 20, 10, 20]
    decision.mesh_order = (0, 1, 2, 3)[::-1]
    assert own_bytes(decision).tolist() == [20, 10, 20, 10]
    decision.mesh_order = (0, 2, 1, 3)
    assert own_bytes(decision).tolist() == [10, 10, 20, 20]
    decision.choice.own = (7,)
    assert own_bytes(decision).tolist() == [7] * 4


@pytest.mark.parametrize("how", [{}, {"window": (500, 0), "tile": "2x2"}, {"direction": "both"}], ids=str)
def test_advice_is_what_comes_of_it(how):
    """Of a room for one choice alone: its advice leads to a plan that needs as much, or none is given."""
    seen, allowed, asked = set(), set(), asked_for(**how)

    def shortage(each):
        seen.add(int(each.max()))
        return None if int(each.max()) in allowed else 0

    only, decision = SimpleNamespace(shared=[Shared([0], 0)], shortage=shortage), decided(4, asked)
    assert advice(only, asked, decision).startswith("no plan fits, the smallest (tile ")
    given = []
    for need in sorted(seen):
        allowed = {need}
        given += [(need, option) for option in re.findall(NEEDS, advice(only, asked, decision))]
    assert 0 < len(given) < len(seen)
    for need, option in given:
        assert int(own_bytes(made_with(option, asked, 4)).max()) == need


def test_advice_receives_ahead_as_far_as_it_can():
    asked = asked_for(tile="ring", schedule="greedy", layout="contiguous")
    decision = decided(8, asked)
    needs = own_bytes(decision)
    room = Room([0] * 8, [[(int(needs.sum()) - 1, 0, 1)]] * 8)
    (option,) = re.findall(NEEDS, advice(room, asked, decision))
    assert decision.choice.ahead == 2 and made_with(option, asked, 8).choice.ahead == 1


def test_ranks_that_need_less():
    """What they do not need, others may have."""
    decision = decided(
        4, asked_for(causal=True, tile="ring", schedule="greedy", layout="contiguous", mesh_layout="contiguous")
    )
    needs = own_bytes(decision)
    assert decision.regrouping is None and needs[0] < 0.5 * needs[3] == 0.5 * needs.max()
    room = Room([0] * 4, [[(int(needs.sum()), 0, 1)]] * 4)
    assert room.shortage(needs) is None and room.shortage(np.full(4, needs.max())) == 0
