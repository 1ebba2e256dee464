"""Messages between ranks of one node through `slots`: MPI carries a byte a piece, the GPUs copy the pieces.

The sender waits until the piece is computed, copies it into a free slot and records the slot's event.  Only then does
it send the number of the slot.  The receiver's stream waits for the event and copies the piece from the sender's GPU.
Once the host has seen that this is done it returns the slot, by a message to its owner (`mpiattn.comm.acks`).  Until
then neither transfer is complete, and no other piece is written to the slot, nor its event recorded again.
"""

import time
from functools import partial

import numpy as np

from ..wire import WireBytes

CLOSING = 10.0  # seconds that a back end waits at its end for copies from other GPUs


class Ipc:
    """The messages of one `CudaBackend` to and from the ranks of its node.

    gpu: the back end.  leaving, arriving: the streams of the copies to slots and from them.
    near: the ranks, a `mpiattn.comm.near.Near`.
    """

    def __init__(self, gpu, leaving, arriving, near):
        self.gpu, self._out, self._in, self.near = gpu, leaving, arriving, near
        self._runtime = gpu.cupy.cuda.runtime

    def quiet(self):
        """Whether all copies from other GPUs are soon done: the event of a process that was killed may never be."""
        event, end = self.gpu.event(self._in), time.monotonic() + CLOSING
        while not self.gpu.all_done([event]):
            if time.monotonic() > end:
                return False
            self.gpu.idle()
        return True

    def outgoing(self, array, events, rank):
        """`WireBytes` to send an array to a rank after these events."""
        size = self.near.own.nbytes
        words, uses = np.empty(-(-array.nbytes // size), np.uint8), {}  # by piece: the slot, and its uses before

        def filled(piece):
            return self.gpu.all_done(events) and self._fill(array, piece, words, uses)

        def over(start, stop):
            self.near.collect()
            return all(self.near.own.uses[words[piece]] != uses[piece] for piece in range(start, stop))

        return WireBytes(words, lambda start, stop: partial(filled, start), over=over, piece=1, stands_for=array.nbytes)

    def _fill(self, array, piece, words, uses):
        """Copy a piece into a slot; False if none is free."""
        own, number = self.near.own, self.near.take()
        if number is None:
            return False
        start, runtime = piece * own.nbytes, self._runtime
        words[piece], uses[piece] = number, own.uses[number]
        count = min(own.nbytes, array.nbytes - start)
        target = own.pointer + number * own.nbytes
        runtime.memcpyAsync(target, array.data.ptr + start, count, runtime.memcpyDeviceToDevice, self._out.ptr)
        with self.gpu.cupy.cuda.Device(self.gpu.device):
            self._out.record(own.events[number])
        return True

    def incoming(self, array, after, rank):
        """`WireBytes` to receive an array from a rank, last used by the events `after`."""
        other = self.near.opened[rank]
        words, copied, waiting = np.empty(-(-array.nbytes // other.nbytes), np.uint8), {}, [after]

        def taken(start, stop):
            self.gpu.wait_on(self._in, waiting.pop() if waiting else ())
            for piece in range(start, stop):
                copied[piece] = self._fetch(array, piece, other, words[piece])

        def over(start, stop):
            if not self.gpu.all_done([copied[piece] for piece in range(start, stop)]):
                return False
            for piece in range(start, stop):
                self.near.acks.send(rank, int(words[piece]))
            return True

        return WireBytes(words, taken=taken, over=over, piece=1, stands_for=array.nbytes)

    def _fetch(self, array, piece, other, number):
        """Copy a piece from another rank's slot; returns the event of the copy."""
        start, runtime, number = piece * other.nbytes, self._runtime, int(number)
        count = min(other.nbytes, array.nbytes - start)
        runtime.streamWaitEvent(self._in.ptr, other.events[number])
        source = other.pointer + number * other.nbytes
        runtime.memcpyAsync(array.data.ptr + start, source, count, runtime.memcpyDeviceToDevice, self._in.ptr)
        return self.gpu.event(self._in)
