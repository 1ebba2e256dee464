"""Blocks as libraries of attention take them, which know full and causal masks and no row intervals.

A block is cut into runs of consecutive rows.  The rows of a run see a staircase: each one key more than the row before,
until all keys of the run are seen.  Every block of a full or causal mask is one run, in any layout: the first rows of a
zigzag or striped chunk may see nothing, and are in no run.  A launch of several chunks has a few runs.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

MOST_RUNS = 8  # of a block: the chunks of a fused launch are several
LEAST = 64  # rows and keys of a run: with fewer, most of a library's tiles is empty


class Run(NamedTuple):
    """Rows [start, stop) of a block, all of which see keys [0, min(keys, right + 1 + i)), i counted from start.

    right: None if all of them see all of these keys.
    """

    start: int
    stop: int
    keys: int
    right: int | None


def runs_of(begin, end):
    """The `Run`s of a block, outside of which no row sees any key; None if it has no such runs.

    begin, end: NumPy's, as for `mpiattn.backends.base.Backend.attend`.

    Windows have none, nor have most documents, nor groups of heads that differ.
    """
    if (begin != begin[0]).any() or (end != end[0]).any():
        return None
    ends = np.where(begin[0] < end[0], end[0], 0)
    if not ends.any():
        return ()
    # Documents alone have keys before those that a row sees, or rows at the end that see none.  Their shapes change
    # from call to call, and a library plans for every shape anew.
    if begin[0, ends > 0].any() or not ends[-1]:
        return None
    steps = np.diff(ends, prepend=-1)
    follows = (steps == 1) | (steps == 0)
    follows[1:] &= ~((steps[1:] == 1) & (steps[:-1] == 0))  # up again after a landing
    follows[1:] &= (ends[1:] > 0) == (ends[:-1] > 0)
    follows[0] = False
    bounds = [*np.flatnonzero(~follows).tolist(), len(ends)]
    parts = [(start, stop) for start, stop in pairwise(bounds) if ends[start]]
    if len(parts) > MOST_RUNS:
        return None
    runs = []
    for start, stop in parts:
        keys, seen = int(ends[stop - 1]), int(ends[start])
        runs.append(Run(start, stop, keys, None if seen == keys else seen - 1))
    if any(run.stop - run.start < LEAST or run.keys < LEAST for run in runs):
        return None
    return tuple(runs)
