"""In a program: a rank that raises gets its error, its peers PeerFailure in time, and the communicator is as before."""

import os
import re
import socket
import time

import launch
import numpy as np
import pytest
from mpi4py import MPI

from mpiattn import ArgumentError, KVCache, MeshAttention, MpiattnError, PeerFailure, tree_decode
from mpiattn.comm import channel
from mpiattn.comm.mpi_errors import in_words
from mpiattn.comm.peers import Peers
from mpiattn.decode import cache_file

SHAPE = {"seqlen": 24, "heads": 2, "head_dim": 4}
TIMEOUT = 0.5  # seconds, on a quiet machine with a core for every four ranks


@pytest.fixture
def timeout(comm):
    """The same on every rank."""
    crowd = comm.size / (4 * (os.cpu_count() or 1))
    return comm.bcast(TIMEOUT * launch.time_factor() * max(1, crowd))


def chunks(plan):
    return [np.ones((1, len(plan.positions), 2, 4), np.float32) for _ in range(3)]


def struck(plan, at_launch):
    """Let this rank's back end fail at its so-many-th launch."""
    attend, count = plan._backend.attend, [0]

    def fail(*args, **how):
        count[0] += 1
        if count[0] > at_launch:
            raise ZeroDivisionError("on purpose")
        return attend(*args, **how)

    plan._backend.attend = fail


@pytest.mark.parametrize("schedule", ["greedy", "collective"])
def test_a_rank_raises_in_a_pass(comm, at_least, schedule):
    at_least(2)
    guilty = comm.size - 1
    # a time-out that nobody lives to see: they learn of it from the one that failed
    plan = MeshAttention(comm, **SHAPE, tile=(1, comm.size), schedule=schedule, timeout=500, layout="contiguous")
    if comm.rank == guilty:
        struck(plan, 0)
    try:
        plan.forward(*chunks(plan))
    except (ZeroDivisionError, PeerFailure) as error:
        ending = error
    else:
        ending = None  # a rank that had all it needed before the other failed
    endings = comm.allgather(type(ending).__name__)
    assert endings[guilty] == "ZeroDivisionError" and set(endings) <= {"ZeroDivisionError", "PeerFailure", "NoneType"}
    if isinstance(ending, PeerFailure):
        assert ending.ranks == (guilty,)
        assert re.fullmatch(
            rf"rank {guilty} on .* raised ZeroDivisionError in call 1 of plan \d+, forward, in step "
            r"\d+ of \d+ of the forward pass: on purpose",
            str(ending),
        )
    if ending is not None:
        with pytest.raises(MpiattnError, match="make a new one"):
            plan.forward(*chunks(plan), check=False)
    comm.Barrier()
    plan.close()
    with MeshAttention(comm, **SHAPE) as again:  # the communicator is none the worse for it
        out, _ = again.forward(*chunks(again))
        assert np.allclose(out, 1)


def test_a_rank_does_not_come(comm, at_least, timeout):
    at_least(2)
    absent, fresh = comm.size - 1, comm.Dup()
    plan = MeshAttention(fresh, **SHAPE, timeout=timeout)
    if comm.rank != absent:
        with pytest.raises(
            PeerFailure,
            match=f"has waited {timeout:g} s for the other ranks; no answer from rank "
            f"{absent} on {socket.gethostname()}$",
        ) as caught:
            plan.forward(*chunks(plan))
        assert caught.value.ranks == (absent,)
    comm.Barrier()
    plan.close()
    with MeshAttention(comm, **SHAPE) as again:
        again.forward(*chunks(again))


