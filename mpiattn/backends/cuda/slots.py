"""Memory of a GPU that other processes of the node read by CUDA IPC: slots of one size, each with an event.

It is an allocation of its own, since CUDA shares whole allocations: the arrays of CuPy's pool, of torch and of the
caller lie in others' allocations, some of which CUDA cannot share.  A process allocates it once for each GPU and opens
that of another process once for each GPU that reads it.  Both stay until the process ends: to free it, all
would have to wait for each other.
"""

import os
from typing import NamedTuple

import numpy as np

from ...errors import MpiattnError

NUMBER = 16  # of the slots of a process; below 256
BYTES = 4 * 2**20  # of a slot
TRIED = 64  # bytes by which a process that opens the memory finds out whether it reads what was written


class Handles(NamedTuple):
    """What another process needs to open a process's slots.

    memory, events: CUDA's handles.  number, nbytes: of the slots.  written: what stands in the one behind the last.
    """

    memory: bytes
    events: list
    number: int
    nbytes: int
    written: bytes


class Slots:
    """The slots of this process on one GPU.

    pointer: where they begin.  events: of each slot, and of one more.  uses: how often each has been given back.
    They are shared by all communicators; the `mpiattn.comm.near.Near` of one holds the slots that it has taken.
    """

    def __init__(self, cupy, device):
        runtime, count = cupy.cuda.runtime, NUMBER + 1
        self.device, self.nbytes = device, BYTES
        with cupy.cuda.Device(device):
            self._memory = cupy.cuda.Memory(count * BYTES)
            self.pointer = self._memory.ptr
            self.events = [cupy.cuda.Event(disable_timing=True, interprocess=True) for _ in range(count)]
            stream, written = cupy.cuda.Stream(non_blocking=True), np.frombuffer(os.urandom(TRIED), np.uint8)
            last = self.pointer + NUMBER * BYTES
            runtime.memcpyAsync(last, written.ctypes.data, TRIED, runtime.memcpyHostToDevice, stream.ptr)
            stream.record(self.events[-1])
            stream.synchronize()
            self.handles = Handles(
                runtime.ipcGetMemHandle(self.pointer),
                [runtime.ipcGetEventHandle(event.ptr) for event in self.events],
                NUMBER,
                BYTES,
                written.tobytes(),
            )
        self.uses, self._free, self._holders = [0] * NUMBER, list(range(NUMBER)), [None] * NUMBER

    def take(self, holder):
        """The number of a free slot, or None."""
        try:
            number = self._free.pop()
        except IndexError:  # or another thread was first
            return None
        self._holders[number] = holder
        return number

    def give(self, number):
        """A slot is free again: what was in it has been read."""
        self._holders[number] = None
        self.uses[number] += 1
        self._free.append(number)

    def gone(self):
        """Whether no slot will ever be free again."""
        return all(holder is not None and holder.failed for holder in self._holders)

    @property
    def lost(self):
        """Slots that are not free.  After a call that failed they never are: another GPU may still read them."""
        return len(self.uses) - len(self._free)


_slots: dict[int, Slots] = {}  # by GPU
_lost: list[Slots] = []  # memory that is still being read, or was when a call failed
_opened: dict[tuple[int, bytes], "Opened"] = {}  # by the GPU that reads, and the handle of the memory


def slots_of(cupy, device):
    """The slots of this process on a GPU; new ones if half of them are lost."""
    slots = _slots.get(device)
    if slots is not None and 2 * slots.lost >= len(slots.uses):
        _lost.append(_slots.pop(device))
    if device not in _slots:
        _slots[device] = Slots(cupy, device)
    return _slots[device]


class Opened:
    """The slots of another process, as this one reads them.  pointer, events: as of `Slots`."""

    def __init__(self, cupy, handles):
        self._runtime, self.nbytes, self.events = cupy.cuda.runtime, handles.nbytes, []
        self.pointer = self._runtime.ipcOpenMemHandle(handles.memory)
        try:
            for handle in handles.events:
                self.events.append(self._runtime.ipcOpenEventHandle(handle))
            self._try(cupy, handles)
        except BaseException:
            self.close()
            raise

    def _try(self, cupy, handles):
        """Copy as messages are copied: from the other's memory to this GPU's."""
        runtime, read, here = self._runtime, np.zeros(TRIED, np.uint8), cupy.cuda.Memory(TRIED)
        stream = cupy.cuda.Stream(non_blocking=True)
        runtime.streamWaitEvent(stream.ptr, self.events[-1])
        last = self.pointer + handles.number * handles.nbytes
        runtime.memcpyAsync(here.ptr, last, TRIED, runtime.memcpyDeviceToDevice, stream.ptr)
        runtime.memcpyAsync(read.ctypes.data, here.ptr, TRIED, runtime.memcpyDeviceToHost, stream.ptr)
        stream.synchronize()
        if read.tobytes() != handles.written:
            raise MpiattnError("other bytes were read than were written")

    def close(self):
        """Close the handles."""
        while self.events:
            self._runtime.eventDestroy(self.events.pop())
        self._runtime.ipcCloseMemHandle(self.pointer)


def opened(cupy, device, handles):
    """The slots of another process, opened by this one on a GPU of its own unless they already are."""
    key = device, handles.memory
    if key not in _opened:
        with cupy.cuda.Device(device):
            _opened[key] = Opened(cupy, handles)
    return _opened[key]
