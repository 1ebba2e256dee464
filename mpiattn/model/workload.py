"""What every rank of a mesh has to compute and to move under a mask: exact, for all ranks at once.  No MPI.

`schedule.needed` answers the same for one rank and one call, with documents; here the whole mesh is seen at once, for
choosing a layout, a tile and a schedule.  Blocks are counted in closed form, however long the sequence; under causal
blocks, those of the mask, one by one.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..schedule.kinds import IN_COLUMNS
from ..schedule.route import leg_of
from ..schedule.travels import in_column, in_row

RUN_PIECE = 2 ** 16         # queries looked at together under causal blocks


def _below(m, length):
    """Sum over all integers x < m of x clipped to [0, length]."""
    m = np.maximum(m, 0)
    ramp = np.minimum(m, length + 1)
    return ramp * (ramp - 1) // 2 + (m - ramp) * length


class _Ranges(NamedTuple):
    """One range of tokens of every chunk: int64 arrays, the step is common."""

    starts: np.ndarray
    lengths: np.ndarray
    step: int

    @classmethod
    def of(cls, layout):
        """The layout's ranges: as many as a chunk has."""
        of_chunks = [layout.ranges(chunk) for chunk in range(layout.chunks)]
        return [cls(np.array([t.start for t in ranges]), np.array([len(t) for t in ranges]), ranges[0].step)
                for ranges in zip(*of_chunks)]

    def before(self, positions):
        """Tokens of every chunk's range before some positions: int64 (positions, chunks)."""
        return (-(-(np.asarray(positions)[:, None] - self.starts) // self.step)).clip(0, self.lengths)

    def between(self, start, stop):
        """Those of the tokens that lie in [start, stop)."""
        first, last = self.before([start, max(start, stop)])
        return _Ranges(self.starts + self.step * first, last - first, self.step)

    def positions(self, chunk):
        """The tokens of a chunk's range."""
        return self.starts[chunk] + self.step * np.arange(self.lengths[chunk])


def _seen(queries, keys, shift):
    """Sum over the queries i of every chunk of the number of keys before i + shift: (query chunks, key chunks)."""
    if queries.step == keys.step:               # then each query sees one key more than the one before it
        first = -(-(queries.starts[:, None] + shift - keys.starts) // keys.step)
        return _below(first + queries.lengths[:, None], keys.lengths) - _below(first, keys.lengths)
    seen = [-(-(queries.positions(chunk)[:, None] + shift - keys.starts) // keys.step)
            for chunk in range(len(queries.starts))]
    return np.stack([before.clip(0, keys.lengths).sum(axis=0) for before in seen])


def _seen_to_the_right(mask, queries, keys):
    """Sum over the queries of every chunk of the number of keys before the end of what they see, as `_seen`."""
    diagonal, right = mask.seqlen_k - mask.seqlen, mask.window[1]
    if mask.causal_block:
        return _seen_by_steps(mask, queries, keys)
    if not mask.causal:
        return queries.lengths[:, None] * keys.lengths if right is None else _seen(queries, keys, diagonal + right + 1)
    # queries before `full` see what the window lets them see of the prefix, before `own` all of it, then to themselves
    own = mask.prefix - diagonal - 1
    full = 0 if right is None else max(own - right, 0)
    total = _seen(queries.between(max(own, 0), mask.seqlen), keys, diagonal + 1)
    if own > 0:
        total += queries.between(full, own).lengths[:, None] * keys.before([mask.prefix])
    if full:
        total += _seen(queries.between(0, full), keys, diagonal + right + 1)
    return total


def _seen_by_steps(mask, queries, keys):
    """The same where consecutive queries see up to the same key: for each run of them their number times the keys."""
    total = np.zeros((len(queries.starts), len(keys.starts)), np.int64)
    for start in range(0, mask.seqlen, RUN_PIECE):
        stop = min(start + RUN_PIECE, mask.seqlen)
        (ends,) = mask.key_interval(np.arange(start, stop))[1]
        first = np.flatnonzero(np.diff(ends, prepend=-1))                             # where runs begin
        members = np.diff(queries.before([*(start + first), stop]), axis=0)
        # sums stay far below 2 ** 53, and floats are multiplied by BLAS
        total += (members.T.astype(float) @ keys.before(ends[first]).astype(float)).astype(np.int64)
    return total


def block_pairs(mask, q_layout, k_layout):
    """Pairs (query, key) that attend, by chunk of the query and chunk of the key: int64 (chunks, chunks)."""
    left, diagonal = mask.window[0], mask.seqlen_k - mask.seqlen
    pairs = np.zeros((q_layout.chunks, k_layout.chunks), np.int64)
    for queries in _Ranges.of(q_layout):
        for keys in _Ranges.of(k_layout):
            pairs += _seen_to_the_right(mask, queries, keys)
            if left is not None:
                pairs -= _seen(queries, keys, diagonal - left)
    return pairs


class Load:
    """Work and transfers of every rank in a mesh of b rows x a columns.

    pairs: of `block_pairs`.  q_lengths, k_lengths: tokens of every chunk.
    """

    def __init__(self, pairs, q_lengths, k_lengths, a, b):
        self.lengths = np.array(q_lengths), np.array(k_lengths)
        ranks = np.arange(a * b)
        self.chunks = (np.stack([in_row(ranks, a, u) for u in range(a)]),            # (hops, ranks): the chunk, and
                       np.stack([in_column(ranks, a, b, w) for w in range(b)]))      # rank, that many hops back
        self.pairs = pairs[self.chunks[0][:, None], self.chunks[1][None]]            # (a, b, ranks): of block (u, w)

    @cached_property
    def work(self):
        """Pairs that every rank computes."""
        return self.pairs.sum(axis=(0, 1))

    @property
    def balance(self):
        """Most work of a rank, in units of the mean; 1 where there is none."""
        return balance(self.work)

    def moved(self, kind, route="direct", collective=False):
        """Tokens that each hop of a kind brings to (of a reduced kind: takes from) every rank: (hops, ranks).

        Hop 0 moves nothing.  As `mpiattn.schedule.needed` decides: a chunk that nobody needs stays where it is.
        """
        column = kind in IN_COLUMNS
        chunks, lengths = self.chunks[column], self.lengths[column]
        needed = np.zeros(chunks.shape, bool)       # (hops, chunks): by the rank that many hops ahead of the owner
        np.put_along_axis(needed, chunks, self.pairs.any(axis=0 if column else 1), axis=1)
        needed[0] = False
        count, extent, moves = needed.cumsum(axis=0, dtype=np.int32), len(chunks), np.zeros_like(needed)
        users = [leg_of(kind, hop, extent, route, collective).users for hop in range(1, extent)]
        moves[1:] = count[[ahead[-1] for ahead in users]] > count[[ahead[0] - 1 for ahead in users]]
        return np.take_along_axis(moves, chunks, axis=1) * lengths[chunks]


def balance(work):
    """Most of some numbers, in units of their mean; 1 where they are all 0."""
    work = np.asarray(work)
    return float(work.max() * len(work) / work.sum()) if work.any() else 1.0
