"""Compares the gradients of biases with float64 ones of inputs that are read again, piece by piece.

The gradient of a number a key, and of slopes, is added up where pairs are swept for dk.  That of a dense bias is
compared in rows of each rank's tile, with float64 out of these rows.
"""

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ..system.words import number
from . import reference
from .compare import WORK_LIMIT, Errors, steps
from .reference_biases import BlockSums, KeySums, SlopeSums

PIECE_BYTES = 16 * 2**20  # of a tile compared at a time, with what is added up for it


class BiasReport(NamedTuple):
    """The errors of the gradients of biases, None of those that are not compared.

    rows, of_rows: rows of the ranks' tiles that were compared, of all.
    """

    rows: int
    of_rows: int
    dbias_error: float | None
    dkey_bias_error: float | None
    dalibi_slopes_error: float | None
    tolerance: float
    differing: int  # elements that are finite on one side only

    @property
    def errors(self):
        """Those that there are, by name."""
        names = ("dbias", "dkey_bias", "dalibi_slopes")
        return {name: error for name, error in zip(names, self[2:5]) if error is not None}

    @property
    def passed(self):
        """Whether every error is within its tolerance."""
        return max(self.errors.values(), default=0) <= self.tolerance and not self.differing

    def __str__(self):
        parts = [f"{name} off by {error:.1e}" for name, error in self.errors.items()]
        text = f"{', '.join(parts) or 'gradients of biases need all rows'} (may be {self.tolerance:.0e})"
        if self.dbias_error is not None:
            text = f"{self.rows} of {number(self.of_rows, 'row')} of tiles, {text}"
        if self.differing:
            text += f", {self.differing} elements are finite on one side only"
        return f"{text}: {'passed' if self.passed else 'FAILED'}"


class TileGradient(NamedTuple):
    """dbias of a rank's tile.

    array: (sequences or 1, heads or 1, rows, columns).  axes: lengths of the first two axes of the whole bias.
    sequences, heads: of the tile, as slices.  rows, columns: positions.
    """

    array: np.ndarray
    axes: tuple
    sequences: slice
    heads: slice
    rows: np.ndarray
    columns: np.ndarray


class BiasGradients:
    """A verification of them.

    source: a `mpiattn.verify.compare.Source` with dout and biases.
    tile: a `TileGradient` or None.  of_keys: (batch or 1, heads or 1, tokens_k) of this rank's keys, or None.
    slopes: (heads,) or None.
    """

    def __init__(self, peers, source, tile=None, of_keys=None, slopes=None):
        self._peers, self._source, self._tile, self._of_keys, self._slopes = peers, source, tile, of_keys, slopes
        self._errors, self._floors = [Errors() for _ in range(3)], np.zeros((3, 2))
        self._of_slopes, self._counts = None, np.zeros(2, np.int64)

    def begin(self, at, every):
        """What adds up a turn of keys at the positions `at`: `Sums`.  every: whether all pairs are swept."""
        sums = [] if self._of_keys is None else [KeySums(self._of_keys.shape[:2], at)]
        if every and self._slopes is not None:
            self._of_slopes = self._of_slopes or SlopeSums(self._source.scores["biases"])
            sums.append(self._of_slopes)
        return sums

    def end(self, sums, keys, own):
        """Compare the numbers of some keys after a turn; collective.

        keys: the numbers among this rank's of those that are compared.  own: their positions.
        """
        if self._of_keys is None:
            return
        of_turn = sums[0]
        self._peers.reduce(of_turn.values, MPI.SUM)
        self._see(1, of_turn.largest)
        _, places, numbers = np.intersect1d(of_turn.keys, own, assume_unique=True, return_indices=True)
        self._errors[1].add(self._of_keys[..., keys[numbers]], of_turn.values[0][..., places])

    def _see(self, number, sizes):
        self._floors[number] = np.maximum(self._floors[number], sizes)

    def compare_tile(self, limit=WORK_LIMIT):
        """Compare this rank's tile: all rows or, if that is too much work, a sample."""
        if self._tile is None:
            return
        p, tile, source = self._source.problem, self._tile, self._source
        work = p.flops_per_pair * (source.keys_seen(tile.rows) + 2 * len(tile.columns))
        some = np.arange(len(tile.rows))
        if work.sum() > limit:
            some = np.random.default_rng([1, self._peers.rank]).permutation(len(some))
            some = some[: max(1, np.searchsorted(np.cumsum(work[some]), limit, side="right"))]
        some, columns = some[np.argsort(tile.rows[some])], np.argsort(tile.columns)
        each = 8 * p.batch * p.heads * (p.head_dim + 4 * p.value_dim)
        for turn in steps(len(some), each):
            rows = some[turn]
            at = tile.rows[rows]
            q, dout = source.rows("q", at), source.rows("dout", at)
            out, lse = source.attention(at, q)
            delta = np.einsum("bqhd,bqhd->bhq", dout.astype(np.float64), out)
            width = 8 * (4 * np.prod(tile.axes) * len(rows) + p.batch * p.kv_heads * (p.head_dim + p.value_dim))
            for part in steps(len(columns), int(width), PIECE_BYTES):
                self._compare_block(rows, columns[part], (dout, q), (lse, delta))
        self._counts += len(some), len(tile.rows)

    def _compare_block(self, rows, columns, inputs, statistics):
        """Compare some rows and columns of the tile."""
        tile, source = self._tile, self._source
        at, keys = tile.rows[rows], tile.columns[columns]
        sums = BlockSums(tile.axes, at, keys)
        given = *inputs, source.rows("k", keys), source.rows("v", keys), *statistics
        reference.gradients(*given, positions=at, keys=keys, of="", sums=[sums], **source.scores, **source.masks)
        self._see(0, sums.largest)
        of_plane = tuple(
            slice(None) if length == 1 else of for length, of in zip(tile.axes, (tile.sequences, tile.heads))
        )
        self._errors[0].add(tile.array[:, :, rows[:, None], columns], sums.values[0][of_plane])

    def report(self, tolerance, change):
        """The ranks' errors as a BiasReport; collective.  change: the largest |dout * out| of a query of this rank."""
        if self._of_slopes is not None:
            self._peers.reduce(self._of_slopes.values, MPI.SUM)
            self._see(2, self._of_slopes.largest)
            self._errors[2].add(self._slopes[None], self._of_slopes.values[:1])
        maxima = np.array([[e.error, e.magnitude] for e in self._errors])
        maxima = np.concatenate([maxima, self._floors, np.full((3, 1), change)], axis=1)
        counts = np.array([*self._counts, sum(e.differing for e in self._errors)])
        self._peers.reduce(maxima, MPI.MAX)
        self._peers.reduce(counts, MPI.SUM)
        errors, sizes, terms, weights, changes = maxima.T
        # Where the terms of a gradient cancel, the error of out, through delta, remains: its size is what counts.
        sizes = np.maximum(sizes, np.maximum(terms, changes * weights))
        relative = (errors / np.where(sizes == 0, 1, sizes)).tolist()
        there = self._tile is not None, self._of_keys is not None, self._of_slopes is not None
        rows, of_rows, differing = counts.tolist()
        return BiasReport(
            rows, of_rows, *(r if is_there else None for r, is_there in zip(relative, there)), tolerance, differing
        )
