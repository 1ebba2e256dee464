"""Memory that is foreseen: what a plan and a cache say they need is what they take, and too much is refused by all."""

import re

import numpy as np
import pytest
from dense import draw_all
from runs import attend, my_chunks
from test_agreement import same_error

from mpiattn import ArgumentError, KVCache, Layout, MeshAttention
from mpiattn.comm import room
from mpiattn.comm.peers import Peers
from mpiattn.errors import MemoryShortage
from mpiattn.plan.foresight import own_bytes
from mpiattn.system import memory_limits
from mpiattn.system.memory_limits import Limit

SHAPE = {"seqlen": 2000, "heads": 4, "head_dim": 16, "direction": "both"}
# Not all back ends of tests have these sizes for their own.
NAME = "the node's memory"


@pytest.fixture
def left(monkeypatch):
    """left(bytes, used, mark, name): what every rank reads."""
    for name, value in (("LEAST", 1), ("SPARE", 0), ("SPARE_SHARE", 0)):
        monkeypatch.setattr(room, name, value)

    def set_(nbytes, used=0, shared="node", name=NAME):
        monkeypatch.setattr(memory_limits, "limits", lambda: [Limit(name, int(nbytes), int(used), shared)])

    return set_


def needed(comm, **how):
    """What all ranks need for a plan, and its number of bytes of a rank at most."""
    with MeshAttention(comm, **how) as plan:
        return int(own_bytes(plan._decision).sum()), plan._decision.choice.nbytes


