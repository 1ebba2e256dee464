"""The ranks of a communicator, and waiting for them with a time limit.

A rank that has died or has raised an exception never answers.  So every wait for other ranks is a nonblocking call that
is completed here and given up after a time limit.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from mpi4py import MPI

from ..errors import ArgumentError, PeerFailure
from ..system.logs import ERROR, note
from . import channel as channels
from .ended import ended, ended_soon
from .mpi_errors import lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

TIMEOUT = 600.0  # seconds; the work of ranks between two calls may differ by minutes
SUSPENDED = 1.0  # seconds; a longer gap between polls means a suspended process: it is not counted as waiting
HEAD = 8192  # bytes of a broadcast's first message
SHORT = 256  # bytes of the first message of every rank, where all gather

Value = TypeVar("Value")


def _is_limit(timeout: Any) -> bool:
    if not isinstance(timeout, Real) or isinstance(timeout, bool):
        return False
    seconds: Any = timeout
    return bool(seconds == math.inf or 0 < seconds <= sys.float_info.max)  # a larger int has no float


def check_timeout(timeout: object) -> None:
    """Raise ArgumentError unless `timeout` is a positive number of seconds, inf for no limit, or None."""
    if timeout is not None and not _is_limit(timeout):
        raise ArgumentError(f"timeout is {timeout!r}; it must be a positive number of seconds, inf for no limit")


def time_limit(timeout: Any, predicted: float = 0.0) -> float:
    """The given timeout or, for None, the default: enough seconds for work of `predicted` seconds."""
    return timeout if _is_limit(timeout) else max(TIMEOUT, 10 * predicted)


def translate_ranks(comm: MPI.Intracomm, ranks: Iterable[int], other: MPI.Intracomm) -> list[int]:
    """The ranks in communicator `other` of some ranks of `comm`."""
    # this form works for mpi4py 3, where it is a class method, and for mpi4py 4
    return MPI.Group.Translate_ranks(comm.Get_group(), list(ranks), other.Get_group())


class HeldRequest(MPI.Request):
    """A request that holds its buffers; those of mpi4py do not for reductions and Iallgatherv (mpi4py 4.1)."""

    buffers: tuple[object, ...]


def hold(request: MPI.Request, *buffers: object) -> HeldRequest:
    """The request, which holds these buffers as long as it lives."""
    held = HeldRequest(request)
    held.buffers = buffers
    return held


def keep_forever(buffers: object) -> None:
    """Never free an object: MPI may write to its buffers even in MPI_Finalize, which comes after the end of Python."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffers))


class keeping:
    """A context in which MPI is given these buffers: if its body raises an exception, they are never freed.

    A signal's handler, Ctrl-C's above all, may raise as soon as an MPI call returns: before its request has a name.
    """

    __slots__ = ("buffers",)

    def __init__(self, *buffers: object) -> None:
        self.buffers = buffers

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            keep_forever(self.buffers)


def _awaited(waiting_for: Callable[[], str] | None) -> str:
    """What a rank waits for, in words."""
    with suppress(MPI.Exception):  # of a request of a rank that has ended
        return waiting_for() if waiting_for else "for the other ranks"
    return "for the other ranks"


