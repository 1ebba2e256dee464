"""No plan leaves the order of two accesses of its buffers to chance.

MPIATTN_SEED=s chooses other random plans.
"""

import random

import draws
import numpy as np
import pytest
from dense import draw_all
from happens_before import HappensBefore
from runs import agreed, my_chunks, on, tiles, use_schedule

from mpiattn import MeshAttention, masks
from mpiattn.backends.testing import deferred
from mpiattn.schedule.greedy import greedy
from mpiattn.schedule.steps import Costs

SEED = draws.seed()


# Plans by their number of ranks.  The gaps for alignment make buffers share memory that would not without them.
IN_GAPS = {
    3: {
        "seqlen": 31,
        "heads": 3,
        "kv_heads": 3,
        "head_dim": 8,
        "value_dim": 1,
        "dtype": "bfloat16",
        "causal": True,
        "tile": (3, 1),
        "layout": "striped",
        "route": "ring",
    },
    4: {
        "seqlen": 97,
        "heads": 6,
        "kv_heads": 3,
        "head_dim": 8,
        "value_dim": 4,
        "dtype": "bfloat16",
        "wire_dtype": "bfloat16",
        "tile": (4, 1),
        "layout": "contiguous",
        "route": "direct",
    },
    6: {
        "seqlen": 17,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 32,
        "value_dim": 8,
        "dtype": "float32",
        "wire_dtype": "bfloat16",
        "tile": (6, 1),
        "layout": "zigzag",
        "route": "direct",
    },
    8: {
        "seqlen": 31,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "value_dim": 4,
        "dtype": "bfloat16",
        "tile": (4, 2),
        "layout": "contiguous",
        "route": "ring",
    },
}


@pytest.fixture(autouse=True)
def detector(monkeypatch):
    """The back end "deferred" looks for races and has no delays."""
    monkeypatch.setattr(deferred, "LONGEST_DELAY", 0.0)
    monkeypatch.setattr(deferred, "DeferredBackend", HappensBefore)


def check(comm, arguments, costs=None, ahead=0):
    """Assert that a forward and a backward pass have no races on any rank.

    costs, ahead: of greedy schedules; without costs the plan's own run.
    """
    with MeshAttention(comm, **arguments, backend="deferred") as plan:
        if costs:
            for direction in ("forward", "backward"):
                use_schedule(plan, greedy(plan.schedule.tile, costs, plan.route, direction, ahead))
        plan._passes.executor("backward")
        backend, executors = plan._backend, plan._passes.executors
        q, k, v, dout, *_ = my_chunks(plan, *draw_all(plan.problem))
        backend.where = lambda: executors["forward"].where
        out, lse = plan.forward(q, k, v)
        backend.where = lambda: executors["backward"].where
        plan.backward(dout, q, k, v, out, lse)
        agreed(comm, "; ".join(list(dict.fromkeys(backend.races))[:2]), (arguments, costs, ahead))


def draw_plan(rng, size, schedule):
    """Arguments of a random plan of few tokens, whose arrays end anywhere between two aligned addresses."""
    kv_heads, route = rng.choice([1, 2, 3]), rng.choice(["direct", "direct", "ring"])
    seqlen, scattered = rng.choice([17, 31, 64, 97]), rng.random() < 0.3  # so that messages are packed
    return {
        "seqlen": seqlen,
        "mask": masks.blocks(1, [(i, (7 * i + 5 * j) % seqlen) for i in range(seqlen) for j in range(3)])
        if scattered
        else None,
        "batch": rng.choice([1, 1, 2]),
        "heads": kv_heads * rng.choice([1, 2]),
        "kv_heads": kv_heads,
        "head_dim": rng.choice([4, 5, 8, 16, 32]),
        "value_dim": rng.choice([1, 4, 8, 16, 32]),
        "dtype": rng.choice(["bfloat16", "float32"]),
        "causal": rng.random() < 0.4,
        "tile": rng.choice(tiles(size)),
        "layout": rng.choice(["contiguous", "zigzag", "striped"]),
        "schedule": schedule,
        "route": route,
        "wire_dtype": rng.choice([None, "bfloat16"]) if route == "direct" else None,
        "max_message": rng.choice([2**30, 500]),
    }


@on(*IN_GAPS)
def test_buffers_that_share_memory_with_the_gaps_between_others(group):
    check(group, {**IN_GAPS[group.size], "schedule": "greedy"})


@pytest.mark.many
@pytest.mark.parametrize("schedule", ["greedy", "collective"])
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["first", "more"])
def test_random_plans(comm, schedule, part):
    """Small ones with the plan's own schedules or with others, in which transfers are posted ahead of their steps."""
    rng = random.Random(f"{SEED} {schedule} {part} {comm.size}")
    count = {"greedy": 20, "collective": 8}[schedule] * (2 if part else 1)
    for _ in range(count if comm.size <= 4 else count // 4):
        arguments, costs = draw_plan(rng, comm.size, schedule), None
        if schedule == "greedy" and rng.random() < 0.6:
            costs = Costs(*(rng.choice([0.1, 0.5, 1, 2, 10]) for _ in range(4)))
        check(comm, arguments, costs, ahead=rng.choice([0, 1, 2, 3]))


@pytest.fixture
def backend():
    made = HappensBefore()
    yield made
    made.close()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_receive_waits_for_launches(backend, ordered):
    a, b = np.zeros((2, 8), "float32")
    event = backend.copy(b, a)
    backend.incoming(a, (event,) if ordered else ())
    assert len(backend.races) == (not ordered)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_launch_waits_for_a_receive(backend, ordered):
    a, b = np.zeros((2, 8), "float32")
    backend.incoming(a).taken(0, a.nbytes)
    event = backend.arrived(a)
    backend.add([b], [a], after=(event,) if ordered else ())
    assert len(backend.races) == (not ordered)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_launch_waits_for_a_send(backend, ordered):
    a, b = np.zeros((2, 8), "float32")
    backend.outgoing(a)
    backend.copy(b, a)  # both only read
    if ordered:
        backend.sent(a)
    backend.copy(a, b)
    assert len(backend.races) == (not ordered)


@pytest.mark.parametrize("ordered", [True, False])
def test_what_follows_from_two_orders(backend, ordered):
    """A send after a launch, which is after a receive, is after the receive."""
    a, b, c = np.zeros((3, 8), "float32")
    backend.incoming(a).taken(0, a.nbytes)
    backend.add([b], [c], after=(backend.arrived(a),))
    event = backend.copy(c, b)
    backend.outgoing(a, (event,) if ordered else ())
    assert len(backend.races) == (not ordered)


@pytest.mark.parametrize("wait", ["wait", "drain"])
def test_what_the_calling_thread_waits_for(backend, wait):
    a, b = np.zeros((2, 8), "float32")
    event = backend.copy(a, b)
    if wait == "wait":
        backend.wait(event)
    else:
        backend.drain()
    backend.forget(a)
    assert not backend.races
    backend.copy(b, a)
    backend.forget(b)
    assert len(backend.races) == 1 and "forget" in backend.races[0] and "copy" in backend.races[0]
