"""Runs of a whole problem on a communicator, compared with the reference, and who takes part in them.

MPIATTN_BACKENDS=cuda, or others with commas between, is what they run on; without float64, which kernels do not take,
these are tried in float32.
"""

import os
import time
from contextlib import contextmanager
from inspect import signature

import numpy as np
import pytest
from caller import caller
from dense import TOLERANCE, Inputs, Result, bits, draw_all, error, expected, gradients_at, largest, masks, wrong
from mpi4py import MPI

from mpiattn import MeshAttention
from mpiattn.engine.executor import Executor
from mpiattn.problem.problem import Problem
from mpiattn.verify import reference

OF_PROBLEM = tuple(signature(Problem).parameters)
BACKENDS = tuple(os.environ.get("MPIATTN_BACKENDS", "numpy,deferred").split(","))
FLUSHED = 4 * float(np.finfo(np.float32).tiny)  # of a gradient: CUDA kernels take smaller numbers than `tiny` for 0
OF_KERNELS = {"cuda", "cuda+cudnn", "emulated", "deferred-emulated"}


def on(*ranks):
    """Run the test on the first `ranks` ranks, as its fixture `group`, once for each of several numbers."""
    return pytest.mark.parametrize("group", ranks, indirect=True, ids=lambda n: f"{n}_ranks")


def narrow(arguments):
    """Arguments that the back ends can take."""
    if arguments.get("dtype") == "float64" and OF_KERNELS & set(BACKENDS):
        return {**arguments, "dtype": "float32"}
    return arguments


def problem_of(arguments):
    return Problem(**{name: value for name, value in narrow(arguments).items() if name in OF_PROBLEM})


def my_chunks(plan, q, k, v, *rest):
    """This rank's chunks of whole arrays, by the plan's positions alone; of all of `Inputs` where they are given."""
    at, at_k = plan.positions, plan.positions_k
    chunks = tuple(
        None if array is None else np.ascontiguousarray(array[:, rows])
        for array, rows in ((q, at), (k, at_k), (v, at_k))
    )
    if not rest:
        return chunks
    dout, dlse, sinks = rest
    return Inputs(*chunks, None if dout is None else dout[:, at], None if dlse is None else dlse[..., at], sinks)


def attend(plan, chunks, call=None, backward=True):
    """What a plan makes of this rank's inputs."""
    with caller(plan.backend) as (give, take):
        inputs, options = [give(array) for array in chunks[:3]], {**(call or {}), "sinks": give(chunks.sinks)}
        out, lse = plan.forward(*inputs, **options)
        grads = ()
        if backward:
            dout, dlse = give(chunks.dout), give(chunks.dlse)  # not before: they come late to this call too
            grads = plan.backward(dout, *inputs, out, lse, dlse=dlse, **options)
        return Result(*take(out, lse, *grads))


def run(comm, inputs, call=None, backward=True, **arguments):
    """A plan's result on this rank and its positions, of queries and of keys; inputs: of the whole problem."""
    with MeshAttention(comm, **{"backend": BACKENDS[0], **narrow(arguments)}) as plan:
        return attend(plan, my_chunks(plan, *inputs), call, backward), plan.positions, plan.positions_k


_ORACLE = {}  # the last problem's result on rank 0: loops over tiles, layouts, schedules ask for it again


def whole_result(key, make):
    """What `make` gives, or gave when it was last called, if the key is the same as then."""
    if key not in _ORACLE:
        _ORACLE.clear()
        _ORACLE[key] = make()
    return _ORACLE[key]


def once(comm, make):
    """What `make` returns, called on one rank while the others leave it the cores."""
    made = make() if comm.rank == 0 else None
    settle(comm)
    return comm.bcast(made)


