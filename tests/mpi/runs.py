"""One forward run of a whole problem on a communicator, and plans whose schedule is given."""

from contextlib import contextmanager

import numpy as np
from dense import draw, wrong
from mpi4py import MPI

from mpiattn import MeshAttention
from mpiattn.executor import Executor
from mpiattn.problem import Problem

OF_PROBLEM = ("seqlen", "heads", "head_dim", "batch", "kv_heads", "value_dim", "seqlen_k", "dtype", "causal", "scale")


def problem_of(arguments):
    return Problem(**{name: value for name, value in arguments.items() if name in OF_PROBLEM})


def my_chunks(plan, q, k, v):
    """This rank's chunks of whole arrays, by the plan's positions alone."""
    at, at_k = plan.positions, plan.positions_k
    return tuple(np.ascontiguousarray(array[:, rows]) for array, rows in ((q, at), (k, at_k), (v, at_k)))


def run(comm, seed=0, inputs=None, **arguments):
    """A plan's out, lse and positions on this rank; inputs: whole q, k, v, else drawn from the seed."""
    inputs = draw(problem_of(arguments), seed) if inputs is None else inputs
    with MeshAttention(comm, **arguments) as plan:
        out, lse = plan.forward(*my_chunks(plan, *inputs))
        return out, lse, plan.positions


def check(comm, seed=0, inputs=None, every=1, **arguments):
    """Run and compare (each `every`-th row) with the reference; every rank raises the same AssertionError."""
    problem = problem_of(arguments)
    inputs = draw(problem, seed) if inputs is None else inputs
    out, lse, positions = run(comm, inputs=inputs, **arguments)
    agreed(comm, wrong(problem, out, lse, *inputs, positions, every), arguments)
    covered = np.sort(np.concatenate(comm.allgather(positions)))
    assert (covered == np.arange(problem.seqlen)).all(), "the ranks' positions do not cover the queries once"
    return out, lse


def agreed(comm, complaint, about=""):
    """Assert on every rank that no rank has a complaint."""
    complaints = {rank: told for rank, told in enumerate(comm.allgather(complaint)) if told}
    assert not complaints, f"{about}: {complaints}"


def tiles(ranks):
    return [(a, ranks // a) for a in range(1, ranks + 1) if ranks % a == 0]


@contextmanager
def subcomm(comm, ranks, key=None):
    """A communicator of the first `ranks` ranks, None on the others; freed at the end."""
    sub = comm.Split(0 if comm.rank < ranks else MPI.UNDEFINED, comm.rank if key is None else key)
    try:
        yield None if sub == MPI.COMM_NULL else sub
    finally:
        if sub != MPI.COMM_NULL:
            sub.Free()


def use_schedule(plan, schedule):
    """Make an open plan run another schedule of its tile; collective."""
    plan.schedule = schedule
    plan._executor = Executor(plan._mesh, schedule, plan._executor.work, plan._exchange, plan.q_layout, plan.k_layout)
