"""What a call adds to its scores and which weights it drops, pair by pair: each rule by its definition, in float64.

It shares no code with what computes them.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

WORD = np.uint64(0xFFFFFFFF)
WORDS = 2**32
HALF = np.uint64(32)


class Numbers:
    """A number a key, (batch or 1, heads or 1, keys), of keys at some increasing positions."""

    def __init__(self, positions, values):
        self.positions, self.values = positions, values

    def __call__(self, b, h, keys):
        """Those of a batch entry and head, of some of the keys."""
        at = np.searchsorted(self.positions, keys)
        return _of(self.values, b, h)[at].astype(np.float64)


class Block:
    """A number a pair, (batch or 1, heads or 1, queries, keys), of queries and keys at some increasing positions."""

    def __init__(self, positions, keys, values):
        self.positions, self.keys, self.values = positions, keys, values

    def __call__(self, b, h, positions, keys):
        """Those of a batch entry and head, of some of the queries and keys."""
        rows, columns = np.searchsorted(self.positions, positions), np.searchsorted(self.keys, keys)
        return _of(self.values, b, h)[np.ix_(rows, columns)].astype(np.float64)


def _of(values, b, h):
    """What arrays (batch or 1, heads or 1, ...) have for a batch entry and head."""
    return values[b if len(values) > 1 else 0][h if values.shape[1] > 1 else 0]


class PairRules(NamedTuple):
    """The biases and the dropout of a call.

    heads, lengths: of the problem, the latter (seqlen, seqlen_k).
    dense(b, h, positions, keys): a number for each of some queries and keys, or None.
    of_keys(b, h, keys): a number for each of some keys, or None.
    slopes: (heads,), ALiBi: -slope * |distance| from the key that the query is aligned with; or None.
    table: (heads or 1, 2 R + 1), a number for each distance from -R to R, and for those further away the last one.
        With grid, the points of its axes in C order, (heads or 1, 2 R + 1 of each axis), by the offset on each axis.
    cyclic: for each axis of grid, whether it has no ends: the shorter way round counts, backwards if both are as long.
    place(keys): from keys to their places, between which distances are; None where these are the positions.
    dropout, seed: a weight is dropped with this probability, by the random word of its pair.
    """

    heads: int
    lengths: tuple[int, int]
    dense: Callable[..., np.ndarray] | None = None
    of_keys: Callable[..., np.ndarray] | None = None
    slopes: np.ndarray | None = None
    table: np.ndarray | None = None
    grid: tuple[int, ...] | None = None
    cyclic: tuple[bool, ...] | None = None
    dropout: float = 0.0
    seed: int | None = None
    place: Callable[..., np.ndarray] | None = None

    def distances(self, positions, keys):
        """How far each key is after the one that the query is aligned with: (queries, keys)."""
        seqlen, seqlen_k = self.lengths
        diagonal = positions + (seqlen_k - seqlen)
        if self.place is not None:
            diagonal, keys = self.place(diagonal), self.place(keys)
        return keys[None, :] - diagonal[:, None]

    def entries(self, positions, keys):
        """The number in a head of the flat table that each pair has: (queries, keys)."""
        if self.grid is None:
            return _clipped(self.distances(positions, keys), self.table.shape[1])
        at, unit = np.zeros((len(positions), len(keys)), np.int64), self.lengths[0]
        for axis, points in enumerate(self.grid):
            unit //= points
            x, y = (tokens // unit % points for tokens in (positions, keys))
            offset = y[None, :] - x[:, None]
            if self.cyclic is not None and self.cyclic[axis]:
                forwards = offset % points
                offset = np.where(2 * forwards < points, forwards, forwards - points)
            length = self.table.shape[1 + axis]
            at = at * length + _clipped(offset, length)
        return at

    def scores(self, b, h, positions, keys):
        """What is added to the scores of some queries and keys of a head: (queries, keys)."""
        added = np.zeros((len(positions), len(keys)))
        if self.dense is not None:
            added += self.dense(b, h, positions, keys)
        if self.of_keys is not None:
            added += self.of_keys(b, h, keys)
        if self.slopes is not None:
            added -= float(self.slopes[h]) * np.abs(self.distances(positions, keys))
        if self.table is not None:
            of_head = self.table[h if len(self.table) > 1 else 0].astype(np.float64)
            added += of_head.reshape(-1)[self.entries(positions, keys)]
        return added

    def kept(self, b, h, positions, keys):
        """What the weights of these pairs are multiplied by, (queries, keys); None without dropout."""
        if not self.dropout:
            return None
        below = min(max(round(self.dropout * WORDS), 1), WORDS - 1)
        groups, group = np.unique(keys // 4, return_inverse=True)
        words = random_words(self.seed, b * self.heads + h, positions[:, None], groups[None, :])
        word = np.choose(keys % 4, [each[:, group] for each in words])
        return np.where(word >= below, WORDS / (WORDS - below), 0.0)


def _clipped(offset, length):
    return np.minimum(np.maximum(offset, -(length // 2)), length // 2) + length // 2


def random_words(seed, head, row, group):
    """The four words of Philox 4x32-10 (Salmon et al., SC 2011) for the counter (group, row, head, 0): uint64 arrays.

    seed: its low and high half are the key.  row, group: whole numbers below 2^32, of shapes that broadcast.
    """
    row, group = np.broadcast_arrays(np.asarray(row, np.uint64), np.asarray(group, np.uint64))
    c0, c1, c2, c3 = group, row, np.full(row.shape, head, np.uint64), np.zeros(row.shape, np.uint64)
    low, high = seed % WORDS, seed // WORDS
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (b >> HALF) ^ c1 ^ np.uint64(low), b & WORD
        c2, c3 = (a >> HALF) ^ c3 ^ np.uint64(high), a & WORD
        low, high = (low + 0x9E3779B9) % WORDS, (high + 0xBB67AE85) % WORDS
    return c0, c1, c2, c3


class Sums:
    """What pairs give to the gradients of some numbers: `values` (3, ...), called with pairs as they are computed.

    values[0]: the gradients.  values[1], values[2]: with magnitudes and with weights in place of what the pairs give,
    to which rounding errors are in proportion.
    """

    def __init__(self, shape):
        self.values = np.zeros((3, *shape))

    def __call__(self, b, h, positions, keys, dscore, weight):
        """Add what some pairs of a head give, float64 (queries, keys): dscore is the gradient of their scores."""
        for values, pairs in zip(self.values, (dscore, np.abs(dscore), weight)):
            self.add(values, b, h, positions, keys, pairs)

    def add(self, values, b, h, positions, keys, pairs):
        """Add numbers of pairs to `values`."""
        raise NotImplementedError

    @property
    def largest(self):
        """The largest of the sums of magnitudes and of weights that are finite."""
        return np.where(np.isfinite(self.values[1:]), np.abs(self.values[1:]), 0).reshape(2, -1).max(axis=1, initial=0)


class BlockSums(Sums):
    """Of a number for each of some queries and keys, (batch or 1, heads or 1, queries, keys)."""

    def __init__(self, axes, positions, keys):
        super().__init__((*axes, len(positions), len(keys)))
        self.positions, self.keys = positions, keys

    def add(self, values, b, h, positions, keys, pairs):
        """As of `Sums`."""
        rows, columns = np.searchsorted(self.positions, positions), np.searchsorted(self.keys, keys)
        _of(values, b, h)[np.ix_(rows, columns)] += pairs


class KeySums(Sums):
    """Of a number for each of some keys, (batch or 1, heads or 1, keys)."""

    def __init__(self, axes, keys):
        super().__init__((*axes, len(keys)))
        self.keys = keys

    def add(self, values, b, h, positions, keys, pairs):
        """As of `Sums`."""
        _of(values, b, h)[np.searchsorted(self.keys, keys)] += pairs.sum(axis=0)


class SlopeSums(Sums):
    """Of the slopes of `PairRules`, (heads,)."""

    def __init__(self, rules):
        super().__init__(rules.slopes.shape)
        self._rules = rules

    def add(self, values, b, h, positions, keys, pairs):
        """As of `Sums`."""
        values[h] -= (pairs * np.abs(self._rules.distances(positions, keys))).sum()


class TableSums(Sums):
    """Of the table of `PairRules`, in its shape."""

    def __init__(self, rules):
        super().__init__(rules.table.shape)
        self._rules = rules

    def add(self, values, b, h, positions, keys, pairs):
        """As of `Sums`."""
        of_head = values[h if len(values) > 1 else 0].reshape(-1)
        np.add.at(of_head, self._rules.entries(positions, keys).ravel(), pairs.ravel())