def check(
    comm,
    *,
    seed=0,
    inputs=None,
    call=None,
    ref=None,
    backward=True,
    dlse=True,
    sinks=False,
    terms=False,
    backends=BACKENDS,
    **arguments,
):
    """Forward and backward against the reference, and every back end the same bits; returns this rank's result.

    call: documents or padding.  ref: the whole problem's result where it is known.  sinks, dlse: whether there are.
    Every rank raises the same AssertionError.
    """
    problem = problem_of(arguments)
    if inputs is None:
        inputs = draw_all(problem, seed, sinks=sinks, dlse=dlse)
        key = problem, seed, sinks, dlse, backward, repr(call)
        ref = ref or once(comm, lambda: whole_result(key, lambda: expected(inputs, backward, **masks(problem, call))))
    ref = once(comm, lambda: expected(inputs, backward, **masks(problem, call))) if ref is None else ref
    result, *at = run(comm, inputs, call, backward, backend=backends[0], **arguments)
    flushed = FLUSHED if OF_KERNELS & set(backends) else 0.0
    agreed(comm, wrong(problem, result, ref, inputs, *at, call, terms, flushed), (arguments, call))
    for other in backends[1:]:
        same = bits(*run(comm, inputs, call, backward, backend=other, **arguments)[0]) == bits(*result)
        agreed(comm, None if same else f"{backends[0]} and {other} differ", (arguments, call))
    for positions, tokens in zip(at, (problem.seqlen, problem.seqlen_k)):
        covered = np.sort(np.concatenate(comm.allgather(positions)))
        assert (covered == np.arange(tokens)).all(), "the ranks' positions do not cover the sequence once"
    return result


def check_long(comm, every, backward=True, **arguments):
    """As `check`, on one back end, of a long problem: each rank computes what it compares, from every `every`-th token.

    Without documents, and with as many keys as queries.
    """
    problem = problem_of(arguments)
    inputs = draw_all(problem)
    result, at, at_k = run(comm, inputs, backward=backward, **arguments)
    step = 1 if backward else every  # gradients of a key need the lse of every query
    out, lse = reference.attention(
        inputs.q[:, at[::step]],
        *inputs[1:3],
        causal=problem.causal,
        positions=at[::step],
        lengths=(problem.seqlen, problem.seqlen),
    )
    compared = [("out", result.out[:, ::step], out), ("lse", result.lse[..., ::step], lse)]
    settle(comm)
    if backward:
        whole_lse, delta = np.empty((2, *inputs.dlse.shape))
        own_delta = np.einsum("bqhd,bqhd->bhq", inputs.dout[:, at].astype(np.float64), out) - inputs.dlse[..., at]
        for positions, *parts in comm.allgather((at, lse, own_delta)):
            whole_lse[..., positions], delta[..., positions] = parts
        grads = gradients_at(inputs, whole_lse, delta, problem.causal, at[::every], at_k[::every])
        compared += [(name, getattr(result, name)[:, ::every], grad) for name, grad in zip(("dq", "dk", "dv"), grads)]
        settle(comm)
    for name, got, ref in compared:
        off, allowed = error(got, ref), TOLERANCE[problem.dtype] * comm.allreduce(largest(ref), MPI.MAX)
        agreed(comm, None if off <= allowed else f"{name} is off by {off:.3g}, allowed {allowed:.3g}", arguments)


def agreed(comm, complaint, about=""):
    """Assert on every rank that no rank has a complaint."""
    complaints = {rank: text for rank, text in enumerate(comm.allgather(complaint)) if text}
    assert not complaints, f"{about}: {complaints}"


def tiles(ranks):
    return [(a, ranks // a) for a in range(1, ranks + 1) if ranks % a == 0]


def settle(comm):
    """A barrier that leaves the cores to those who are not there yet."""
    done = comm.Ibarrier()
    while not done.Test():
        time.sleep(0.002)


@contextmanager
def subcomm(comm, ranks, key=None):
    """A communicator of the first `ranks` ranks, or of a list of them in its order; None on the others."""
    members = list(range(ranks)) if isinstance(ranks, int) else ranks
    member = comm.rank in members
    place = 0 if not member else members.index(comm.rank) if key is None else key
    sub = comm.Split(0 if member else MPI.UNDEFINED, place)
    try:
        yield sub if member else None
    finally:
        if member:
            sub.Free()


def use_schedule(plan, schedule):
    """Make an open plan run another schedule of its tile, forward or backward; collective."""
    executors = plan._passes.executors
    if schedule.direction == "backward":
        plan._passes.executor("backward")  # made, to be replaced
    else:
        plan.schedule = schedule
    executors[schedule.direction] = Executor(
        plan._mesh,
        schedule,
        executors[schedule.direction].computation,
        plan._exchange,
        plan._passes.call_cache.without_documents,
        plan._passes.pool,
    )
