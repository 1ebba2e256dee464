"""The collective calls that run in this process, in all its threads.

A rank that answers others says which call it is in.  Threads with communicators of their own may call at the same time,
if MPI allows it: else the second one is refused, since MPI would end the process or mix up messages.
"""

import contextlib
import threading
from functools import cache
from typing import Any, NamedTuple

from mpi4py import MPI

from ..errors import MpiattnError


class Running(NamedTuple):
    """A call that runs, the `Channel` of its communicator, and its thread."""

    call: str
    channel: Any
    thread: int


_running: list[Running] = []  # innermost last


@cache
def _thread_level():
    """What MPI allows threads to do; it stays as MPI was initialized."""
    return MPI.Query_thread()


def check_thread(call):
    """Raise MpiattnError, on this rank alone, unless MPI may be called by this thread now."""
    level = _thread_level()
    if level == MPI.THREAD_MULTIPLE:
        return
    if level < MPI.THREAD_SERIALIZED and not MPI.Is_thread_main():
        raise MpiattnError(
            f"{call} is refused in this thread: MPI was initialized so that only its main thread may call; a call in "
            "another thread needs MPI_THREAD_SERIALIZED, and calls in several threads at a time MPI_THREAD_MULTIPLE"
        )
    own = threading.get_ident()
    for other in _running.copy():
        if other.thread != own:
            raise MpiattnError(
                f"{call} is refused: {other.call} is running in another thread, and MPI was initialized so that one "
                "thread at a time may call; several need MPI_THREAD_MULTIPLE, also on communicators of their own"
            )


def begin(call, channel):
    """From now on, answer ranks that ask what this process is doing with `call`.  Raises as `check_thread`."""
    check_thread(call)
    _running.append(Running(call, channel, threading.get_ident()))


def end(call, channel):
    """This thread is not in `call` any more."""
    with contextlib.suppress(ValueError):  # an interrupt may have come before `begin` noted it
        _running.remove(Running(call, channel, threading.get_ident()))


@contextlib.contextmanager
def during(call, channel):
    """Run the body as a call."""
    begin(call, channel)
    try:
        yield
    finally:
        end(call, channel)


def call_on(channel):
    """The innermost call on a channel's communicator; else the innermost of this process, "" if it is in none."""
    calls = _running.copy()
    here = [each for each in calls if each.channel is channel]
    return next((each.call for each in reversed(here or calls)), "")
