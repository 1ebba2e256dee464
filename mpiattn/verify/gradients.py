"""Compares gradients with float64 gradients of inputs that are read again, piece by piece.

Gradients need lse and delta = rowsum(dout * out) of every row.  Where every row is checked they are float64, which
checking out computes anyway, and a pair of a row and a key that it sees gives to dq, dk and dv at once.  Else a sample
of rows and a sample of keys are checked apart: the rows with their float64 lse and delta; the keys, which many more
rows see, with those of the run itself.  In either way every rank goes through its own rows, and ranks add up what
their rows give to the keys.
"""

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ..comm.agreement import everywhere
from ..errors import VerificationError
from ..system.words import number
from .compare import MOST, WORK_LIMIT, Errors, accumulation_error, choose_rows, largest, rounding_error, verify
from .sweep import key_turns, sweep

# Gradients are rounded themselves, and are computed from delta, which comes from a rounded out.
TIMES_ROUNDING = 3


def gradient_tolerance(problem, largest_lse):
    """Allowed error of a gradient, relative to its largest value."""
    rounding, _ = rounding_error(problem, 1)
    return min(TIMES_ROUNDING * rounding + accumulation_error(problem, largest_lse), MOST)


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
            f"{self.rows} of {number(self.of_rows, 'row')}: dq off by {self.dq_error:.1e}; "
            f"{self.keys} of {number(self.of_keys, 'key')}: dk by {self.dk_error:.1e}"
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


class Chosen(NamedTuple):
    """The rows of dq and the keys of dk and dv that are checked on a rank.  every: whether all are, on every rank."""

    rows: np.ndarray
    keys: np.ndarray
    every: bool


def choose(peers, source, layouts, limit=WORK_LIMIT):
    """What `verify_both` checks of gradients on a rank; collective.

    All, if no rank has too much work with its rows, which are all that keys are seen by.  Else samples of both.
    """
    problem, (q_layout, k_layout) = source.problem, layouts
    products = problem.flops_per_pair / 2  # two for out, five for gradients
    seen = source.keys_seen(q_layout.positions(peers.rank))
    rows = choose_rows(q_layout, peers.rank, 7 * products * seen, limit)
    if all(peers.allgather(len(rows) == len(seen))):
        return Chosen(rows, np.arange(k_layout.length(peers.rank)), True)
    queries = np.full(k_layout.length(peers.rank), problem.seqlen)  # that may see a key
    return Chosen(rows, choose_rows(k_layout, peers.rank, 5 * products * queries, limit), False)


def _delta(dout, out):
    return np.einsum("bqhd,bqhd->bhq", dout.astype(np.float64), out.astype(np.float64))


class _Check:
    """A verification: the errors so far, and the float64 lse and delta of this rank's rows as they become known."""

    def __init__(self, peers, source, positions, out, lse, progress):
        self.peers, self.source, self.positions = peers, source, positions
        self.progress = progress or (lambda done: None)
        self.out, self.lse, self.exact = out, lse, np.zeros((2, *lse.shape))
        self.dq, self.dk, self.dv = Errors(), Errors(), Errors()
        self.largest = {"lse": 0.0, "q": 0.0, "k": 0.0, "dout * out": 0.0}

    def _see(self, name, size):
        self.largest[name] = max(self.largest[name], size)

    def keep(self, rows, out, lse):
        """Keep what gradients need of the float64 out and lse of some rows."""
        dout = self.source.rows("dout", self.positions[rows])
        self.exact[..., rows] = lse, _delta(dout, out)
        self._see("lse", largest(lse))
        self._see("dout * out", largest(np.sqrt(np.square(dout * out).sum(axis=-1))))

    def float64(self, rows, dout):
        """lse and delta of rows that were kept."""
        return self.exact[..., rows]

    def of_run(self, rows, dout):
        """lse and delta of rows as the run itself has them."""
        return self.lse[..., rows], _delta(dout, self.out[:, rows])

    def of_rows(self, dq, rows):
        """What a sweep over some rows calls to check dq."""

        def check(queries, expected):
            self.dq.add(dq[:, rows[queries]], expected)
            self.progress(len(queries))

        return check

    def of_keys(self, dk, dv, keys, own, biases=None):
        """What a sweep calls to check dk and dv of some keys at the positions `own`.  dv: None where dk takes both.

        biases: `bias_gradients.BiasGradients` of which it checks those of keys too, or None.
        """

        def check(positions, expected_dk, expected_dv, sums=()):
            self.peers.reduce(expected_dk, MPI.SUM)  # over all rows
            self.peers.reduce(expected_dv, MPI.SUM)
            if dv is None:
                expected_dk[..., : self.source.problem.value_dim] += expected_dv
            _, places, numbers = np.intersect1d(positions, own, assume_unique=True, return_indices=True)
            some = keys[numbers]
            self.dk.add(dk[:, some], expected_dk[:, places])
            if dv is not None:
                self.dv.add(dv[:, some], expected_dv[:, places])
            if biases is not None:
                biases.end(sums, keys, own)
            self.progress(len(some))

        return check

    def sweep(self, rows, turns, statistics, **checks):
        """`sweep` over some of this rank's rows.  statistics: as there, but of rows."""
        sizes = sweep(
            self.source, self.positions[rows], turns, lambda queries, dout: statistics(rows[queries], dout), **checks
        )
        for name, size in zip("qk", sizes.tolist()):
            self._see(name, size)

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
        sizes = np.maximum(sizes, [abs(p.scale) * k_size * change, abs(p.scale) * q_size * change, 0])
        _, absolute = rounding_error(p, 1)
        relative = np.maximum(0, errors - absolute) / np.where(sizes == 0, 1, sizes)
        counts = np.array(
            [sum(e.differing for e in errors_of), self.dq.nonfinite, max(self.dk.nonfinite, self.dv.nonfinite)]
        )
        self.peers.reduce(counts, MPI.SUM)
        of_q, of_k, of_v = relative.tolist()
        return of_q, of_k, None if p.shared_kv else of_v, gradient_tolerance(p, lse_size), *counts.tolist()


