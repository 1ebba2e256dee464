"""Small messages that have come, of sizes that their receiver does not know.

Without MPI's matched probes (MPI_Improbe): they fail on Slingshot networks whose libfabric lacks them.
"""

import threading

from mpi4py import MPI

_lock = threading.Lock()  # of two threads that see a message, only one may receive it


def take(comm, tag):
    """(sender's rank, bytes) of the next message with this tag; None if none has come."""
    status = MPI.Status()
    with _lock:
        if not comm.Iprobe(MPI.ANY_SOURCE, tag, status):
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        comm.Recv([data, MPI.BYTE], status.source, tag)
    return status.source, data
