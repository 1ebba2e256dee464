"""How a subcommand that uses MPI ends: all ranks together, with one message."""

import socket
import sys
import traceback

from ..errors import MpiattnError


def on_all_ranks(work):
    """Run work(comm) on every rank and return the exit code.

    An error that the ranks agreed on is said once, by rank 0, and ends all of them with code 1.  An error that
    only one rank knows of would leave the others waiting: that rank says which it is and aborts the launch.
    """
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    try:
        return work(comm)
    except BaseException as error:
        if isinstance(error, MpiattnError) and (error.everywhere or comm.size == 1):
            if comm.rank == 0:
                print(f"mpiattn: {error}", file=sys.stderr, flush=True)
            comm.Barrier()             # a launcher ends all ranks with the first that fails; it has been said by now
            return 1
        if comm.size == 1:
            raise
        where = f"rank {comm.rank} of {comm.size} on {socket.gethostname()}"
        if not isinstance(error, KeyboardInterrupt):
            print(f"mpiattn: {where} failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        comm.Abort(1)
