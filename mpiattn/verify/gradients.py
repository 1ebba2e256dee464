"""Compares gradients with float64 gradients of inputs that are read again, piece by piece.

dq of a row depends on all keys, and on the row's own lse and delta = rowsum(dout * out).  dk and dv of a key depend on
lse and delta of every query.  These are float64 where every row is checked, since that computes them; else they are
those of the run itself, whose out and lse `mpiattn.verify.compare` has sampled.
"""

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from . import reference
from .compare import (
    MOST,
    WORK_LIMIT,
    Errors,
    Source,
    accumulation_error,
    choose_rows,
    keys_seen,
    largest,
    rounding_error,
    steps,
)

# Gradients are rounded themselves, and are computed from delta, which comes from a rounded out.
TIMES_ROUNDING = 3


class GradientReport(NamedTuple):
    """The rows and keys that were checked on all ranks, and their errors."""

    rows: int
    of_rows: int
    keys: int
    of_keys: int
    dq_error: float
    dk_error: float
    dv_error: float | None  # None where dk takes dv
    tolerance: float
    differing: int  # elements that are finite on one side only
    nonfinite_rows: int  # rows of dq with elements that are NaN or infinite on both sides alike
    nonfinite_keys: int  # and keys of dk or of dv, whichever are more
    independent: bool  # whether keys were checked with float64 lse and delta, not with those of the run

    @property
    def passed(self):
        """Whether every error is within its tolerance."""
        return max(self.dq_error, self.dk_error, self.dv_error or 0) <= self.tolerance and not self.differing

    def __str__(self):
        sampled = (self.rows, self.keys) != (self.of_rows, self.of_keys)
        text = (
            f"{self.rows} of {self.of_rows} rows: dq off by {self.dq_error:.1e}; {self.keys} of {self.of_keys} "
            f"keys: dk by {self.dk_error:.1e}"
            + ("" if self.dv_error is None else f", dv by {self.dv_error:.1e}")
            + f" (may be {self.tolerance:.0e})"
        )
        if sampled:
            text += ", a seeded sample with the first, last and edges"
        if not self.independent:
            text += ", keys with this run's own lse and out"
        if self.differing:
            text += f", {self.differing} elements are finite on one side only"
        if self.nonfinite_rows or self.nonfinite_keys:
            text += f", {self.nonfinite_rows} rows and {self.nonfinite_keys} keys are NaN or infinite on both sides"
        return f"{text}: {'passed' if self.passed else 'FAILED'}"


def choose(problem, q_layout, k_layout, rank, documents=None, limit=WORK_LIMIT, seed=0):
    """The rows of dq and the keys of dk and dv that `verify_gradients` checks on a rank."""
    products = problem.flops_per_pair / 2  # two for out, five for gradients
    seen = keys_seen(problem, q_layout.positions(rank), documents)
    every = np.full(k_layout.length(rank), problem.seqlen)  # whatever the masks are, keys go through all queries
    return (
        choose_rows(q_layout, rank, 7 * products * seen, limit, seed),
        choose_rows(k_layout, rank, 5 * products * every, limit, seed),
    )


def _delta(dout, out):
    return np.einsum("bqhd,bqhd->bhq", dout.astype(np.float64), out.astype(np.float64))


