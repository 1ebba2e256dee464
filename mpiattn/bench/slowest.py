"""Times work that all ranks do at once: the slowest rank counts."""

import time

import numpy as np
from mpi4py import MPI

from ..comm.blocking import RARELY, blocking


def slowest(peers, work, in_mpi, times=1):
    """Seconds per call of work() on the slowest rank, over `times` calls; collective.

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
