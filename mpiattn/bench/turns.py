"""Times works in turn: run 1 of each, run 2 of each, ..., so that drift of the machine affects all alike."""

import math
import time

import numpy as np
from mpi4py import MPI

from ..comm.blocking import RARELY, blocking

LEAST = 0.01  # seconds of a measurement, at least: short works are repeated
MOST = 200  # repeats, at most


def slowest(peers, work, in_mpi=False, times=1):
    """Seconds per call of work() on the slowest rank, over `times` calls that begin together; collective.

    in_mpi: whether the work waits for other ranks inside MPI, which knows no time limit.
    """

    def timed():
        start = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - start) / times

    if in_mpi:
        took = blocking(peers, timed, RARELY)
    else:
        peers.barrier()
        took = timed()
    seconds = np.array([took])
    peers.reduce(seconds, MPI.MAX)
    return float(seconds[0])


def repeats(timed, most=MOST):
    """The number of repeats that take LEAST seconds.  timed: times the work once, in seconds."""
    timed()  # warm up
    return min(most, max(1, math.ceil(LEAST / max(timed(), 1e-9))))


def in_turn(works, runs, warmup=0):
    """Seconds of every run, by name.  works: by name, functions that time it once; warmup: runs before, unmeasured."""
    seconds = {name: [] for name in works}
    for run in range(-warmup, runs):
        for name, timed in works.items():
            took = timed()
            if run >= 0:
                seconds[name].append(took)
    return seconds


def summary(name, seconds, **more):
    """The runs of one work, for JSON; more: its other figures."""
    low, median, high = np.percentile(seconds, (25, 50, 75)).tolist()
    return {"name": name, "median": median, "quartiles": [low, high], **more, "seconds": list(map(float, seconds))}


def difference(results, expected):
    """The largest difference of any array, relative to the largest value of the expected one."""
    return max(
        float(np.abs(result.astype(np.float64) - reference).max() / max(np.abs(reference).max(), 1e-300))
        for result, reference in zip(results, expected)
    )