@pytest.mark.parametrize("algorithm", ["butterfly", "allreduce"])
def test_a_rank_raises_while_decoding(comm, at_least, algorithm):
    at_least(2)
    guilty, fresh = comm.size - 1, comm.Dup()
    cache = KVCache(fresh, capacity=40, kv_heads=1, head_dim=4, timeout=500)
    cache.append(*np.ones((2, 1, 24, 1, 4), np.float32))
    if comm.rank == guilty:
        cache._backend.attend_pages = None  # not callable
    q, ending = np.ones((1, 1, 2, 4), np.float32), None
    try:
        tree_decode(q, cache, algorithm=algorithm)
    except (TypeError, PeerFailure) as error:
        ending = error
    endings = comm.allgather(type(ending).__name__)
    assert endings[guilty] == "TypeError" and "PeerFailure" in endings
    if isinstance(ending, PeerFailure):
        assert str(ending).startswith(f"rank {guilty} on ") and ending.ranks == (guilty,)
        assert "raised TypeError in call 2 of cache 1, tree_decode: " in str(ending)
    if ending is not None:
        with pytest.raises(MpiattnError, match="make a new one"):
            tree_decode(q, cache, check=False)
    comm.Barrier()
    cache.close()


def test_an_error_of_another_communicator(comm, at_least):
    """What all ranks of that one raise, here one rank alone, is not what all ranks of this one do."""
    at_least(2)
    fresh = comm.Dup()
    plan = MeshAttention(fresh, **SHAPE, tile=(1, comm.size), schedule="greedy", timeout=500, layout="contiguous")
    comm.Barrier()

    def progress(done):
        if not comm.rank:
            MeshAttention(MPI.COMM_SELF, seqlen=-1, heads=1, head_dim=1)

    try:
        plan.forward(*chunks(plan), progress=progress)
    except (ArgumentError, PeerFailure) as error:
        ending = error
    else:
        ending = None
    endings = comm.allgather(type(ending).__name__)
    assert endings[0] == "ArgumentError" and set(endings[1:]) <= {"PeerFailure", "NoneType"}
    if isinstance(ending, PeerFailure):
        assert "rank 0 on " in str(ending) and "raised ArgumentError in call 1 of plan 1, forward" in str(ending)
    if ending is not None:
        with pytest.raises(MpiattnError, match="did not end"):
            plan.forward(*chunks(plan))
    comm.Barrier()
    plan.close()


def test_a_lost_rank_of_another_communicator(comm, at_least, timeout):
    """Ranks of one communicator that know of the failure tell those of the other, who do not."""
    at_least(3)
    fresh, pair = comm.Dup(), comm.Split(comm.rank > 1)
    plan = MeshAttention(fresh, **SHAPE, timeout=500)
    inner = MeshAttention(pair, **SHAPE, timeout=timeout)
    comm.Barrier()

    def progress(done):
        if not comm.rank:
            inner.forward(*chunks(inner))

    expected = "raised PeerFailure in call 1 of plan 1, forward" if comm.rank else "has waited"
    try:
        plan.forward(*chunks(plan), progress=progress)
    except PeerFailure as error:
        assert expected in str(error)
        assert error.ranks == ((0,) if comm.rank else ())  # of its own communicator; there all wait
    else:
        assert comm.rank
    with pytest.raises(MpiattnError, match=r"raised PeerFailure|did not end"):
        plan.forward(*chunks(plan))
    comm.Barrier()
    for made in (plan, inner):
        made.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda comm: MeshAttention(comm, **SHAPE, timeout=500),
        lambda comm: KVCache(comm, capacity=9, kv_heads=1, head_dim=4, timeout=500),
    ],
)
def test_a_rank_is_interrupted_in_the_making(comm, at_least, monkeypatch, make):
    at_least(2)
    fresh = comm.Dup()
    plan = MeshAttention(fresh, **SHAPE, timeout=500)
    comm.Barrier()
    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            for collective in ("allgather", "broadcast"):
                patch.setattr(Peers, collective, interrupted)
        with pytest.raises((KeyboardInterrupt, PeerFailure)) as caught:
            make(fresh)
    if comm.rank < comm.size - 1:
        assert re.fullmatch(
            r"rank \d+ on .* raised KeyboardInterrupt in making a (plan|cache): on purpose", str(caught.value)
        )
        assert caught.value.ranks == (comm.size - 1,)
    with pytest.raises(MpiattnError, match="did not end"):
        plan.forward(*chunks(plan))
    plan.close()
    with MeshAttention(fresh, **SHAPE) as again:
        again.forward(*chunks(again))


