"""Compares a result with float64 attention of keys and values that are read again, piece by piece."""

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ..comm.rounds import PIECE_BYTES
from ..problem.mask import MASK_FIELDS
from ..system.words import number
from . import reference

WORK_LIMIT = 2e11  # operations of float64 attention per rank: tens of seconds on one core
STATE_BYTES = 4 * 2**20  # of float64 queries and results in memory at a time

# Allowed errors are relative to the largest absolute value.  Of accumulation in float32 (float64 for float64):
ACCUMULATION = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5}
# Rounding errors of scores grow with the scores: above this score the allowed error grows in proportion.
USUAL_SCORE = 16.0
# At most this is allowed, so that a wrong result still fails.
MOST = 0.05
# Of rounding to a narrower dtype: the relative error, and the absolute error of float16's subnormal numbers.
ROUNDING = {"float32": (6e-8, 0), "bfloat16": (4e-3, 0), "float16": (5e-4, 2.0**-25)}
# Factor for partial results that are sent in a narrower dtype: they may be larger than the result.
OF_WIRE = 2
# Kernels for half types round weights before they multiply values by them, and then the result.  The allowed error of
# one rounding is twice that of rounding to the nearest.
OF_RESULT = 1.5


def accumulation_error(problem, largest_lse):
    """Allowed relative error of accumulation, for results that are computed from scores."""
    return ACCUMULATION[problem.dtype] * max(1, largest_lse / USUAL_SCORE)


def rounding_error(problem, of_dtype):
    """Allowed relative and absolute error of rounding `of_dtype` times to the problem's dtype, and what is sent."""
    relative = absolute = 0
    for dtype, times in ((problem.dtype, of_dtype), (problem.wire_dtype, OF_WIRE)):
        if dtype != problem.partial_dtype:
            relative += times * ROUNDING[dtype][0]
            absolute += times * ROUNDING[dtype][1]
    return relative, absolute


def out_tolerance(problem, largest_lse):
    """Allowed error of out, relative to its largest value."""
    rounding, _ = rounding_error(problem, OF_RESULT)
    return min(rounding + accumulation_error(problem, largest_lse), MOST)


class Report(NamedTuple):
    """The rows that were checked on all ranks, and their errors."""

    rows: int
    of_rows: int
    out_error: float
    lse_error: float
    tolerance: float
    lse_tolerance: float
    differing: int  # elements that are finite on one side only
    nonfinite: int = 0  # rows of out with elements that are NaN or infinite on both sides alike
    # of the rows, over the batch: tokens in no document, and others that see no key
    padding: int = 0
    without_keys: int = 0

    @property
    def passed(self):
        """Whether every error is within its tolerance."""
        return self.out_error <= self.tolerance and self.lse_error <= self.lse_tolerance and not self.differing

    def __str__(self):
        rows = f"all {self.rows} rows" if self.rows > 1 else number(self.rows, "row")
        if self.rows != self.of_rows:
            rows = f"{self.rows} of {self.of_rows} rows, a seeded sample with the first, last and edges"
        if self.padding:
            rows += f", {number(self.padding, 'token')} of padding"
        if self.without_keys:
            rows += f", {number(self.without_keys, 'token')} without a visible key"
        text = (
            f"{rows}: out off by {self.out_error:.1e} (may be {self.tolerance:.0e}), "
            f"lse by {self.lse_error:.1e} (may be {self.lse_tolerance:.0e})"
        )
        if self.differing:
            text += f", {self.differing} elements are finite on one side only"
        if self.nonfinite:
            text += f", {self.nonfinite} rows are NaN or infinite on both sides"
        return f"{text}: {'passed' if self.passed else 'FAILED'}"


