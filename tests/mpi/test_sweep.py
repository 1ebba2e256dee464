"""Random cases, forward and backward: a new draw for every rank count, on sub-communicators in any order.

MPIATTN_CASES=n and MPIATTN_SEED=s choose how many and which (see draws.py); MPIATTN_CASE=i runs the i-th alone.
A failure prints the line that runs it again.
"""

import os
import random
import sys
import time
import traceback

import draws
import numpy as np
import pytest
from dense import bits, draw_all, expected, masks, wrong
from memories import KINDS, Memory
from random_cases import draw_case
from runs import attend, my_chunks, problem_of, settle, subcomm, use_schedule
from test_hidden_numbers import hidden_from_all, visible

from mpiattn import MeshAttention
from mpiattn.engine import coming
from mpiattn.schedule import piece_steps
from mpiattn.schedule.greedy import greedy

SEED = draws.seed()
CASES = int(os.environ.get("MPIATTN_CASES", "50"))
FIRST = CASES if "MPIATTN_CASES" in os.environ else 12  # that are not slow
ONLY = os.environ.get("MPIATTN_CASE")


def as_programs_have_them(chunks, rng):
    """The chunks, each in some kind of memory between guard bytes; the memories."""
    memories = {
        name: Memory.of(KINDS[rng.choice(list(KINDS))], array)
        for name, array in chunks._asdict().items()
        if array is not None
    }
    return chunks._replace(**{name: memory.array for name, memory in memories.items()}), memories


def moved(plan, case, rng):
    """What is wrong with a random array that goes to the ranks and back, as text, or None."""
    axis, keys = rng.randrange(3), rng.random() < 0.5
    root = rng.choice([None, rng.randrange(len(case.members))])
    shape = [rng.randint(1, 3), rng.randint(1, 3)]
    shape.insert(axis, plan.problem.seqlen_k if keys else plan.problem.seqlen)
    dtype = rng.choice(["float32", ">f8", "int8", ">i2", case.plan["dtype"]])
    whole = (np.arange(np.prod(shape)) % 100).reshape(shape).astype(dtype)
    kinds = [KINDS[rng.choice(list(KINDS))] for _ in range(2)]
    has = root in (None, plan.rank)
    how = {"root": root, "axis": axis, "keys": keys}
    chunk = plan.scatter(Memory.of(kinds[0], whole).array if has else None, **how)
    if not np.array_equal(chunk, whole.take(plan.positions_k if keys else plan.positions, axis)):
        return f"scatter of {dtype} {shape}, {how}"
    back = plan.gather(Memory.of(kinds[1], chunk).array, **how)
    return None if (np.array_equal(back, whole) if has else back is None) else f"gather of {dtype} {shape}, {how}"


def complaint(comm, case):
    """What is wrong with a case's results on this rank, as text; None if nothing is."""
    problem = problem_of(case.plan)
    inputs = draw_all(problem, case.seed, case.spread, case.sinks, case.dlse)
    ref = expected(inputs, **masks(problem, case.call))
    rng = random.Random(case.seed)
    hidden = hidden_from_all(visible(problem, case.call))
    garbage = hidden.into(inputs, rng.choice([np.nan, np.inf, -np.inf, 1.0]), dlse=not case.sinks)
    results = set()
    for backend in case.backends:
        with MeshAttention(comm, **case.plan, backend=backend) as plan:
            if case.costs and plan.schedule.name == "greedy":
                for direction in ("forward", "backward"):
                    use_schedule(plan, greedy(plan.schedule.tile, case.costs, plan.route, direction))
            chunks, memories = as_programs_have_them(my_chunks(plan, *garbage), rng)
            for _ in range(1 + case.seed % 2):  # what a call leaves in the buffers must not matter
                result = attend(plan, chunks, case.call)
                results.add(bits(*result))
            error = wrong(problem, result, ref, inputs, plan.positions, plan.positions_k, case.call, terms=True)
            error = error or moved(plan, case, rng)
            if not all(memory.intact for memory in memories.values()):
                error = "bytes outside of an input were written"
            if error:
                return f"{backend}: {error}"
    return "back ends or repeats differ" if len(results) > 1 else None


@pytest.fixture(autouse=True)
def pieces_of_few_tokens(monkeypatch):
    """Short chunks too are waited for in several pieces."""
    monkeypatch.setattr(coming, "LEAST", 4)
    monkeypatch.setattr(piece_steps, "LEAST", 4)


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
