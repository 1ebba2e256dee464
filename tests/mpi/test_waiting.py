"""How a rank waits for others, and how values travel that are just short or just too long for one message."""

import gc
import pickle
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from mpiattn import PeerFailure
from mpiattn.backends.wire import WireBytes
from mpiattn.comm import peers as waiting
from mpiattn.comm.channel import Channel, listen
from mpiattn.comm.exchange import Exchange
from mpiattn.comm.peers import HEAD, SHORT, Peers


class Buffer:
    """Of a message; lives on after the wait if MPI may still write to it."""


class Answers:
    """In place of a `Channel`: what others do while this rank asks who is there, at its time limit."""

    failure, failed, broken = None, (), False

    def __init__(self, meanwhile=lambda channel: None):
        self.meanwhile, self.alarms = meanwhile, []

    def roll_call(self, done):
        self.meanwhile(self)
        return "", ()

    def alarm(self, failure, failed):
        self.alarms.append(failure)


@pytest.fixture
def polls(monkeypatch):
    """Counts the polls of a process that is suspended for an hour after each."""
    polls = []
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: 3600.0 * len(polls)))
    return polls


def waited(comm, polls, channel=None, timeout=5.0, **how):
    Peers(comm, timeout, channel=channel, **how).until(lambda: bool(polls.append(0)), lambda: "for nobody")


def test_a_suspended_process_does_not_wait(comm, polls):
    """A gap between polls counts as one second, however long it was."""
    with pytest.raises(PeerFailure, match="has waited 5 s for nobody"):
        waited(comm, polls)
    assert 5 < len(polls) < 10


def test_what_it_waits_for_is_named(comm, polls):
    """Of two transfers the one that is not complete, by the rank that has not sent."""
    duplicate, late = comm.Dup(), (comm.rank + 1) % comm.size
    patient, exchange = Exchange(Peers(duplicate)), Exchange(Peers(duplicate, 5.0, idle=lambda: polls.append(0)))
    late_wire, own_wire, sent = (WireBytes(np.zeros(size, np.uint8)) for size in (12, 4, 4))
    posted = exchange.receive(duplicate, late_wire, late, 1) + exchange.receive(duplicate, own_wire, comm.rank, 2)
    patient.wait(patient.send(duplicate, sent, comm.rank, 2))
    with pytest.raises(PeerFailure, match=f"has waited 5 s in a step to receive 12 bytes from rank {late}$"):
        exchange.wait(posted, "in a step")
    comm.Barrier()
    patient.wait(patient.send(duplicate, WireBytes(np.ones(12, np.uint8)), (comm.rank - 1) % comm.size, 1) + posted)
    duplicate.Free()


def test_what_comes_at_the_time_limit(comm, polls):
    """It counts, and nobody is told of a failure."""
    came = []
    channel = Answers(lambda channel: came.append(0))
    Peers(comm, 5.0, channel=channel).until(lambda: polls.append(0) or bool(came))
    assert came and not channel.alarms


def test_another_rank_gives_up_at_the_same_time(comm, polls):
    """Its word stands, which it has told everybody."""

    def gives_up(channel):
        channel.failure, channel.failed = "rank 7 has waited", (3,)

    lost, channel = [], Answers(gives_up)
    with pytest.raises(PeerFailure, match="rank 7 has waited") as caught:
        waited(comm, polls, channel, lost=lost.append)
    assert caught.value.relayed and caught.value.ranks == (3,)
    assert len(lost) == 1 and not channel.alarms


def test_a_rank_that_was_told_of_a_failure_tells_nobody(comm, at_least):
    """Its own error follows from that failure, of which the others would take it for the cause."""
    at_least(2)
    duplicate = comm.Dup()
    channel = Channel(duplicate)
    if comm.rank == 0:
        channel.failure = "rank 1 raised KeyError"
        channel.alarm("rank 0 raised PeerFailure", (0,))
    comm.Barrier()
    for _ in range(20):
        channel.poll()
    assert channel.failure is None or comm.rank == 0
    channel.close()
    comm.Barrier()
    duplicate.Free()


def test_a_communicator_that_the_caller_has_freed(comm, at_least):
    """A channel that stays open after a failure, on the caller's own: others are read as before."""
    at_least(2)
    duplicate = comm.Dup()
    channel = Channel(duplicate)
    duplicate.Free()
    listen()
    channel.close()
    Peers(comm).barrier()


def test_an_exception_holds_the_buffers(comm):
    """Of an interrupt, or of a GPU that fails: MPI may still write to them."""
    buffer = Buffer()
    alive = weakref.ref(buffer)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Peers(comm).until(interrupted, buffers=[buffer])
    del buffer
    gc.collect()
    assert alive() is not None


@pytest.mark.parametrize("more", range(-1, 3))
@pytest.mark.parametrize("call, room", [("broadcast", HEAD - 8), ("allgather", SHORT - 8)])
def test_values_of_about_a_message(comm, call, room, more):
    """They arrive whole; where all gather, the last rank's alone is so long."""
    value = bytes(2 * room + more - len(pickle.dumps(bytes(room))))
    assert len(pickle.dumps(value)) == room + more
    got = getattr(Peers(comm), call)(value if call == "broadcast" or comm.rank == comm.size - 1 else None)
    assert got == (value if call == "broadcast" else [None] * (comm.size - 1) + [value])
