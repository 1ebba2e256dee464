"""How MPI is started: once the arguments are known, with a time limit, by a launcher that starts this MPI's ranks."""

from . import interrupts, witness

LOADING = 30.0             # seconds besides the time-out: hosts load Python at different speeds

OVERDUE = ("starting MPI, for which {:g} s were given; ranks wait there for all: for one whose node lacks mpiattn or "
           "has another MPI, that has ended, or that the network does not reach")


def defer(wanted=True):
    """Let `start` start MPI or, if that is not wanted, whoever imports mpi4py's MPI first, as without this."""
    import mpi4py
    mpi4py.rc.initialize = not wanted
    if mpi4py.rc.finalize is None:
        mpi4py.rc.finalize = True


def start(timeout):
    """Start MPI unless it has been; gives all ranks.

    timeout: seconds that a rank waits for others, None for the library's.  MPI waits for every rank here and cannot be
    interrupted: when time is up the system ends this process, and its witness says why.
    """
    from mpi4py import MPI, rc

    from ..comm.peers import time_limit
    if not MPI.Is_initialized():
        seconds = time_limit(timeout) + LOADING
        with witness.limit(OVERDUE.format(seconds), seconds), interrupts.plain():
            if rc.threads:
                MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}"))
            else:
                MPI.Init()
    return MPI.COMM_WORLD
