"""Blocks as libraries of attention take them, which know full and causal masks and no row intervals.

A block is cut into runs of consecutive rows.  The rows of a run see a staircase: each one key more than the row before,
until all keys of the run are seen.  Every block of a full or causal mask is one run, in any layout: the first rows of a
zigzag or striped chunk may see nothing, and are in no run.
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

    Windows have none, nor have documents that begin inside a chunk of keys, nor groups of heads that differ.
    """
    if (begin != begin[0]).any() or (end != end[0]).any():
        return None
    rows = np.flatnonzero(begin[0] < end[0])
    if not len(rows):
        return ()
    first, keys = int(rows[0]), end[0, rows[0] :]
    # Documents alone have other keys, or rows that see none behind rows that see some.  Their shapes change from call
    # to call, and a library plans for every shape anew.
    if len(rows) < len(keys) or begin[0, first:].any():
        return None
    steps = np.diff(keys)
    if ((steps != 0) & (steps != 1)).any():
        return None
    starts = 1 + np.flatnonzero((steps[1:] == 1) & (steps[:-1] == 0)) + 1  # steps up again after a landing
    bounds = [0, *starts.tolist(), len(keys)]
    if len(bounds) > MOST_RUNS + 1:
        return None
    runs = []
    for start, stop in pairwise(bounds):
        last, right = int(keys[stop - 1]), int(keys[start]) - 1
        runs.append(Run(first + start, first + stop, last, None if right + 1 == last else right))
    if any(run.stop - run.start < LEAST or run.keys < LEAST for run in runs):
        return None
    return tuple(runs)
