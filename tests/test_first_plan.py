"""A rank that never comes to the first plan, cache or call on a communicator: the job ends and says who is missing."""

import sys
import time

import launch
import pytest

TIMEOUT = 2.0  # seconds that a rank waits for others, on a quiet machine
SOON = 40.0  # seconds within which a job must end, from its start
PROGRAM = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
import mpiattn
entry, fate, timeout = sys.argv[1], sys.argv[2], float(sys.argv[3])
comm, ones = MPI.COMM_WORLD, np.ones((1, 9, 2, 8), np.float32)
if comm.rank == 1:
    if fate == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fate == "raises":
        raise ZeroDivisionError("on purpose")
    time.sleep(1000)
if entry == "plan":
    mpiattn.MeshAttention(comm, seqlen=100, heads=2, head_dim=8, timeout=timeout)
elif entry == "cache":
    mpiattn.KVCache(comm, capacity=100, kv_heads=2, head_dim=8, timeout=timeout)
else:
    mpiattn.attention(ones, ones, ones, comm=comm, timeout=timeout)
"""


@pytest.mark.draw(2)
@pytest.mark.parametrize(
    "entry, fate", [("plan", "sleeps"), ("plan", "stopped"), ("cache", "sleeps"), ("call", "stopped")]
)
def test_the_job_ends(entry, fate):
    start, limit = time.monotonic(), TIMEOUT * launch.time_factor()
    outcome = launch.mpirun(
        3, [sys.executable, "-c", PROGRAM, entry, fate, str(limit)], timeout=SOON * launch.time_factor(), check=False
    )
    assert outcome.returncode and time.monotonic() - start < SOON * launch.time_factor()
    said = "for the other ranks to begin the first plan or cache on this communicator; no answer from rank 1"
    assert said in outcome.stderr, outcome.stderr


def test_a_rank_that_comes_late_is_waited_for():
    """Also where the others are asked meanwhile who is missing; and nothing is left on the caller's communicator."""
    program = """
import time
from mpi4py import MPI
import mpiattn
comm = MPI.COMM_WORLD
time.sleep(comm.rank)
with mpiattn.MeshAttention(comm, seqlen=100, heads=2, head_dim=8, timeout=60):
    pass
comm.Barrier()
assert not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
"""
    launch.mpirun(3, [sys.executable, "-c", program])
