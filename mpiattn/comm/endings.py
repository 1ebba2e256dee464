"""The end of a program in which a rank has failed.

MPI_Finalize waits for every rank.  If an uncaught PeerFailure ended Python on most ranks, they would wait there for
ever for the rank that hangs.  So once a call has failed, an uncaught exception aborts the whole job, as under
`python -m mpi4py`.
"""

import sys
import time

from mpi4py import MPI

FLUSH = 0.5  # seconds that a launcher needs to forward a message; it drops output after an abort
COURTESY = 5.0  # seconds in which the failed rank can print why and end the job itself

_watching = False


def abort_if_uncaught():
    """From now on, an uncaught exception is printed and then aborts the job."""
    global _watching
    if _watching:
        return
    _watching, print_it = True, sys.excepthook

    def print_and_abort(kind, error, trace):
        print_it(kind, error, trace)
        sys.stderr.flush()
        time.sleep(COURTESY if getattr(error, "relayed", False) else FLUSH)
        if not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(1)

    sys.excepthook = print_and_abort
