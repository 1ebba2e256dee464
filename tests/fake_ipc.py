"""What `fake_cupy` has of CUDA IPC: memory and events in memory that processes share.

A process's streams go on only when it asks for something of its own, or when it idles while another waits for one of
its events: then no further than that event.
"""

import mmap
import os
import time
import types

import numpy as np

HANDLE = 64  # bytes, as CUDA's
LONGEST = 60.0  # seconds that another process may take
_sched_yield = os.sched_yield


class Refused(RuntimeError):
    """What CUDA would refuse."""


class Shared:
    """Bytes that are this process's own, or that it has opened by the handle of another's."""

    def __init__(self, size, handle=None):
        if handle is None:
            self.file = os.memfd_create("mpiattn")
            os.truncate(self.file, size)
            self.handle = f"{os.getpid()} {self.file}".encode().ljust(HANDLE, b"\0")
        else:
            self.handle, (process, file) = handle, map(int, handle.rstrip(b"\0").split())
            if process == os.getpid():
                raise Refused("cudaErrorDeviceUninitialized: invalid device context")  # a handle of one's own
            self.file = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        self.bytes = np.frombuffer(mmap.mmap(self.file, 0), np.uint8)
        self.ptr = self.bytes.ctypes.data


class SharedEvent:
    """How often an event has been recorded, up to which record it is done, and for which one a stream waits."""

    def __init__(self, handle=None):
        self.shared = Shared(3 * 8, handle)
        self.counts = self.shared.bytes.view(np.uint64)  # recorded, done, wanted
        if handle is None:
            own_events.append(self)

    def record(self):
        """The mark of a new record, and what its stream does when it comes to it."""
        self.counts[0] += np.uint64(1)
        number = self.counts[0].copy()

        def do():
            self.counts[1] = max(self.counts[1], number)

        return Mark(self, number), do

    def last(self):
        return Mark(self, self.counts[0].copy())


class Mark:
    """A record of a `SharedEvent`."""

    def __init__(self, event, number):
        self.event, self.number = event, number

    @property
    def done(self):
        if self.event.counts[1] >= self.number:
            return True
        self.event.counts[2] = max(self.event.counts[2], self.number)
        return False


own_events = []  # of this process, for other ones


def serve(some_steps):
    """Let streams go on until the events of this process that others wait for are done, or this one waits itself."""
    for event in own_events:
        while event.counts[2] > event.counts[1] and event.counts[0] >= event.counts[2]:
            if not some_steps(1):
                break


def patience(some_steps):
    """A function to call between two looks at whether another process has gone on."""
    end = time.monotonic() + LONGEST

    def wait():
        assert time.monotonic() < end, "another process's event is never done"
        serve(some_steps)
        _sched_yield()

    return wait


def idle_with(some_steps):
    """From now on a process that yields its core serves others: a GPU needs nobody's core."""

    def sched_yield():
        serve(some_steps)
        _sched_yield()

    os.sched_yield = sched_yield


def runtime_of(error, streams, own_event, current_device):
    """The functions of CuPy's `runtime`, as a namespace; error: what they raise."""
    opened = {}  # by the pointer that the process was given

    def guarded(make):
        try:
            return make()
        except (Refused, OSError) as refused:
            raise error(str(refused)) from refused

    def getMemHandle(devPtr):
        return memories[devPtr].handle  # KeyError: not where an allocation begins

    def openMemHandle(handle, flags=1):
        shared = guarded(lambda: Shared(0, handle))
        shared.device = current_device()
        assert (handle, shared.device) not in [(o.handle, o.device) for o in opened.values()], "it is open already"
        opened[shared.ptr] = shared
        return shared.ptr

    def closeMemHandle(devPtr):
        del opened[devPtr]

    def getEventHandle(event):
        return own_event(event).shared_event.shared.handle

    def openEventHandle(handle):
        event = guarded(lambda: SharedEvent(handle))
        opened_events[id(event)] = event
        return id(event)

    def streamWaitEvent(stream, event, flags=0):
        foreign = opened_events.get(event)
        streams[stream].put(foreign.last() if foreign else own_event(event).mark)

    def eventDestroy(event):
        del opened_events[event]

    return types.SimpleNamespace(
        ipcGetMemHandle=getMemHandle,
        ipcOpenMemHandle=openMemHandle,
        ipcCloseMemHandle=closeMemHandle,
        ipcGetEventHandle=getEventHandle,
        ipcOpenEventHandle=openEventHandle,
        streamWaitEvent=streamWaitEvent,
        eventDestroy=eventDestroy,
    )


memories, opened_events = {}, {}


class Memory:
    """As CuPy's: an allocation of its own."""

    def __init__(self, size):
        self._shared = Shared(size)
        self._shared.bytes.fill(0xFF)
        self.ptr, self.size = self._shared.ptr, size
        memories[self.ptr] = self._shared
