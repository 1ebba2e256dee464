"""Times works in turn, on all ranks at once, and summarises the samples of all ranks and turns."""

import time
from typing import NamedTuple

import numpy as np

LEAST, MOST = 3, 100  # turns


class Sample(NamedTuple):
    """A measured figure: the median, the quartiles and the number of its samples."""

    typical: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, values):
        """The Sample of an array; nan, where a rank took no part, is left out."""
        values = np.asarray(values, float)
        values = values[np.isfinite(values)]
        low, typical, high = np.percentile(values, (25, 50, 75)).tolist()
        return cls(typical, low, high, values.size)


def take_turns(peers, works, seconds, progress=lambda seconds: None, most=MOST):
    """Time the functions `works` in turn, for about `seconds` but at most `most` turns; collective.

    After a barrier each is called with the number of the turn.  It may return its own seconds instead of those timed
    here; nan: this rank takes no part.  Each is called once before, untimed, to open connections and touch memory.
    progress: called with the seconds that have just passed, `seconds` in all.
    Returns seconds, float64 (ranks, turns, works).
    """
    for work in works:
        peers.barrier()
        work(0)
    turns, reported, begun = [], 0.0, time.monotonic()
    while True:
        turns.append([_timed(peers, work, len(turns)) for work in works])
        # the slowest rank's time, so that all ranks stop after the same turn
        gone = peers.largest([1e3 * (time.monotonic() - begun)])[0] / 1e3
        over = len(turns) >= most or (len(turns) >= LEAST and gone >= seconds)
        now = seconds if over else min(gone, seconds)
        progress(now - reported)
        reported = now
        if over:
            return np.array(peers.allgather(np.array(turns)))


def _timed(peers, work, turn):
    peers.barrier()
    start = time.perf_counter()
    own = work(turn)
    took = time.perf_counter() - start
    return took if own is None else own
