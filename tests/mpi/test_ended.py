"""A rank has ended, and MPI tells the others: here it only says so, and shrinks.py has ranks that do end."""

import socket

import numpy as np
import pytest
from mpi4py import MPI

from mpiattn import KVCache, MeshAttention, MpiattnError, PeerFailure
from mpiattn.comm import channel, mesh, peers

SHAPE = {"seqlen": 24, "heads": 2, "head_dim": 4, "timeout": 500}


@pytest.fixture
def gone(comm, at_least, monkeypatch):
    """The last rank, of which MPI says that it has ended."""
    at_least(2)
    gone = comm.size - 1
    for module in (channel, mesh, peers):
        for name in {"ended", "ended_soon"} & set(vars(module)):
            monkeypatch.setattr(module, name, lambda comm: (gone,))
    comm.Barrier()
    return gone


@pytest.mark.parametrize("waits", [True, False])
def test_each_rank_knows_by_itself(comm, request, waits):
    """While it waits for others, and by an error of MPI in a call."""
    plan = MeshAttention(comm.Dup(), **SHAPE)
    gone, x = request.getfixturevalue("gone"), np.ones((3, 1, len(plan.positions), 2, 4), np.float32)
    if comm.rank != gone:
        with pytest.raises(PeerFailure, match=rf"rank {gone} on {socket.gethostname()} ended$") as caught:
            if waits:
                plan.forward(*x)
            with plan.call("test"):
                raise MPI.Exception(MPI.ERR_OTHER)
        assert caught.value.ranks == (gone,) and not caught.value.relayed
        with pytest.raises(MpiattnError, match=r"did not end .*ended"):
            plan.forward(*x)
    comm.Barrier()
    plan._raising = True  # the rank that is gone waits for nobody either
    plan.close()
    comm.Barrier()


@pytest.mark.parametrize("make", [MeshAttention, KVCache])
def test_closing_says_so_and_waits_for_nobody(comm, request, make):
    shape = SHAPE if make is MeshAttention else {"capacity": 9, "kv_heads": 1, "head_dim": 4, "timeout": 500}
    made = make(comm.Dup(), **shape)
    gone = request.getfixturevalue("gone")
    if comm.rank != gone:
        with pytest.raises(PeerFailure) as caught:
            made.close()
        assert caught.value.ranks == (gone,)
        made.close()
    comm.Barrier()
    made.drop()


def test_the_first_plan(comm, gone):
    fresh = comm.Dup()
    if comm.rank != gone:
        with pytest.raises(PeerFailure, match=rf"rank {gone} ended$") as caught:
            MeshAttention(fresh, **SHAPE)
        assert caught.value.ranks == (gone,)
    comm.Barrier()
