"""Ranks of a node that copy from each other's GPU, on a made-up CuPy over real shared memory; and one such rank."""

import os
import re
import sys
import time
from types import SimpleNamespace

import fake_cupy
import fake_ipc
import launch
import numpy as np
import pytest
from files import write_input
from launch import ROOT, TESTS, mpirun

from mpiattn.arguments.arrays import on_host
from mpiattn.backends.cuda import backend, ipc, slots
from mpiattn.backends.testing import emulated
from mpiattn.comm.near import Near
from mpiattn.errors import MpiattnError

needs_compiler = pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler")
FAKE = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, TESTS)))}
BEGIN = (
    "import os, signal, sys, fake_cupy; sys.modules['cupy'] = fake_cupy; from mpiattn.backends.cuda import slots, ipc; "
)
COMMAND = "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.draw(1)
@needs_compiler
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks(ranks):
    """tests/mpi/test_ipc.py, which is skipped elsewhere."""
    outcome = mpirun(
        ranks,
        [sys.executable, *"-m pytest -q --color=no -p no:cacheprovider".split(), TESTS / "mpi" / "test_ipc.py"],
        timeout=120,
        cwd=ROOT,
        env={"MPIATTN_BACKENDS": "cuda", "MPIATTN_CUPY": "fake", "MPIATTN_TRANSPORT": "ipc"},
    )
    assert re.search(r"^(16|20) passed", outcome.stdout, re.MULTILINE), outcome.stdout


@needs_compiler
def test_commands_say_so(tmp_path):
    """What goes how, and why, in the text and in OUT."""
    import h5py

    why = r"ipc: this MPI does not take device memory \(.+\); ranks of a node copy from each other's GPU"
    source, out = write_input(tmp_path / "in.h5", seqlen=43, kv_heads=2, heads=4, head_dim=16), tmp_path / "out.h5"
    for arguments in (["info"], ["run", source, out, "--backend", "cuda", "--verify"]):
        text = mpirun(2, [sys.executable, "-c", BEGIN + COMMAND, *arguments], env=FAKE).stdout
        assert re.search(rf"^transport( of cuda)? +{why}$", text, re.MULTILINE), text
    assert text.count("\ntransport") == 2, "at the beginning and in the results"
    with h5py.File(out) as file:
        assert re.fullmatch(why, file.attrs["transport"])
    bench = "bench --decode --backend cuda --transport ipc --seqlen 21 --heads 2 --head-dim 16 --runs 1".split()
    text = mpirun(2, [sys.executable, "-c", BEGIN + COMMAND, *bench], env=FAKE).stdout
    assert re.search(r"^transport +ipc: as asked for$", text, re.MULTILINE), text
    outcome = mpirun(1, [sys.executable, "-c", BEGIN + COMMAND, *bench], env=FAKE, check=False)
    assert outcome.returncode and outcome.stderr.count("transport is 'ipc', but no two ranks share a node") == 1


@needs_compiler
@pytest.mark.parametrize("fate", ["SIGKILL", "SIGSTOP"])
def test_a_rank_ends_with_slots_under_way(tmp_path, fate):
    """The job ends soon, and says which rank it was."""
    strike = (
        "from mpi4py import MPI; rank, fetch = MPI.COMM_WORLD.rank, ipc.Ipc._fetch; "
        f"ipc.Ipc._fetch = lambda *a: os.kill(os.getpid(), signal.{fate}) if rank == 1 else fetch(*a); "
    )
    source, out = write_input(tmp_path / "in.h5", seqlen=43, kv_heads=2, heads=4, head_dim=16), tmp_path / "out.h5"
    limit, start = 2.0 * launch.time_factor(), time.monotonic()
    command = ["run", source, out, "--backend", "cuda", "--schedule", "greedy", "--timeout", limit]
    outcome = mpirun(
        3, [sys.executable, "-c", BEGIN + strike + COMMAND, *command], env=FAKE, check=False, timeout=20 * limit
    )
    assert outcome.returncode and time.monotonic() - start < 15 * limit and not out.exists()
    if fate == "SIGSTOP":
        assert "no answer from rank 1" in outcome.stderr, outcome.stderr


class Returned:
    """In place of messages between ranks: the slots that come back."""

    def __init__(self):
        self.numbers, self.sent = [], []

    def send(self, rank, number):
        self.sent.append((rank, number))

    def receive(self):
        numbers, self.numbers = self.numbers, []
        return numbers


@pytest.fixture
def near(gpu, monkeypatch):
    """The back end with the transport ipc; rank 1 is on its node, and that is its own memory, rank 2 is not."""
    monkeypatch.setattr(slots, "_slots", {})
    monkeypatch.setattr(slots, "BYTES", 1000)
    monkeypatch.setattr(slots, "NUMBER", 2)
    own = gpu.slots()
    theirs = SimpleNamespace(pointer=own.pointer, events=[event.ptr for event in own.events], nbytes=own.nbytes)
    near = Near(gpu.device, own, {1: theirs}, Returned())
    assert gpu.transport == "staged" and gpu.assumed_machine.name == "h100-staged"
    gpu.connect(near)
    assert gpu.transport == "ipc" and gpu.assumed_machine.name == "h100"
    return near


