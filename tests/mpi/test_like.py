"""`plan.like`: a plan of another length with the same choice, as a new plan would be, for one small allreduce."""

import numpy as np
import pytest
from dense import bits, draw_all
from runs import attend, my_chunks
from test_agreement import same_error

from mpiattn import ArgumentError, Layout, MeshAttention
from mpiattn.comm.peers import Peers
from mpiattn.model import search

SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
HOW = [
    {"causal": True},
    {"window": (9, 0), "layout": "striped", "schedule": "collective"},
    {"softcap": 3.0, "scale": 0.2},
    {"prefix": 40, "dtype": "float64", "schedule": "greedy", "route": "ring"},
    {"causal_block": 50, "dtype": "bfloat16", "wire_dtype": "float16", "max_message": 100},
    {"causal": True, "direction": "both", "overlap": False, "backend": "deferred", "timeout": 50.0},
]


def choice_of(plan):
    """What a plan has chosen, as arguments that leave no other."""
    return {
        "tile": plan.tile,
        "layout": plan.q_layout.kind,
        "schedule": plan.schedule.name,
        "route": plan.route,
        "machine": plan.machine,
    }


def description(plan):
    """What a plan tells of itself."""
    return (
        repr(plan),
        plan.schedule,
        plan.q_layout,
        plan.k_layout,
        plan.balance,
        plan.predicted_seconds,
        plan.timeout,
        plan.nbytes,
        plan.memory_cost,
        plan.problem,
    )


@pytest.mark.draw(2)
@pytest.mark.many
@pytest.mark.parametrize("how", HOW, ids=str)
def test_as_a_new_plan(comm, how):
    """To the bit, forward and backward, shorter, longer and of no tokens."""
    with MeshAttention(comm, seqlen=31, **SHAPE, **how) as first:
        for given, lengths in (
            ({"seqlen": 97}, (97, 97)),
            ({"seqlen": 5, "seqlen_k": 64}, (5, 64)),
            ({}, (31, 31)),
            ({"seqlen_k": 40}, (31, 40)),
            ({"seqlen": 0}, (0, 0)),
        ):
            arguments = {**SHAPE, **how, **choice_of(first), "seqlen": lengths[0], "seqlen_k": lengths[1]}
            with first.like(**given) as plan, MeshAttention(comm, **arguments) as new:
                assert description(plan) == description(new)
                chunks = my_chunks(plan, *draw_all(plan.problem, sinks=True))
                assert bits(*attend(plan, chunks)) == bits(*attend(new, chunks))
                assert plan.nbytes == new.nbytes


def test_like_a_plan_like_another(comm):
    """Masks keep what was asked, not what was left of it at a shorter length."""
    with (
        MeshAttention(comm, seqlen=7, seqlen_k=3, **SHAPE, prefix=10, window=(25, None)) as first,
        first.like(seqlen=50) as second,
        second.like(seqlen=40, seqlen_k=40) as third,
        third.like(seqlen=60) as fourth,
    ):
        assert (second.problem.seqlen, second.problem.seqlen_k, second.problem.prefix) == (50, 3, 3)
        assert third.problem.prefix == 10 and third.problem.window == (25, None)
        assert fourth.problem.seqlen_k == 60 and fourth.tile == first.tile


def counts(monkeypatch):
    """Two lists that grow from now on: the waits for other ranks, and the spaces that are searched."""
    waits, spaces, wait, survey = [], [], Peers.wait, search.survey

    def counted(self, *arguments, **options):
        waits.append(arguments)
        return wait(self, *arguments, **options)

    def noted(space, every):
        spaces.append(space)
        return survey(space, every)

    monkeypatch.setattr(Peers, "wait", counted)
    monkeypatch.setattr(search, "survey", noted)
    return waits, spaces


def test_nothing_is_searched(comm, monkeypatch):
    """One small allreduce, and one tile of one schedule, route and layout looked at."""
    with MeshAttention(comm, seqlen=100, **SHAPE, causal=True) as first:
        waits, spaces = counts(monkeypatch)
        with first.like(seqlen=200):
            assert len(waits) == (comm.size > 1)
    (space,) = spaces
    assert len(space.tiles) == len(space.schedules) == len(space.layout_pairs) == 1


def test_either_may_be_closed_first(comm):
    q = np.ones((2, 64, 4, 8), np.float32)
    for order in ((0, 1), (1, 0)):
        plans = [MeshAttention(comm, seqlen=16 * comm.size, **SHAPE)]
        plans.append(plans[0].like(seqlen=64 * comm.size))
        plans[order[0]].close()
        left = plans[order[1]]
        chunk = q[:, : len(left.positions)]
        out, _ = left.forward(chunk, chunk[:, :, :2], chunk[:, :, :2])
        assert np.allclose(out, 1)
        left.close()
        with pytest.raises(ArgumentError, match="the plan is closed"):
            plans[0].like(seqlen=3)


def test_many(comm):
    """Of changing lengths, open at once."""
    with MeshAttention(comm, seqlen=1, heads=1, head_dim=1) as first:
        plans = [first.like(seqlen=length) for length in range(1, 200)]
        assert [plan.problem.seqlen for plan in plans] == list(range(1, 200))
        ones = np.ones((1, len(plans[-1].positions), 1, 1), np.float32)
        assert np.allclose(plans[-1].forward(ones, ones, ones)[0], 1)
        for plan in plans:
            plan.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"seqlen": -1}, "seqlen is -1; it must be a whole number"),
        ({"seqlen": "9"}, "seqlen is '9'"),
        ({"seqlen_k": 1.5}, "seqlen_k is 1.5"),
        ({"seqlen": True}, "seqlen is True"),
    ],
)
def test_wrong_on_one_rank(comm, given, says):
    """The same error on all, and the first plan goes on."""
    last = comm.rank == comm.size - 1
    with MeshAttention(comm, seqlen=24, **SHAPE) as first:
        text = same_error(comm, lambda: first.like(**given if last else {}))
        assert says in text
        first.like(seqlen=8).close()


def test_lengths_that_differ(comm, at_least):
    at_least(2)
    with MeshAttention(comm, seqlen=24, **SHAPE) as first:
        assert "seqlen is 10 on rank 0 but 11 on rank 1" in same_error(comm, lambda: first.like(seqlen=10 + comm.rank))


def test_what_a_length_does_not_fit(comm):
    with MeshAttention(comm, seqlen=24, **SHAPE, max_memory=100_000) as first:
        assert "max_memory is 100000 bytes a rank" in same_error(comm, lambda: first.like(seqlen=100_000))
        first.like(seqlen=48).close()
    sizes = (24, *(0,) * (comm.size - 1))
    with MeshAttention(comm, seqlen=24, **SHAPE, layout=Layout("contiguous", 24, comm.size, sizes)) as first:
        assert "whose sum is seqlen, 25" in same_error(comm, lambda: first.like(seqlen=25))
        first.like().close()
