"""Ranks that copy from each other's GPU, where that is refused, and where a rank fails; on a GPU that is none.

Ranks on the same GPU or not: CUDA has no other way between processes.
"""

import os
import re
import time
import types

import launch
import numpy as np
import pytest
from mpi4py import MPI
from runs import check

from mpiattn import ArgumentError, KVCache, Layout, MeshAttention, PeerFailure, backends
from mpiattn.arguments.arrays import on_host
from mpiattn.comm import device_trial, mesh, transport
from mpiattn.comm.acks import Acks
from mpiattn.comm.peers import Peers
from mpiattn.model import divided

pytestmark = [
    pytest.mark.workshop,
    pytest.mark.skipif(
        (os.environ.get("MPIATTN_CUPY"), os.environ.get("MPIATTN_TRANSPORT")) != ("fake", "ipc"),
        reason="MPIATTN_CUPY and MPIATTN_TRANSPORT do not say that there is a made-up GPU",
    ),
]
SHAPE = {"seqlen": 24, "heads": 2, "head_dim": 16, "backend": "cuda"}
AUTO = "ipc: this MPI does not take device memory"


@pytest.fixture
def fresh(comm, monkeypatch):
    """A communicator on which nothing has been found out, in processes that have shared no memory yet."""
    from mpiattn.backends.cuda import slots

    backends.get("cuda", "staged", comm.rank).close()  # the process takes its GPU
    monkeypatch.setattr(slots, "_slots", {})
    fresh = comm.Dup()
    yield fresh
    comm.Barrier()
    fresh.Free()


def right(plan):
    """Whether a plan's result is: a mean of ones."""
    out, _ = plan.forward(*np.ones((3, 1, len(plan.positions), 2, 16), np.float32))
    return bool(np.allclose(on_host(out), 1))


@pytest.mark.parametrize(
    "function, says",
    [
        ("ipcGetMemHandle", "rank {} cannot share memory of its GPU: CUDARuntimeError: a test refuses"),
        ("ipcGetEventHandle", "rank {} cannot share memory of its GPU: CUDARuntimeError: a test refuses"),
        ("ipcOpenMemHandle", "rank {} cannot read the GPU memory of rank 0: CUDARuntimeError: a test refuses"),
        ("ipcOpenEventHandle", "rank {} cannot read the GPU memory of rank 0: CUDARuntimeError: a test refuses"),
        ("written", "cannot read the GPU memory of rank {}: other bytes were read than were written"),
    ],
)
def test_a_refusal(comm, fresh, at_least, monkeypatch, function, says):
    """All ranks go on staged and say why; who insists gets an error, the same on every rank."""
    import cupy

    from mpiattn.backends.cuda import slots

    at_least(2)
    victim = comm.size - 1
    if comm.rank == victim and function == "written":
        own = slots.slots_of(cupy, cupy.cuda.runtime.getDevice())
        own.handles = own.handles._replace(written=bytes(slots.TRIED))
    elif comm.rank == victim:

        def refuse(*arguments):
            raise cupy.cuda.runtime.CUDARuntimeError("a test refuses")

        monkeypatch.setattr(cupy.cuda.runtime, function, refuse)
    texts = []
    with (
        MeshAttention(fresh, **SHAPE) as plan,
        KVCache(fresh, capacity=8, kv_heads=1, head_dim=16, backend="cuda") as cache,
    ):
        texts += plan.transport, cache.transport
        assert right(plan)
    assert re.match(r"staged: this MPI does not take device memory \(.*\), and no CUDA IPC: ", texts[0])
    assert says.format(victim) in texts[0] and "different GPUs" not in texts[0]
    with pytest.raises(ArgumentError) as caught:
        MeshAttention(fresh, **SHAPE, transport="ipc")
    texts.append(str(caught.value))
    assert texts[2].startswith("transport is 'ipc', but ") and says.format(victim) in texts[2]
    assert comm.allgather(texts) == [texts] * comm.size


