"""Collective calls of MPI that have no nonblocking form, given up after a time limit all the same."""

import threading

from mpi4py import MPI

LOOK = 1e-3                # seconds between two looks whether a call has ended


def blocking(peers, call):
    """What call() gives, a blocking and collective call of MPI; PeerFailure where a rank does not come in time.

    The ranks meet first, so that it cannot wait for one that has not come so far.  Where this MPI lets two threads call
    it at once, the call is made by a thread of its own, so that even a rank that stops inside keeps nobody.
    """
    peers.barrier()
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
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
    peers.until(lambda: ended.wait(LOOK), kept=outcome)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
