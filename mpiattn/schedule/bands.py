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
    from collections.abc import Mapping, Sequence

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


class _Turned:
    """A mask without a caller's, with keys as its rows and queries as its keys."""

    def __init__(self, mask: Mask) -> None:
        self.seqlen, self.seqlen_k = mask.seqlen_k, mask.seqlen
        self._mask = mask

    def key_intervals(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `Mask.key_intervals`: of each key, the queries that see it."""
        first, end = (side.astype(np.int64)[None, None] for side in self._mask.queries_seeing(rows, rows + 1))
        return first, np.maximum(first, end)


class _Side(NamedTuple):
    """The matrix of a group as it is, or turned: with keys as its rows and queries as its keys.

    row_bytes, key_bytes: bytes that a row and a key move for each rank that needs them.
    own_rows, own_keys: where those of each rank begin, and the last end; both (ranks + 1,), or None.
    """

    mask: Mask | _Turned
    row_bytes: int
    key_bytes: int
    own_rows: NDArray[np.int64] | None
    own_keys: NDArray[np.int64] | None

    def piece(self, group: int, top: int, bottom: int, first: int, last: int) -> Piece:
        """The piece of these rows and keys."""
        if isinstance(self.mask, _Turned):
            return Piece(group, first, last, top, bottom)
        return Piece(group, top, bottom, first, last)


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


def _sampled(mask: Mask | _Turned) -> _Sampled:
    count = min(mask.seqlen, ROWS)
    start = np.arange(count + 1, dtype=np.int64) * mask.seqlen // max(count, 1)
    low, high, seen = _outermost(mask, start[:-1])
    before = np.append(0, np.cumsum(seen * np.diff(start)))
    return _Sampled(start, low, high, before)


def _outermost(mask: Mask | _Turned, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
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


def _cheapest(side: _Side, sampled: _Sampled, rows: NDArray[np.int64]) -> tuple[int, list[int]]:
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
        cost = least[:last] + of_rows * side.row_bytes + seen * side.key_bytes
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

    def __init__(self, mask: Mask | _Turned, top: int, bottom: int) -> None:
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

    @property
    def tiles(self) -> int:
        """How many it has."""
        return len(self.before) - 1


class _Pattern(NamedTuple):
    """How groups are divided whose shares have the same sizes.

    number: its own.
    cost: bytes that such a group moves, if ranks own nothing.
    order: numbers of the shares, from the top to the bottom.
    """

    number: int
    side: _Side
    cost: int
    order: tuple[int, ...]
    bands: tuple[_Band, ...]

    def striped(self, band: _Band) -> bool:
        """Whether it pays that each rank of a band gets the keys that it owns."""
        side = self.side
        if side.own_keys is None or band.tiles == 1:
            return False
        need = (band.bottom - band.top) * side.row_bytes * band.tiles
        need += (band.below.last - band.below.first) * side.key_bytes
        of_rank = int(side.own_keys[-1]) // (len(side.own_keys) - 1)
        return of_rank * side.key_bytes * band.tiles * STRIP >= need


def _pattern(number: int, side: _Side, sampled: _Sampled, parts: tuple[int, ...]) -> _Pattern:
    falling = tuple(range(len(parts)))
    orders = [falling] if parts[0] == parts[-1] else [falling, falling[::-1]]
    found = []
    for order in orders:
        rows = _row_cuts(sampled, [parts[share] for share in order])
        cost, cuts = _cheapest(side, sampled, rows)
        found.append((cost, order, cuts, rows.tolist()))
    cost, order, cuts, tops = min(found)
    bands = []
    for first, last in pairwise(cuts):
        before = np.cumsum([0, *(parts[share] for share in order[first:last])])
        bands.append(_Band(first, tops[first], tops[last], before, _Below(side.mask, tops[first], tops[last])))
    return _Pattern(number, side, cost, order, tuple(bands))


def _own(first: int, last: int, cuts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many tokens of [first, last) each rank owns: (ranks,)."""
    return np.maximum(np.minimum(cuts[1:], last) - np.maximum(cuts[:-1], first), 0)


# The first of all tiles of a pattern that are alike for the ranks, and bytes that each rank owns of its needs
_Kind: TypeAlias = "tuple[tuple[int, int], NDArray[np.int64]]"


def _kinds(pattern: _Pattern) -> list[_Kind]:
    """The kind of every tile of a pattern, from the top."""
    number, side, found = pattern.number, pattern.side, []
    assert side.own_rows is not None and side.own_keys is not None
    for band in pattern.bands:
        of_rows = _own(band.top, band.bottom, side.own_rows) * side.row_bytes
        if pattern.striped(band):
            worth = of_rows + _own(band.below.first, band.below.last, side.own_keys) * side.key_bytes
            found += [((number, band.first), worth)] * band.tiles
            continue
        for tile, (first, last) in enumerate(pairwise(band.below.keys(band.pairs).tolist()), band.first):
            found.append(((number, tile), of_rows + _own(first, last, side.own_keys) * side.key_bytes))
    return found


def _ranks(slots: dict[int, list[_Kind]]) -> tuple[int, dict[int, int]]:
    """The rank of each slot, so that ranks own as many bytes as can be of what they need; and these bytes.

    slots: the kinds of its tiles.
    """
    kinds: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for slot, tiles in slots.items():
        kinds.setdefault(tuple(like for like, _ in tiles), []).append(slot)
    worth = np.stack([sum(worth for _, worth in slots[alike[0]]) for alike in kinds.values()])
    kind_of = kinds_of_ranks(worth, np.array([len(alike) for alike in kinds.values()]))
    rank_of: dict[int, int] = {}
    for kind, alike in enumerate(kinds.values()):
        rank_of.update(zip(alike, np.flatnonzero(kind_of == kind).tolist()))
    return int(worth[kind_of, np.arange(len(kind_of))].sum()), rank_of


# The number of a tile in its band, and its first key and one past its last
_Keys: TypeAlias = "tuple[int, int, int]"


def _plain(mask: Mask | _Turned, band: _Band) -> list[_Keys]:
    """The pieces of a band: one for each tile."""
    cuts = band.below.keys(band.pairs)
    # The first and the last key that is seen are not yet the ends of the sequence
    cuts[band.pairs >= band.below.all] = mask.seqlen_k
    cuts[0] = 0
    return [(tile, first, last) for tile, (first, last) in enumerate(pairwise(cuts.tolist())) if first < last]


def _striped(band: _Band, keys: NDArray[np.int64], tiles: Sequence[tuple[int, int]]) -> list[_Keys]:
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
    bounds = np.unique(np.concatenate([cuts, begin, end, [0, keys[-1]]]))
    first = bounds[:-1]
    owner = begin.searchsorted(first, "right") - 1
    tile = np.where((owner >= 0) & (first < end[owner]), owner, cuts.searchsorted(first, "right"))
    new = np.flatnonzero(np.diff(tile, prepend=-1))
    return list(zip(tile[new].tolist(), first[new].tolist(), [*first[new[1:]].tolist(), int(keys[-1])]))


def _patterns(sides: Sequence[_Side], parts_of: Sequence[tuple[int, ...]], choose: bool) -> list[list[_Pattern]]:
    """The patterns of each group, one list for each choice that there is.

    parts_of: sizes of the shares of each group.
    choose: whether bytes depend on what ranks own; if not, there is one choice.
    """
    sizes = list(dict.fromkeys(parts_of))
    by_side: list[dict[tuple[int, ...], _Pattern]] = []
    for side in sides:
        sampled, before = _sampled(side.mask), len(by_side) * len(sizes)
        by_side.append({parts: _pattern(before + n, side, sampled, parts) for n, parts in enumerate(sizes)})
    if not choose:
        return [[min((found[parts] for found in by_side), key=lambda one: one.cost) for parts in parts_of]]
    choices = [[found[parts] for parts in parts_of] for found in by_side]
    if len(sides) > 1 and len(parts_of) > 1:
        # Of groups in a row one is turned and one is not, so that different ranks own what they need
        choices.append([by_side[group % len(sides)][parts] for group, parts in enumerate(parts_of)])
    return choices


class _Plan(NamedTuple):
    """What is known of a choice of patterns.

    cost: bytes that it moves.
    patterns: of each group.
    rank_of: the rank of each slot.
    """

    cost: int
    patterns: list[_Pattern]
    rank_of: dict[int, int]


def _plan(shares: Sequence[Sequence[_Share]], patterns: list[_Pattern], choose: bool) -> _Plan:
    slots: dict[int, list[tuple[int, int]]] = {}
    for pattern, of_group in zip(patterns, shares):
        for tile, share in enumerate(pattern.order):
            slots.setdefault(of_group[share].slot, []).append((pattern.number, tile))
    cost = sum(pattern.cost for pattern in patterns)
    if not choose:
        return _Plan(cost, patterns, {slot: rank for rank, slot in enumerate(slots)})
    kinds = {number: _kinds(pattern) for number, pattern in {pattern.number: pattern for pattern in patterns}.items()}
    own, rank_of = _ranks({slot: [kinds[number][tile] for number, tile in tiles] for slot, tiles in slots.items()})
    return _Plan(cost - own, patterns, rank_of)


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
    choose = owned is not None
    own_queries, own_keys = (None, None) if owned is None else owned
    sides = [_Side(mask, row_bytes, key_bytes, own_queries, own_keys)]
    if mask.mask is None:
        sides.append(_Side(_Turned(mask), key_bytes, row_bytes, own_keys, own_queries))
    shares = _shares(ranks, groups)
    choices = _patterns(sides, [tuple(share.parts for share in of_group) for of_group in shares], choose)
    plan = min((_plan(shares, patterns, choose) for patterns in choices), key=lambda plan: plan.cost)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    alike: dict[int, list[int]] = {}
    for group, pattern in enumerate(plan.patterns):
        alike.setdefault(pattern.number, []).append(group)
    for of_pattern in alike.values():
        pattern = plan.patterns[of_pattern[0]]
        for band in pattern.bands:
            _deal(pattern, band, {group: shares[group] for group in of_pattern}, plan.rank_of, pieces)
    return tuple(tuple(sorted(of_rank)) for of_rank in pieces)


def _deal(
    pattern: _Pattern,
    band: _Band,
    shares: Mapping[int, Sequence[_Share]],
    rank_of: Mapping[int, int],
    pieces: Sequence[list[Piece]],
) -> None:
    """Give each rank its pieces of a band of all groups of a pattern."""
    side = pattern.side
    if band.top == band.bottom:
        return
    striped, of_tiles = pattern.striped(band), _plain(side.mask, band)
    for group, of_group in shares.items():
        inside = (of_group[share] for share in pattern.order[band.first : band.first + band.tiles])
        tiles = [(rank_of[share.slot], share.parts) for share in inside]
        if striped and side.own_keys is not None:
            tiles.sort()
            of_tiles = _striped(band, side.own_keys, tiles)
        for tile, first, last in of_tiles:
            pieces[tiles[tile][0]].append(side.piece(group, band.top, band.bottom, first, last))