def test_hidden_gpus(comm, fresh, at_least, monkeypatch):
    """What is likely the reason is said too."""
    import cupy

    at_least(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(comm.rank))
    monkeypatch.setattr(cupy.cuda.runtime, "ipcOpenMemHandle", None)
    with MeshAttention(fresh, **SHAPE) as plan:
        assert "CUDA_VISIBLE_DEVICES is '0' on rank 0 and '1' on rank 1" in plan.transport
        assert "--gpus-per-node" in plan.transport and right(plan)


def test_handles_are_opened_once(comm, fresh, monkeypatch):
    """Of every other rank, whatever plans, caches and communicators come and go."""
    import cupy

    runtime, opened = cupy.cuda.runtime, []
    counted = runtime.ipcOpenMemHandle
    monkeypatch.setattr(runtime, "ipcOpenMemHandle", lambda handle: opened.append(handle) or counted(handle))
    for group in (fresh, comm, fresh):
        with MeshAttention(group, **SHAPE) as plan, plan.like(seqlen=30) as other:
            with KVCache(group, capacity=8, kv_heads=1, head_dim=16, backend="cuda", transport="auto") as cache:
                assert len({plan.transport, other.transport, cache.transport}) == 1
            assert right(plan) and right(other)
            assert plan.transport.startswith(AUTO) == (comm.size > 1)
    with pytest.raises(ZeroDivisionError), MeshAttention(fresh, **SHAPE):
        raise ZeroDivisionError("between calls, on every rank")
    assert len(opened) == len(set(opened)) == comm.size - 1


def test_more_pieces_than_slots(comm, at_least):
    """All ranks send to all at once; then again, so that slots must have come back."""
    at_least(2)
    with MeshAttention(comm, **SHAPE, transport="ipc") as plan:
        gpu, exchange = plan._backend, plan._exchange
        assert plan.transport == "ipc: as asked for"
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        for turn in range(3):
            own = gpu.contiguous(np.arange(1801, dtype=np.float32) + 10000 * comm.rank + turn)
            got = {rank: gpu.empty((1801,), np.float32) for rank in others}
            gpu.begin()
            posted, before = [], plan.sent
            for rank in others:
                posted += exchange.receive(comm, gpu.incoming(got[rank], [gpu.zero([got[rank]])]), rank, 7)
            for rank in others:
                posted += exchange.send(comm, gpu.outgoing(own), rank, 7)
            exchange.wait(posted)
            for rank in others:
                gpu.sent(own)
                gpu.wait(gpu.arrived(got[rank]))
                expected = np.arange(1801, dtype=np.float32) + 10000 * rank + turn
                assert (on_host(got[rank]) == expected).all()
            assert plan.sent[0] - before[0] == len(others) * own.nbytes
            assert not gpu.near.own.lost and not gpu.staged_bytes


@pytest.mark.parametrize("schedule", ["greedy", "collective"])
def test_two_nodes(comm, fresh, at_least, monkeypatch, schedule):
    """Ranks of the other node are reached through host memory, with other pieces; a rank may be alone on its node."""
    at_least(3)
    nodes = [int(rank >= 2) for rank in range(comm.size)]
    monkeypatch.setattr(mesh, "nodes_of", lambda peers: nodes[: peers.size])
    shape = {"seqlen": 43, "heads": 4, "kv_heads": 2, "head_dim": 16, "causal": True, "backends": ("cuda",)}
    layout = Layout("contiguous", 43, comm.size, (20, 0, 23, *[0] * comm.size)[: comm.size])
    check(fresh, **shape, tile="auto", layout=layout, schedule=schedule)
    with MeshAttention(fresh, **SHAPE, schedule="greedy") as plan:
        assert plan.transport.startswith(AUTO) and right(plan)
        assert set(plan._backend.near.opened) == {r for r in range(comm.size) if nodes[r] == nodes[comm.rank]} - {
            comm.rank
        }


