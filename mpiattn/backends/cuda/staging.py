"""Copies between a GPU's arrays and pinned host memory, which MPI sends and receives, in pieces."""

from functools import partial

import numpy as np

from ..wire import WireBytes
from .pinned import PinnedBlocks

PIECE = 4 * 2**20  # maximum bytes of a staged message


class Staging:
    """The arrays of one `CudaBackend` that travel through host memory.

    gpu: the back end.  leaving, arriving: the streams of the copies to the host and from it.
    """

    def __init__(self, gpu, leaving, arriving):
        self.gpu, self._out, self._in = gpu, leaving, arriving
        self._runtime = gpu.cupy.cuda.runtime
        self._pinned = PinnedBlocks(gpu.cupy, gpu.device)
        self._leaving, self._arriving = {}, {}  # by the array's id; what is in them holds the array

    @property
    def nbytes(self):
        """Bytes of pinned host memory that are allocated."""
        return self._pinned.nbytes

    def outgoing(self, array, after):
        """As `Backend.outgoing`."""
        if not array.nbytes:
            return WireBytes(np.empty(0, np.uint8), lambda start, stop: lambda: True, piece=PIECE)
        self.count(array)
        held = self._leaving[id(array)]
        if held.block is None:  # else it is staged for another rank already, and unchanged since
            held.block = self._pinned.take(array.nbytes)
            self.gpu.wait_on(self._out, after)
        return WireBytes(held.block.bytes[: array.nbytes], partial(self._copy_out, held), piece=PIECE)

    def count(self, array):
        """Count a send of an array, which may go another way: `sent` is called for each, and its block is in use."""
        if array.nbytes:
            self._leaving.setdefault(id(array), _Leaving(array)).users += 1

    def _copy_out(self, held, start, stop):
        copied = held.copied.get((start, stop))
        if copied is None and stop > start:
            self._runtime.memcpyAsync(
                held.block.pointer + start,
                held.array.data.ptr + start,
                stop - start,
                self._runtime.memcpyDeviceToHost,
                self._out.ptr,
            )
            copied = held.copied[start, stop] = self.gpu.event(self._out)
        return partial(self.gpu.all_done, [copied])

    def sent(self, array):
        """As `Backend.sent`."""
        held = self._leaving.get(id(array))
        if held is None:
            return
        held.users -= 1
        if not held.users:
            del self._leaving[id(array)]
            if held.block is not None:
                self._pinned.give(held.block)

    def incoming(self, array, after):
        """As `Backend.incoming`."""
        if not array.nbytes:
            return WireBytes(np.empty(0, np.uint8), piece=PIECE)
        held = self._arriving[id(array)] = _Arriving(array, self._pinned.take(array.nbytes), after)
        return WireBytes(held.block.bytes[: array.nbytes], taken=partial(self._copy_in, held), piece=PIECE)

    def _copy_in(self, held, start, stop):
        self.gpu.wait_on(self._in, held.after)  # only now, so that earlier copies need not wait for them
        held.after = ()
        self._runtime.memcpyAsync(
            held.array.data.ptr + start,
            held.block.pointer + start,
            stop - start,
            self._runtime.memcpyHostToDevice,
            self._in.ptr,
        )

    def arrived(self, array):
        """As `Backend.arrived`."""
        held = self._arriving.pop(id(array), None)
        if held is None:
            return None  # MPI has written the array itself
        event = self.gpu.event(self._in)
        self._pinned.give(held.block, event)
        return event

    def clear(self):
        """Free the blocks that are not in use."""
        self._pinned.clear()


class _Leaving:
    """An array being sent.

    block: its pinned memory, None before it is needed.  copied: events of its pieces' copies, by their bytes.
    users: pending sends.
    """

    def __init__(self, array):
        self.array, self.block, self.copied, self.users = array, None, {}, 0


class _Arriving:
    """An array being received into a pinned block.  after: the events of its last uses."""

    def __init__(self, array, block, after):
        self.array, self.block, self.after = array, block, after