@pytest.mark.many
@pytest.mark.parametrize(
    "how",
    [
        {"schedule": "greedy"},
        {"schedule": "collective", "causal": True},
        {"layout": "striped", "mesh_layout": "contiguous", "schedule": "greedy"},
        {"window": (300, 0), "batch": 2, "schedule": "greedy", "layout": "contiguous", "mesh_layout": "contiguous"},
        {"tile": "ulysses", "heads": 12},
        {"uneven": True, "dtype": "bfloat16", "mesh_layout": "contiguous"},
    ],
    ids=str,
)
def test_what_is_foreseen_is_taken(comm, how):
    """Within a tenth, on every rank."""
    how = {**SHAPE, "tile": "auto", **how}
    if how.get("tile") == "ulysses" and how["heads"] % comm.size:
        pytest.skip("the planes cannot split these heads")
    if how.pop("uneven", False):
        sizes = [2000 // comm.size] * comm.size
        sizes[-1] += 2000 - sum(sizes) + (comm.size > 1) * 500
        sizes[0] -= (comm.size > 1) * 500 if sizes[0] > 500 else 0
        sizes[-1] += 2000 - sum(sizes)
        how["layout"] = Layout("contiguous", 2000, comm.size, tuple(sizes))
    with MeshAttention(comm, backend="numpy", **how) as plan:
        foreseen = own_bytes(plan._decision)[comm.rank]
        attend(plan, my_chunks(plan, *draw_all(plan.problem)))
        way = plan._passes._way
        taken = plan._passes.pool.nbytes + way._folding.copies.nbytes(("delta", "lse"))
        taken += sum(chunk.nbytes for chunk in getattr(way, "_chunks", {}).values())
        nbytes = plan.nbytes
    assert 0.9 * taken - 4096 <= foreseen <= 1.02 * taken + 4096 and foreseen < nbytes


def test_too_little_for_a_plan(comm, at_least, left):
    """What is left is shared by the ranks.  A max_memory is the caller's word."""
    at_least(2)
    total, _ = needed(comm, **SHAPE)
    left(total)
    needed(comm, **SHAPE)
    left(total - 1)
    text = same_error(comm, lambda: MeshAttention(comm, **SHAPE), MemoryShortage)
    assert text.startswith(f"the plan, besides the caller's arrays, needs {memory_limits.size(total)} on ")
    assert f" for each of {comm.size} ranks; {memory_limits.size(total - 1)} are left of {NAME}; " in text
    assert isinstance(MemoryShortage(text), ArgumentError) and isinstance(MemoryShortage(text), MemoryError)
    left(0)
    MeshAttention(comm, **SHAPE, max_memory=2**40).close()
    text = same_error(comm, lambda: MeshAttention(comm, **SHAPE), MemoryShortage)
    assert "no plan fits, the smallest (tile " in text and text.endswith(
        "more ranks, on more nodes: each then needs less"
    )


def test_a_limit_of_one_rank_names_the_rank(comm, at_least, left):
    """As `ulimit -v` in the shell of one rank, while others of its host have room."""
    at_least(2)
    last = comm.size - 1
    left(2**10 if comm.rank == last else 2**50, shared="", name="the limit of 1 KiB on the address space (ulimit -v)")
    text = same_error(comm, lambda: MeshAttention(comm, **SHAPE), MemoryShortage)
    assert re.search(rf" on rank {last} \(.+\); 1 KiB are left of the limit of 1 KiB on the address space", text), text


@pytest.mark.parametrize("direction", ["forward", "both"])
def test_advice_is_followed(comm, at_least, left, direction):
    """The plan that is made with the max_memory of the message needs no more than is left, whatever that is."""
    at_least(2)
    # which plan is fastest, and so whether a smaller one is left to advise, depends on the kernels of the processor
    how = {**SHAPE, "direction": direction, "schedule": "collective", "window": (200, 0), "backend": "numpy"}
    total, _ = needed(comm, **how)
    advised = 0
    for share in (0.95, 0.8, 0.6, 0.4):
        left(share * total)
        text = same_error(comm, lambda: MeshAttention(comm, **how), MemoryShortage)
        for option in re.findall("a plan with max_memory='([^']*)' fits", text):
            advised += 1
            assert needed(comm, **how, max_memory=option)[0] <= share * total
    assert advised or (comm.size, direction) not in ((2, "forward"), (4, "forward"), (4, "both"))


def test_limits_of_each_rank(comm, at_least, left):
    """What a rank has for itself is not shared, and what it uses already counts; the tightest is named."""
    at_least(2)
    with MeshAttention(comm, **SHAPE) as plan:
        own = own_bytes(plan._decision)
    most = int(own.max())
    left(most + 1000, 1000, "")
    MeshAttention(comm, **SHAPE).close()
    left(most + 1000, 1000 + (comm.rank == comm.size - 1) * (most - int(own.min()) + 1), "", f"limit {comm.rank}")
    text = same_error(comm, lambda: MeshAttention(comm, **SHAPE), MemoryShortage)
    assert f"left of limit {comm.size - 1}; " in text and "for each" not in text.split(";")[0]
    left(int(own.sum()) + 1000 * comm.size - 1, 1000, "slurm 5")
    assert "for each of" in same_error(comm, lambda: MeshAttention(comm, **SHAPE), MemoryShortage)


def test_the_tightest_of_a_ranks_own_limits_is_named(comm, at_least, monkeypatch):
    at_least(2)
    limits = [Limit("wide", 2**40), Limit("narrow", 2024, 1000), Limit("less narrow", 1500)]
    monkeypatch.setattr(room, "LEAST", 1)
    monkeypatch.setattr(memory_limits, "limits", lambda: limits)
    assert "; 1 KiB are left of narrow; " in same_error(comm, lambda: MeshAttention(comm, **SHAPE), MemoryShortage)


def test_another_length(comm, at_least, left):
    at_least(2)
    total, _ = needed(comm, **SHAPE)
    with MeshAttention(comm, **SHAPE) as plan:
        left(total - 1)
        assert "needs" in same_error(comm, lambda: plan.like(seqlen=2000), MemoryShortage)
        with plan.like(seqlen=500) as shorter:
            out, _ = shorter.forward(*my_chunks(shorter, *np.ones((3, 1, 500, 4, 16), np.float32)))
    assert np.allclose(out, 1)


def test_too_little_for_a_cache(comm, left):
    """The capacity of the message fits, and one token more does not."""
    how = {"kv_heads": 2, "head_dim": 16, "sequences": 3, "page_size": 8}
    page = 8 * 2 * 32 * 4
    left(20 * page * comm.size - 1)
    text = same_error(comm, lambda: KVCache(comm, capacity=1000 * comm.size, **how), MemoryShortage)
    capacity = 17 * 8 * comm.size
    assert text.startswith(f"a cache of capacity={1000 * comm.size} needs ") and f"; capacity={capacity} fits; " in text
    with KVCache(comm, capacity=capacity, **how) as cache:
        assert cache.nbytes == 19 * page
    assert "capacity=" in same_error(comm, lambda: KVCache(comm, capacity=capacity + 1, **how), MemoryShortage)
    left(0)
    assert "fits" not in same_error(comm, lambda: KVCache(comm, capacity=1, **how), MemoryShortage)


def test_small_plans_do_not_look(comm, monkeypatch):
    """Nor do calls: no file is read, and no message is sent."""
    waits, wait = [], Peers.wait
    monkeypatch.setattr(Peers, "wait", lambda *arguments, **how: (waits.append(0), wait(*arguments, **how))[1])

    def messages():
        waits.clear()
        MeshAttention(comm, **SHAPE).close()
        return len(waits)

    before = messages(), messages()
    monkeypatch.setattr(memory_limits, "limits", lambda: pytest.fail("a small plan looks at limits"))
    assert messages() == before[1]
    monkeypatch.setattr(memory_limits, "limits", list)
    monkeypatch.setattr(room, "LEAST", 1 - (comm.size == 1))
    assert messages() == before[1] + 1
