"""Buffers of messages that are given up stay alive: MPI writes to them when the missing rank comes."""

import gc
import weakref

import numpy as np
import pytest
from mpi4py import MPI

from mpiattn import MeshAttention, PeerFailure
from mpiattn.backends.wire import WireBytes
from mpiattn.comm import running
from mpiattn.comm.exchange import Exchange
from mpiattn.comm.peers import Peers
from mpiattn.comm.rounds import Rounds


class Watched(np.ndarray):
    """An array that is seen to be freed, as are the arrays made like it."""

    alive = []  # weak references

    def __array_finalize__(self, _):
        self.alive.append(weakref.ref(self))


@pytest.mark.parametrize("call", ["reduce", "allgather"])
def test_a_given_up_request_holds_its_buffers(comm, at_least, monkeypatch, call):
    """MPI writes to them when the missing rank comes."""
    at_least(2)
    monkeypatch.setattr(Watched, "alive", [])
    fresh, late = comm.Dup(), comm.rank == comm.size - 1

    def array(*elements):
        return np.array(elements).view(Watched)

    def begin(peers):
        if call == "reduce":
            return peers.reduce(array(3, 4, 5), MPI.MAX)
        exchange = Exchange(peers)
        chunk, arena = array(7).view(np.uint8), array(*range(comm.size)).view(np.uint8)
        wires = WireBytes(chunk), WireBytes(arena)
        exchange.wait(exchange.allgather(fresh, *wires, [1] * comm.size, [*range(comm.size)], 8))

    if not late:
        lost = []
        with pytest.raises(PeerFailure):
            begin(Peers(fresh, 0.2, lost.append))
        gc.collect()
        assert len(lost) == 1 and sum(array() is not None for array in Watched.alive) >= 2
    comm.Barrier()
    if late:
        begin(Peers(fresh))
    comm.Barrier()
    fresh.Free()


def test_rounds_that_end_in_an_exception_hold_their_buffers(comm, at_least, monkeypatch):
    """Of all rounds, also of arrays that are received in place: MPI writes to them when the late rank sends."""
    at_least(2)
    monkeypatch.setattr(Watched, "alive", [])
    fresh, late = comm.Dup(), comm.size - 1
    if comm.rank != late:
        with pytest.raises(KeyboardInterrupt), Rounds(Peers(fresh), 2**20) as messages:
            for _ in range(2):
                messages.receive(late, np.zeros(5).view(Watched))
                messages.turn()
            raise KeyboardInterrupt
        del messages
        gc.collect()
        assert sum(array() is not None for array in Watched.alive) >= 2
    comm.Barrier()
    if comm.rank == late:
        with Rounds(Peers(fresh), 2**20) as messages:
            for rank in range(late):
                for _ in range(2):
                    messages.send(rank, np.ones(5))
            messages.turn()
            messages.end()
    comm.Barrier()
    fresh.Free()


def test_an_interrupt_as_a_collective_is_posted(comm, at_least, monkeypatch):
    """A signal's handler raises as soon as MPI's function returns: before its request has a name."""
    at_least(2)
    monkeypatch.setattr(Watched, "alive", [])
    fresh = comm.Dup()

    class Interrupted:
        rank, size = fresh.rank, fresh.size

        def Iallreduce(self, *arguments):
            fresh.Iallreduce(*arguments)
            raise KeyboardInterrupt

    guilty = comm.size - 1
    if comm.rank == guilty:
        peers = Peers(fresh)
        peers.comm = Interrupted()
        given = np.array([1, 2]).view(Watched)
        with pytest.raises(KeyboardInterrupt):
            peers.reduce(given, MPI.MAX)
        del given
        gc.collect()
        assert sum(array() is not None for array in Watched.alive) == 2  # what is given, and the result
    else:
        Peers(fresh).reduce(np.array([3, 4]), MPI.MAX)
    comm.Barrier()
    fresh.Free()


@pytest.mark.parametrize("call", ["send", "receive", "allgather"])
def test_an_interrupt_as_a_round_is_posted(comm, at_least, monkeypatch, call):
    """Its array stays alive, although the request has no name."""
    at_least(2)
    monkeypatch.setattr(Watched, "alive", [])
    fresh, guilty = comm.Dup(), comm.size - 1

    class Interrupted:
        rank, size = fresh.rank, fresh.size

        def __getattr__(self, name):
            def post(*arguments):
                getattr(fresh, name)(*arguments)
                raise KeyboardInterrupt

            return post

    def begin(messages, call):
        array = np.ones(5).view(Watched)
        if call == "allgather":
            every = np.ones(5 * comm.size).view(Watched)
            messages.allgather(array, every, [5] * comm.size, [*range(0, 5 * comm.size, 5)], 8)
        else:
            getattr(messages, call)(guilty if comm.rank == 0 else 0, array)

    if comm.rank == guilty:
        with pytest.raises(KeyboardInterrupt), Rounds(Peers(fresh), 2**20) as messages:
            messages._comm = Interrupted()
            begin(messages, call)
        del messages
        gc.collect()
        assert sum(array() is not None for array in Watched.alive) >= 1 + (call == "allgather")
    elif comm.rank == 0 or call == "allgather":
        with Rounds(Peers(fresh), 2**20) as messages:
            begin(messages, {"send": "receive", "receive": "send"}.get(call, call))
            messages.turn()
            messages.end()
    comm.Barrier()
    fresh.Free()


def test_a_call_that_another_rank_has_failed(comm, at_least):
    """Its buffers outlive the plan."""
    at_least(2)
    fresh = comm.Dup()
    plan = MeshAttention(fresh, seqlen=4 * comm.size, heads=1, head_dim=4, timeout=500)
    ones, buffers = np.ones((1, 4, 1, 4), np.float32), weakref.ref(plan._passes)
    comm.Barrier()  # all have it
    if comm.rank == comm.size - 1:
        with pytest.raises(KeyError), plan._home.call("another call"):
            raise KeyError
    else:
        with pytest.raises(PeerFailure):
            plan.forward(ones, ones, ones)
    comm.Barrier()
    plan.close()
    del plan
    gc.collect()
    assert buffers() is not None or comm.rank == comm.size - 1


def test_an_interrupt_as_a_call_begins(comm, at_least, monkeypatch):
    """It leaves the communicator as it was: no call is running."""
    at_least(2)
    ones = np.ones((1, 12 // comm.size, 1, 4), np.float32)
    with MeshAttention(comm, seqlen=12 // comm.size * comm.size, heads=1, head_dim=4) as plan:
        begin = running.begin

        def interrupted(*call):
            begin(*call)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(running, "begin", interrupted)
            with pytest.raises(KeyboardInterrupt):
                plan.forward(ones, ones, ones)
        out, _ = plan.forward(ones, ones, ones)
        assert (out == 1).all()
