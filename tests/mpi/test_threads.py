"""Threads that call at the same time, each on a communicator of its own, and what is refused."""

import threading

import numpy as np
import pytest
from mpi4py import MPI

import mpiattn
from mpiattn.comm import mesh, running

# Communicators are made by blocking calls, in which MPICH's threads poll: on few cores these keep the others, and other
# ranks, from MPI for 20 s at times.
TIMEOUT = 120


@pytest.fixture
def comms(comm):
    """Communicators of equal ranks, made before threads use them."""
    made = [comm.Dup() for _ in range(3)]
    yield made
    for each in made:
        each.Free()


def in_threads(function, arguments):
    """Call a function in a thread for each argument; returns the exceptions that it raised."""
    raised = []

    def work(argument):
        try:
            function(argument)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def made(comm, **options):
    return mpiattn.MeshAttention(comm, seqlen=64, heads=2, head_dim=16, timeout=TIMEOUT, **options)


def ones(plan):
    return np.ones((1, len(plan.positions), 2, 16), np.float32)


@pytest.fixture
def multiple():
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("MPI was initialized with less than MPI_THREAD_MULTIPLE")


def test_plans_are_made_and_closed(comms, multiple):
    """A thread that waits reads the channels of others, which are closed and freed meanwhile."""

    def work(comm):
        for _ in range(10):
            with made(comm) as plan:
                x = ones(plan)
                out, lse = plan.forward(x, x, x)
                plan.backward(out, x, x, x, out, lse)
                np.testing.assert_array_equal(out, x)

    assert not in_threads(work, comms)


def test_communicators_are_made_one_at_a_time(comms, multiple, monkeypatch):
    """In each process: MPICH may crash where two threads make them."""
    make, active, most = mesh.Mesh, [], []

    def counted(*arguments):
        active.append(arguments)
        most.append(len(active))
        try:
            return make(*arguments)
        finally:
            active.remove(arguments)

    def work(comm):
        for _ in range(5):
            with made(comm):
                pass

    monkeypatch.setattr(mesh, "Mesh", counted)
    assert not in_threads(work, comms)
    assert max(most) == 1


def test_attention_without_a_plan(comms, multiple):
    def work(comm):
        for _ in range(20):
            x = np.ones((1, 3, 2, 4), np.float32)
            out, _ = mpiattn.attention(x, x, x, comm=comm, timeout=TIMEOUT)
            np.testing.assert_array_equal(out, x)

    assert not in_threads(work, comms)


def test_caches(comms, multiple):
    def work(comm):
        for _ in range(10):
            with mpiattn.KVCache(comm, kv_heads=2, head_dim=4, capacity=64, timeout=TIMEOUT) as cache:
                x = np.ones((1, 5, 2, 4), np.float32)
                cache.append(x, x)
                out, _ = mpiattn.tree_decode(np.ones((1, 1, 2, 4), np.float32), cache)
                np.testing.assert_array_equal(out, 1)

    assert not in_threads(work, comms)


def test_an_error_stays_in_its_thread(comms, multiple):
    """All ranks of one communicator raise it, those of the others go on."""

    def work(comm):
        with made(comm) as plan:
            for _ in range(20):
                x = ones(plan)
                plan.forward(x, x, x)
                if comm is comms[0]:
                    with pytest.raises(mpiattn.ArgumentError, match="q has shape"):
                        plan.forward(x[:, :, :1], x, x)

    assert not in_threads(work, comms)


def test_the_first_plans_of_one_communicator(comms, multiple, monkeypatch):
    """Two threads make the first plan on a communicator: the second is refused, on every rank."""
    entered, refused, nodes_of = threading.Event(), threading.Event(), mesh.nodes_of

    def late(peers):
        entered.set()
        assert refused.wait(TIMEOUT)
        return nodes_of(peers)

    monkeypatch.setattr(mesh, "nodes_of", late)

    def make(place):
        if place == 0:
            made(comms[0]).close()
            return
        assert entered.wait(TIMEOUT)
        with pytest.raises(mpiattn.MpiattnError, match="another thread makes one on this communicator"):
            made(comms[0])
        refused.set()

    assert not in_threads(make, (0, 1))


def test_one_thread_at_a_time(comms, monkeypatch):
    """Where MPI allows no more, a call beside another one is refused, also on a communicator of its own."""
    monkeypatch.setattr(running, "_thread_level", lambda: MPI.THREAD_SERIALIZED)
    plans = [made(comm) for comm in comms[:2]]
    x, raised = ones(plans[0]), []

    def beside(done):
        raised.extend(in_threads(lambda plan: plan.forward(x, x, x), plans[1:]))
        raised.extend(in_threads(made, comms[2:]))

    plans[0].forward(x, x, x, progress=beside)
    assert len(raised) >= 2
    for error in raised:
        assert type(error) is mpiattn.MpiattnError
        assert "call 1 of plan 1, forward is running in another thread" in str(error)
        assert "MPI_THREAD_MULTIPLE" in str(error)
    assert not in_threads(lambda plan: plan.forward(x, x, x), plans[1:])  # one after the other is right
    for plan in plans:
        plan.close()


def test_only_the_main_thread(comms, monkeypatch):
    plan = made(comms[0])
    x = ones(plan)
    monkeypatch.setattr(running, "_thread_level", lambda: MPI.THREAD_FUNNELED)
    raised = in_threads(lambda plan: plan.forward(x, x, x), [plan]) + in_threads(made, comms[1:2])
    assert [type(error) for error in raised] == [mpiattn.MpiattnError] * 2
    assert all("only its main thread may call" in str(error) for error in raised)
    plan.forward(x, x, x)
    plan.close()


def test_a_rank_names_its_call_on_that_communicator(comms):
    """An answer speaks of the communicator that was asked about, also if another thread began a call later."""
    plans = [made(comm) for comm in comms[:2]]
    for plan, call in zip(plans, ("the earlier", "the later")):
        running.begin(call, plan._home.channel)
    try:
        assert [running.call_on(plan._home.channel) for plan in plans] == ["the earlier", "the later"]
        assert running.call_on(None) == "the later"
    finally:
        for plan, call in zip(plans, ("the earlier", "the later")):
            running.end(call, plan._home.channel)
            plan.close()
