"""Ranks must make the same calls in the same order: otherwise all of them get one error, and nobody a wrong number."""

import copy
import pickle
import re
import threading

import numpy as np
import pytest
from mpi4py import MPI
from runs import on
from test_agreement import same_error

import mpiattn
from mpiattn import KVCache, MeshAttention, MpiattnError, PeerFailure, attention, ring_decode, tree_decode
from mpiattn.errors import CallError, CopyError

SHAPE = {"seqlen": 24, "heads": 2, "head_dim": 4, "causal": True}


@pytest.fixture
def two_plans(group):
    with MeshAttention(group, **SHAPE) as a, MeshAttention(group, **SHAPE) as b:
        yield a, b


@pytest.fixture
def two_caches(group):
    with (
        KVCache(group, capacity=90, kv_heads=2, head_dim=4) as a,
        KVCache(group, capacity=90, kv_heads=2, head_dim=4) as b,
    ):
        yield a, b


def chunks(plan, seed=0):
    whole = np.random.default_rng(seed).standard_normal((3, 1, 24, 2, 4), np.float32)
    return whole[:, :, plan.positions]


def crossed(group, odd, first, second):
    """The error of `first` on rank `odd` while the others make the call `second`."""
    return same_error(group, first if group.rank == odd else second, CallError)


@on(3)
@pytest.mark.parametrize("odd", [0, 2])
def test_case_32_two_plans(group, two_plans, odd):
    a, b = two_plans
    x, y = chunks(a), chunks(b, 1)
    expected = a.forward(*x), b.forward(*y)
    text = crossed(group, odd, lambda: a.forward(*x), lambda: b.forward(*y))
    others = [rank for rank in range(3) if rank != odd]
    assert f"rank {odd} is in call 2 of {a._name}, forward" in text
    assert f"ranks {others[0]}, {others[1]} are in call 2 of {b._name}, forward" in text
    again = a.forward(*x), b.forward(*y)  # the plans are as good as before
    assert all((array == other).all() for pair in zip(expected, again) for array, other in zip(*pair))


@on(3)
def test_case_32_plans_of_different_tiles(group):
    with MeshAttention(group, **SHAPE, tile="ring") as a, MeshAttention(group, **SHAPE, tile="qring") as b:
        crossed(group, 0, lambda: a.forward(*chunks(a)), lambda: b.forward(*chunks(b)))


@on(3)
def test_case_32_two_caches(group, two_caches):
    a, b = two_caches
    k = np.ones((1, 5, 2, 4), np.float32)
    for cache in two_caches:
        cache.append(k, k)
    q = np.ones((1, 1, 2, 4), np.float32)
    for first, second in (
        (lambda: tree_decode(q, a), lambda: tree_decode(q, b)),
        (lambda: a.append(k, k), lambda: b.append(k, k)),
        (lambda: a.truncate(3), lambda: b.free()),
        (lambda: tree_decode(q, a), lambda: ring_decode(q, a)),
    ):
        crossed(group, 0, first, second)
    assert a.lengths == b.lengths == (5,)
    tree_decode(q, a)


@on(3)
def test_case_32_different_methods(group, two_plans, two_caches):
    a, b = two_plans
    cache = two_caches[0]
    x = chunks(a)
    out, lse = a.forward(*x)
    calls = {
        "forward": lambda: a.forward(*x),
        "backward": lambda: a.backward(out, *x, out, lse),
        "gather": lambda: a.gather(out),
        "scatter": lambda: b.scatter(np.zeros((1, 24)), root=None),
        "append": lambda: cache.append(np.ones((1, 1, 2, 4), "f4"), np.ones((1, 1, 2, 4), "f4")),
        "a plan": lambda: MeshAttention(group, **SHAPE),
        "attention": lambda: attention(*x, comm=group),
        "a cache": lambda: KVCache(group, capacity=9, kv_heads=1, head_dim=4),
    }
    for first in calls:
        for second in calls:
            if first != second:
                crossed(group, 1, calls[first], calls[second])
    assert (a.forward(*x)[0] == out).all()