def interrupted(*args):
    raise KeyboardInterrupt("on purpose")


def test_a_rank_is_interrupted_while_loading(comm, at_least, tmp_path):
    at_least(2)
    fresh, path = comm.Dup(), comm.bcast(str(tmp_path / "cache.h5"))
    with KVCache(fresh, capacity=40, kv_heads=1, head_dim=4) as cache:
        cache.append(*np.ones((2, 1, 24, 1, 4), np.float32))
        cache.save(path)
    guilty = comm.rank == comm.size - 1
    with pytest.raises((KeyboardInterrupt, PeerFailure)) as caught:
        cache_file.load(KVCache, fresh, path, {"timeout": 500}, progress=interrupted if guilty else None)
    if not guilty:
        assert "raised KeyboardInterrupt in call 1 of cache 1, load: on purpose" in str(caught.value)
    comm.Barrier()
    with KVCache.load(fresh, path) as again:
        assert again.lengths == (24,)


def test_a_stale_message(comm, at_least):
    """A rank that did not notice a failure frees its communicator, and MPI uses its number again."""
    at_least(3)
    pair = comm.Split(comm.rank > 1)
    fresh = comm.Dup()
    plan = MeshAttention(fresh, **SHAPE, timeout=500)
    comm.Barrier()
    if comm.rank == 2:
        with pytest.raises(ZeroDivisionError), plan.call("test"):
            raise ZeroDivisionError("on purpose")
    comm.Barrier()
    plan.close()
    fresh.Free()
    for _ in range(10):
        other = pair.Dup()
        with MeshAttention(other, **SHAPE) as inner:
            inner.forward(*chunks(inner))
            time.sleep(5 * channel.LISTEN)
            inner.forward(*chunks(inner))
        other.Free()
    pair.Free()


def test_a_long_error(comm, at_least):
    at_least(2)
    fresh = comm.Dup()
    plan = MeshAttention(fresh, **SHAPE, timeout=500)
    comm.Barrier()
    if comm.rank == comm.size - 1:
        with pytest.raises(ZeroDivisionError), plan.call("test"):
            raise ZeroDivisionError("x" * 2**22)
        time.sleep(1)  # outside MPI
        comm.Barrier()
    else:
        with pytest.raises(PeerFailure, match=r"raised ZeroDivisionError .*xxx") as caught:
            plan.forward(*chunks(plan))
        assert len(str(caught.value)) <= channel.LONGEST
        comm.Barrier()
    plan.close()


def test_plans_that_shared_the_mesh(comm, at_least, timeout):
    """What is still under way is not read by another plan: it says so, on every rank that knows."""
    at_least(2)
    late, fresh = comm.size - 1, comm.Dup()
    plans = [MeshAttention(fresh, **SHAPE, timeout=timeout) for _ in range(2)]
    inputs = chunks(plans[0])
    if comm.rank == late:
        comm.Barrier()  # until the others have given up
    with pytest.raises(PeerFailure):
        plans[0].forward(*inputs)
    if comm.rank != late:
        comm.Barrier()
    for call in (
        lambda plan: plan.forward(*inputs),
        lambda plan: plan.gather(inputs[0]),
        lambda plan: plan.scatter(inputs[0]),
    ):
        for plan in plans:
            with pytest.raises(MpiattnError, match="did not end"):
                call(plan)
    for plan in plans:
        plan.close()
    with MeshAttention(fresh, **SHAPE) as again:
        again.forward(*inputs)


def test_a_rank_makes_no_plan(comm, at_least, timeout):
    at_least(2)
    fresh = comm.Dup()
    if comm.rank:
        with pytest.raises(PeerFailure) as caught:
            MeshAttention(fresh, **SHAPE, timeout=timeout)
        assert caught.value.ranks == (0,)
    comm.Barrier()