@pytest.mark.parametrize("schedule", ["greedy", "collective"])
def test_an_mpi_that_is_slower_within_nodes(comm, fresh, at_least, monkeypatch, schedule):
    """It carries device memory between nodes all the same; the same ranks are timed once."""
    at_least(3)
    from mpiattn.system import gpu_aware_mpi, gpu_probe

    nodes = [int(rank >= 2) for rank in range(comm.size)]
    monkeypatch.setattr(mesh, "nodes_of", lambda peers: nodes[: peers.size])
    monkeypatch.setattr(gpu_aware_mpi, "gpu_aware", lambda: (True, "a test says so"))
    monkeypatch.setattr(gpu_probe, "probe", lambda: {"answer": "yes", "text": "and that it works"})
    monkeypatch.setattr(transport, "_probed", {})
    monkeypatch.setattr(device_trial, "_SECONDS", {})
    monkeypatch.setattr(device_trial, "NBYTES", 2500)  # several pieces of several slots
    monkeypatch.setattr(transport, "CLEARLY", np.inf)
    timed, seconds = [], device_trial.seconds
    monkeypatch.setattr(device_trial, "seconds", lambda *given: timed.append(given[-1].transport) or seconds(*given))
    shape = {"seqlen": 43, "heads": 4, "kv_heads": 2, "head_dim": 16, "causal": True, "backends": ("cuda",)}
    layout = Layout("contiguous", 43, comm.size, (20, 0, 23, *[0] * comm.size)[: comm.size])
    check(fresh, **shape, tile="auto", layout=layout, schedule=schedule)
    with MeshAttention(fresh, **SHAPE, schedule="greedy") as plan, plan.like(seqlen=30) as other:
        for made in (plan, other):
            assert right(made) and made._backend.by_mpi == "device"
            assert made.transport.startswith("ipc: a test says so; and that it works; between ranks of a node ")
            assert re.search(r" \S+ GB/s by MPI, \S+ GB/s by CUDA IPC$", made.transport)
        assert not plan._backend.staged_bytes, "nothing has gone through the host"
    assert timed == ["device", "ipc"]
    monkeypatch.setattr(transport, "CLEARLY", 0)
    with MeshAttention(fresh, **SHAPE, schedule="greedy") as plan:
        assert plan.transport.startswith("device: a test says so") and right(plan)


def test_ranks_are_timed_on_other_gpus_too(comm, fresh, at_least, monkeypatch):
    """And all take the times of the GPUs that they have now, also where only one of them has changed its GPU."""
    at_least(2)
    seconds, faster = iter([10.0, 1.0, 1.0, 10.0]), []  # by MPI and by CUDA IPC, on the first GPUs and on the others
    monkeypatch.setattr(transport, "another", lambda *arguments: backends.get("numpy"))
    monkeypatch.setattr(device_trial, "_SECONDS", {})
    monkeypatch.setattr(device_trial, "seconds", lambda *arguments: next(seconds))
    for gpu in (0, 1, 0):
        backend = types.SimpleNamespace(device=gpu if comm.rank == 1 else 0, by_mpi="device")
        faster.append(transport._is_faster(Peers(fresh), [0] * comm.size, backend, None)[0])
    assert faster == [True, False, True]


def test_ranks_that_are_alone(comm, fresh, monkeypatch):
    monkeypatch.setattr(mesh, "nodes_of", lambda peers: [*range(peers.size)])
    with MeshAttention(fresh, **SHAPE) as plan:
        assert plan.transport.endswith("no two ranks share a node") and right(plan)
    with pytest.raises(
        ArgumentError, match="transport is 'ipc', but no two ranks share a node; take 'staged' or 'auto'"
    ):
        KVCache(fresh, capacity=8, kv_heads=1, head_dim=16, backend="cuda", transport="ipc")


def test_another_gpu(comm, fresh, at_least, monkeypatch):
    """A plan made while another GPU is current shares memory of that one, which opens that of the others too.

    `like` stays on its plan's GPU.
    """
    import cupy

    at_least(2)
    runtime, opened_on = cupy.cuda.runtime, set()
    counted = runtime.ipcOpenMemHandle
    monkeypatch.setattr(
        runtime, "ipcOpenMemHandle", lambda handle: opened_on.add(runtime.getDevice()) or counted(handle)
    )
    with MeshAttention(fresh, **SHAPE) as plan:
        assert right(plan)
        device = plan._backend.device
        if comm.rank == 1:
            cupy.cuda.Device(1 - device).use()
        try:
            with pytest.raises(ArgumentError, match=r"the current GPU is .; it must be ., .* \(on rank 1 of "):
                plan.like(seqlen=30)
            with MeshAttention(fresh, **SHAPE) as other:
                assert other.transport.startswith(AUTO) and right(other)
                assert other._backend.near.device == (1 - device if comm.rank == 1 else device)
        finally:
            cupy.cuda.Device(device).use()
        assert opened_on == ({0, 1} if comm.rank == 1 else {device})
        assert right(plan)


