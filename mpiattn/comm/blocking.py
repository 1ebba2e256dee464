"""A time limit for collective MPI calls that have no nonblocking form, one at a time in a process."""

import random
import threading
import time
from contextlib import contextmanager

from mpi4py import MPI

LOOK = 1e-3  # seconds between two tests whether a call has ended
RARELY = 2e-2  # of a call that is timed, to disturb it little
PAUSE = 1e-2  # seconds, at most, before the ranks of a communicator try again to have the turn of their processes
_TURN = threading.Lock()  # held while a call runs
_random = random.Random()  # the program's own numbers stay as they are


def blocking(peers, call, look=LOOK):
    """The result of call(), a blocking collective call of MPI; PeerFailure if a rank does not come in time.

    look: seconds between two tests whether it has ended.

    The ranks wait for each other first, with a time limit, so that the call cannot wait for a rank that never enters
    it.  With MPI_THREAD_MULTIPLE the call runs in its own thread, so that even a rank that hangs inside it is given up.
    """
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        peers.barrier()
        return call()
    with _alone(peers):
        if peers.size == 1:
            return call()
        return _in_a_thread(peers, call, look)


@contextmanager
def _alone(peers):
    """A context in which no other thread of any of these ranks makes a blocking call; collective.

    Two threads that make communicators at once may end MPICH with a segmentation fault, and keep each other waiting.
    A rank cannot wait here for another thread's call, since that may wait for a rank that waits for this one's.  So
    each takes its turn or goes without, and if any rank has none, all give theirs back and try again.
    """
    while True:
        has_turn = _TURN.acquire(blocking=False)
        try:
            if not peers.largest([not has_turn])[0]:
                yield
                return
        finally:
            if has_turn:
                _TURN.release()
        time.sleep(_random.uniform(0, PAUSE))  # not all alike: or two communicators might fail together for ever


def _in_a_thread(peers, call, look):
    """As `blocking`, of ranks that all are there."""
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
