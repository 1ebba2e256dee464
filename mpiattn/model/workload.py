"""Exact work and transfers of every rank of a mesh under a mask.  No MPI.

The search for a layout, tile and schedule uses it for the whole mesh.  `schedule.needed` gives the same for one rank
and one call, with documents.
"""

from functools import cached_property, lru_cache

import numpy as np

from ..schedule.kinds import IN_COLUMNS
from ..schedule.remembered import Remembered
from ..schedule.route import FEW_RANGES, leg_of, passed_on
from .pairs import Pairs
from .spans import NONE, Spans
from .token_sets import TokenSets

PACKING = 0.5  # share of a machine's edge that packing rows takes; the rest is tiles that a mask cuts


def _all_see(mask, q_layout, k_layout):
    """Whether the last query of every chunk surely sees a key of every chunk.

    It does if keys are striped and it sees as many keys in a row as there are chunks.
    """
    if not k_layout.striped or mask.mask is not None:
        return False
    starts, lengths, step = q_layout.all_ranges()
    last = np.sort(np.where(lengths > 0, starts + (lengths - 1) * step, 0).max(axis=0))
    lo, hi = mask.key_interval(last)
    return bool((hi - lo >= k_layout.chunks).all())


class Work:
    """What a mask asks of two layouts, on any mesh.

    counts: the `Pairs` of the layouts.  pairs: its table.
    keys_seen: the most keys of a chunk that an interval of a query has; with documents, the mean number of keys that a
        query sees of all chunks.
    lists: the most intervals that a query has, each of which a block is launched for.
    lengths: tokens of every chunk of queries, and of keys.
    ordered: whether the keys of consecutive chunks follow one another.
    many_ranges: whether what travels of a chunk may be many ranges.
    """

    def __init__(self, mask, q_layout, k_layout):
        self.counts = Pairs(mask, q_layout, k_layout)
        self.keys_seen = -(-mask.widest // max(tokens.step for tokens in k_layout.ranges(0)))
        self.lists = mask.lists
        if mask.cuts is not None:
            self.keys_seen = self.pairs.sum() / max(len(mask.unpadded), 1)
        self.lengths = np.array(q_layout.lengths), np.array(k_layout.lengths)
        self.ordered = k_layout.kind == "contiguous" or k_layout.chunks == 1
        self._mask, self._layouts = mask, (q_layout, k_layout)
        shortest = min(min(layout.lengths) for layout in self._layouts)
        striped = q_layout.striped or k_layout.striped
        self.many_ranges = not striped and (
            mask.mask is not None or max(len(layout.all_ranges()[0]) for layout in self._layouts) > FEW_RANGES
        )
        self.whole = shortest > 0 and (mask.full or _all_see(mask, q_layout, k_layout))

    @cached_property
    def needed(self):
        """The `Spans` or `TokenSets` of the tokens that travel; None where all or nothing of a chunk does."""
        q_layout, k_layout = self._layouts
        striped = q_layout.striped or k_layout.striped
        whole = self._mask.full or striped or q_layout.chunks == 1 or not self.counts.any()
        return None if whole else (Spans if self._mask.mask is None else TokenSets)(self._mask, q_layout, k_layout)

    @property
    def pairs(self):
        """By chunk of queries and chunk of keys: int64 (chunks, chunks)."""
        return self.counts.table

    @cached_property
    def _any(self):
        """Whether there is a pair: by chunk of keys and chunk of queries, and by chunk of queries and chunk of keys."""
        some = self.pairs > 0
        return np.ascontiguousarray(some.T), some

    def moved(self, column, tile):
        """Tokens of keys (with `column`) or queries that travel on the direct route, of all ranks of a mesh."""
        if (tile.b if column else tile.a) == 1:
            return 0  # all in one group have the same
        chunks = np.arange(tile.ranks).reshape(tile.b, tile.a)
        groups, own = (chunks, chunks.ravel() // tile.a) if column else (chunks.T, chunks.ravel() % tile.a)
        if self.needed is not None:
            return self.needed.moved(column, groups, own)
        if self.whole:
            return int(self.lengths[column].sum()) * (len(groups) - 1)
        some = self._any[column].reshape(tile.b, tile.a, -1).any(axis=1 if column else 0)  # (groups, chunks)
        return int((self.lengths[column] * (some.sum(axis=0) - some[own, chunks.ravel()])).sum())

    def tokens(self, column, chunks, others):
        """Tokens of chunks that are needed together with any of `others`, chunks of the other side.

        chunks: of keys with `column`, else of queries: (hops, ranks).
        others: (hops, ranks).
        """
        if self.needed is not None:
            return self.needed.tokens(column, chunks, others)
        if self.whole:
            return self.lengths[column][chunks]
        pairs = self.pairs.T if column else self.pairs
        return self.lengths[column][chunks] * np.stack([pairs[of, others].any(axis=0) for of in chunks])


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
        self._needed, self._tokens = Remembered(self._by_owner), Remembered(self._moved)
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

    def _by_owner(self, column):
        """The tokens [first, last) of each run of a chunk that ranks need: two arrays (runs, hops, chunks).

        Hops are those from the owner ahead to the rank.
        """
        chunks = self.chunks[column]
        if self._work.needed is None:
            needed = self.pairs.any(axis=0 if column else 1)[None]
            ends = np.where(needed, 0, NONE), needed * self.lengths[column][chunks]
        else:
            ends = self._work.needed.ends(column, chunks, self.chunks[not column])
        by_owner, hops = tuple(np.empty_like(end) for end in ends), np.arange(len(chunks))[:, None]
        for to, end in zip(by_owner, ends):
            to[:, hops, chunks] = end
        return by_owner

    def moved(self, kind, route="direct", collective=False):
        """Tokens that every rank receives (of a reduced kind: sends) in each hop of a kind: (hops, ranks).

        Hop 0 moves nothing, and tokens that no rank needs do not move, as in `mpiattn.schedule.needed`.
        """
        return self._tokens(*_carried(kind, len(self.chunks[kind in IN_COLUMNS]), route, collective))

    def _moved(self, column, earlier, later, together):
        """`moved`, of keys with `column`.

        earlier, later: whether a hop also carries what the users of the hops before it need, of those after it.
        together: whether it carries one range of a chunk.
        """
        chunks = self.chunks[column]
        if isinstance(self._work.needed, TokenSets):
            tokens = self._work.needed.by_owner(column, self._tile.a, len(chunks), earlier, later, together)
            return tokens[np.arange(len(chunks))[:, None], chunks]
        first, last = (ends[:, 1:] for ends in self._needed(column))
        if together:
            first, last = first.min(axis=0, keepdims=True), last.max(axis=0, keepdims=True)
        if earlier:
            first, last = np.minimum.accumulate(first, axis=1), np.maximum.accumulate(last, axis=1)
        if later:
            first, last = (
                of.accumulate(ends[:, ::-1], axis=1)[:, ::-1] for of, ends in ((np.minimum, first), (np.maximum, last))
            )
        tokens = np.zeros(chunks.shape, np.int64)
        tokens[1:] = np.where(first < last, last - first, 0).sum(axis=0)
        return tokens[np.arange(len(chunks))[:, None], chunks]

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
