"""A test-only back end that runs late: code that orders launches wrongly on a GPU fails here too.

Launches run in one thread, copies to the wire in two others and copies from it in a fourth, each after a random delay.
Copies are made piece by piece, and those to the wire may overtake one another.  Launches do not call `meanwhile`,
because only the calling thread may call MPI.  A buffer that is not ready, or was released, holds NaN.  Writing to a
buffer that MPI is still sending raises.  Results equal those of the NumPy back end bit for bit.
"""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..numpy.backend import NumpyBackend
from ..wire import WireBytes, flat

LONGEST_DELAY = 1e-3  # seconds, for the copy of an array or for a launch
PIECE = 4096  # bytes
NAN = 0xFF  # a byte that makes NaN in every dtype if all bytes have it


class DeferredBackend(NumpyBackend):
    """The NumPy back end, as asynchronous as a GPU; see the module."""

    name = "deferred"
    sends_blocks = False

    def __init__(self):
        super().__init__()
        self._launches = ThreadPoolExecutor(1)
        self._copies_out, self._copies_in = ThreadPoolExecutor(2), ThreadPoolExecutor(1)
        self._delays = random.Random(0)
        self._sending = []
        self._arriving = {}
        self._failure = None  # the first failure; every later wait raises it

    def empty(self, shape, dtype):
        array = super().empty(shape, dtype)
        array.reshape(-1).view(np.uint8).fill(NAN)
        return array

    def begin(self):
        self.drain()

    def finish(self):
        self.drain()

    def drain(self):
        for thread in (self._launches, self._copies_in):
            self.wait(self._later(thread, (), int))

    def _later(self, thread, after, work, *args, share=1):
        delay = self._delays.uniform(0, LONGEST_DELAY / share)

        def run():
            for event in after:
                self.wait(event)
            time.sleep(delay)
            try:
                work(*args)
            except BaseException as error:
                self._failure = self._failure or error
                raise

        return thread.submit(run)

    def _launch(self, written, after, work, *args):
        for array in written:
            if array is not None:
                self._check_not_sending(array)
        return self._later(self._launches, after, work, *args)

    def _check_not_sending(self, array):
        if any(np.may_share_memory(array, busy) for busy, _ in self._sending):
            raise RuntimeError("a buffer is written to while MPI is sending it")

    def clear(self, out, lse):
        return self._launch((out, lse), (), super().clear, out, lse)

    def attend(self, block, out, lse, after=(), meanwhile=None):
        return self._launch((out, lse), after, super().attend, block, out, lse)

    def attend_pages(self, block, out, lse, after=(), meanwhile=None):
        return self._launch((out, lse), after, super().attend_pages, block, out, lse)

    def unnormalize(self, out, lse, top):
        return self._launch((out, lse), (), super().unnormalize, out, lse, top)

    def normalize(self, out, lse, top):
        return self._launch((out, lse), (), super().normalize, out, lse, top)

    def attend_backward(self, block, given, grads, after=(), meanwhile=None):
        return self._launch(grads, after, super().attend_backward, block, given, grads)

    def delta(self, delta, dout, out, dlse):
        return self._launch((delta,), (), super().delta, delta, dout, out, dlse)

    def zero(self, arrays):
        return self._launch(arrays, (), super().zero, arrays)

    def add(self, arrays, others, after=()):
        return self._launch(arrays, after, super().add, arrays, others)

    def merge(self, out, lse, out_b, lse_b, after=()):
        return self._launch((out, lse), after, super().merge, out, lse, out_b, lse_b)

    def sink(self, out, lse, sinks):
        return self._launch((out, lse), (), super().sink, out, lse, sinks)

    def sink_gradient(self, gradient, sinks, lse, delta):
        return self._launch((gradient,), (), super().sink_gradient, gradient, sinks, lse, delta)

    def take(self, dst, src, rows, after=()):
        return self._launch((dst,), after, super().take, dst, src, rows)

    def copy(self, dst, src, after=()):
        return self._launch((dst,), after, super().copy, dst, src)

    def accumulate(self, dst, src):
        return self._launch((dst,), (), super().accumulate, dst, src)

    def scatter(self, pool, slots, src, entries, tokens):
        return self._launch((pool,), (), super().scatter, pool, slots, src, entries, tokens)

    def outgoing(self, array, after=(), collective=False):
        source, staged = flat(array), np.full(array.nbytes, NAN, np.uint8)
        if array.size:
            self._sending.append((array, staged))
        share = max(1, -(-array.nbytes // PIECE))

        def ready(start, stop):
            piece = slice(start, stop)
            return self._later(self._copies_out, after, np.copyto, staged[piece], source[piece], share=share).done

        return WireBytes(staged, ready, piece=PIECE)

    def sent(self, array):
        self._sending = [busy for busy in self._sending if busy[0] is not array]

    def incoming(self, array, after=(), collective=False):
        self._check_not_sending(array)
        spoiled = self._later(self._copies_in, after, array.fill, np.nan)
        staged, target = np.full(array.nbytes, NAN, np.uint8), flat(array)
        pieces = [spoiled][: array.size]

        def taken(start, stop):
            pieces.append(
                self._later(
                    self._copies_in,
                    (),
                    np.copyto,
                    target[start:stop],
                    staged[start:stop],
                    share=max(1, -(-array.nbytes // PIECE)),
                )
            )

        self._arriving[id(array)] = pieces, staged
        return WireBytes(staged, taken=taken, piece=PIECE)

    def arrived(self, array):
        pieces, _ = self._arriving.pop(id(array))
        return pieces[-1] if pieces else None

    def forget(self, array):
        array.reshape(-1).view(np.uint8).fill(NAN)

    def wait(self, event):
        if event is not None:
            event.result()
        if self._failure:
            raise self._failure

    def close(self):
        self._launches.shutdown()
        self._copies_out.shutdown()
        self._copies_in.shutdown()
        super().close()