def test_a_rank_raises_in_a_pass(comm, at_least):
    """Slots that were under way are not used again; when most are lost, others take their place."""
    at_least(2)
    guilty = comm.size - 1
    for _ in range(4):
        plan = MeshAttention(comm, **SHAPE, tile=(1, comm.size), schedule="greedy", layout="contiguous", timeout=500)
        assert plan.transport.startswith(AUTO)
        if comm.rank == guilty:

            def fail(*arguments, **options):
                raise ZeroDivisionError("on purpose")

            plan._backend.attend = fail
        try:
            right(plan)
        except (ZeroDivisionError, PeerFailure) as error:
            ending = type(error).__name__
        else:
            ending = "nothing"
        endings = comm.allgather(ending)
        assert endings[guilty] == "ZeroDivisionError" and set(endings) <= {
            "ZeroDivisionError",
            "PeerFailure",
            "nothing",
        }
        plan.close()
        with MeshAttention(comm, **SHAPE) as again:
            assert again.transport.startswith(AUTO) and right(again)
            assert (plan._backend.near.failed, again._backend.near.failed) == (True, False)


def test_slots_that_do_not_come_back(comm, at_least, monkeypatch):
    """A rank that has died holds them: those that wait for it give up at their time limit and say for whom."""
    at_least(2)
    guilty, limit = comm.size - 1, comm.bcast(0.5 * launch.time_factor() * max(1, comm.size / 4))
    plan = MeshAttention(
        comm, **SHAPE, tile=(1, comm.size), schedule="greedy", route="direct", layout="contiguous", timeout=limit
    )
    if comm.rank == guilty:
        monkeypatch.setattr(Acks, "send", lambda *arguments: None)
        plan._exchange.peers.timeout = 500.0  # it learns of it from the others
    start, text = time.monotonic(), ""
    try:
        right(plan)
    except PeerFailure as failure:
        text = str(failure)
    if comm.rank != guilty:
        assert time.monotonic() - start < 20 * limit
        assert re.search(rf"has waited .* send \d+ bytes to rank {guilty}\b", text) or (comm.size > 2 and not text), (
            text
        )
    assert any(comm.allgather(text))
    plan.close()
    monkeypatch.undo()
    with MeshAttention(comm, **SHAPE) as again:
        assert right(again)


def test_one_rank():
    with MeshAttention(MPI.COMM_SELF, **SHAPE) as plan:
        assert plan.transport.startswith("staged: ") and right(plan)


def test_pieces_of_the_scores(comm):
    """Ranks receive in another order than others send, so that messages nobody waits for yet would hold all slots."""
    arguments = {"batch": 2, "seqlen": 48, "heads": 4, "head_dim": 16, "causal": True, "tile": "bands", "timeout": 20.0}
    check(comm, **arguments, layout="zigzag", dtype="float32")
    with MeshAttention(comm, **arguments, backend="cuda") as plan:
        assert plan.transport.startswith("staged: ") and plan.transport.endswith(" do not copy from each other's GPU")
    with pytest.raises(
        ArgumentError, match=r"^transport is 'ipc'; with tile bands, .* it must be auto, staged or device$"
    ):
        MeshAttention(comm, **arguments, backend="cuda", transport="ipc")


def test_auto_takes_meshes(comm, at_least, monkeypatch):
    """Also where pieces would take no time, and for a plan like another one."""
    at_least(2)
    monkeypatch.setattr(divided.PassLoad, "seconds", lambda *how: (np.zeros(comm.size), np.zeros(comm.size)))
    shape = SHAPE | {"seqlen": 4096, "causal": True}
    with MeshAttention(comm, **shape, transport="staged") as plan:
        assert plan.tile.divided
    with MeshAttention(comm, **shape, transport="ipc") as plan, plan.like(window=(1023, 0)) as windowed:
        assert not plan.tile.divided and not windowed.tile.divided
