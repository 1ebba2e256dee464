"""Exact work and transfers of every rank of a mesh under a mask.  No MPI.

The search for a layout, tile and schedule uses it for the whole mesh.  `schedule.needed` gives the same for one rank
and one call, with documents.  Pairs are counted in closed form, independent of the sequence length, if the layouts of
queries and keys have the same step, else query by query.  With `causal_block` they are counted by runs of queries.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..schedule.kinds import IN_COLUMNS
from ..schedule.route import leg_of

RUN_PIECE = 2**16  # queries counted at a time with causal_block


def _below(m, length):
    """The sum of clip(x, 0, length) over all integers x < m."""
    m = np.maximum(m, 0)
    ramp = np.minimum(m, length + 1)
    return ramp * (ramp - 1) // 2 + (m - ramp) * length


class _Ranges(NamedTuple):
    """One range of tokens of every chunk: int64 arrays (chunks,) and a common step."""

    starts: np.ndarray
    lengths: np.ndarray
    step: int

    @classmethod
    def of(cls, layout):
        """A list of `_Ranges` of a layout, as many as a chunk has ranges."""
        of_chunks = [layout.ranges(chunk) for chunk in range(layout.chunks)]
        return [
            cls(np.array([t.start for t in ranges]), np.array([len(t) for t in ranges]), ranges[0].step)
            for ranges in zip(*of_chunks)
        ]

    def before(self, positions):
        """Number of tokens of every chunk's range before each position: int64 (positions, chunks)."""
        return (-(-(np.asarray(positions)[:, None] - self.starts) // self.step)).clip(0, self.lengths)

    def between(self, start, stop):
        """The ranges cut to [start, stop)."""
        first, last = self.before([start, max(start, stop)])
        return _Ranges(self.starts + self.step * first, last - first, self.step)

    def positions(self, chunk):
        """The positions of the tokens in a chunk's range."""
        return self.starts[chunk] + self.step * np.arange(self.lengths[chunk])


def _seen(queries, keys, shift):
    """Number of keys before i + shift, summed over the queries i of a chunk: (query chunks, key chunks)."""
    if queries.step == keys.step:  # each query sees one key more than the query before it
        first = -(-(queries.starts[:, None] + shift - keys.starts) // keys.step)
        return _below(first + queries.lengths[:, None], keys.lengths) - _below(first, keys.lengths)
    seen = [
        -(-(queries.positions(chunk)[:, None] + shift - keys.starts) // keys.step)
        for chunk in range(len(queries.starts))
    ]
    return np.stack([before.clip(0, keys.lengths).sum(axis=0) for before in seen])


def _seen_to_the_right(mask, queries, keys):
    """Number of keys before the end of a query's interval, summed over the queries of a chunk; shape as `_seen`."""
    diagonal, right = mask.seqlen_k - mask.seqlen, mask.window[1]
    if mask.causal_block:
        return _seen_by_steps(mask, queries, keys)
    if not mask.causal:
        return queries.lengths[:, None] * keys.lengths if right is None else _seen(queries, keys, diagonal + right + 1)
    # Queries before `full` see the part of the prefix inside the window.  Those from `full` to `own` see the whole
    # prefix.  Later ones see up to the diagonal.
    own = mask.prefix - diagonal - 1
    full = 0 if right is None else max(own - right, 0)
    total = _seen(queries.between(max(own, 0), mask.seqlen), keys, diagonal + 1)
    if own > 0:
        total += queries.between(full, own).lengths[:, None] * keys.before([mask.prefix])
    if full:
        total += _seen(queries.between(0, full), keys, diagonal + right + 1)
    return total


def _seen_by_steps(mask, queries, keys):
    """The same with causal_block, where runs of queries end at the same key: length of the run x keys before it."""
    total = np.zeros((len(queries.starts), len(keys.starts)), np.int64)
    for start in range(0, mask.seqlen, RUN_PIECE):
        stop = min(start + RUN_PIECE, mask.seqlen)
        (ends,) = mask.key_interval(np.arange(start, stop))[1]
        first = np.flatnonzero(np.diff(ends, prepend=-1))  # starts of runs
        members = np.diff(queries.before([*(start + first), stop]), axis=0)
        # in float, because BLAS multiplies floats only; sums stay far below 2 ** 53, so they are exact
        total += (members.T.astype(float) @ keys.before(ends[first]).astype(float)).astype(np.int64)
    return total


def block_pairs(mask, q_layout, k_layout):
    """Number of attended (query, key) pairs, by chunk of queries and chunk of keys: int64 (chunks, chunks)."""
    left, diagonal = mask.window[0], mask.seqlen_k - mask.seqlen
    pairs = np.zeros((q_layout.chunks, k_layout.chunks), np.int64)
    for queries in _Ranges.of(q_layout):
        for keys in _Ranges.of(k_layout):
            pairs += _seen_to_the_right(mask, queries, keys)
            if left is not None:
                pairs -= _seen(queries, keys, diagonal - left)
    return pairs


class Load:
    """Work and transfers of every rank of a mesh.

    pairs: the result of `block_pairs`, by numbers of chunks.  The attribute `pairs` has them by hops: (a, b, ranks).
    q_lengths, k_lengths: tokens of every chunk.
    """

    def __init__(self, pairs, q_lengths, k_lengths, tile):
        self.lengths = np.array(q_lengths), np.array(k_lengths)
        ranks = np.arange(tile.ranks)
        self.chunks = np.stack(tile.row(ranks)), np.stack(tile.column(ranks))  # (hops, ranks): so many hops back
        self.pairs = pairs[self.chunks[0][:, None], self.chunks[1][None]]  # (a, b, ranks): of block (u, w)

    @cached_property
    def work(self):
        """Number of pairs that each rank computes: int64 (ranks,)."""
        return self.pairs.sum(axis=(0, 1))

    @property
    def balance(self):
        """Maximum / mean of the ranks' work; 1 if there is none."""
        return balance(self.work)

    def moved(self, kind, route="direct", collective=False):
        """Tokens that every rank receives (of a reduced kind: sends) in each hop of a kind: (hops, ranks).

        Hop 0 moves nothing, and chunks that no rank needs do not move, as in `mpiattn.schedule.needed`.
        """
        column = kind in IN_COLUMNS
        chunks, lengths = self.chunks[column], self.lengths[column]
        needed = np.zeros(chunks.shape, bool)  # (hops, chunks): by the rank so many hops ahead of the owner
        np.put_along_axis(needed, chunks, self.pairs.any(axis=0 if column else 1), axis=1)
        needed[0] = False
        count, extent, moves = needed.cumsum(axis=0, dtype=np.int32), len(chunks), np.zeros_like(needed)
        users = [leg_of(kind, hop, extent, route, collective).users for hop in range(1, extent)]
        moves[1:] = count[[ahead[-1] for ahead in users]] > count[[ahead[0] - 1 for ahead in users]]
        return np.take_along_axis(moves, chunks, axis=1) * lengths[chunks]


def balance(work):
    """Maximum / mean of some numbers; 1 if they are all 0."""
    work = np.asarray(work)
    return float(work.max() * len(work) / work.sum()) if work.any() else 1.0
