"""A back end that finds races: two accesses of the same memory, one of them a write, of which either may come first.

Operations access memory: launches, copies to the wire, copies from it, and writes by the calling thread.  An operation
begins after whatever the calling thread has waited for, after the events that it is given and, if it is a launch, after
all launches before it.  Nothing else orders two operations.  The back end notes for each operation which others are
over when it begins.  An operation that shares memory with another that is not over races with it, unless both only
read.

A race is seen also where it does no harm in this run.  Delays therefore play no role, and every run of a plan finds the
same races.

What an operation knows to be over is a set of numbers of operations, kept as the bits of an int.
"""

import threading
from typing import NamedTuple

import numpy as np

from mpiattn.backends.testing import deferred


class Access(NamedTuple):
    """An array that an operation reads or writes.

    operation: its number.  The array keeps its memory from being given to another array.
    """

    operation: int
    array: np.ndarray
    writes: bool
    text: str


class HappensBefore(deferred.DeferredBackend):
    """The deferred back end, which also lists its `races`; see the module.

    where: a function that returns what the calling thread does, in words.
    """

    def __init__(self):
        super().__init__()
        self.races: list[str] = []
        self.where = str
        self._caller = threading.get_ident()
        self._count = 0  # operations so far
        self._accesses: list[Access] = []  # of operations that the calling thread has not waited for
        self._over = 0  # what the calling thread knows to be over
        self._launched = 0  # what is over after the last launch
        self._drained = 0  # what is over after `drain`
        self._leaving: list[tuple[np.ndarray, int]] = []  # arrays that are sent, and what is over after that
        self._landing: list[tuple[np.ndarray, int]] = []  # the same of arrays that are received

    def _operation(self, name, reads, writes, past):
        """Note an operation that begins when `past` is over, and its races; returns what is over when it is."""
        past |= self._over
        accesses = [
            Access(self._count, array, kind == "writes", f"{name} {self.where()} {kind} {array.dtype} {array.shape}")
            for kind, arrays in (("reads", reads), ("writes", writes))
            for array in arrays
        ]
        for access in accesses:
            for other in self._accesses:
                ordered = past >> other.operation & 1 or not (access.writes or other.writes)
                if not ordered and np.shares_memory(access.array, other.array):
                    self.races.append(f"{access.text}, maybe before the end of: {other.text}")
        self._accesses += accesses
        self._count += 1
        return past | 1 << (self._count - 1)

    def _learn(self, over):
        """The calling thread has waited until these operations are over."""
        self._over |= over
        self._accesses = [access for access in self._accesses if not self._over >> access.operation & 1]

    def _launch(self, written, after, work, *args):
        arrays = list(_arrays(args))
        writes = [array for array in written if array is not None]
        reads = [array for array in arrays if not any(array is other for other in writes)]
        self._launched = self._operation(work.__name__, reads, writes, self._launched | _over(after))
        self._drained |= self._launched
        event = super()._launch(written, after, work, *args)
        event.over = self._launched
        return event

    def _check_not_sending(self, array):
        """Nothing: such a write is a race."""

    def outgoing(self, array, after=(), collective=False):
        self._leaving.append((array, self._operation("a send", [array], [], _over(after))))
        return super().outgoing(array, after, collective)

    def sent(self, array):
        self._learn(_taken(self._leaving, array))
        super().sent(array)

    def incoming(self, array, after=(), collective=False):
        over = self._operation("a receive", [], [array], _over(after))
        self._drained |= over
        self._landing.append((array, over))
        return super().incoming(array, after, collective)

    def arrived(self, array):
        over, event = _taken(self._landing, array), super().arrived(array)
        if event is not None:  # None of an empty array
            event.over = over
        return event

    def wait(self, event):
        super().wait(event)
        if threading.get_ident() == self._caller:  # threads wait too, before what they run
            self._learn(_over([event]))

    def drain(self):
        super().drain()
        self._learn(self._drained)

    def forget(self, array):
        self._learn(self._operation("forget", [], [array], 0))
        super().forget(array)


def _arrays(given):
    """The arrays among some arguments, such as the fields of a block."""
    for each in given:
        if isinstance(each, np.ndarray):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _arrays(each)


def _over(events):
    """What is over after some events."""
    over = 0
    for event in events:
        over |= getattr(event, "over", 0)
    return over


def _taken(pairs, array):
    """Remove the pairs with an array from a list; returns what is over after their operations."""
    over = 0
    for pair in [pair for pair in pairs if pair[0] is array]:
        over |= pair[1]
    pairs[:] = [pair for pair in pairs if pair[0] is not array]
    return over
