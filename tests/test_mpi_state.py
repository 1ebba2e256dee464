"""Calls before MPI is initialized and after it is finalized: an error, and not MPI's end of the process."""

import sys

import launch
import pytest

PROGRAM = """
import sys
import mpi4py
mpi4py.rc.initialize = sys.argv[1] == "ended"
from mpi4py import MPI
import numpy as np
import mpiattn
ones, made = np.ones((1, 9, 2, 8), np.float32), []
calls = [
    lambda: mpiattn.MeshAttention(MPI.COMM_WORLD, seqlen=9, heads=2, head_dim=8),
    lambda: mpiattn.attention(ones, ones, ones, comm=MPI.COMM_WORLD),
    lambda: mpiattn.KVCache(MPI.COMM_WORLD, capacity=9, kv_heads=2, head_dim=8),
    lambda: mpiattn.KVCache.load(MPI.COMM_WORLD, "cache.h5"),
]
if sys.argv[1] == "ended":
    plan, _, cache = (call() for call in calls[:3])
    MPI.Finalize()
    calls += [lambda: plan.forward(ones, ones, ones), lambda: plan.like(seqlen=8), lambda: plan.gather(ones)]
    calls += [lambda: cache.append(ones, ones), lambda: mpiattn.tree_decode(ones, cache), lambda: cache.save("x.h5")]
for call in calls:
    try:
        call()
    except mpiattn.ArgumentError as error:
        sys.stdout.write(f"{error}\\n")  # in one piece: the ranks share the output
if sys.argv[1] == "ended":
    cache.close()  # nothing is left to do
    plan.close()
"""


@pytest.mark.parametrize("ranks, state, errors", [(1, "not started", 4), (2, "ended", 10)])
def test_without_mpi(tmp_path, ranks, state, errors):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    outcome = launch.mpirun(ranks, [sys.executable, program, state])
    said = outcome.stdout.splitlines()
    word = {"not started": "MPI is not initialized", "ended": "MPI is finalized"}[state]
    assert len(said) == ranks * errors and all(word in line for line in said), outcome