def choose_rows(layout, rank, work, limit=WORK_LIMIT, seed=0):
    """The rows to check on a rank: all or, if that is too much work, a sample that has the ends of every token range.

    work: operations that each of the rank's rows takes, at most.
    """
    count = layout.length(rank)
    if work.sum() <= limit:
        return np.arange(count)
    edges, before = set(), 0
    for tokens in layout.ranges(rank):
        if tokens:
            edges |= {before, before + len(tokens) - 1}
        before += len(tokens)
    sample = np.random.default_rng([seed, rank]).permutation(count)
    sample = sample[: np.searchsorted(np.cumsum(work[sample]), limit, side="right")]
    return np.array(sorted(edges | set(sample.tolist())), np.int64)


def steps(count, row_bytes, limit=STATE_BYTES):
    """Consecutive slices that cover `count` rows, each of at most `limit` bytes but at least one row."""
    size = max(1, limit // max(row_bytes, 1))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


class Source:
    """The inputs of the float64 attention, read in pieces, and its masks.

    read(name, start, stop): returns tokens of "q", "k", "v" or "dout" at those positions, (batch, tokens, heads, dim);
    it must not communicate.  It is not asked for a "v" that keys hold.
    documents: their arguments of `mpiattn.verify.reference.attention`, or None.
    biases: `mpiattn.verify.reference_biases.PairRules`, or None.
    """

    def __init__(self, problem, read, documents=None, biases=None):
        self.problem, self._read = problem, read
        self.masks = masks_of(problem, documents)
        self.scores = {"scale": problem.scale, "softcap": problem.softcap, "biases": biases}

    def read(self, name, start, stop):
        """The tokens of a tensor at positions [start, stop)."""
        if name == "v" and self.problem.shared_kv:
            return self._read("k", start, stop)[..., : self.problem.value_dim]
        return self._read(name, start, stop)

    def _row(self, name):
        p = self.problem
        return p.kv_heads if name in "kv" else p.heads, p.head_dim if name in "qk" else p.value_dim

    def _steps(self, *names):
        p = self.problem
        elements = p.batch * sum(heads * dim for heads, dim in map(self._row, names))
        return steps(p.seqlen_k if names[0] in "kv" else p.seqlen, elements * p.itemsize, PIECE_BYTES)

    def pieces(self, *names, within=None):
        """The pieces of tensors of equal length: (positions, the tokens of each tensor).

        within: (first, last) position of the tokens that matter, last excluded; by default all.
        """
        first, last = within or (0, np.inf)
        for tokens in self._steps(*names):
            start, stop = max(tokens.start, first), min(tokens.stop, last)
            if start < stop:
                yield np.arange(start, stop), *(self.read(name, start, stop) for name in names)

    def keys_seen(self, positions):
        """At most how many keys each query at some positions sees, the mean over the batch."""
        begin, end = reference.bounds(positions, self.problem.batch, **self.masks)
        return (end - begin).mean(axis=0)

    def keys_of(self, positions):
        """The pieces of k and v that the queries at some positions may see: (positions, k, v)."""
        begin, end = reference.bounds(positions, self.problem.batch, **self.masks)
        some = begin < end
        if some.any():
            yield from self.pieces("k", "v", within=(begin[some].min(), end[some].max()))

    def empty(self, positions):
        """How many of the batch's queries at some positions are padding, and how many others see no key: an array."""
        none = reference.blind(positions, self.problem.batch, **self.masks)
        padding = reference.padding(positions, self.problem.batch, self.masks.get("cu_seqlens"))
        return np.array([padding, none.sum() - padding])

    def rows(self, name, positions):
        """A tensor's tokens at increasing positions."""
        rows = np.empty((self.problem.batch, len(positions), *self._row(name)), self.problem.dtype)
        for tokens in self._steps(name):
            first, last = np.searchsorted(positions, (tokens.start, tokens.stop))
            if first < last:
                start, stop = positions[first], positions[last - 1] + 1
                rows[:, first:last] = self.read(name, start, stop)[:, positions[first:last] - start]
        return rows

    def attention(self, positions, q):
        """float64 out and lse of the queries q at some positions."""
        p = self.problem
        out = np.zeros((p.batch, len(positions), p.heads, p.value_dim))
        lse = np.full((p.batch, p.heads, len(positions)), -np.inf)
        for keys, k, v in self.keys_of(positions):
            part = reference.attention(q, k, v, positions=positions, keys=keys, **self.scores, **self.masks)
            out, lse = reference.merge(out, lse, *part)
        return out, lse


def largest(array):
    """max|array| over its finite elements, 0 where there are none."""
    with np.errstate(invalid="ignore"):  # NaN of half types
        size = max(array.max(initial=0), -array.min(initial=0))
    return float(size if np.isfinite(size) else np.abs(array[np.isfinite(array)]).max(initial=0))


class Errors:
    """The largest difference and the largest magnitude so far, over finite elements."""

    def __init__(self):
        self.error = self.magnitude = 0.0
        self.differing = self.nonfinite = 0

    def add(self, got, expected):
        """Compare more elements, (batch, rows, ...); `nonfinite` counts rows, `differing` counts elements."""
        got = got.astype(np.float64)
        with np.errstate(invalid="ignore"):
            off = got - expected
        finite = np.isfinite(off)
        if not finite.all():
            same = (got == expected) | (np.isnan(got) & np.isnan(expected))
            self.differing += int((~same & ~finite).sum())
            self.nonfinite += int((same & ~finite).any(axis=(0, *range(2, got.ndim))).sum())
            off = off[finite]
        self.error = max(self.error, largest(off))
        self.magnitude = max(self.magnitude, largest(expected))


def masks_of(problem, documents=None):
    """The masks of a problem and of a call as arguments of `mpiattn.verify.reference.bounds`."""
    p = problem
    return {
        **{name: getattr(p, name) for name in MASK_FIELDS if not name.startswith("seqlen")},
        "lengths": (p.seqlen, p.seqlen_k),
        **{name: value for name, value in (documents or {}).items() if name != "padding"},
    }


def choose(source, layout, rank, limit=WORK_LIMIT):
    """The rows of out and lse that `verify` checks on a rank."""
    seen = source.keys_seen(layout.positions(rank))
    return choose_rows(layout, rank, source.problem.flops_per_pair * seen, limit)


def verify(peers, source, layout, out, lse, limit=WORK_LIMIT, progress=None, see=None):
    """Compare this rank's out and lse with float64 attention of a `Source`; collective.

    limit: operations of each rank; a sample is checked where all would take more.  progress: called with the number of
    rows just checked.  see: called with these rows and their float64 out and lse.  Returns a Report, the same on every
    rank.
    """
    problem = source.problem
    chosen, positions = choose(source, layout, peers.rank, limit), layout.positions(peers.rank)
    outs, lses = Errors(), Errors()
    for turn in steps(len(chosen), 8 * problem.batch * problem.heads * (problem.head_dim + 4 * problem.value_dim)):
        rows = chosen[turn]
        expected_out, expected_lse = source.attention(positions[rows], source.rows("q", positions[rows]))
        outs.add(out[:, rows], expected_out)
        lses.add(lse[:, :, rows], expected_lse)
        if see:
            see(rows, expected_out, expected_lse)
        if progress:
            progress(len(rows))
    return conclude(peers, problem, outs, lses, len(chosen), len(positions), source.empty(positions[chosen]))


def conclude(peers, problem, outs, lses, checked, rows, empty):
    """Combine the ranks' `Errors` of out and lse, over `checked` of `rows` rows each, to a Report; collective.

    empty: from `Source.empty`, of the rows that were checked.
    """
    maxima = np.array([outs.error, outs.magnitude, lses.error, lses.magnitude])
    counts = np.array([checked, rows, outs.differing + lses.differing, outs.nonfinite, *empty])
    peers.reduce(maxima, MPI.MAX)
    peers.reduce(counts, MPI.SUM)
    out_error, out_size, lse_error, lse_size = maxima.tolist()
    _, absolute = rounding_error(problem, OF_RESULT)
    return Report(
        *counts[:2].tolist(),
        max(0.0, out_error - absolute) / (out_size or 1),
        lse_error / max(1, lse_size),
        out_tolerance(problem, lse_size),
        ACCUMULATION[problem.dtype],
        *counts[2:].tolist(),
    )
