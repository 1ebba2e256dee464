"""Bands and tiles: a division of the scores into pieces of equal work, for any number of ranks and any mask.

The work of every group is cut into as many parts as there are ranks, and each rank gets as many parts as there are
groups, of as few groups as can be: its shares.  The rows of a group are cut into bands, each of some shares, and the
keys of a band into a tile for each of them.  A rank needs the rows of its band and the keys of its tile, so a band of n
shares costs n times its rows and once the keys that they see.  Dynamic programming over the shares above each cut
finds the bands that move fewest bytes.

Where every rank owns some tokens in a row, ranks are chosen for the tiles whose tokens they own.  A rank then also
gets the keys that it owns against all rows of its band, which costs nothing, and so much less of the other keys.

Ring is a band for each rank, Q-ring a single band, and an equal mesh has square tiles.

All numbers are integers, so that all ranks find the same division.  Of long sequences some rows stand for all: work is
then equal but for a small part.  Plans do not take this division yet: it is checked and measured by its tests alone.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from .owners import kinds_of_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..problem.mask import Mask

ROWS = 2**14  # rows of a matrix that are looked at: with 1,024 ranks of one matrix 16 of a rank's
TILE_ROWS = 2**8  # rows of a band that are looked at to cut its keys
STRIP = 2**6  # of what a rank needs, the part that its own keys must be to be worth a piece of their own


class Piece(NamedTuple):
    """A rectangle of the score matrix of a group, which is a KV head of a sequence.

    group: number of the group, sequence * kv_heads + KV head.
    first_row, last_row: its queries [first_row, last_row), as positions in the sequence.
    first_key, last_key: its keys [first_key, last_key).
    """

    group: int
    first_row: int
    last_row: int
    first_key: int
    last_key: int


# The pieces of each rank.  Each pair of a query and a key is in one piece of one rank, whether the mask shows it or not
Division: TypeAlias = "tuple[tuple[Piece, ...], ...]"


class _Sampled(NamedTuple):
    """Some rows of a matrix, each of which stands for the rows up to the next one.

    start: these rows, and at last the number of rows: (rows + 1,).
    low, high: the first key that each of them sees, and one past the last, (rows,); 0 and 0 without any.
    before: visible pairs above each, and at last all of them: (rows + 1,).
    """

    start: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]
    before: NDArray[np.int64]


def _sampled(mask: Mask) -> _Sampled:
    count = min(mask.seqlen, ROWS)
    start = np.arange(count + 1, dtype=np.int64) * mask.seqlen // max(count, 1)
    low, high, seen = _outermost(mask, start[:-1])
    before = np.append(0, np.cumsum(seen * np.diff(start)))
    return _Sampled(start, low, high, before)


def _outermost(mask: Mask, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """The first key that each row sees, one past the last, and how many it sees; all 0 without any."""
    begin, end = (side[:, 0] for side in mask.key_intervals(rows))
    seen = (end - begin).sum(axis=0)
    low = np.where(begin < end, begin, mask.seqlen_k).min(axis=0, initial=mask.seqlen_k)
    high = np.where(begin < end, end, 0).max(axis=0, initial=0)
    return np.where(seen > 0, low, 0), high, seen


class _Share(NamedTuple):
    """What a rank computes of a group: so many of the parts into which the work of a group is cut, one for each rank.

    slot: number of the rank, before it is known who that is.
    """

    slot: int
    parts: int


def _shares(ranks: int, groups: int) -> list[list[_Share]]:
    """The shares of each group, largest first: every group has `ranks` parts, and every rank gets `groups` of them.

    As Euclid finds the common divisor of the two: each group gives whole shares to ranks of its own, or each rank takes
    whole groups, and what is left of either is divided in the same way.  No division has fewer shares, and few ranks
    have two of like size, which cost most.
    """
    shares: list[list[_Share]] = [[] for _ in range(groups)]
    slots, unfinished = list(range(ranks)), list(range(groups))
    of_slot, of_group = groups, ranks  # parts that each still has
    while slots and unfinished:
        pairs = list(zip(unfinished, slots))
        parts = min(of_slot, of_group)
        for group, slot in pairs:
            shares[group].append(_Share(slot, parts))
        if len(slots) >= len(unfinished):
            slots = slots[len(pairs) :]
            of_group -= parts
        else:
            unfinished = unfinished[len(pairs) :]
            of_slot -= parts
    return shares


def _row_cuts(sampled: _Sampled, parts: Sequence[int]) -> NDArray[np.int64]:
    """The rows between shares of so many parts of a group's work, the outermost included: (shares + 1,)."""
    whole, all_pairs = sum(parts), int(sampled.before[-1])
    # Python's integers: the products may be beyond int64
    above = np.array([all_pairs * part // whole for part in accumulate(parts[:-1])], np.int64)
    at = np.minimum(sampled.before.searchsorted(above, "right") - 1, len(sampled.low) - 1)
    # The rows for which a looked-at row stands have as many pairs each, as far as is known
    each = np.maximum(np.diff(sampled.before)[at] // np.diff(sampled.start)[at], 1)
    rows = np.minimum(sampled.start[at] + (above - sampled.before[at]) // each, sampled.start[at + 1])
    return np.concatenate([[0], rows, sampled.start[-1:]])


class _Weights(NamedTuple):
    """Bytes that move for each rank that needs them.

    row: of a query in all heads of a group.
    key: of a key in a KV head.
    """

    row: int
    key: int


def _cheapest(sampled: _Sampled, rows: NDArray[np.int64], weights: _Weights) -> tuple[int, list[int]]:
    """Bytes of the bands that move fewest, and the numbers of the cuts between them, the outermost included.

    rows: those at which bands may begin and end.
    """
    shares = len(rows) - 1
    distinct = np.unique(rows)
    at = distinct.searchsorted(rows)
    low, high = _of_parts(sampled, distinct)
    least, previous = np.zeros(shares + 1, np.int64), np.zeros(shares + 1, np.int64)
    for last in range(1, shares + 1):
        # From this cut upwards: the keys that the rows from each cut on see
        part = slice(None, at[last])
        seen = np.maximum.accumulate(high[part][::-1]) - np.minimum.accumulate(low[part][::-1])
        seen = np.append(np.maximum(seen[::-1], 0), 0)[at[:last]]
        of_rows = np.arange(last, 0, -1) * (rows[last] - rows[:last])
        cost = least[:last] + of_rows * weights.row + seen * weights.key
        previous[last] = cost.argmin()
        least[last] = cost[previous[last]]
    cuts = [shares]
    while cuts[-1]:
        cuts.append(int(previous[cuts[-1]]))
    return int(least[-1]), cuts[::-1]


def _of_parts(sampled: _Sampled, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first key that the rows between each two of `rows` see, and one past the last.

    Parts without any have the highest number of a key first, so that they add nothing to the keys of parts around them.
    """
    nothing = int(sampled.high.max(initial=0))
    low = np.where(sampled.low < sampled.high, sampled.low, nothing)
    begin = sampled.start.searchsorted(rows[:-1], "right") - 1
    end = np.maximum(sampled.start.searchsorted(rows[1:], "left"), begin + 1)
    bounds = np.stack([begin, end], axis=1).ravel()
    # A last bound at the very end is left out: the last reduction goes on to the end by itself
    bounds = bounds[: len(bounds) - (end[-1:] == len(low)).sum()]
    return np.minimum.reduceat(low, bounds)[::2], np.maximum.reduceat(sampled.high, bounds)[::2]


class _Below:
    """The visible pairs that some rows have below each key, as far as a few of them tell.

    first, last: the first key that they see, and one past the last.
    all: number of these pairs.
    """

    def __init__(self, mask: Mask, top: int, bottom: int) -> None:
        count = min(bottom - top, TILE_ROWS)
        rows = top + (np.arange(count, dtype=np.int64) * 2 + 1) * (bottom - top) // (2 * max(count, 1))
        begin, end = (side[:, 0] for side in mask.key_intervals(rows))
        some = begin < end
        begin, end = np.sort(begin[some]), np.sort(end[some])
        self._key = np.unique(np.concatenate([begin, end, [0]]))
        # Between two of these keys as many rows see each key
        self._seeing = begin.searchsorted(self._key, "right") - end.searchsorted(self._key, "right")
        self._before = np.append(0, np.cumsum(self._seeing[:-1] * np.diff(self._key)))
        self.first = int(begin[0]) if len(begin) else 0
        self.last = int(self._key[-1])
        self.all = int(self._before[-1])

    def pairs(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those below each of `keys`."""
        at = self._key.searchsorted(keys, "right") - 1
        return self._before[at] + (keys - self._key[at]) * self._seeing[at]

    def keys(self, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
        """The keys below which there are so many."""
        at = np.minimum(self._before.searchsorted(pairs, "right") - 1, max(len(self._key) - 2, 0))
        return self._key[at] + (pairs - self._before[at]) // np.maximum(self._seeing[at], 1)


class _Band(NamedTuple):
    """The rows [top, bottom) of a group.

    first: number of its first share, from the top of the group on.
    before: parts of the band's work before each of its tiles, and at last all of them: (tiles + 1,).
    below: of its rows.
    """

    first: int
    top: int
    bottom: int
    before: NDArray[np.int64]
    below: _Below

    @property
    def pairs(self) -> NDArray[np.int64]:
        """Visible pairs before each of its tiles, and at last all of them."""
        return self.below.all * self.before // self.before[-1]

    def striped(self, own_keys: int, weights: _Weights) -> bool:
        """Whether it pays that each rank gets the keys that it owns.

        own_keys: how many these are.
        """
        tiles = len(self.before) - 1
        need = (self.bottom - self.top) * weights.row * tiles + (self.below.last - self.below.first) * weights.key
        return tiles > 1 and own_keys * weights.key * tiles * STRIP >= need


class _Pattern(NamedTuple):
    """How all groups are divided whose shares have the same sizes.

    order: numbers of the shares, from the top to the bottom.
    """

    order: tuple[int, ...]
    bands: tuple[_Band, ...]


def _pattern(mask: Mask, sampled: _Sampled, parts: tuple[int, ...], weights: _Weights) -> _Pattern:
    falling = tuple(range(len(parts)))
    orders = [falling] if parts[0] == parts[-1] else [falling, falling[::-1]]
    found = []
    for order in orders:
        rows = _row_cuts(sampled, [parts[share] for share in order])
        cost, cuts = _cheapest(sampled, rows, weights)
        found.append((cost, order, cuts, rows.tolist()))
    _, order, cuts, tops = min(found)
    bands = []
    for first, last in pairwise(cuts):
        before = np.cumsum([0, *(parts[share] for share in order[first:last])])
        bands.append(_Band(first, tops[first], tops[last], before, _Below(mask, tops[first], tops[last])))
    return _Pattern(order, tuple(bands))


class _Owned(NamedTuple):
    """Where the tokens of each rank begin, and the last end: both (ranks + 1,)."""

    queries: NDArray[np.int64]
    keys: NDArray[np.int64]


def _own(first: int, last: int, cuts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many tokens of [first, last) each rank owns: (ranks,)."""
    return np.maximum(np.minimum(cuts[1:], last) - np.maximum(cuts[:-1], first), 0)


# A tile: number of the pattern and, from its top, of the share
_Tile: TypeAlias = "tuple[int, int]"


def _worth(
    patterns: Sequence[_Pattern], owned: _Owned, weights: _Weights
) -> dict[_Tile, tuple[_Tile, NDArray[np.int64]]]:
    """For each tile the first one that is like it for the ranks, and bytes that each rank owns of its needs."""
    own_keys = int(owned.keys[-1]) // (len(owned.keys) - 1)
    found = {}
    for number, pattern in enumerate(patterns):
        for band in pattern.bands:
            of_rows = _own(band.top, band.bottom, owned.queries) * weights.row
            if band.striped(own_keys, weights):
                worth = of_rows + _own(band.below.first, band.below.last, owned.keys) * weights.key
                for tile in range(len(band.before) - 1):
                    found[number, band.first + tile] = (number, band.first), worth
                continue
            for tile, (first, last) in enumerate(pairwise(band.below.keys(band.pairs).tolist())):
                like = number, band.first + tile
                found[like] = like, of_rows + _own(first, last, owned.keys) * weights.key
    return found


def _ranks(
    slots: dict[int, list[_Tile]], patterns: Sequence[_Pattern], owned: _Owned, weights: _Weights
) -> dict[int, int]:
    """The rank of each slot, so that ranks own as much as can be of what they need.

    slots: the tiles of each.
    """
    worth = _worth(patterns, owned, weights)
    kinds: dict[tuple[_Tile, ...], list[int]] = {}
    for slot, tiles in slots.items():
        kinds.setdefault(tuple(worth[tile][0] for tile in tiles), []).append(slot)
    of_kinds = np.stack([sum(worth[tile][1] for tile in kind) for kind in kinds])
    kind_of = kinds_of_ranks(of_kinds, np.array([len(alike) for alike in kinds.values()]))
    rank_of: dict[int, int] = {}
    for kind, alike in enumerate(kinds.values()):
        rank_of.update(zip(alike, np.flatnonzero(kind_of == kind).tolist()))
    return rank_of


def _plain(mask: Mask, band: _Band) -> list[tuple[int, int, int]]:
    """The tile and the keys of each piece of a band: a piece for each tile."""
    cuts = band.below.keys(band.pairs)
    # The first and the last key that is seen are not yet the ends of the sequence
    cuts[band.pairs >= band.below.all] = mask.seqlen_k
    cuts[0] = 0
    return [(tile, first, last) for tile, (first, last) in enumerate(pairwise(cuts.tolist())) if first < last]


def _striped(
    mask: Mask, band: _Band, keys: NDArray[np.int64], tiles: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """As `_plain`, but each rank gets the keys that it owns, and a tile of what these leave.

    keys: where those of each rank begin, and the last end.
    tiles: the ranks, which increase, and how many parts of the work each gets.
    """
    ranks, parts = np.array(tiles, np.int64).T
    below = band.below
    share = np.diff(below.all * np.append(0, np.cumsum(parts)) // parts.sum())
    begin, end = keys[ranks], keys[ranks + 1]
    above = below.pairs(begin)
    # No more than a rank's share
    end = np.minimum(end, np.maximum(below.keys(above + share), begin))
    own = np.minimum(below.pairs(end) - above, share)
    left, skipped = np.cumsum(share - own), np.cumsum(own)
    # Cuts of what is left, moved by the owned keys that lie above
    at = (above - skipped + own).searchsorted(left[:-1], "right")
    cuts = below.keys(left[:-1] + np.append(0, skipped)[at])
    bounds = np.unique(np.concatenate([cuts, begin, end, [0, mask.seqlen_k]]))
    first = bounds[:-1]
    owner = begin.searchsorted(first, "right") - 1
    tile = np.where((owner >= 0) & (first < end[owner]), owner, cuts.searchsorted(first, "right"))
    new = np.flatnonzero(np.diff(tile, prepend=-1))
    return list(zip(tile[new].tolist(), first[new].tolist(), [*first[new[1:]].tolist(), mask.seqlen_k]))


def bands(
    mask: Mask,
    ranks: int,
    groups: int,
    row_bytes: int,
    key_bytes: int,
    owned: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
) -> Division:
    """The division into bands and tiles that moves fewest bytes.

    mask: of every group, without documents of a call.
    groups: sequences times KV heads.
    row_bytes, key_bytes: bytes that a row of a group moves for each rank that needs it, of all query heads of the
        group, and that a key moves.
    owned: where the queries of each rank begin, in order of rank, and the last end, and where its keys: both int64
        (ranks + 1,).  None where the tokens of a rank are not in a row; ranks then get pieces as they come.
    """
    sampled, weights = _sampled(mask), _Weights(row_bytes, key_bytes)
    shares = _shares(ranks, groups)
    numbers: dict[tuple[int, ...], int] = {}  # of patterns
    pattern_of = [numbers.setdefault(tuple(parts for _, parts in of_group), len(numbers)) for of_group in shares]
    patterns = [_pattern(mask, sampled, parts, weights) for parts in numbers]
    slots: dict[int, list[_Tile]] = {}
    for number, of_group in zip(pattern_of, shares):
        for tile, share in enumerate(patterns[number].order):
            slots.setdefault(of_group[share].slot, []).append((number, tile))
    rank_of, own_keys = {slot: rank for rank, slot in enumerate(slots)}, 0
    if owned is not None:
        rank_of = _ranks(slots, patterns, _Owned(*owned), weights)
        own_keys = int(owned[1][-1]) // ranks
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for number, pattern in enumerate(patterns):
        alike = [(group, shares[group]) for group, of_group in enumerate(pattern_of) if of_group == number]
        for band in pattern.bands:
            inside = pattern.order[band.first : band.first + len(band.before) - 1]
            striped = owned is not None and band.striped(own_keys, weights)
            plain = _plain(mask, band)
            for group, of_group in alike:
                tiles = [(rank_of[of_group[share].slot], of_group[share].parts) for share in inside]
                for_ranks = plain
                if owned is not None and striped:
                    tiles.sort()
                    for_ranks = _striped(mask, band, owned[1], tiles)
                for tile, first, last in for_ranks:
                    pieces[tiles[tile][0]].append(Piece(group, band.top, band.bottom, first, last))
    return tuple(tuple(sorted(of_rank)) for of_rank in pieces)