def verify_both(peers, source, layouts, out, lse, gradients, limit=WORK_LIMIT, progress=None, biases=None):
    """Compare this rank's out, lse and gradients (dq, dk, dv) with float64 ones of a `Source` with dout; collective.

    layouts: of the queries and of the keys.  dv: None where keys hold the values.  limit: as of `verify`.  progress:
    called with the number of rows of out, rows of dq or keys just checked.  biases: `bias_gradients.BiasGradients` or
    None.  Returns a Report, a GradientReport and, with biases, a BiasReport, the same on every rank.
    """
    problem, (q_layout, k_layout) = source.problem, layouts
    rows, keys, independent = choose(peers, source, layouts, limit)
    positions, key_positions = q_layout.positions(peers.rank), k_layout.positions(peers.rank)
    own = key_positions[keys]
    check = _Check(peers, source, positions, out, lse, progress)
    report = verify(peers, source, q_layout, out, lse, limit, progress, check.keep)
    dq, dk, dv = gradients
    of_rows, of_keys = check.of_rows(dq, rows), check.of_keys(dk, dv, keys, own, biases)
    turns = key_turns(problem, peers.allgather(own))
    more = {} if biases is None else {"sums_of": lambda at: biases.begin(at, independent)}
    if independent:
        check.sweep(rows, turns, check.float64, see_rows=of_rows, see_keys=of_keys, **more)
    else:
        check.sweep(rows, key_turns(problem, [np.arange(problem.seqlen_k)]), check.float64, see_rows=of_rows)
        check.sweep(np.arange(len(positions)), turns, check.of_run, see_keys=of_keys, **more)
    counts = np.array([len(rows), len(positions), len(keys), len(key_positions)])
    peers.reduce(counts, MPI.SUM)
    of_gradients = GradientReport(*counts.tolist(), *check.errors(), independent)
    if biases is None:
        return report, of_gradients
    biases.compare_tile(limit)
    return report, of_gradients, biases.report(of_gradients.tolerance, check.largest["dout * out"])


def verify_results(peers, source, layouts, results, limit=WORK_LIMIT, progress=None, biases=None):
    """The reports of a pass, one of (out, lse), two of (out, lse, dq, dk, dv), three with biases; collective.

    Arguments are as of `verify_both`.
    """
    out, lse, *grads = results
    if grads:
        return verify_both(peers, source, layouts, out, lse, grads, limit, progress, biases)
    return (verify(peers, source, layouts[0], out, lse, limit, progress),)


def check_passed(peers, reports, otherwise=""):
    """Raise VerificationError on every rank unless all reports, the same on every rank, have passed.

    otherwise: begins the message.
    """
    failed = [str(report) for report in reports if not report.passed]
    if failed:
        raise everywhere(VerificationError(otherwise + "; ".join(failed)), peers)
