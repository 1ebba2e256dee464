"""Checks a result against float64 attention whose keys and values are read again, piece by piece."""

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from . import reference
from .redistribute import PIECE_BYTES

WORK_LIMIT = 2e11          # operations of float64 attention per rank: tens of seconds on one core
STATE_BYTES = 4 * 2 ** 20   # float64 queries and results held at a time

# Largest error allowed, relative to the largest absolute value: of accumulating in float32 (float64) ...
ACCUMULATION = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-5}
# ... where scores, which are rounded relative to themselves, stay below this; beyond, in proportion ...
USUAL_SCORE = 16.0
# ... but so that a wrong result is still told from a right one ...
MOST = 0.05
# ... and of rounding the result: relative, and absolute where float16 becomes subnormal.
ROUNDING = {"float64": (0, 0), "float32": (0, 0), "float16": (5e-4, 2.0 ** -25)}


def tolerances(dtype, largest_lse):
    """Relative errors allowed of out and of lse, and the absolute error of out that is not counted."""
    rounding, absolute = ROUNDING[dtype]
    scores = ACCUMULATION[dtype] * max(1, largest_lse / USUAL_SCORE)
    return min(rounding + scores, MOST), ACCUMULATION[dtype], absolute


class Report(NamedTuple):
    """What was checked, over all ranks, and how far off it is."""

    rows: int
    of_rows: int
    out_error: float
    lse_error: float
    tolerance: float
    lse_tolerance: float
    differing: int         # elements that are finite on one side only

    @property
    def passed(self):
        """Whether every error is within its tolerance."""
        return (self.out_error <= self.tolerance and self.lse_error <= self.lse_tolerance and not self.differing)

    def __str__(self):
        rows = "all rows" if self.rows == self.of_rows else "rows, a seeded sample with the first, last and edges"
        text = (f"{self.rows} of {self.of_rows} {rows}: out off by {self.out_error:.1e} (may be {self.tolerance:.0e}), "
                f"lse by {self.lse_error:.1e} (may be {self.lse_tolerance:.0e})")
        if self.differing:
            text += f", {self.differing} elements are finite on one side only"
        return f"{text}: {'passed' if self.passed else 'FAILED'}"


def choose_rows(problem, layout, rank, limit=WORK_LIMIT, seed=0):
    """Which of a rank's rows to check: all, or if that is too much work a sample with every edge of the chunk."""
    count = layout.length(rank)
    work = problem.flops_per_pair * problem.seqlen_k
    if count * work <= limit:
        return np.arange(count)
    edges, before = set(), 0
    for tokens in layout.ranges(rank):
        if tokens:
            edges |= {before, before + len(tokens) - 1}
        before += len(tokens)
    sample = np.random.default_rng([seed, rank]).choice(count, min(count, int(limit // work)), replace=False)
    return np.array(sorted(edges | set(sample.tolist())), np.int64)


def _read_queries(problem, positions, read):
    """Queries at increasing positions, read in pieces."""
    q = np.empty((problem.batch, len(positions), problem.heads, problem.head_dim), problem.dtype)
    step = max(1, PIECE_BYTES // problem.q_bytes)
    for start in range(0, problem.seqlen, step):
        stop = min(start + step, problem.seqlen)
        first, last = np.searchsorted(positions, (start, stop))
        if first < last:
            q[:, first:last] = read("q", start, stop)[:, positions[first:last] - start]
    return q


def _expected(problem, positions, read):
    """float64 out and lse of the queries at some positions, keys and values read in pieces."""
    q = _read_queries(problem, positions, read)
    out = np.zeros((problem.batch, len(positions), problem.heads, problem.value_dim))
    lse = np.full((problem.batch, problem.heads, len(positions)), -np.inf)
    step = max(1, PIECE_BYTES // problem.kv_bytes)
    for start in range(0, problem.seqlen_k, step):
        stop = min(start + step, problem.seqlen_k)
        k, v = read("k", start, stop), read("v", start, stop)
        part = reference.attention(q, k, v, problem.causal, problem.scale, window=problem.window,
                                   softcap=problem.softcap, positions=positions, keys=np.arange(start, stop),
                                   lengths=(problem.seqlen, problem.seqlen_k))
        out, lse = reference.merge(out, lse, *part)
    return out, lse


class _Errors:
    """Largest difference and largest magnitude so far, over finite elements."""

    def __init__(self):
        self.error = self.magnitude = 0.0
        self.differing = 0

    def add(self, got, expected):
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
        finite = np.isfinite(got) & np.isfinite(expected)
        self.differing += int((~same & ~finite).sum())
        self.error = max(self.error, float(np.abs(got[finite] - expected[finite]).max(initial=0)))
        self.magnitude = max(self.magnitude, float(np.abs(expected[finite]).max(initial=0)))


def verify(comm, problem, layout, out, lse, read, limit=WORK_LIMIT, seed=0, progress=None):
    """Compare this rank's out and lse with float64 attention of the source; collective.

    read(name, start, stop): tokens of "q", "k" or "v" at those positions, (batch, tokens, heads, dim), from where
    they came; it must not communicate.  progress: called with the rows just checked.  Returns a Report, the same on
    every rank.
    """
    chosen = choose_rows(problem, layout, comm.rank, limit, seed)
    positions = layout.positions(comm.rank)
    outs, lses = _Errors(), _Errors()
    row_bytes = 8 * problem.batch * problem.heads * (problem.head_dim + 4 * problem.value_dim)
    step = max(1, STATE_BYTES // row_bytes)
    for first in range(0, len(chosen), step):
        rows = chosen[first:first + step]
        expected_out, expected_lse = _expected(problem, positions[rows], read)
        outs.add(out[:, rows].astype(np.float64), expected_out)
        lses.add(lse[:, :, rows].astype(np.float64), expected_lse)
        if progress:
            progress(len(rows))
    largest = np.array([outs.error, outs.magnitude, lses.error, lses.magnitude])
    counts = np.array([len(chosen), len(positions), outs.differing + lses.differing])
    comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
    comm.Allreduce(MPI.IN_PLACE, counts, MPI.SUM)
    out_error, out_size, lse_error, lse_size = largest.tolist()
    out_tolerance, lse_tolerance, absolute = tolerances(problem.dtype, lse_size)
    return Report(*counts[:2].tolist(), max(0.0, out_error - absolute) / (out_size or 1), lse_error / max(1, lse_size),
                  out_tolerance, lse_tolerance, int(counts[2]))