class _Check:
    """A verification: the errors so far, and the lse and delta of this rank's queries."""

    def __init__(self, peers, source, positions, lse, out, progress):
        self.peers, self.source, self.positions = peers, source, positions
        self.progress = progress or (lambda done: None)
        self.lse, self.out, self.delta = lse, out, None  # delta None: of this out
        self.dq, self.dk, self.dv = Errors(), Errors(), Errors()
        self.largest = {"lse": 0.0, "q": 0.0, "k": 0.0, "dout * out": 0.0}

    def _see(self, name, array):
        self.largest[name] = max(self.largest[name], largest(array))

    def rows(self, dq, rows, keep):
        """Check some rows of dq.  keep: these are all rows; their float64 lse and delta replace those of the run."""
        p, source = self.source.problem, self.source
        kept = np.zeros((2, *self.lse.shape) if keep else 0)
        for turn in steps(len(rows), 8 * p.batch * p.heads * (3 * p.head_dim + 5 * p.value_dim)):
            some = rows[turn]
            positions = self.positions[some]
            q, dout = source.rows("q", positions), source.rows("dout", positions)
            out, lse = source.attention(positions, q)
            delta, expected = _delta(dout, out), np.zeros(q.shape)
            for keys, k, v in source.keys_of(positions):
                where = {"positions": positions, "keys": keys, **source.scores, **source.masks}
                expected += reference.gradients(dout, q, k, v, lse, delta, of="q", **where)[0]
                self._see("k", k)
            self.dq.add(dq[:, some], expected)
            self._see("lse", lse)
            self._see("dout * out", np.sqrt(np.square(dout * out).sum(axis=-1)))
            if keep:
                kept[..., some] = lse, delta
            self.progress(len(some))
        if keep:
            self.lse, self.delta = kept

    def _of_all(self, positions, dout):
        """lse and delta of the queries at consecutive positions, each from the rank that has it; collective."""
        lse_and_delta = np.zeros((2, *self.lse.shape[:2], len(positions)))
        own = slice(*np.searchsorted(self.positions, (positions[0], positions[-1] + 1)))
        places = self.positions[own] - positions[0]
        lse_and_delta[0][..., places] = self.lse[..., own]
        lse_and_delta[1][..., places] = (
            _delta(dout[:, places], self.out[:, own]) if self.delta is None else self.delta[..., own]
        )
        self.peers.reduce(lse_and_delta, MPI.SUM)  # every element is zero on all ranks but one
        return lse_and_delta

    def keys(self, dk, dv, keys, key_positions):
        """Check some keys of dk and dv; collective.  dv: None where dk takes both."""
        p, source = self.source.problem, self.source
        turns = steps(len(keys), 8 * p.batch * p.kv_heads * 3 * (p.head_dim + p.value_dim))
        for turn in range(self.peers.largest([len(turns)])[0]):
            some = keys[turns[turn]] if turn < len(turns) else keys[:0]
            positions = key_positions[some]
            k, v = source.rows("k", positions), source.rows("v", positions)
            expected_dk, expected_dv = np.zeros(k.shape), np.zeros(v.shape)
            for queries, q, dout in source.pieces("q", "dout"):
                _, of_k, of_v = reference.gradients(
                    dout,
                    q,
                    k,
                    v,
                    *self._of_all(queries, dout),
                    positions=queries,
                    keys=positions,
                    of="kv",
                    **source.scores,
                    **source.masks,
                )
                expected_dk += of_k
                expected_dv += of_v
                self._see("q", q)
            if dv is None:
                expected_dk[..., : p.value_dim] += expected_dv
            else:
                self.dv.add(dv[:, some], expected_dv)
            self.dk.add(dk[:, some], expected_dk)
            self.progress(len(some))

    def errors(self):
        """The fields of a GradientReport from dq_error to nonfinite_keys."""
        p = self.source.problem
        errors_of = (self.dq, self.dk, self.dv)
        maxima = np.array(
            [[e.error for e in errors_of], [e.magnitude for e in errors_of], [*self.largest.values()][1:]]
        )
        lse_size = max(self.peers.allgather(self.largest["lse"]))
        self.peers.reduce(maxima, MPI.MAX)
        errors, sizes, (q_size, k_size, change) = maxima
        # Where the terms of dq or dk cancel, the error of out, through delta, remains: its size replaces theirs.
        sizes = np.maximum(sizes, [p.scale * k_size * change, p.scale * q_size * change, 0])
        rounding, absolute = rounding_error(p, 1)
        tolerance = min(TIMES_ROUNDING * rounding + accumulation_error(p, lse_size), MOST)
        relative = np.maximum(0, errors - absolute) / np.where(sizes == 0, 1, sizes)
        counts = np.array(
            [sum(e.differing for e in errors_of), self.dq.nonfinite, max(self.dk.nonfinite, self.dv.nonfinite)]
        )
        self.peers.reduce(counts, MPI.SUM)
        of_q, of_k, of_v = relative.tolist()
        return of_q, of_k, None if p.shared_kv else of_v, tolerance, *counts.tolist()


def verify_gradients(
    peers,
    problem,
    q_layout,
    k_layout,
    out,
    lse,
    gradients,
    read,
    documents=None,
    limit=WORK_LIMIT,
    seed=0,
    progress=None,
):
    """Compare this rank's gradients (dq, dk, dv) with float64 ones of the source; collective.

    dv: None where keys hold the values.
    out, lse: of the same run.  read, documents: as for `verify.compare.Source`, with dout.  progress: called with the
    number of rows or keys just checked.  Returns a GradientReport, the same on every rank.
    """
    rows, keys = choose(problem, q_layout, k_layout, peers.rank, documents, limit, seed)
    positions, key_positions = q_layout.positions(peers.rank), k_layout.positions(peers.rank)
    independent = all(peers.allgather(len(rows) == len(positions)))
    check = _Check(peers, Source(problem, read, documents), positions, lse, out, progress)
    dq, dk, dv = gradients
    check.rows(dq, rows, keep=independent)
    check.keys(dk, dv, keys, key_positions)
    counts = np.array([len(rows), len(positions), len(keys), len(key_positions)])
    peers.reduce(counts, MPI.SUM)
    return GradientReport(*counts.tolist(), *check.errors(), independent)
