"""Small messages among ranks, where MPI lacks matched probes and where two threads look for them."""

import pickle
import threading
import time

import pytest
from mpi4py import MPI

from mpiattn.comm import arrivals
from mpiattn.comm.acks import TAG, Acks
from mpiattn.comm.channel import Channel


class Slingshot(MPI.Intracomm):
    """A communicator of one rank without matched probes; two threads that probe both see the message."""

    def Improbe(self, *arguments):
        raise MPI.Exception(MPI.ERR_OTHER)

    def Iprobe(self, *arguments):
        seen = super().Iprobe(*arguments)
        time.sleep(0.05)  # lets the other thread probe
        return seen


@pytest.fixture
def alone():
    comm = Slingshot(MPI.COMM_SELF.Dup())
    yield comm
    comm.Free()


def test_a_failure_is_heard(alone):
    channel = Channel(alone)
    requests = [
        alone.Isend([pickle.dumps((mark, "failure", text, (), "")), MPI.BYTE], 0, channel.tag)
        for mark, text in ((b"another", "late"), (b"", "rank 0 has failed"), (b"", "rank 1 too"))
    ]
    until = time.monotonic() + 30
    while any(not request.Test() for request in requests) and time.monotonic() < until:
        channel.poll()
    channel.poll()
    assert channel.failure == "rank 0 has failed"


def test_slots_come_back(alone):
    acks = Acks(alone)
    for number in (7, 255):
        acks.send(0, number)
    numbers, until = [], time.monotonic() + 30
    while len(numbers) < 2 and time.monotonic() < until:
        numbers += acks.receive()
    assert numbers == [7, 255]


def test_two_threads_take_a_message_once(alone):
    """Else the one that comes late waits in MPI for a message that the other has taken."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI serves one thread")
    request, taken = alone.Isend([b"x", MPI.BYTE], 0, TAG), []
    while not alone.Iprobe(MPI.ANY_SOURCE, TAG):
        pass
    threads = [threading.Thread(target=lambda: taken.append(arrivals.take(alone, TAG)), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    late = any(thread.is_alive() for thread in threads)
    if late:
        alone.Send([b"y", MPI.BYTE], 0, TAG)  # lets the thread end
    request.Wait()
    assert not late and sorted(map(bool, taken)) == [False, True]
