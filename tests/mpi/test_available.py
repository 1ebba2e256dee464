"""Which back end the ranks use, where hosts differ in what they have."""

import socket

import numpy as np
import pytest
from runs import my_chunks
from test_agreement import SHAPE, same_error

from mpiattn import KVCache, MeshAttention, attention
from mpiattn.backends import registry
from mpiattn.backends.testing.deferred import DeferredBackend


@pytest.fixture
def fresh(comm):
    """A communicator of the same ranks, of which nothing is known yet."""
    duplicate = comm.Dup()
    yield duplicate
    duplicate.Free()


@pytest.fixture
def lacking(comm, monkeypatch):
    """The last rank lacks the back end "deferred"."""
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(socket, "gethostname", lambda: "node9")
        monkeypatch.setattr(DeferredBackend, "missing", classmethod(lambda cls: "it needs a coffee: pip install cup"))


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize(
    "make",
    [
        lambda comm: MeshAttention(comm, **SHAPE, backend="deferred"),
        lambda comm: KVCache(comm, capacity=64, kv_heads=2, head_dim=8, backend="deferred"),
        lambda comm: attention(*np.ones((3, 1, 4, 2, 8), np.float32), comm=comm, backend="deferred"),
    ],
    ids=["plan", "cache", "one call"],
)
def test_one_error_on_every_rank(comm, fresh, make):
    text = same_error(comm, lambda: make(fresh))
    assert text == (
        f"backend is 'deferred', which cannot run on node9 (rank {comm.size - 1}): it needs a coffee: pip install cup"
    )


@pytest.mark.usefixtures("lacking")
def test_auto_is_what_every_rank_can_run(fresh, monkeypatch):
    monkeypatch.setattr(registry, "AUTO", ("deferred", "numpy"))
    for make in (lambda: MeshAttention(fresh, **SHAPE), lambda: KVCache(fresh, capacity=64, kv_heads=2, head_dim=8)):
        with make() as made:
            assert made.backend == "numpy"
    out, _ = attention(*np.ones((3, 1, 4, 2, 8), np.float32), comm=fresh)
    assert np.allclose(out, 1)


def test_auto_is_the_best_that_every_rank_can_run(fresh, monkeypatch):
    monkeypatch.setattr(registry, "AUTO", ("deferred", "numpy"))
    with MeshAttention(fresh, **SHAPE) as plan, plan.like(seqlen=48) as longer:
        assert plan.backend == longer.backend == "deferred"
        plan.forward(*my_chunks(plan, *(np.ones((1, 24, heads, 8), np.float32) for heads in (4, 2, 2))))
