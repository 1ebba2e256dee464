"""A test-only back end that runs late: what fails on it would fail on a GPU.

Launches wait in one thread, copies from the wire in another, each with a random delay.  A buffer that is
not ready, or was given back, holds NaN; writing to one that MPI is still sending raises.  Results are those of
the NumPy back end, bit for bit.
"""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .numpy import NumpyBackend

LONGEST_DELAY = 2e-3      # seconds


class DeferredBackend(NumpyBackend):
    """NumPy, as asynchronous as a GPU; see the module."""

    name = "deferred"
    meanwhile = property(lambda self: None, lambda self, call: None)       # MPI is the calling thread's alone

    def __init__(self):
        super().__init__()
        self._launches = ThreadPoolExecutor(1)
        self._copies = ThreadPoolExecutor(1)
        self._delays = random.Random(0)
        self._sending = []
        self._staged = {}
        self._failure = None                   # the first; from then on every wait raises it

    def empty(self, shape, dtype):
        array = super().empty(shape, dtype)
        array.fill(np.nan)
        return array

    def _later(self, thread, after, work, *args):
        delay = self._delays.uniform(0, LONGEST_DELAY)

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
            self._check_not_sending(array)
        return self._later(self._launches, after, work, *args)

    def _check_not_sending(self, array):
        if any(np.may_share_memory(array, busy) for busy in self._sending):
            raise RuntimeError("a buffer is written to while MPI is sending it")

    def clear(self, out, lse):
        return self._launch((out, lse), (), super().clear, out, lse)

    def attend(self, q, k, v, begin, end, out, lse, scale, softcap=None, after=()):
        return self._launch((out, lse), after, super().attend, q, k, v, begin, end, out, lse, scale, softcap)

    def attend_pages(self, q, keys, values, pages, page_size, begin, end, out, lse, scale, softcap=None, after=()):
        return self._launch((out, lse), after, super().attend_pages, q, keys, values, pages, page_size, begin, end, out,
                            lse, scale, softcap)

    def unnormalize(self, out, lse, top):
        return self._launch((out, lse), (), super().unnormalize, out, lse, top)

    def normalize(self, out, lse, top):
        return self._launch((out, lse), (), super().normalize, out, lse, top)

    def attend_backward(self, q, dout, lse, delta, k, v, begin, end, dq, dk, dv, scale, softcap=None, after=()):
        return self._launch((dq, dk, dv), after, super().attend_backward, q, dout, lse, delta, k, v, begin, end,
                            dq, dk, dv, scale, softcap)

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

    def copy(self, dst, src):
        return self._launch((dst,), (), super().copy, dst, src)

    def outgoing(self, array, after=()):
        for event in after:
            self.wait(event)
        if array.size:
            self._sending.append(array)
        return super().outgoing(array)

    def sent(self, array):
        self._sending = [busy for busy in self._sending if busy is not array]

    def incoming(self, array, after=()):
        self._check_not_sending(array)
        self._later(self._copies, after, array.fill, np.nan)
        staged = self._staged[id(array)] = np.empty(array.nbytes, np.uint8)
        return staged

    def arrived(self, array):
        staged = self._staged.pop(id(array))
        return self._later(self._copies, (), np.copyto, super().incoming(array), staged)

    def forget(self, array):
        array.fill(np.nan)

    def wait(self, event):
        if event is not None:
            event.result()
        if self._failure:
            raise self._failure

    def close(self):
        self._launches.shutdown()
        self._copies.shutdown()
        super().close()
