"""Records of logger `mpiattn`: what was made, why, which calls and which failures, each with the rank."""

import logging

import pytest
from dense import draw
from runs import my_chunks, on

from mpiattn import ArgumentError, KVCache, MeshAttention, PeerFailure

PROBLEM = {"seqlen": 40, "heads": 2, "head_dim": 8, "backend": "numpy"}


@pytest.fixture
def group(group):
    with_own_home = group.Dup()
    yield with_own_home
    with_own_home.Free()


def texts(caplog, level):
    """The records of a level so far; they are taken away."""
    some = [record.getMessage() for record in caplog.records if record.levelno == level]
    caplog.clear()
    return some


@on(1, 2)
def test_what_is_made_and_called(group, caplog):
    caplog.set_level(logging.DEBUG, "mpiattn")
    tile = f"1x{group.size}"
    with MeshAttention(group, **PROBLEM, tile=tile, schedule="greedy", direction="both") as plan:
        assert {record.rank for record in caplog.records} == {group.rank}
        backend, made = texts(caplog, logging.INFO)
        assert backend == "back end numpy; asked for: numpy, transport auto"
        assert made.startswith(f"plan 1 is MeshAttention(batch 1, 40 tokens, 2 heads x 8, float32, full; tile {tile}, ")
        assert "open): layout, mesh_layout, route chosen by the shortest predicted time, " in made
        assert made.endswith(" s for direction both on machine default")
        plan.forward(*my_chunks(plan, *draw(plan.problem)))
        assert [(record.rank, record.getMessage()) for record in caplog.records] == [
            (group.rank, "call 1 of plan 1, forward")
        ]
        caplog.clear()
        with plan.like(seqlen=50):
            (made,) = texts(caplog, logging.INFO)
            assert made.startswith("plan 2 is MeshAttention(batch 1, 50 tokens") and made.endswith("open): as plan 1")
        with pytest.raises(ArgumentError):  # which is for the caller alone
            plan.forward(1, 2, 3)
        assert not texts(caplog, logging.ERROR) and not texts(caplog, logging.WARNING)
    with KVCache(group, capacity=40, kv_heads=2, head_dim=8, backend="numpy"):
        assert texts(caplog, logging.INFO) == ["back end numpy; asked for: numpy, transport auto"]
    caplog.set_level(logging.WARNING, "mpiattn")
    with MeshAttention(group, **PROBLEM) as plan:
        plan.forward(*my_chunks(plan, *draw(plan.problem)))
    assert not caplog.records


@on(2)
def test_a_failure(group, caplog):
    """On the rank that fails and on the other one; Python prints it where there is no handler."""
    handlers = logging.getLogger("mpiattn").handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)

    def fail(blocks):
        raise RuntimeError("a disk is full")

    plan = MeshAttention(group, **PROBLEM)
    with pytest.raises(RuntimeError if group.rank else PeerFailure):
        for _ in range(2):  # rank 0 may end its own part of the first
            plan.forward(*my_chunks(plan, *draw(plan.problem)), progress=fail if group.rank else None)
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert {(record.name, record.levelname, record.rank) for record in records} == {("mpiattn", "ERROR", group.rank)}
    (text,) = (record.getMessage() for record in records if "can be used any more" in record.getMessage())
    assert text.startswith("no plan or cache on this communicator can be used any more: ")
    assert text.endswith("a disk is full")
    plan.close()


@on(2)
def test_a_rank_that_does_not_come(group, caplog):
    plan = MeshAttention(group, **PROBLEM, timeout=0.2)
    if group.rank == 0:
        with pytest.raises(PeerFailure):
            plan.forward(*my_chunks(plan, *draw(plan.problem)))
        waited, unusable = (record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
        assert waited.startswith("rank 0 of 2 on ") and "has waited 0.2 s" in waited
        assert "no plan or cache on this communicator can be used any more" in unusable
    group.Barrier()
    plan.close()
