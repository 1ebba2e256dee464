"""A program that uses the library and in which one rank hangs, dies or raises: the job ends, and says who it was."""

import os
import re
import sys
import time
from itertools import product

import launch
import pytest

RANKS, VICTIM = 4, 2
TIMEOUT = 2.0  # seconds that a rank waits for others

PROGRAM = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
import mpiattn
fate, victim, timeout, call = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
comm = MPI.COMM_WORLD
plan = mpiattn.MeshAttention(comm, seqlen=64, heads=2, head_dim=8, tile="2x2", schedule="greedy", timeout=timeout)
cache = mpiattn.KVCache(comm, capacity=200, kv_heads=2, head_dim=8, timeout=timeout)
x = np.ones((3, 1, len(plan.positions), 2, 8), np.float32)
out, lse = plan.forward(*x)
cache.append(x[1], x[2])

def strike(*args, **how):
    if comm.rank == victim:
        if fate == "raise":
            raise ZeroDivisionError("on purpose")
        if fate == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, fate))

if call == "forward":
    plan.forward(*x, progress=strike)
elif call == "backward":
    plan.backward(out, *x, out, lse, progress=strike)
else:
    attend, cache._backend.attend_pages = cache._backend.attend_pages, lambda *a, **h: (strike(), attend(*a, **h))[1]
    mpiattn.tree_decode(x[0][:, :1], cache)
plan.gather(out)
"""


@pytest.mark.draw(3)
@pytest.mark.parametrize(
    "call, fate", list(product(["forward", "backward", "decode"], ["SIGSTOP", "raise", "SIGKILL", "exit"]))
)
def test_the_job_ends(call, fate):
    start = time.monotonic()
    timeout = (500 if fate == "raise" else TIMEOUT) * launch.time_factor()
    outcome = launch.mpirun(
        RANKS, [sys.executable, "-c", PROGRAM, fate, VICTIM, timeout, call], timeout=100, check=False
    )
    assert outcome.returncode
    # of 500 s: a rank that raises is heard of at once
    assert time.monotonic() - start < 90 * launch.time_factor()
    if fate == "raise":
        assert re.search("ZeroDivisionError.*: on purpose", outcome.stderr), outcome.stderr
    if fate == "SIGSTOP":  # the launcher tells of the others
        host = os.uname().nodename
        assert "PeerFailure: rank " in outcome.stderr
        assert f"no answer from rank {VICTIM} on {host}" in outcome.stderr, outcome.stderr


def test_a_program_that_catches_it_goes_on():
    """Nothing is aborted behind its back."""
    program = PROGRAM.replace(
        "    plan.forward(*x, progress=strike)\n",
        '''
    try:
        plan.forward(*x, progress=strike)
    except (mpiattn.PeerFailure, ZeroDivisionError) as error:
        os.write(1, f"caught {type(error).__name__}\\n".encode())              # in one piece
    plan.close()
    cache.close()
    comm.Barrier()
    with mpiattn.MeshAttention(comm, seqlen=64, heads=2, head_dim=8, tile="2x2") as plan:
        assert abs(plan.forward(*x)[0] - 1).max() < 1e-6
        os.write(1, b"and again\\n")
        sys.exit()
''',
    )
    outcome = launch.mpirun(RANKS, [sys.executable, "-c", program, "raise", VICTIM, 500, "forward"], timeout=100)
    assert outcome.stdout.count("caught ZeroDivisionError") == 1
    assert outcome.stdout.count("and again") == RANKS


UNCAUGHT = """
import sys
import numpy as np
from mpi4py import MPI
import mpiattn
comm, ones = MPI.COMM_WORLD, np.ones((1, 9, 2, 8), np.float32)
if sys.argv[1] == "argument":
    mpiattn.MeshAttention(comm, seqlen=9, heads=2 - 2 * (comm.rank == 1), head_dim=8)
def progress(share):
    if comm.rank == 1:
        raise ZeroDivisionError("on purpose")
mpiattn.attention(ones, ones, ones, comm=comm)
with mpiattn.MeshAttention(comm, seqlen=9 * comm.size, heads=2, head_dim=8, layout="contiguous") as plan:
    out, _ = plan.forward(ones, ones, ones, progress=progress)
    plan.gather(out)
"""


@pytest.mark.parametrize("fault, says", [("argument", "heads is 0; "), ("progress", "ZeroDivisionError: on purpose")])
def test_an_uncaught_error_is_told_once(fault, says):
    """By the rank that failed; then the job ends."""
    outcome = launch.mpirun(3, [sys.executable, "-c", UNCAUGHT, fault], check=False)
    assert outcome.returncode and says in outcome.stderr
    lines = [line for line in outcome.stderr.splitlines() if re.match(r"mpiattn\.errors\.|ZeroDivisionError", line)]
    wanted = 2 if fault == "argument" else 1  # the rank's own, and what all ranks raise
    assert len(lines) == wanted, outcome.stderr
