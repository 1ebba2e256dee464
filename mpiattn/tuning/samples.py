"""Times things on all ranks at once, in turn, and says what is typical of the samples of all ranks and turns."""

import time
from typing import NamedTuple

import numpy as np

LEAST, MOST = 3, 100         # turns


class Sample(NamedTuple):
    """A figure: the median of its samples, their quartiles, and how many there are."""

    typical: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values):
        """Of any array; nan is where a rank had no part."""
        values = np.asarray(values, float)
        values = values[np.isfinite(values)]
        low, typical, high = np.percentile(values, (25, 50, 75)).tolist()
        return cls(typical, low, high, values.size)


def take_turns(peers, works, seconds, progress=lambda seconds: None, most=MOST):
    """Time every one of `works` in turn, until about `seconds` are over or `most` turns; collective.

    Works are called with the number of the turn once all ranks are there.  One may return what is to count as its
    seconds: nan where this rank has no part in it.  Each is done once before, untimed: connections are made and memory
    is touched.  progress: called with the seconds that have just gone by, `seconds` in all.
    Returns seconds, float64 (ranks, turns, works).
    """
    for work in works:
        peers.barrier()
        work(0)
    mine, told, begun = [], 0.0, time.monotonic()
    while True:
        mine.append([_timed(peers, work, len(mine)) for work in works])
        # whole milliseconds of the slowest, so that all ranks stop after the same turn
        gone = peers.largest([1e3 * (time.monotonic() - begun)])[0] / 1e3
        over = len(mine) >= most or (len(mine) >= LEAST and gone >= seconds)
        now = seconds if over else min(gone, seconds)
        progress(now - told)
        told = now
        if over:
            return np.array(peers.allgather(np.array(mine)))


def _timed(peers, work, turn):
    peers.barrier()
    start = time.perf_counter()
    own = work(turn)
    took = time.perf_counter() - start
    return took if own is None else own