class Peers:
    """The ranks of `comm`, waited for up to `timeout` seconds.

    lost: called with the requests that were given up; it must keep them.  idle: called between two polls, to yield the
    core: a rank that shares it may be the awaited one.  channel: a `mpiattn.comm.channel.Channel` for messages about
    failures; without it ranks notice failures only at their time limit, and not who is missing.

    The methods are collective; each raises PeerFailure on a rank whose peers fail or do not come in time.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        timeout: float = TIMEOUT,
        lost: Callable[[object], object] = keep_forever,
        idle: Callable[[], object] = os.sched_yield,
        channel: channels.Channel | None = None,
    ) -> None:
        self.comm, self.timeout, self.lost, self.idle, self.channel = comm, timeout, lost, idle, channel
        self.rank, self.size = comm.rank, comm.size

    def wait(self, requests: Sequence[MPI.Request], waiting_for: Callable[[], str] | None = None) -> None:
        """Complete requests, polling MPI so that they make progress.

        waiting_for: called at the time limit; returns what this rank was waiting for, for the message.
        """
        done = requests[0].Test if len(requests) == 1 else partial(MPI.Request.Testall, requests)
        self.until(done, waiting_for, requests)

    def until(
        self, done: Callable[[], bool], waiting_for: Callable[[], str] | None = None, buffers: object = None
    ) -> None:
        """Call `done`, which polls MPI, until it returns true.

        waiting_for: as for `wait`.
        buffers: objects that MPI may still use if the time limit or an exception ends the wait.
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
                    self._listen(buffers, waiting_for)
                    listening = now + channels.LISTEN
                if waited > self.timeout:
                    return self._give_up(done, waiting_for, buffers)
                self.idle()
        except MPI.Exception as error:  # a rank has ended, or the link to it is lost
            self._lost_message(error, waiting_for, buffers)
        except BaseException:  # an interrupt, a GPU that has failed
            keep_forever(buffers)
            raise

    def _listen(self, buffers: object, waiting_for: Callable[[], str] | None) -> None:
        channels.listen()
        if self.channel and self.channel.failure:
            self.lost(buffers)
            failure = PeerFailure(self.channel.failure, self.channel.failed)
            failure.relayed = True
            raise failure
        if self.channel and (self.channel.broken or ended(self.comm)):
            ranks = ended_soon(self.comm)
            who = self.channel.names(ranks) or "a rank"
            self._fail(_awaited(waiting_for), f"{who} ended", ranks, buffers)

    def _lost_message(self, error: MPI.Exception, waiting_for: Callable[[], str] | None, buffers: object) -> NoReturn:
        """Raise PeerFailure, here and on the other ranks: MPI reports an error of what this rank waits for."""
        state: str = ""
        ranks: tuple[int, ...] = ended_soon(self.comm)
        if self.channel and not ranks:
            with suppress(MPI.Exception):
                state, ranks = self.channel.roll_call(lambda: False)
        self._listen(buffers, waiting_for)  # another rank may know more
        self._fail(f"{_awaited(waiting_for)}, {lost(error)}", state, ranks, buffers, error)

    def _give_up(self, done: Callable[[], bool], waiting_for: Callable[[], str] | None, buffers: object) -> None:
        """At the time limit: raise PeerFailure, here and on the other ranks, unless the wait just ends."""
        state, ranks = self.channel.roll_call(done) if self.channel else ("", ())
        if done():
            return
        self._listen(buffers, waiting_for)  # another rank may have given up first
        self._fail(f"{self.timeout:g} s {_awaited(waiting_for)}", state, ranks, buffers)

    def _fail(
        self, waited: str, state: str, ranks: tuple[int, ...], buffers: object, cause: Exception | None = None
    ) -> NoReturn:
        """Raise PeerFailure, here and on the other ranks.

        waited: for what, and how long; state: of the others; ranks: those that failed.
        """
        failure = (
            f"rank {self.rank} of {self.size} on {socket.gethostname()} has waited {waited}{state and '; '}{state}"
        )
        note(ERROR, self.rank, "%s", failure)
        self.lost(buffers)
        if self.channel:
            self.channel.alarm(failure, ranks)
        raise PeerFailure(failure, ranks) from cause

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.wait([self.comm.Ibarrier()])

    def reduce(self, array: NDArray[Any], operation: MPI.Op) -> None:
        """Combine an array over the ranks, in place."""
        if self.size == 1:
            return
        result = np.empty_like(array)
        with keeping(array, result):
            self.wait([self.comm.Iallreduce(array, result, operation)])
        array[...] = result

    def largest(self, numbers: Sequence[float]) -> NDArray[np.int64]:
        """The maximum of each number over the ranks, int64."""
        given = np.array(numbers, np.int64)
        if self.size == 1:
            return given
        result = np.empty(len(given), np.int64)
        with keeping(given, result):
            self.wait([self.comm.Iallreduce(given, result, MPI.MAX)])
        return result

    def each(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """The numbers of every rank, as many on each: int64 (ranks, numbers)."""
        given, result = np.array(numbers, np.int64), np.empty((self.size, len(numbers)), np.int64)
        with keeping(given, result):
            self.wait([self.comm.Iallgather(given, result)])
        return result

    def broadcast(self, value: Value) -> Value:
        """Rank 0's value, anything that can be pickled, on every rank; one message where it is short."""
        data = np.frombuffer(pickle.dumps(value) if self.rank == 0 else b"", np.uint8)
        head = np.zeros(HEAD, np.uint8)
        if self.rank == 0:
            head[:8].view(np.int64)[0] = len(data)
            head[8 : 8 + len(data)] = data[: HEAD - 8]
        with keeping(head):
            self.wait([self.comm.Ibcast([head, MPI.BYTE])])
        length = int(head[:8].view(np.int64)[0])
        if length <= HEAD - 8:
            return pickle.loads(head[8 : 8 + length].tobytes())
        whole = data.copy() if self.rank == 0 else np.empty(length, np.uint8)
        with keeping(whole):
            self.wait([self.comm.Ibcast([whole, MPI.BYTE])])
        return pickle.loads(whole.tobytes())

    def gather(self, value: Value) -> list[Value] | None:
        """The value of every rank, anything that can be pickled, as a list by rank on rank 0; None on the others."""
        pickled = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = self.each([len(pickled)])[:, 0]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        everything = np.empty(starts[-1] if self.rank == 0 else 0, np.uint8)
        with keeping(pickled, everything):
            received = [everything, lengths, starts[:-1], MPI.BYTE] if self.rank == 0 else None
            self.wait([self.comm.Igatherv([pickled, MPI.BYTE], received)])
        if self.rank:
            return None
        return [pickle.loads(everything[start:stop].tobytes()) for start, stop in pairwise(starts)]

    def allgather(self, value: Value) -> list[Value]:
        """The value of every rank, anything that can be pickled, as a list by rank; one message where all are short."""
        pickled = np.frombuffer(pickle.dumps(value), np.uint8)
        head, heads = np.zeros(SHORT, np.uint8), np.empty((self.size, SHORT), np.uint8)
        head[:8].view(np.int64)[0] = len(pickled)
        head[8 : 8 + len(pickled)] = pickled[: SHORT - 8]
        with keeping(head, heads):
            self.wait([self.comm.Iallgather(head, heads)])
        lengths = heads[:, :8].copy().view(np.int64)[:, 0]
        if lengths.max() <= SHORT - 8:
            return [pickle.loads(each[8:].tobytes()) for each in heads]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        everything = np.empty(starts[-1], np.uint8)
        with keeping(pickled, everything):
            gathered = self.comm.Iallgatherv([pickled, MPI.BYTE], [everything, lengths, starts[:-1], MPI.BYTE])
            self.wait([gathered])
        return [pickle.loads(everything[start:stop].tobytes()) for start, stop in pairwise(starts)]
