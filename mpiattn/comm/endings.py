"""How a program ends in which a rank has failed.

MPI_Finalize waits for every rank.  A program whose uncaught PeerFailure ended Python on most ranks would wait there for
ever for the rank that hangs.  So once a call has failed, an exception that nobody catches ends the whole job, as it
does under `python -m mpi4py`.
"""

import sys
import time

from mpi4py import MPI

FLUSH = 0.5                # seconds that a launcher needs to pass a message on, which it drops when the job is aborted
COURTESY = 5.0             # seconds that the rank which has failed gets to say why and to end the job itself

_watching = False


def abort_if_uncaught():
    """From now on an uncaught exception ends the job, after it has been printed."""
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
