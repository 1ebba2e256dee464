"""A time limit for collective MPI calls that have no nonblocking form."""

import threading

from mpi4py import MPI

LOOK = 1e-3  # seconds between two tests whether a call has ended
RARELY = 2e-2  # of a call that is timed, to disturb it little


def blocking(peers, call, look=LOOK):
    """The result of call(), a blocking collective call of MPI; PeerFailure if a rank does not come in time.

    look: seconds between two tests whether it has ended.

    A barrier with a time limit comes first, so that the call cannot wait for a rank that never enters it.  With
    MPI_THREAD_MULTIPLE the call runs in its own thread, so that even a rank that hangs inside it is given up.
    """
    peers.barrier()
    if peers.size == 1 or MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return call()
    ended = threading.Event()
    outcome = []

    def work():
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))
        ended.set()

    threading.Thread(target=work, name="mpiattn: a blocking call", daemon=True).start()
    peers.until(lambda: ended.wait(look), buffers=outcome)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