def test_pieces_wait_for_slots(gpu, near):
    """A slot is filled again when it has come back, and a transfer is over only then."""
    array, arrived = gpu.contiguous(np.arange(777, dtype=np.float32)), gpu.empty((777,), "float32")
    gpu.begin()
    leaving, coming = gpu.outgoing(array).by_peer(1), gpu.incoming(arrived).by_peer(1)
    assert leaving.nbytes == coming.nbytes == 3108 and len(leaving.array) == len(coming.array) == 4
    ready = [leaving.ready(piece, piece + 1) for piece in range(4)]
    while not ready[0]():
        pass
    assert ready[1]() and not ready[2](), "there are two slots"
    for piece in range(4):
        while not ready[piece]() if piece > 1 else False:
            pass
        assert not leaving.over(piece, piece + 1)
        coming.array[piece] = leaving.array[piece]
        coming.taken(piece, piece + 1)
        while not coming.over(piece, piece + 1):
            pass
        assert near.acks.sent.pop() == (1, leaving.array[piece])
        near.acks.numbers.append(int(leaving.array[piece]))
        assert leaving.over(piece, piece + 1)
    gpu.sent(array)
    assert gpu.arrived(arrived) is None and (on_host(arrived) == np.arange(777)).all()
    assert not near.own.lost and not gpu.staged_bytes


def test_an_array_that_goes_near_and_far(gpu, near):
    """Its pinned memory is in use until it has been sent far, whichever is the first to be complete."""
    array = gpu.contiguous(np.arange(9.0))
    gpu.begin()
    gpu.outgoing(array).by_peer(1)
    far = gpu.outgoing(array).by_peer(2)
    gpu.sent(array)
    other = gpu.outgoing(gpu.contiguous(np.ones(9))).by_peer(2)
    assert other.array.ctypes.data != far.array.ctypes.data, "it is still being sent"
    gpu.sent(array)
    assert gpu.outgoing(gpu.contiguous(np.ones(9))).by_peer(2).array.ctypes.data == far.array.ctypes.data


def test_slots_that_are_lost(gpu, near):
    """When half of them are, there are new ones for the next communicator."""
    assert gpu.slots() is near.own
    near.take()
    again = gpu.slots()
    assert again is not near.own and not again.lost and gpu.slots() is again


def test_slots_that_failed_calls_hold(gpu, near):
    """A plan on another communicator waits while a slot may come back, and raises once none can."""
    other = Near(near.device, near.own, near.opened, Returned())
    first = near.take()
    second = other.take()
    assert {first, second} == {0, 1} and near.take() is None
    other.failed = True
    assert near.take() is None, "the first may still come back"
    near.acks.numbers.append(first)
    near.collect()
    assert other.take() == first
    with pytest.raises(MpiattnError, match="calls that failed on other communicators hold all GPU memory by which"):
        near.take()
    other.acks.numbers.append(second)
    other.collect()
    assert near.take() == second


def test_closing_does_not_wait_for_the_dead(gpu, near, monkeypatch):
    """A process was killed before its GPU came to an event."""
    monkeypatch.setattr(ipc, "CLOSING", 0.1)
    event = fake_ipc.SharedEvent()
    event.record()  # which no stream ever comes to
    monkeypatch.setitem(fake_ipc.opened_events, id(event), event)
    fake_cupy.runtime.streamWaitEvent(gpu._in.ptr, id(event))
    array = gpu.contiguous(np.ones(9))
    gpu.outgoing(array).by_peer(2)
    gpu.sent(array)
    staged, start = gpu.staged_bytes, time.monotonic()
    gpu.close()
    assert 0.1 < time.monotonic() - start < 10
    assert gpu.staged_bytes == staged > 0, "pinned memory that may still be copied to or from has been freed"
    gpu._in.queue.clear()
    del fake_cupy._busy[gpu._in.serial]
    fake_ipc.own_events.remove(event)
    backend._STUCK.remove(gpu)


def test_the_fence(gpu, near):
    """The made-up CUDA waits for the record that an event had when it was waited for, as CUDA does."""
    event, seen = near.own.events[0], []
    stream, late = (fake_cupy.Stream(non_blocking=True) for _ in range(2))
    done = []
    for number in range(2):
        stream.put(lambda number=number: done.append(number))
        stream.record(event)
    fake_cupy.runtime.streamWaitEvent(late.ptr, event.ptr)
    late.put(lambda: seen.extend(done))
    late.synchronize()
    assert seen == [0, 1]
