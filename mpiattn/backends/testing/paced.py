"""A back end that computes with NumPy and takes the time of a slower machine, to test how compute hides transfers.

Ranks that share a few cores cannot compute in parallel, but they can sleep in parallel.  Each block launch computes its
result, and then sleeps until its operations would be done at the given speed, while MPI goes on moving messages.
Waiting ranks sleep between two tests of their messages; that is the only latency all share.  Results are correct.
Every timing is of emulated compute, and must be reported as such.
"""

import time
from contextlib import contextmanager

import numpy as np

from ...errors import ArgumentError
from ..numpy.backend import NumpyBackend

SLACK = 0.1  # a launch later than the end of the one before by less than this share of its time starts there
NAP = 2.0  # milliseconds between two tests of the messages, unless given
BACKWARD = 2.5  # a block takes five matrix products backward, two forward


class PacedBackend(NumpyBackend):
    """NumPy at `gflops` billion operations per second.

    A block takes 2 (head_dim + value_dim) operations per pair and head forward, and 2.5 times that backward.
    nap: seconds between two tests of the messages.

    The time of a launch starts at the end of the one before it, so that late wake-ups do not accumulate.
    """

    def __init__(self, name):
        super().__init__()
        gflops, nap = self.parse(name)
        self.name, self.emulated_flops, self.nap = name, gflops * 1e9, nap * 1e-3
        self._over = 0.0

    @staticmethod
    def parse(name):
        """(billion operations per second, milliseconds of a nap) from "paced:GFLOPS[:MS]".

        Raises ArgumentError for any other form.
        """
        try:
            gflops, nap = ([float(number) for number in name.split(":")[1:]] + [NAP])[:2]
        except ValueError:
            gflops = nap = 0.0
        if not (0 < gflops < float("inf") and 0 < nap < float("inf") and name.count(":") <= 2):
            raise ArgumentError(f"backend is {name!r}; write paced:GFLOPS or paced:GFLOPS:MS, both positive numbers")
        return gflops, nap

    def idle(self):
        time.sleep(self.nap)  # a rank with its own machine would not take a core from the others while it waits

    def attend(self, block, out, lse, after=(), meanwhile=None):
        with self._paced(self._flops(block, out), meanwhile):
            super().attend(block, out, lse, after, meanwhile)

    def attend_pages(self, block, out, lse, after=(), meanwhile=None):
        with self._paced(self._flops(block, out), meanwhile):
            super().attend_pages(block, out, lse, after, meanwhile)

    def attend_backward(self, block, given, grads, after=(), meanwhile=None):
        with self._paced(BACKWARD * self._flops(block, given.dout), meanwhile):
            super().attend_backward(block, given, grads, after, meanwhile)

    def _flops(self, block, out):
        pairs = int(np.maximum(block.end - block.begin, 0).sum(dtype=np.int64))  # over all groups of heads
        groups = len(block.begin) if block.pages is None else 1
        return 2 * (block.q.shape[2] + out.shape[2]) * pairs * (block.q.shape[1] // groups)

    @contextmanager
    def _paced(self, flops, meanwhile):
        seconds, now = flops / self.emulated_flops, time.perf_counter()
        start = self._over if now - self._over < SLACK * seconds else now
        self._over = start + seconds
        yield
        while (left := self._over - time.perf_counter()) > 0:
            if meanwhile:
                meanwhile(1.0)
                left = self._over - time.perf_counter()
            time.sleep(max(0.0, min(left, self.nap)))
        self._over = max(self._over, time.perf_counter() - SLACK * seconds)