@on(3)
def test_case_32_closing(group, two_plans):
    """One rank closes a plan that the others call, or another one than they close."""
    a, b = two_plans
    x = chunks(a)
    crossed(group, 1, a.close, lambda: a.forward(*x))
    crossed(group, 0, a.close, b.close)
    assert a.forward(*x)[0].shape == x[0].shape  # nobody has closed anything
    a.close()


@on(3)
def test_a_rank_leaves_the_block_before_the_others_call(group):
    """All ranks leave it by the error that this is, so that they can make another plan."""
    fresh = group.Dup()

    def early():
        with MeshAttention(fresh, **SHAPE) as plan:
            if fresh.rank != 1:
                plan.forward(*chunks(plan))

    assert "rank 1 is in closing plan 1" in same_error(group, early, CallError)
    with MeshAttention(fresh, **SHAPE, timeout=20) as plan:
        plan.forward(*chunks(plan))
    fresh.Free()


@on(2)
def test_an_exception_leaves_a_plan_at_once(group):
    """Its rank does not wait for the others, who may never come to close theirs."""
    plan = MeshAttention(group, **SHAPE)
    if group.rank == 0:
        with pytest.raises(ZeroDivisionError), plan:
            raise ZeroDivisionError
    group.Barrier()
    if group.rank == 1:
        with pytest.raises(ZeroDivisionError), plan:
            raise ZeroDivisionError


@on(2)
def test_case_32_inside_its_own_callback(group, two_plans):
    a, b = two_plans
    x = chunks(a)
    other = group.Dup()
    with MeshAttention(other, **SHAPE) as elsewhere:  # another communicator's is no matter
        expected = a.forward(*x)[0]
        assert (a.forward(*x, progress=lambda done: elsewhere.forward(*x))[0] == expected).all()
    other.Free()
    with pytest.raises(MpiattnError, match="is running on this communicator") as caught:
        a.forward(*x, progress=lambda done: b.forward(*x))
    assert isinstance(caught.value, PeerFailure) or "forward is running on this communicator" in str(caught.value)
    with pytest.raises(MpiattnError, match="did not end"):
        a.forward(*x)


@on(2)
def test_case_32_from_a_second_thread(group, two_plans):
    a, _ = two_plans
    x, refused = chunks(a), []

    def call():
        try:
            a.gather(x[0])
        except MpiattnError as error:
            refused.append(str(error))

    def progress(done):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    expected = a.forward(*x)[0]
    assert (a.forward(*x, progress=progress)[0] == expected).all()
    assert refused and all("forward is running on this communicator" in text for text in refused)


@on(2)
def test_closing_inside_its_own_callback(group, two_plans):
    a, b = two_plans
    x, refused = chunks(a), []

    def progress(done):
        for plan in two_plans:
            try:
                plan.close()
            except MpiattnError as error:
                refused.append(str(error))

    expected = a.forward(*x)[0]
    assert (a.forward(*x, progress=progress)[0] == expected).all()
    refusal = r"closing plan \d+ is refused: call 2 of plan \d+, forward is running on this communicator"
    assert len(refused) > 1 and all(re.match(refusal, text) for text in refused)
    b.forward(*x)


@on(2)
def test_copies_are_refused(group, two_plans, two_caches):
    for made in (two_plans[0], two_caches[0]):
        for how in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(CopyError, match="cannot be copied or pickled"):
                how(made)
        assert isinstance(CopyError(""), TypeError) and issubclass(CopyError, mpiattn.MpiattnError)


@on(2)
@pytest.mark.parametrize("times", [20, pytest.param(600, marks=pytest.mark.slow)])
def test_unclosed_plans_leave_no_communicator(group, times):
    """MPI has only so many: here, slowly, more are made, and dropped, than there are."""
    homes = []
    for _ in range(times):
        fresh = group.Dup()
        plan = MeshAttention(fresh, seqlen=4, heads=1, head_dim=2, tile="1x2")
        homes.append(plan._home)
        del plan
        fresh.Free()
    assert all(home.comm == MPI.COMM_NULL for home in homes[:-1])  # what is left goes when the next is made