def test_a_rank_makes_no_second_plan(comm, at_least, timeout):
    """All others name it and nobody else, after one time limit; the communicator is none the worse for it."""
    at_least(2)
    fresh = comm.Dup()
    plan = MeshAttention(fresh, **SHAPE, timeout=timeout)
    if comm.rank:
        with pytest.raises(PeerFailure) as caught:
            MeshAttention(fresh, **SHAPE, timeout=timeout)
        assert caught.value.ranks == (0,)
    comm.Barrier()
    with MeshAttention(fresh, **SHAPE, timeout=20 * timeout) as again:  # of which rank 0 learns here
        again.forward(*chunks(again))
    plan.close()


def test_a_rank_raises_while_a_plan_is_made(comm, at_least, monkeypatch):
    at_least(2)
    fresh = comm.Dup()

    def fail(*args):
        raise ZeroDivisionError("on purpose")

    if comm.rank == 0:
        monkeypatch.setattr("mpiattn.plan.mesh_attention.settle", fail)
    with pytest.raises((ZeroDivisionError, PeerFailure)) as caught:
        MeshAttention(fresh, **SHAPE, timeout=500)
    if comm.rank:
        assert re.fullmatch("rank 0 on .* raised ZeroDivisionError in making a plan: on purpose", str(caught.value))


def test_a_slow_rank_is_waited_for(comm, timeout):
    with MeshAttention(comm, **SHAPE, timeout=60 * timeout) as plan:
        if not comm.rank:
            time.sleep(timeout)
        plan.forward(*chunks(plan))
    with MeshAttention(comm, **SHAPE, timeout=float("inf")) as plan:
        plan.forward(*chunks(plan))


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), "soon", True])
@pytest.mark.parametrize(
    "make",
    [
        lambda comm, timeout: MeshAttention(comm, **SHAPE, timeout=timeout),
        lambda comm, timeout: KVCache(comm, capacity=9, kv_heads=1, head_dim=4, timeout=timeout),
    ],
)
def test_wrong_timeouts(comm, wrong, make):
    with pytest.raises(ArgumentError, match=r"^timeout is") as caught:
        make(comm, 5 if comm.rank else wrong)
    assert len(set(comm.allgather(str(caught.value)))) == 1


def test_allgather_and_reduce(comm):
    peers = Peers(comm)
    assert peers.allgather({"rank": comm.rank, "more": "x" * comm.rank}) == [
        {"rank": rank, "more": "x" * rank} for rank in range(comm.size)
    ]
    assert peers.largest([comm.rank, -comm.rank]).tolist() == [comm.size - 1, 0]
    total = np.full((2, 3), 1.5)
    peers.reduce(total, MPI.SUM)
    assert (total == 1.5 * comm.size).all()


def test_an_error_of_mpi_is_no_exception_of_this_rank(comm, at_least):
    """A message that MPI cannot complete: the rank that waits for it says so, and asks who is there."""
    at_least(2)

    def fails():
        raise MPI.Exception(MPI.ERR_IN_STATUS)

    duplicate = comm.Dup()
    own = channel.Channel(duplicate)
    peers = Peers(duplicate, 20.0, channel=own)
    try:
        if comm.rank == 0:
            with pytest.raises(PeerFailure) as caught:
                peers.until(fails, lambda: "for a message")
            assert "has waited for a message, and MPI cannot complete it; the other ranks" in str(caught.value)
        else:
            with pytest.raises(PeerFailure, match=r"rank 0 of .* has waited for a message, and MPI cannot complete it"):
                peers.until(lambda: False)
        assert in_words(MPI.Exception(MPI.ERR_IN_STATUS)) == "MPI reports an error"
        assert "runcat" in in_words(MPI.Exception(MPI.ERR_TRUNCATE)) and in_words(KeyError("x")) == "KeyError: 'x'"
    finally:
        own.close()
        comm.Barrier()
        duplicate.Free()
