"""Small messages between ranks about failures: who has failed, who still answers.

A rank that raises while others wait for it tells them, so that they need not wait until their time limit.  A rank at
its time limit asks who still answers, so that its error can name the ranks that do not.  Ranks read these messages
whenever they wait for others.
"""

import contextlib
import pickle
import threading
import time

from mpi4py import MPI

from . import arrivals, running
from .ended import ended, tells

TAG = 32000  # of these messages only; MPI guarantees tags up to 32767
LISTEN = 1e-3  # seconds between two probes for messages while a rank waits
ANSWER = 1.0  # seconds in which a waiting rank answers, even on a crowded core
NAMED = 500  # failed ranks of a message: it stays shorter than 4 KB, which every MPI sends eagerly
LONGEST = 1000  # characters of a message: short ones are sent eagerly, and arrive without the sender's help

_channels: list["Channel"] = []  # the open channels: a rank that waits on one of them answers on all


def listen():
    """Read and answer the messages on all channels."""
    for channel in _channels.copy():
        channel.poll()


class Channel:
    """The messages about failures among the ranks of `comm`, on which nothing else uses `tag`.

    hosts: the host name of every rank; None where unknown.
    mark: identifies the communicator, the same on every rank.  MPI may reuse the number of a freed communicator for a
        new one, which then receives late messages of the old one: messages with another mark are dropped.
    failure: the text that another rank has sent about its failure, else None.
    failed: the ranks that have failed, by that message.
    failed_in: the call in which that other rank was, "" if in none.
    broken: whether MPI has told that a rank has ended, or that another one has given up because of that.
    """

    def __init__(self, comm, hosts=None, mark=b"", tag=TAG):
        self.comm, self.hosts, self.mark, self.failure, self.tag = comm, hosts, mark, None, tag
        self.failed, self.failed_in = (), ""
        self.broken, self._answers, self._sending, self._alarmed = False, {}, [], False
        # Every thread that waits reads all channels, while another may close this one and free its communicator.
        # A signal's handler may come in between and close it too, in the same thread.
        self._turn, self._open = threading.RLock(), True
        if comm.size > 1:
            _channels.append(self)

    def close(self):
        """Stop listening; call it before the communicator is freed."""
        with self._turn:
            self._open = False
            if self in _channels:
                _channels.remove(self)

    def name(self, rank):
        """A rank in words."""
        return f"rank {rank}" + (f" on {self.hosts[rank]}" if self.hosts else "")

    def names(self, ranks):
        """Ranks in words."""
        return _several([self.name(rank) for rank in ranks])

    def _others(self):
        return [rank for rank in range(self.comm.size) if rank != self.comm.rank]

    def _send(self, ranks, kind, text=None, failed=()):
        data = pickle.dumps((self.mark, kind, text and text[:LONGEST], failed[:NAMED], running.call_on(self)))
        with self._turn, contextlib.suppress(MPI.Exception):  # the rank or the link may be gone
            self._sending = [request for request in self._sending if not request.Test()]
            self._sending += [self.comm.Isend([data, MPI.BYTE], rank, self.tag) for rank in ranks]

    def alarm(self, failure, failed):
        """Tell all other ranks that these have failed: they raise PeerFailure with that text.

        Does nothing where a failure has been announced, by this rank or to this rank, or where MPI tells it.
        """
        if self.failure is None and not self._alarmed and not ended(self.comm):
            self._alarmed = True
            self._send(self._others(), "failure", failure, failed)

    def poll(self):
        """Read and answer the messages that have come, unless another thread does so now."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self.comm == MPI.COMM_NULL:  # after a failure the channel stays open, and the caller may free his own
                self.close()
            elif self._open:
                self._read()
        except MPI.Exception:  # a rank has ended: from now on ranks learn of failures by `ended`
            if not tells():
                raise
            self.broken = True
            self.close()
        finally:
            self._turn.release()

    def _read(self):
        while (message := arrivals.take(self.comm, self.tag)) is not None:
            source, data = message
            mark, kind, text, failed, call = pickle.loads(data)
            if mark != self.mark:
                continue
            if kind == "failure":
                if self.failure is None:
                    self.failure, self.failed, self.failed_in = text, failed, call
            elif kind == "question":
                self._send([source], "answer")
            else:
                self._answers[source] = call

    def roll_call(self, done):
        """Who answers, in words, and the ranks that do not.

        "" and () if there are no other ranks or `done()` becomes true meanwhile.
        """
        if self.comm.size == 1:
            return "", ()
        self._answers = {}
        self._send(self._others(), "question")
        until = time.monotonic() + ANSWER
        while len(self._answers) < self.comm.size - 1 and time.monotonic() < until:
            if done():
                return "", ()
            listen()
            time.sleep(LISTEN)
        silent = tuple(rank for rank in self._others() if rank not in self._answers)
        if silent:
            return f"no answer from {self.names(silent)}", silent
        calls = [f"{self.name(rank)} is in {call or 'no call'}" for rank, call in sorted(self._answers.items())]
        return f"the other ranks are waiting too: {_several(calls)}", ()


def _several(names, most=8):
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
