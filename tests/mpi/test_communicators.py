"""Whatever communicator a program has, and any number of plans on it; nothing is left behind."""

import resource
import sys

import numpy as np
import pytest
from dense import bits, draw_all
from mpi4py import MPI
from runs import attend, check, my_chunks, on, subcomm, tiles

from mpiattn import ArgumentError, MeshAttention, MpiattnError, PeerFailure
from mpiattn.comm import mesh
from mpiattn.comm.mesh import Home

SHAPE = {"seqlen": 43, "heads": 2, "head_dim": 8, "dtype": "float64", "causal": True}
TINY = {"seqlen": 4, "heads": 1, "head_dim": 1}


@pytest.mark.many
def test_case_25_reversed_ranks(comm):
    with subcomm(comm, comm.size, key=-comm.rank) as back:
        assert back.rank == comm.size - 1 - comm.rank
        for a, b in tiles(comm.size):
            check(back, **SHAPE, tile=(a, b))


def test_case_25_halves_at_once(comm, at_least):
    """8 -> 4 and 4: each half runs its own problem, in a shuffled order of ranks."""
    at_least(2)
    half = comm.Split(comm.rank % 2, (comm.rank * 5) % 7)
    for seed in range(3):
        check(half, seed=seed, **{**SHAPE, "seqlen": 20 + 11 * (comm.rank % 2)}, layout="striped")
    half.Free()


def test_case_25_plans_interleaved(comm):
    """Two communicators with the same ranks and two plans on one of them: no message of one is taken by another."""
    other = comm.Split(0, -comm.rank)
    arguments = [(comm, {}), (other, {"tile": "ring"}), (comm, {"tile": "qring", "seqlen": 31})]
    inputs, expected, plans = [], [], []
    for seed, (where, different) in enumerate(arguments):
        plan = MeshAttention(where, **{**SHAPE, **different}, backend="deferred")
        chunks = my_chunks(plan, *draw_all(plan.problem, seed))
        plans.append(plan)
        inputs.append(chunks)
        with MeshAttention(where, **{**SHAPE, **different}, backend="numpy") as alone:
            expected.append(attend(alone, chunks))
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        for i in order:
            assert bits(*plans[i].forward(*inputs[i][:3])) == bits(*expected[i][:2])
        for i in order[::-1]:  # a backward after other plans' passes
            q, k, v, dout, dlse, _ = inputs[i]
            grads = plans[i].backward(dout, q, k, v, *expected[i][:2], dlse=dlse)
            assert bits(*grads) == bits(*expected[i][2:])
    for plan in plans[::-1]:
        plan.close()
    other.Free()


def test_messages_of_the_program_stay_its_own(comm):
    """A receive from anyone with any tag, posted by the program, gets the program's message only."""
    note = np.full(1, -1)
    request = comm.Irecv(note, MPI.ANY_SOURCE, MPI.ANY_TAG)
    check(comm, **SHAPE)
    comm.Isend(np.array([comm.rank]), (comm.rank + 1) % comm.size, 0).Wait()
    request.Wait()
    assert note[0] == (comm.rank - 1) % comm.size


@pytest.mark.slow
@on(2)
def test_case_31_three_thousand_plans(group):
    plans = [MeshAttention(group, **TINY, tile=tiles(2)[i % 2]) for i in range(3000)]
    chunk = np.ones((1, 2, 1, 1), np.float32)
    for plan in (plans[0], plans[1], plans[-1]):
        out, lse = plan.forward(chunk, chunk, chunk)
        _, _, dv = plan.backward(chunk, chunk, chunk, chunk, out, lse)
        assert (out == 1).all() and np.allclose(dv, 1)
    for plan in plans:
        plan.close()


@pytest.mark.parametrize("times", [20, pytest.param(600, marks=pytest.mark.slow)])
def test_plans_on_fresh_communicators_leave_nothing(comm, times):
    """Slowly, more communicators one after another than MPI libraries can hold at once (MPICH: 2048 contexts)."""
    for i in range(times if comm.size <= 2 else 20):
        fresh = comm.Dup()
        plan = MeshAttention(fresh, **TINY, tile=tiles(comm.size)[i % len(tiles(comm.size))])
        home, mesh = plan._home, plan._mesh
        plan.close()
        assert MPI.COMM_NULL == mesh.comm == mesh.row == mesh.column == home.comm
        fresh.Free()


@on(2)
def test_a_hundred_plans_leave_no_memory(group):
    """Each holds some megabytes while it is open."""

    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    sizes = []
    for _ in range(100):
        with MeshAttention(group, seqlen=128, heads=8, head_dim=256) as plan:
            chunk = np.ones((1, 64, 8, 256), np.float32)
            plan.backward(chunk, chunk, chunk, chunk, *plan.forward(chunk, chunk, chunk))
            held = plan.nbytes
        sizes.append(resident())
    assert held > 4e6
    assert sizes[-1] - sizes[19] < 4 * held  # and not 80 times


def test_plans_share_one_duplicate_and_mesh(comm):
    fresh = comm.Dup()
    first, second = MeshAttention(fresh, **TINY), MeshAttention(fresh, **TINY)
    assert first._home is second._home and first._mesh is second._mesh
    first.close()
    assert second._mesh.comm != MPI.COMM_NULL
    chunk = np.ones((1, len(second.positions), 1, 1), np.float32)
    second.forward(chunk, chunk, chunk)
    second.close()
    second.close()  # closing twice is closing once
    third = MeshAttention(fresh, **TINY)  # and the communicator can be used again
    assert third._home is not first._home
    third.close()
    fresh.Free()


