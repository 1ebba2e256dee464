"""Starts MPI: after the arguments are parsed, and with a time limit."""

import os
import socket

from . import interrupts, witness

LOADING = 30.0  # seconds added to the timeout: hosts load Python at different speeds

OVERDUE = (
    "starting MPI, for which {:g} s were given; ranks wait there for all: for one whose node lacks mpiattn or "
    "has another MPI, that has ended, or that the network does not reach"
)


def defer(wanted=True):
    """Let `start` start MPI instead of the first import of mpi4py.MPI; wanted=False undoes this."""
    import mpi4py

    if wanted:
        os.environ.setdefault("UCX_DEBUG_SIGNO", "0")  # else UCX, once MPI loads it, takes SIGHUP for its debug mode
    mpi4py.rc.initialize = not wanted
    if mpi4py.rc.finalize is None:
        mpi4py.rc.finalize = True


def unloadable(error):
    """What to say if mpi4py has raised this error as it loaded its MPI, else None."""
    # Without MPI, mpi4py's wheels raise RuntimeError; what is compiled with one MPI cannot be imported.
    if getattr(error, "name", None) != "mpi4py.MPI" and not str(error).startswith("cannot load MPI library"):
        return None
    reason = " ".join(str(error).removeprefix("cannot load MPI library").split())
    return (
        f"mpi4py cannot load its MPI on {socket.gethostname()}: {reason}. Nothing was done. Load the modules of the "
        "MPI that mpi4py was installed with, and of what it is linked with, on every node; or rebuild mpi4py with the "
        "MPI that is there"
    )


def start(timeout):
    """Start MPI unless it is running; returns MPI.COMM_WORLD.

    timeout: seconds that a rank waits for others; None: the library's default.  Starting MPI waits for every rank and
    cannot be interrupted: at the time limit an alarm signal ends this process, and its witness prints why.
    """
    from mpi4py import MPI, rc

    if not MPI.Is_initialized():
        seconds = _seconds(timeout)
        with witness.limit(OVERDUE.format(seconds), seconds):
            if rc.threads:
                MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}"))
            else:
                MPI.Init()
    interrupts.mpi_runs(MPI.COMM_WORLD)
    return MPI.COMM_WORLD


def finish(timeout):
    """Leave it to an alarm signal to end this process if MPI's end takes longer than its start may take."""
    witness.limit_end(_seconds(timeout))


def _seconds(timeout):
    from ..comm.peers import time_limit

    return time_limit(timeout) + LOADING
