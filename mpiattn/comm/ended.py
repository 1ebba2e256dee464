"""Ranks that have ended, where MPI tells which: User-Level Failure Mitigation, ULFM, in a job that was started with it.

MPI then lets the other ranks go on: it completes what waits for such a rank with an error.  Ranks that wait for others
only look here too, so that all of them notice soon.
"""

import os
import time
from contextlib import suppress
from functools import cache

from mpi4py import MPI

ENABLED = "OMPI_MCA_mpi_ft_enable"  # of the ranks' environment under `mpiexec --with-ft ulfm`, of Open MPI 5
NOTICE = 5.0  # seconds in which MPI tells a rank which one has ended, after an error that comes of it
LOOK = 1e-3  # seconds between two looks


@cache
def tells():
    """Whether MPI tells which ranks have ended, and lets the others go on."""
    return (
        hasattr(MPI.Comm, "Get_failed")  # mpi4py 4
        and MPI.get_vendor()[0] == "Open MPI"
        and os.environ.get(ENABLED, "").lower() in ("1", "true", "yes", "enabled")
    )


def ended(comm):
    """The ranks of a communicator that have ended, as far as this one knows now; () where MPI does not tell."""
    if not tells():
        return ()
    group = comm.Get_failed()
    ranks = ()
    if group.size:
        everyone = comm.Get_group()
        ranks = tuple(sorted(MPI.Group.Translate_ranks(group, list(range(group.size)), everyone)))
        everyone.Free()
    group.Free()
    return ranks


def ended_soon(comm):
    """The same after an error of MPI that may come of a rank's end, which is waited for a little."""
    until = time.monotonic() + NOTICE * tells()
    while not (ranks := ended(comm)) and time.monotonic() < until:
        MPI.COMM_SELF.Iprobe()  # MPI learns of it only while it is called
        time.sleep(LOOK)
    return ranks


def revoke(comms):
    """Let all that is under way on some communicators end with an error, on every rank of theirs, where MPI can."""
    if tells():
        for comm in comms:
            with suppress(MPI.Exception):
                comm.Revoke()
