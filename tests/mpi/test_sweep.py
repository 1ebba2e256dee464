"""Random cases, forward and backward: a new draw for every rank count, on sub-communicators in any order.

MPIATTN_CASES=n and MPIATTN_SEED=s choose how many and which (see draws.py); MPIATTN_CASE=i runs the i-th alone.
A failure prints the line that runs it again.
"""

import os
import sys
import time
import traceback

import draws
import pytest
from dense import bits, draw_all, expected, masks, wrong
from random_cases import draw_case
from runs import attend, my_chunks, problem_of, settle, subcomm, use_schedule

from mpiattn import MeshAttention
from mpiattn.engine import coming
from mpiattn.schedule.greedy import greedy

SEED = draws.seed()
CASES = int(os.environ.get("MPIATTN_CASES", "50"))
FIRST = CASES if "MPIATTN_CASES" in os.environ else 12  # that are not slow
ONLY = os.environ.get("MPIATTN_CASE")


def complaint(comm, case):
    """What is wrong with a case's results on this rank, as text; None if nothing is."""
    problem = problem_of(case.plan)
    inputs = draw_all(problem, case.seed, case.spread, case.sinks, case.dlse)
    ref = expected(inputs, **masks(problem, case.call))
    results = set()
    for backend in case.backends:
        with MeshAttention(comm, **case.plan, backend=backend) as plan:
            if case.costs and plan.schedule.name == "greedy":
                for direction in ("forward", "backward"):
                    use_schedule(plan, greedy(plan.schedule.tile, case.costs, plan.route, direction))
            chunks = my_chunks(plan, *inputs)
            for _ in range(1 + case.seed % 2):  # what a call leaves in the buffers must not matter
                result = attend(plan, chunks, case.call)
                results.add(bits(*result))
            error = wrong(problem, result, ref, inputs, plan.positions, plan.positions_k, case.call, terms=True)
            if error:
                return f"{backend}: {error}"
    return "back ends or repeats differ" if len(results) > 1 else None


@pytest.fixture(autouse=True)
def pieces_of_few_tokens(monkeypatch):
    """Short chunks too are waited for in several pieces."""
    monkeypatch.setattr(coming, "LEAST", 4)


@pytest.mark.many
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["first", "more"])
def test_random_cases(comm, part):
    count, first = CASES if comm.size <= 8 else CASES // 4, min(CASES, FIRST)
    indices = range(first) if part == 0 else range(first, count)
    if ONLY is not None:
        indices = [int(ONLY)] if part == 0 else []
    failures = []
    for index in indices:
        case, failure = draw_case(SEED, index, comm.size), None
        again = (
            f"MPIATTN_SEED={SEED} MPIATTN_CASE={index} mpiexec -n {comm.size} "
            f"python -m pytest tests/mpi/test_sweep.py   # {case}"
        )
        with subcomm(comm, case.members) as group:
            try:
                failure = complaint(group, case) if group else None
            except Exception:  # its peers may be waiting for it
                print(
                    f"rank {comm.rank} of {comm.size}\n{traceback.format_exc()}{again}", file=sys.__stderr__, flush=True
                )
                time.sleep(0.5)  # the launcher passes it on
                comm.Abort(1)
            settle(comm)
        if comm.allreduce(failure is not None):
            ranks = [f"rank {rank}: {text}" for rank, text in enumerate(comm.allgather(failure)) if text]
            failures.append(f"{again}    {'; '.join(ranks)}")
    assert not failures, "\n" + "\n".join(failures)