def test_meshes_of_plans_to_come(comm, monkeypatch):
    """While a home has users, the newest mesh without users is kept for the next plan, here one."""
    monkeypatch.setattr(mesh, "UNUSED", 1)
    fresh, made, how = comm.Dup(), [], TINY | {"heads": comm.size}
    with MeshAttention(fresh, **how, tile=(1, comm.size)) as plan:
        for shape in [*tiles(comm.size), (comm.size, 1, 1)] if comm.size > 1 else []:
            for _ in range(2 * (shape != (1, comm.size))):
                with MeshAttention(fresh, **how, tile=shape) as other:
                    made.append(other._mesh)
                    chunk = np.ones((1, len(other.positions), comm.size, 1), np.float32)
                    other.forward(chunk, chunk, chunk)
        assert all(first is again for first, again in zip(made[::2], made[1::2]))
        assert [each.row != MPI.COMM_NULL for each in made[::2]] == [False] * (len(made) // 2 - 1) + [True] * bool(made)
        assert plan._mesh.row != MPI.COMM_NULL
    assert all(each.row == MPI.COMM_NULL for each in made)
    fresh.Free()


def test_a_plan_that_fails_leaves_nothing(comm):
    fresh = comm.Dup()
    for wrong in ({"heads": 0}, {"tile": "0x0"}, {"dtype": "int8"}, {"backend": "abacus"}):
        with pytest.raises(ArgumentError):
            MeshAttention(fresh, **{**TINY, **wrong})
    with MeshAttention(fresh, **TINY) as plan:
        assert plan._home.users == 1
    home = Home.enter(fresh)
    assert home.users == 1 and not home.meshes
    home.leave()
    fresh.Free()


def test_communicator_freed_before_the_plan(comm):
    fresh = comm.Dup()
    plan = MeshAttention(fresh, **TINY)
    fresh.Free()
    chunk = np.ones((1, len(plan.positions), 1, 1), np.float32)
    plan.forward(chunk, chunk, chunk)
    plan.close()


def test_communicator_freed_through_another_handle(comm):
    """The program may hold the communicator in several Python objects; only one of them knows that it was freed."""
    fresh = comm.Dup()
    plan = MeshAttention(MPI.Intracomm(fresh), **TINY)
    fresh.Free()
    plan.close()


def test_closed_plan_says_so(comm):
    plan = MeshAttention(comm, **TINY)
    chunk = np.ones((1, len(plan.positions), 1, 1), np.float32)
    plan.close()
    for call in (lambda: plan.forward(chunk, chunk, chunk), lambda: plan.scatter(chunk), lambda: plan.gather(chunk)):
        with pytest.raises(ArgumentError, match="closed"):
            call()


@pytest.mark.parametrize(
    "wrong, says",
    [
        (None, "comm is None; it must be an mpi4py intracommunicator"),
        (3, r"comm is 3; .* MPI.Comm.f2py\(3\)"),
        (MPI.COMM_NULL, "comm is MPI.COMM_NULL; .* Split with MPI.UNDEFINED"),
    ],
)
def test_no_communicator(wrong, says):
    with pytest.raises(ArgumentError, match=says):
        MeshAttention(wrong, **TINY)


def test_a_communicator_that_was_freed(comm):
    freed = comm.Dup()
    freed.Free()
    with pytest.raises(ArgumentError, match=r"comm is MPI\.COMM_NULL; .* freed"):
        MeshAttention(freed, **TINY)


def test_after_a_pass_that_did_not_end(comm):
    """Its messages are still under way: they must not reach a new plan, and the old one says that it is unusable."""

    def stop(done):
        raise KeyboardInterrupt

    arguments = {"seqlen": 40, "heads": 2, "head_dim": 8, "tile": "ring", "schedule": "greedy"}
    rng = np.random.default_rng(comm.rank)
    plan = MeshAttention(comm, **arguments)
    q, k, v = rng.standard_normal((3, 1, len(plan.positions), 2, 8), np.float32)
    with MeshAttention(comm, **arguments) as fresh:
        expected, _ = fresh.forward(q, k, v)
    comm.Barrier()  # all have closed it
    with pytest.raises((KeyboardInterrupt, PeerFailure)):  # of another rank, who was quicker
        plan.forward(k, v, q, progress=stop)
    if comm.size > 1:
        with pytest.raises(MpiattnError, match="did not end"):
            plan.forward(q, k, v)
    else:  # there are no messages, and the plan is as before
        assert np.array_equal(plan.forward(q, k, v)[0], expected)
    with MeshAttention(comm, **arguments) as fresh:
        for _ in range(2):
            assert np.array_equal(fresh.forward(q, k, v)[0], expected)
    plan.close()


def test_what_a_closed_plan_still_tells(comm):
    plan = MeshAttention(comm, **TINY)
    before = plan.nbytes, plan.tile, plan.sent, plan.positions.tolist()
    plan.close()
    plan.close()
    assert (plan.nbytes, plan.tile, plan.sent, plan.positions.tolist()) == before


def test_the_callers_arrays_are_let_go(comm):
    with MeshAttention(comm, **TINY) as plan:
        arrays = [np.ones((1, len(plan.positions), 1, 1), np.float32) for _ in range(3)]
        before = [sys.getrefcount(array) for array in arrays]
        plan.forward(*arrays)
        assert [sys.getrefcount(array) for array in arrays] == before
