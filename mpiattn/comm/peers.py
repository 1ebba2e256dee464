"""The ranks of a communicator, and how long they are waited for.

A rank that has died, or has raised and gone its own way, never answers.  So everything that waits for others is
nonblocking, completed here, and given up after a time limit.
"""

import os
import pickle
import socket
import time
from itertools import pairwise

import numpy as np
from mpi4py import MPI

from ..errors import ArgumentError, PeerFailure
from . import channel as channels

TIMEOUT = 600.0            # seconds; what ranks do between two calls may differ by minutes
SUSPENDED = 1.0            # seconds; this process did not run in what is longer between two looks, so it did not wait
_LOST = []                 # requests that were given up: MPI may still write to their buffers, so they are kept


def _is_limit(timeout):
    return isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout > 0


def check_timeout(timeout):
    """Raise ArgumentError unless it is a time limit: a positive number of seconds, inf for none, or None."""
    if timeout is not None and not _is_limit(timeout):
        raise ArgumentError(f"timeout is {timeout!r}; it must be a positive number of seconds, inf for no limit")


def time_limit(timeout, predicted=0.0):
    """Seconds that are meant: what was asked or, where nothing was, time enough for work of `predicted` seconds."""
    return timeout if _is_limit(timeout) else max(TIMEOUT, 10 * predicted)


def translate_ranks(comm, ranks, other):
    """Numbers in another communicator of some ranks of one."""
    # called so, it is the same of mpi4py 3, where it is a class's method, and of mpi4py 4
    return MPI.Group.Translate_ranks(comm.Get_group(), list(ranks), other.Get_group())


class Peers:
    """The ranks of `comm`, waited for up to `timeout` seconds.

    lost: called with the requests that were given up; it must keep them.  idle: called between two looks at what is
    waited for; a rank that shares this core may be the one.  channel: over which ranks tell each other of failures, a
    `mpiattn.comm.channel.Channel`; without it they only find out when their time is up, and not who is missing.

    The methods are collective; each raises PeerFailure on a rank whose peers fail or do not come in time.
    """

    def __init__(self, comm, timeout=TIMEOUT, lost=_LOST.append, idle=os.sched_yield, channel=None):
        self.comm, self.timeout, self.lost, self.idle, self.channel = comm, timeout, lost, idle, channel
        self.rank, self.size = comm.rank, comm.size

    def wait(self, requests, tell=None):
        """Complete requests, staying inside MPI so that it makes progress.

        tell: called when time is up for what this rank was waiting for, for the message.
        """
        self.until(lambda: MPI.Request.Testall(requests), tell, requests)

    def until(self, done, tell=None, kept=None):
        """Call `done`, which lets MPI move messages, until it says that it is.

        tell: as of `wait`.  kept: what MPI may still use when time is up or anything else ends the wait.
        """
        try:
            if done():
                return
            waited, last = 0.0, time.monotonic()
            listening = last + channels.LISTEN
            while not done():
                now = time.monotonic()
                waited, last = waited + min(now - last, SUSPENDED), now
                if now > listening:
                    self._listen(kept)
                    listening = now + channels.LISTEN
                if waited > self.timeout:
                    return self._give_up(done, tell, kept)
                self.idle()
        except BaseException:                # an interrupt, a GPU that has failed
            _LOST.append(kept)
            raise

    def _listen(self, kept):
        channels.listen()
        if self.channel and self.channel.failure:
            self.lost(kept)
            failure = PeerFailure(self.channel.failure)
            failure.relayed = True
            raise failure

    def _give_up(self, done, tell, kept):
        """Time is up: raise PeerFailure, here and on the other ranks, unless what is waited for comes just now."""
        state = self.channel.roll_call(done) if self.channel else ""
        if done():
            return
        self._listen(kept)                   # another rank may have given up first
        failure = (f"rank {self.rank} of {self.size} on {socket.gethostname()} has waited {self.timeout:g} s "
                   f"{tell() if tell else 'for the other ranks'}{state and '; '}{state}")
        self.lost(kept)
        if self.channel:
            self.channel.alarm(failure)
        raise PeerFailure(failure)

    def barrier(self):
        """Return once every rank has come."""
        self.wait([self.comm.Ibarrier()])

    def reduce(self, array, operation):
        """Combine an array over the ranks, in place."""
        result = np.empty_like(array)
        self.wait([self.comm.Iallreduce(array, result, operation)])
        array[...] = result

    def largest(self, numbers):
        """The largest of every number over the ranks: int64."""
        result = np.array(numbers, np.int64)
        self.reduce(result, MPI.MAX)
        return result

    def allgather(self, thing):
        """What every rank gives, anything that can be pickled, as a list by rank."""
        mine = np.frombuffer(pickle.dumps(thing), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self.wait([self.comm.Iallgather(np.array([len(mine)], np.int64), lengths)])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        everything = np.empty(starts[-1], np.uint8)
        self.wait([self.comm.Iallgatherv([mine, MPI.BYTE], [everything, lengths, starts[:-1], MPI.BYTE])])
        return [pickle.loads(everything[start:stop].tobytes()) for start, stop in pairwise(starts)]
