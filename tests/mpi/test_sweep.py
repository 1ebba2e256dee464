"""Random problems on random sub-communicators, a new draw for every rank count.

MPIATTN_CASES=n and MPIATTN_SEED=s choose how many and which; MPIATTN_CASE=i runs the i-th alone.  A failure
prints the line that runs it again.
"""

import os
import random
import sys
import time
import traceback

import pytest
from dense import bits, draw, wrong
from runs import my_chunks, problem_of, tiles, use_schedule

from mpiattn import Layout, MeshAttention
from mpiattn.greedy import greedy

SEED = int(os.environ.get("MPIATTN_SEED", "1"))
CASES = int(os.environ.get("MPIATTN_CASES", "60"))
ONLY = os.environ.get("MPIATTN_CASE")


def cut(rng, seqlen, ranks):
    """A random uneven cut, in which chunks may be empty."""
    points = sorted(rng.randint(0, seqlen) for _ in range(ranks - 1))
    return tuple(stop - start for start, stop in zip([0, *points], [*points, seqlen]))


def draw_case(index, size):
    """A problem, how to run it and on which ranks: a function of seed, index and the launch's size."""
    rng = random.Random(f"{SEED} {index} {size}")
    ranks = rng.randint(max(1, size // 2), size)
    members = rng.sample(range(size), ranks)
    kv_heads = rng.choice([1, 1, 2, 3])
    length = rng.choice([0, 1, 3, 17, 40, 64, 97, 150, 301])
    seqlen_k = length if rng.random() < 0.6 else rng.choice([0, 1, 5, 64, 128, 200])
    layout = rng.choice(["contiguous", "striped", "zigzag", "uneven"])
    if layout == "uneven":
        layout = tuple(Layout("contiguous", n, ranks, cut(rng, n, ranks)) for n in (length, seqlen_k))
    plan = {"batch": rng.choice([1, 1, 2, 3]), "seqlen": length, "seqlen_k": seqlen_k,
            "heads": kv_heads * rng.choice([1, 1, 2, 4]), "kv_heads": kv_heads,
            "head_dim": rng.choice([1, 4, 8, 13, 32]), "value_dim": rng.choice([1, 4, 8, 13, 32]),
            "dtype": rng.choice(["float16", "float32", "float64"]), "causal": rng.random() < 0.6,
            "scale": rng.choice([None, None, 0.5, 2.0]), "tile": rng.choice(tiles(ranks)), "layout": layout,
            "schedule": rng.choice(["greedy", "greedy", "collective"]), "route": rng.choice(["direct", "ring"]),
            "max_message": rng.choice([2 ** 30, 2 ** 30, 1000, 64])}
    costs = tuple(rng.choice([0.1, 0.5, 1, 1.7, 3, 50]) for _ in range(3))
    return {"members": members, "plan": plan, "costs": costs, "seed": rng.randrange(2 ** 30),
            "spread": rng.choice([1, 1, 1, 5])}


def run_case(comm, case):
    """What is wrong with the results of one case on this rank, as text; None if nothing is."""
    arguments = case["plan"]
    inputs = draw(problem_of(arguments), case["seed"], case["spread"])
    results = []
    for backend in ("numpy", "deferred"):
        with MeshAttention(comm, **arguments, backend=backend) as plan:
            if plan.schedule.name == "greedy":
                use_schedule(plan, greedy(*plan.tile, case["costs"], plan.route))
            out, lse = plan.forward(*my_chunks(plan, *inputs))
            results.append(bits(out, lse))
            complaint = wrong(plan.problem, out, lse, *inputs, plan.positions)
            if complaint:
                return f"{backend}: {complaint}"
    return None if results[0] == results[1] else "numpy and deferred differ"


@pytest.mark.many
def test_random_cases(comm):
    indices = [int(ONLY)] if ONLY is not None else range(CASES if comm.size <= 8 else CASES // 4)
    failures = []
    for index in indices:
        case = comm.bcast(draw_case(index, comm.size) if comm.rank == 0 else None)
        again = (f"MPIATTN_SEED={SEED} MPIATTN_CASE={index} mpiexec -n {comm.size} "
                 f"python -m pytest tests/mpi/test_sweep.py   # {case}")
        sub = comm.Split(0 if comm.rank in case["members"] else 1, case["members"].index(comm.rank)
                         if comm.rank in case["members"] else 0)
        complaint = None
        try:
            if comm.rank in case["members"]:
                complaint = run_case(sub, case)
        except Exception:                            # its peers may be waiting for it
            print(f"rank {comm.rank} of {comm.size}\n{traceback.format_exc()}{again}", file=sys.__stderr__, flush=True)
            time.sleep(0.5)                          # the launcher passes it on
            comm.Abort(1)
        sub.Free()
        if comm.allreduce(complaint is not None):
            told = [f"rank {rank}: {text}" for rank, text in enumerate(comm.allgather(complaint)) if text]
            failures.append(f"{again}\n    {'; '.join(told)}")
    assert not failures, "\n" + "\n".join(failures)
