"""A back end that computes with NumPy and takes the time of a slower machine: for tests of how transfers hide.

Ranks that share a few cores cannot compute side by side, but they can sleep side by side.  Each launch of a block is
really computed, and then sleeps until the time that its work takes at a given speed has passed, while MPI goes on
moving messages.  Waiting ranks nap between two looks at their messages, which is all the latency that they have in
common.  The results are right; every figure of time is of emulated compute, and has to be called so.
"""

import time
from contextlib import contextmanager

import numpy as np

from ...errors import ArgumentError
from ..numpy.backend import NumpyBackend

SLACK = 0.1             # a launch begins when the one before has ended, if no later than this share of its time
NAP = 2.0               # milliseconds between two looks at the messages, where none are given
BACKWARD = 2.5          # five matrix products of a block against two


class PacedBackend(NumpyBackend):
    """NumPy at `gflops` billion operations a second: 2 (head_dim + value_dim) a pair and head, 2.5 times that backward.

    nap: milliseconds between two looks at the messages.

    The time for a launch starts when the one before it was over, so that waking up late does not add up.
    """

    def __init__(self, name):
        super().__init__()
        gflops, nap = self.parse(name)
        self.name, self.emulated_flops, self.nap = name, gflops * 1e9, nap * 1e-3
        self._over = 0.0

    @staticmethod
    def parse(name):
        """The billions of operations a second and milliseconds of a nap of "paced:GFLOPS[:MS]".

        Raises ArgumentError.
        """
        try:
            gflops, nap = ([float(number) for number in name.split(":")[1:]] + [NAP])[:2]
        except ValueError:
            gflops = nap = 0.0
        if not (0 < gflops < float("inf") and 0 < nap < float("inf") and name.count(":") <= 2):
            raise ArgumentError(f"backend is {name!r}; after paced: it must have a positive number of Gflop/s and may "
                                "have another : and milliseconds")
        return gflops, nap

    def idle(self):
        time.sleep(self.nap)   # a machine of its own would not take the core from the others while it waits

    def attend(self, q, k, v, begin, end, out, lse, scale, softcap=None, after=(), meanwhile=None):
        with self._paced(self._flops(q, v, begin, end), meanwhile):
            super().attend(q, k, v, begin, end, out, lse, scale, softcap, after, meanwhile)

    def attend_pages(self, q, keys, values, pages, page_size, begin, end, out, lse, scale, softcap=None, after=(),
                     meanwhile=None):
        pairs = int(np.maximum(end - begin, 0).sum(dtype=np.int64))
        with self._paced(2 * (keys.shape[2] + values.shape[2]) * pairs * q.shape[1], meanwhile):
            super().attend_pages(q, keys, values, pages, page_size, begin, end, out, lse, scale, softcap, after,
                                 meanwhile)

    def attend_backward(self, q, dout, lse, delta, k, v, begin, end, dq, dk, dv, scale, softcap=None, after=(),
                        meanwhile=None):
        with self._paced(BACKWARD * self._flops(q, v, begin, end), meanwhile):
            super().attend_backward(q, dout, lse, delta, k, v, begin, end, dq, dk, dv, scale, softcap, after,
                                    meanwhile)

    def _flops(self, q, v, begin, end):
        pairs = int(np.maximum(end - begin, 0).sum(dtype=np.int64))        # of every group of heads
        return 2 * (q.shape[2] + v.shape[2]) * pairs * (q.shape[1] // len(begin))

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
