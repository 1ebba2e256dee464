"""Masks of several intervals for tests: random tables, and one that promises pieces."""

from dataclasses import dataclass

import numpy as np

from mpiattn.masks.interval_mask import IntervalMask


@dataclass(frozen=True)
class Table(IntervalMask):
    """By query, its disjoint intervals, ((begin, end), ...) in any order."""

    rows: tuple[tuple[tuple[int, int], ...], ...]

    def intervals(self, queries, seqlen, seqlen_k):
        rows = [self.rows[query] for query in queries.tolist()]
        both = np.zeros((2, max(map(len, rows), default=0), len(rows)), np.int64)
        for number, row in enumerate(rows):
            for k, ends in enumerate(row):
                both[:, k, number] = ends
        return tuple(both)


@dataclass(frozen=True)
class Lines(IntervalMask):
    """Tokens in lines of `line`: a query sees `reach` tokens to each side in its own line and in those around it."""

    line: int
    reach: int = 1

    def intervals(self, queries, seqlen, seqlen_k):
        row, column = np.divmod(queries, self.line)
        rows = row + np.arange(-1, 2)[:, None]
        begin = rows * self.line + (column - self.reach).clip(0)
        return begin, rows * self.line + (column + self.reach + 1).clip(None, self.line)

    def cuts(self, seqlen, seqlen_k):
        edges = np.arange(seqlen) // self.line
        row_of_keys = -(-seqlen_k // self.line)
        there = (edges >= 1) & (edges < row_of_keys - 1)  # whether all lists have keys
        return np.flatnonzero(np.diff(edges, prepend=-1) | np.diff(there, prepend=False) | (seqlen_k % self.line > 0))


def random_table(rng, seqlen, seqlen_k):
    """Up to 4 intervals a query, none for some."""
    rows = []
    for _ in range(seqlen):
        ends = sorted(rng.randint(0, seqlen_k) for _ in range(2 * rng.choice([0, 1, 1, 2, 4])))
        row = list(zip(ends[::2], ends[1::2]))
        rng.shuffle(row)
        rows.append(tuple(row))
    return Table(tuple(rows))


def random_mask(rng, seqlen, seqlen_k):
    """A mask of this module."""
    return rng.choice([random_table, lambda *_: Lines(rng.randint(1, 9), rng.randint(0, 3))])(rng, seqlen, seqlen_k)
