"""Checks a result against float64 attention whose keys and values are read again, piece by piece."""

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from . import reference
from .redistribute import PIECE_BYTES

WORK_LIMIT = 2e11          # operations of float64 attention per rank: tens of seconds on one core
STATE_BYTES = 16 * 2 ** 20  # float64 queries and results held at a time

# Largest error allowed, relative to the largest absolute value: accumulation in float32 (float64), and for
# float16 the rounding of the result.
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-3}
# Scores are rounded relative to themselves, so where rows of scores reach beyond this the tolerance grows.
USUAL_LSE = 16.0


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


def _expected(problem, q, positions, read_keys):
    """float64 out and lse of some queries, keys and values read in pieces."""
    out = np.zeros((problem.batch, len(positions), problem.heads, problem.value_dim))
    lse = np.full((problem.batch, problem.heads, len(positions)), -np.inf)
    step = max(1, PIECE_BYTES // problem.kv_bytes)
    for start in range(0, problem.seqlen_k, step):
        stop = min(start + step, problem.seqlen_k)
        k, v = read_keys(start, stop)
        part = reference.attention(q, k, v, problem.causal, problem.scale, positions, np.arange(start, stop),
                                   (problem.seqlen, problem.seqlen_k))
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


def verify(comm, problem, layout, q, out, lse, read_keys, limit=WORK_LIMIT, seed=0, progress=None):
    """Compare this rank's out and lse with float64 attention of its own q; collective.

    read_keys(start, stop): keys and values (batch, tokens, kv_heads, dim) of those positions, from their source;
    it must not communicate.  progress: called with the rows just checked.  Returns a Report, the same on every rank.
    """
    chosen = choose_rows(problem, layout, comm.rank, limit, seed)
    positions = layout.positions(comm.rank)
    outs, lses = _Errors(), _Errors()
    row_bytes = 8 * problem.batch * problem.heads * (problem.head_dim + 4 * problem.value_dim)
    step = max(1, STATE_BYTES // row_bytes)
    for first in range(0, len(chosen), step):
        rows = chosen[first:first + step]
        expected_out, expected_lse = _expected(problem, q[:, rows], positions[rows], read_keys)
        outs.add(out[:, rows].astype(np.float64), expected_out)
        lses.add(lse[:, :, rows].astype(np.float64), expected_lse)
        if progress:
            progress(len(rows))
    largest = np.array([outs.error, outs.magnitude, lses.error, lses.magnitude])
    counts = np.array([len(chosen), len(positions), outs.differing + lses.differing])
    comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
    comm.Allreduce(MPI.IN_PLACE, counts, MPI.SUM)
    out_error, out_size, lse_error, lse_size = largest.tolist()
    return Report(*counts[:2].tolist(), out_error / (out_size or 1), lse_error / max(1, lse_size),
                  TOLERANCE[problem.dtype] * max(1, lse_size / USUAL_LSE),
                  TOLERANCE["float64" if problem.dtype == "float64" else "float32"], int(counts[2]))
