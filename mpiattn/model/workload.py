"""Exact work and transfers of every rank of a mesh under a mask.  No MPI.

The search for a layout, tile and schedule uses it for the whole mesh.  `schedule.needed` gives the same for one rank
and one call, with documents, from the same table.
"""

from functools import cached_property, lru_cache

import numpy as np

from ..schedule.kinds import IN_COLUMNS
from ..schedule.remembered import Remembered
from ..schedule.route import FEW_RANGES, leg_of, passed_on
from ..schedule.table import Lines, Table
from .pairs import Pairs

PACKING = 0.5  # share of a machine's edge that packing rows takes; the rest is tiles that a mask cuts


class Work:
    """What a mask asks of two layouts, on any mesh.

    counts: the `Pairs` of the layouts.  pairs: its table.
    keys_seen: the most keys of a chunk that an interval of a query has; with documents, the mean number of keys that a
        query sees of all chunks.
    lists: the most intervals that a query has, each of which a block is launched for.
    lengths: tokens of every chunk of queries, and of keys.
    ordered: whether the keys of consecutive chunks follow one another.
    many_ranges: whether what travels of a chunk may be many ranges.
    lines: a function of `column` and a tile that makes, and keeps, the `Lines` of a mesh.
    """

    def __init__(self, mask, q_layout, k_layout):
        self.counts = Pairs(mask, q_layout, k_layout)
        self.keys_seen = -(-mask.widest // max(tokens.step for tokens in k_layout.ranges(0)))
        self.lists = mask.lists
        if mask.cuts is not None:
            self.keys_seen = self.pairs.sum() / max(len(mask.unpadded), 1)
        self.lengths = np.array(q_layout.lengths), np.array(k_layout.lengths)
        self.ordered = k_layout.kind == "contiguous" or k_layout.chunks == 1
        table = Table(mask, q_layout, k_layout, has_pairs=lambda: self.pairs > 0)
        ranges = max(len(layout.all_ranges()[0]) for layout in (q_layout, k_layout))
        self.many_ranges = table.exact or (ranges > FEW_RANGES and not table.whole_chunks)
        side = Remembered(table.side)
        self.lines = Remembered(lambda column, tile: Lines(side(column), tile, column))

    @property
    def pairs(self):
        """By chunk of queries and chunk of keys: int64 (chunks, chunks)."""
        return self.counts.table


def chunks_of(tile, column, ranks):
    """The chunks of keys (with `column`) or queries of the tiles of some ranks: (hops, ranks), as many hops back."""
    hops = np.arange(tile.b if column else tile.a)[:, None]
    return tile.in_column(ranks, hops) if column else tile.in_row(ranks, hops)


@lru_cache(256)
def _carried(kind, extent, route, collective):
    """What the hops of a kind carry: the arguments of `Load._moved`."""
    # Hops 1 and 2 show it for all: whether hop 2 also carries what the user of hop 1 needs, and hop 1 what the user of
    # hop 2 needs (`Leg.users`).
    first, second = (leg_of(kind, hop, extent, route, collective).users for hop in (1, 2))
    return kind in IN_COLUMNS, second.start < 2, first.stop > 2, collective and not passed_on(route)


def edges(pairs, queries, keys, work):
    """Number of edges of blocks with so many pairs, queries and keys: float, of the shape of pairs.

    An interval of a query that has keys of a block has one edge there, or PACKING of one if no mask cuts the block.
    How many do is an estimate: where a mask cuts a block, the average interval has half of what it might.  Of several
    intervals most are whole.
    work: their `Work`.
    """
    cut = 2 if work.lists == 1 else 1
    rows = np.minimum(cut * pairs / np.maximum(np.minimum(keys, work.keys_seen), 1), queries * work.lists)
    return np.where(pairs < queries * keys, rows, PACKING * rows)


class Load:
    """Work and transfers of every rank of a mesh.

    work: the `Work` of its layouts.
    The attribute `pairs` has the pairs of block (u, w) of every rank: (a, b, ranks).
    """

    def __init__(self, work, tile):
        self.lengths, self.ordered, self._work, self._tile = work.lengths, work.ordered, work, tile
        self.many_ranges, self.lists = work.many_ranges, work.lists
        ranks = np.arange(tile.ranks)
        self.chunks = chunks_of(tile, False, ranks), chunks_of(tile, True, ranks)
        self.pairs = work.pairs[self.chunks[0][:, None], self.chunks[1][None]]
        self._tokens = Remembered(self._moved)
        self.timed_pairs, self.fused_pairs = Remembered(self._timed_pairs), Remembered(self._fused_pairs)

    @cached_property
    def rank_pairs(self):
        """Number of pairs that each rank computes: int64 (ranks,)."""
        return self.pairs.sum(axis=(0, 1))

    def _edges(self):
        """Number of edges of every block: float (a, b, ranks)."""
        queries, keys = (lengths[chunks] for lengths, chunks in zip(self.lengths, self.chunks))
        return edges(self.pairs, queries[:, None], keys, self._work)

    def _timed_pairs(self, edge):
        """Pairs of which blocks take the time, if queries take it for `edge` keys more than they see: as `pairs`."""
        return self.pairs + edge * self._edges()

    def _fused_pairs(self, edge):
        """As `timed_pairs`, of all blocks in one launch: (ranks,)."""
        return self.rank_pairs + edge * self._edges().max(axis=1).sum(axis=0)

    @property
    def balance(self):
        """Maximum / mean of `rank_pairs`; 1 if there are none."""
        return balance(self.rank_pairs)

    def moved(self, kind, route="direct", collective=False):
        """Tokens that every rank receives (of a reduced kind: sends) in each hop of a kind: (hops, ranks).

        Hop 0 moves nothing, and tokens that no rank needs do not move, as in `mpiattn.schedule.needed`.
        """
        return self._tokens(*_carried(kind, len(self.chunks[kind in IN_COLUMNS]), route, collective))

    def _moved(self, column, *how):
        """`moved`, of keys with `column`.  how: as for `Lines.moved`."""
        chunks = self.chunks[column]
        return self._work.lines(column, self._tile).moved(*how)[np.arange(len(chunks))[:, None], chunks]

    def held(self, kind, route="direct", packed=False, collective=False):
        """Tokens of each chunk or accumulator of others that every rank has room for: (hops, ranks).

        packed: whether the arenas are, which have room for the tokens that any rank of the group needs.
        """
        if not packed:
            return self.moved(kind, route, collective)
        column, everyone = kind in IN_COLUMNS, "Q" if kind not in IN_COLUMNS else "KV"
        if collective:
            return self.moved(everyone, collective=True)
        to_first = self.moved(everyone, "ring")[1:2]  # what passes by the first neighbour is for all
        by_owner = np.zeros(self.chunks[column].shape, np.int64)
        if len(by_owner) > 1:
            np.put_along_axis(by_owner, np.broadcast_to(self.chunks[column][1], by_owner.shape), to_first, axis=1)
        tokens = np.take_along_axis(by_owner, self.chunks[column], axis=1)
        tokens[0] = 0
        return tokens


def balance(counts):
    """Maximum / mean of some numbers; 1 if they are all 0."""
    counts = np.asarray(counts)
    return float(counts.max() * len(counts) / counts.sum()) if counts.any() else 1.0
