"""The end of a program that does not catch an error of the library: one rank tells it, and no rank waits for ever.

MPI_Finalize waits for every rank.  If an uncaught PeerFailure ended Python on most ranks, they would wait there for
ever for the rank that hangs.  So once a call has failed, an uncaught exception aborts the whole job, as under
`python -m mpi4py`.

An error that all ranks raise, or that a rank has told the others, is printed by the rank that failed, which then ends
the job.  The others wait for that, and print theirs only if nothing comes of it.
"""

import sys
import time

from mpi4py import MPI

FLUSH = 0.5  # seconds that a launcher needs to forward a message; it drops output after an abort
COURTESY = 5.0  # seconds in which the failed rank can print why and end the job itself
TURN, LATEST = 0.7, 8  # seconds by which a rank waits longer than the one before it, so that one prints; the last turn

_watching = _failed = False


def abort_if_uncaught():
    """From now on, an uncaught exception is printed and then aborts the job."""
    global _failed
    _failed = True
    tell_once()


def tell_once():
    """From now on, an uncaught error that all ranks raise is printed by one of them, which then aborts the job."""
    global _watching
    if _watching:
        return
    _watching, print_it = True, sys.excepthook

    def print_and_abort(kind, error, trace):
        comm, shared = MPI.COMM_WORLD, getattr(error, "everywhere", False)
        of_all = shared and getattr(error, "raised_by", 1) == comm.size > 1  # else other ranks go on
        tells = getattr(error, "tells", True)
        if shared and not (of_all or tells):
            print(
                f"rank {comm.rank} of {comm.size} ends by the same {kind.__name__}, which another rank tells",
                file=sys.stderr,
            )
            return
        if not tells or getattr(error, "relayed", False):
            time.sleep(COURTESY)
        if not tells or hasattr(error, "relayed"):
            time.sleep(TURN * min(comm.rank, LATEST))
        print_it(kind, error, trace)
        sys.stderr.flush()
        if _failed or of_all:
            time.sleep(FLUSH)
            if not MPI.Is_finalized():
                comm.Abort(1)

    sys.excepthook = print_and_abort
