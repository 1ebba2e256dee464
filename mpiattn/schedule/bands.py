"""Bands and tiles: a division of the scores into pieces of equal work, for any number of ranks and any mask.

The work of every group is cut into as many parts as there are ranks, and each rank gets as many parts as there are
groups, of as few groups as can be: its shares.  The rows of a group are cut into bands, each of some shares, and the
keys of a band into a tile for each of them.  A rank needs the rows of its band and the keys of its tile, so a band of n
shares costs n times its rows and once the keys that they see.  Dynamic programming over the shares above each cut
finds the bands that move fewest bytes.

Where every rank owns some tokens in a row, ranks are chosen for the tiles whose tokens they own.  A rank then also
gets the keys that it owns against all rows of its band, which costs nothing, and so much less of the other keys.  Of
groups in a row every second one is turned, if other ranks then own more: its bands are of keys, and its tiles of rows.

The triangle at the top of a causal mask would make one rank the busiest by far: a corner of three tiles takes its place
where that costs little.

Ring is a band for each rank, Q-ring a single band, and an equal mesh has square tiles.

All numbers are integers, so that all ranks find the same division.  Of long sequences some rows stand for all: work is
then equal but for a small part.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import isqrt
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from .owners import kinds_of_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ..problem.mask import Mask

ROWS = 2**14  # rows of a matrix that are looked at: with 1,024 ranks of one matrix 16 of a rank's
TILE_ROWS = 2**8  # rows of a band that are looked at to cut its keys
CORNER = 3  # ranks of a corner
MORE = 2**5  # of all bytes, the part that may move in addition where the busiest rank then needs fewer
BUSIER = 2**4  # of the bytes of the busiest rank, the part in addition that is then worth it
UNEQUAL = 2**7  # of the work of a rank, the part that others of a corner may have less
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

# Rows [top, bottom) and keys [first, last)
_Rectangle: TypeAlias = "tuple[int, int, int, int]"


class _Turned:
    """A mask turned about its other diagonal: its rows are keys, the last first, and its keys are queries.

    A causal mask stays as it is.
    """

    def __init__(self, mask: Mask) -> None:
        self.seqlen, self.seqlen_k = mask.seqlen_k, mask.seqlen
        self._mask = mask

    def key_intervals(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `Mask.key_intervals`: of each key, the queries that see it."""
        keys = self.seqlen - 1 - rows
        first, end = (side.astype(np.int64)[None, None] for side in self._mask.queries_seeing(keys, keys + 1))
        return self.seqlen_k - np.maximum(first, end), self.seqlen_k - first


class _Side(NamedTuple):
    """The matrix of a group as it is, or turned: what is to be divided, and who owns what of it.

    row_bytes, key_bytes: bytes that a row and a key move for each rank that needs them.
    own_rows, own_keys: where those of each rank begin, and the last end; both (ranks + 1,), or empty where that is not
        known.  Of a turned matrix the last rank is the first.
    """

    mask: Mask | _Turned
    row_bytes: int
    key_bytes: int
    own_rows: NDArray[np.int64]
    own_keys: NDArray[np.int64]

    @classmethod
    def turned(cls, side: _Side, mask: Mask) -> _Side:
        """The matrix of `side`, which is not turned and has this mask."""
        rows, keys = (cuts[-1] - cuts[::-1] for cuts in (side.own_rows, side.own_keys))
        return cls(_Turned(mask), side.key_bytes, side.row_bytes, keys, rows)

    def rows_owned(self, first: int, last: int) -> NDArray[np.int64]:
        """Bytes of the rows [first, last) that each rank owns: (ranks,)."""
        return _owned(self.own_rows, first, last)[:: self.step] * self.row_bytes

    def keys_owned(self, first: int, last: int) -> NDArray[np.int64]:
        """Bytes of the keys [first, last) that each rank owns: (ranks,)."""
        return _owned(self.own_keys, first, last)[:: self.step] * self.key_bytes

    @property
    def step(self) -> int:
        """Of ranks, from one to the next: -1 where the last is the first."""
        return -1 if isinstance(self.mask, _Turned) else 1

    def piece(self, group: int, part: _Rectangle) -> Piece:
        """The piece of these rows and keys."""
        top, bottom, first, last = part
        if isinstance(self.mask, _Turned):
            rows, keys = self.mask.seqlen_k, self.mask.seqlen
            return Piece(group, rows - last, rows - first, keys - bottom, keys - top)
        return Piece(group, top, bottom, first, last)


def _owned(cuts: NDArray[np.int64], first: int, last: int) -> NDArray[np.int64]:
    return np.maximum(np.minimum(cuts[1:], last) - np.maximum(cuts[:-1], first), 0)


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
    """The share of a rank in a group: so many of the parts into which the work of a group is cut, one for each rank.

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
    slot, group = 0, 0  # the first that are not finished
    of_slot, of_group = groups, ranks  # parts that each of these still has
    while slot < ranks and group < groups:
        parts, pairs = min(of_slot, of_group), min(ranks - slot, groups - group)
        for pair in range(pairs):
            shares[group + pair].append(_Share(slot + pair, parts))
        if ranks - slot >= groups - group:
            slot, of_group = slot + pairs, of_group - parts
        else:
            group, of_slot = group + pairs, of_slot - parts
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


def _cheapest(
    side: _Side, sampled: _Sampled, rows: NDArray[np.int64], corner: _Corner | None
) -> tuple[int, list[int], _Corner | None]:
    """Bytes of the bands that move fewest, and the numbers of the cuts between them, the outermost included.

    rows: those at which bands may begin and end.
    corner: what may be instead of bands of the first shares; returned if it is.
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
        if corner is not None and last == CORNER:
            if MORE * corner.cost(side) <= (MORE + 1) * least[last]:
                least[last], previous[last] = corner.cost(side), 0
            else:
                corner = None
    cuts = [shares]
    while cuts[-1]:
        cuts.append(int(previous[cuts[-1]]))
    return int(least[-1]), cuts[::-1], corner if CORNER in cuts[-2:-1] else None


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
        self._key = np.sort(np.concatenate([begin, end, [0]]))
        # Between two of these keys as many rows see each key
        self._seeing = begin.searchsorted(self._key, "right") - end.searchsorted(self._key, "right")
        self._before = np.append(0, np.cumsum(self._seeing[:-1] * np.diff(self._key)))
        self.first = int(begin[0]) if len(begin) else 0
        self.last = int(self._key[-1])
        self.all = int(self._before[-1])

    def pairs(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The visible pairs below each of `keys`."""
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


class _Corner(NamedTuple):
    """The first rows of a group as three tiles, none of which is the triangle at the top of a causal mask.

    Rows and keys are cut in three; a number is a tile, a dot sees nothing:

        0 . .
        0 2 .
        1 2 1

    Bands of three ranks move as much, but the triangle at the top makes one of them the busiest of all.

    third, bottom: rows of each third, but that the last goes on to `bottom`.
    first_end, second_end, last: one past the last key that each third sees.
    """

    third: int
    bottom: int
    first_end: int
    second_end: int
    last: int

    def cost(self, side: _Side) -> int:
        """Bytes that it moves."""
        return (2 * self.bottom - self.third) * side.row_bytes + (self.first_end + self.last) * side.key_bytes

    def worth(self, side: _Side) -> list[NDArray[np.int64]]:
        """Bytes that each rank owns of the needs of each tile: (ranks,)."""
        step, bottom = self.third, self.bottom
        needs = [
            (side.rows_owned(0, 2 * step), side.keys_owned(0, self.first_end)),
            (
                side.rows_owned(2 * step, bottom),
                side.keys_owned(0, self.first_end) + side.keys_owned(self.second_end, self.last),
            ),
            (side.rows_owned(step, bottom), side.keys_owned(self.first_end, self.second_end)),
        ]
        return [of_rows + of_keys for of_rows, of_keys in needs]

    def tiles(self, keys: int) -> list[list[_Rectangle]]:
        """The rectangles of each tile, of so many keys."""
        return [
            [(0, 2 * self.third, 0, self.first_end)],
            [(2 * self.third, self.bottom, 0, self.first_end), (0, self.bottom, self.second_end, keys)],
            [(0, self.bottom, self.first_end, self.second_end)],
        ]


def _corner(side: _Side, bottom: int) -> _Corner | None:
    """That of the rows above `bottom`, which have the work of three ranks; None where work would not be equal."""
    third = bottom // CORNER
    if third < TILE_ROWS:
        return None
    first_end, second_end = _outermost(side.mask, np.array([third - 1, 2 * third - 1]))[1].tolist()
    if not 0 < first_end < second_end:
        return None
    upper, middle, lower = (_Below(side.mask, *rows) for rows in pairwise([0, third, 2 * third, bottom]))
    if upper.last > first_end or middle.last > second_end:
        return None
    cuts = np.array([first_end, second_end])
    (of_middle, _), (left, right) = middle.pairs(cuts).tolist(), lower.pairs(cuts).tolist()
    pairs = upper.all + of_middle, left + lower.all - right, middle.all - of_middle + right - left
    if (max(pairs) - min(pairs)) * UNEQUAL > max(pairs):
        return None
    return _Corner(third, bottom, first_end, second_end, lower.last)


class _Pattern(NamedTuple):
    """How groups are divided whose shares have the same sizes.

    number: its own.
    cost: bytes that such a group moves, if ranks own nothing.
    order: numbers of the shares, from the top to the bottom.
    corner: of the first three shares, or None.
    """

    number: int
    side: _Side
    cost: int
    order: tuple[int, ...]
    corner: _Corner | None
    bands: tuple[_Band, ...]

    def busiest(self, parts: Sequence[int]) -> int:
        """About the most bytes that a rank needs which has a tile, of those with half a rank's work at least."""
        most, largest = 0, max(parts)
        mean = self.cost * largest // sum(parts)
        for band in self.bands:
            keys = np.diff(band.below.keys(band.pairs).clip(band.below.first, band.below.last))
            for share, of_tile in zip(self.order[band.first :], keys.tolist()):
                need = (band.bottom - band.top) * self.side.row_bytes + of_tile * self.side.key_bytes
                rest = largest - parts[share]
                if rest % parts[share] == 0:  # the rest of the rank's work is in like tiles of other groups
                    need += need * rest // parts[share]
                elif rest < parts[share]:
                    need += mean * isqrt(rest * largest) // largest
                else:
                    continue
                most = max(most, need)
        return most

    def striped(self, band: _Band) -> bool:
        """Whether it pays that each rank of a band gets the keys that it owns."""
        side = self.side
        if not len(side.own_keys) or band.tiles == 1:
            return False
        need = (band.bottom - band.top) * side.row_bytes * band.tiles
        need += (band.below.last - band.below.first) * side.key_bytes
        of_rank = int(side.own_keys[-1]) // (len(side.own_keys) - 1)
        return of_rank * side.key_bytes * band.tiles * STRIP >= need


def _pattern(number: int, side: _Side, sampled: _Sampled, parts: tuple[int, ...]) -> _Pattern:
    """The better of two: with the largest shares at the top, or at the bottom."""
    falling = _ordered(number, side, sampled, parts, tuple(range(len(parts))))
    if parts[0] == parts[-1]:
        return falling
    rising = _ordered(number, side, sampled, parts, tuple(range(len(parts)))[::-1])
    best, other = (falling, rising) if falling.cost <= rising.cost else (rising, falling)
    much_busier = best.busiest(parts) * BUSIER > other.busiest(parts) * (BUSIER + 1)
    if much_busier and other.cost * MORE <= best.cost * (MORE + 1):
        return other
    return best


def _ordered(number: int, side: _Side, sampled: _Sampled, parts: tuple[int, ...], order: tuple[int, ...]) -> _Pattern:
    sizes = [parts[share] for share in order]
    rows = _row_cuts(sampled, sizes)
    alike = len(order) >= CORNER and len(set(sizes[:CORNER])) == 1
    corner = _corner(side, int(rows[CORNER])) if alike else None
    cost, cuts, corner = _cheapest(side, sampled, rows, corner)
    tops, bands = rows.tolist(), []
    within = list(order)
    for first, last in pairwise(cuts[1:] if corner else cuts):
        # The first tile of a band often needs least: it is for a rank with more work elsewhere
        within[first:last] = sorted(order[first:last], key=lambda share: parts[share])
        before = np.cumsum([0, *sorted(sizes[first:last])])
        bands.append(_Band(first, tops[first], tops[last], before, _Below(side.mask, tops[first], tops[last])))
    return _Pattern(number, side, cost, tuple(within), corner, tuple(bands))


# The first of all tiles of a pattern that are alike for the ranks, and bytes that each rank owns of its needs
_Kind: TypeAlias = "tuple[tuple[int, int], NDArray[np.int64]]"


def _kinds(pattern: _Pattern) -> list[_Kind]:
    """The kind of every tile of a pattern, in order of the shares."""
    number, side = pattern.number, pattern.side
    kinds: list[_Kind] = []
    if pattern.corner:
        kinds += [((number, tile), worth) for tile, worth in enumerate(pattern.corner.worth(side))]
    for band in pattern.bands:
        of_rows, below = side.rows_owned(band.top, band.bottom), band.below
        if pattern.striped(band):
            worth = of_rows + side.keys_owned(below.first, below.last)
            kinds += [((number, band.first), worth)] * band.tiles
            continue
        for tile, (first, last) in enumerate(pairwise(below.keys(band.pairs).tolist()), band.first):
            kinds.append(((number, tile), of_rows + side.keys_owned(first, last)))
    return kinds


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


def _striped(side: _Side, band: _Band, tiles: Sequence[tuple[int, int]]) -> list[_Keys]:
    """As `_plain`, but each rank gets the keys that it owns, and a tile of what these leave.

    tiles: the ranks, in order of what they own, and how many parts of the work each gets.
    """
    ranks, parts = np.array(tiles, np.int64).T
    below, keys = band.below, side.own_keys
    before = below.all * np.append(0, parts.cumsum()) // parts.sum()
    share = before[1:] - before[:-1]
    chunk = ranks if side.step > 0 else len(keys) - 2 - ranks
    begin, end = keys[chunk], keys[chunk + 1]
    in_turn = np.argsort(parts, kind="stable")  # as in the band's order
    above = below.pairs(begin)
    # No more than a rank's share
    end = np.minimum(end, np.maximum(below.keys(above + share), begin))
    own = np.minimum(below.pairs(end) - above, share)
    left, skipped = np.cumsum((share - own)[in_turn]), np.cumsum(own)
    # Cuts of what is left, moved by the owned keys that lie above
    at = (above - skipped + own).searchsorted(left[:-1], "right")
    cuts = below.keys(left[:-1] + np.append(0, skipped)[at])
    bounds = np.sort(np.concatenate([cuts, begin, end, [0, keys[-1]]]))
    first = bounds[:-1][bounds[:-1] < bounds[1:]]
    owner = begin.searchsorted(first, "right") - 1
    tile = np.where((owner >= 0) & (first < end[owner]), owner, in_turn[cuts.searchsorted(first, "right")])
    new = np.append(0, np.flatnonzero(tile[1:] != tile[:-1]) + 1)
    return list(zip(tile[new].tolist(), first[new].tolist(), [*first[new[1:]].tolist(), int(keys[-1])]))


def _patterns(sides: Sequence[_Side], parts_of: Sequence[tuple[int, ...]]) -> list[list[_Pattern]]:
    """The patterns of each group, one list for each choice that there is.

    parts_of: sizes of the shares of each group.
    """
    sizes = list(dict.fromkeys(parts_of))
    by_side: list[dict[tuple[int, ...], _Pattern]] = []
    for side in sides:
        sampled, before = _sampled(side.mask), len(by_side) * len(sizes)
        by_side.append({parts: _pattern(before + n, side, sampled, parts) for n, parts in enumerate(sizes)})
    choices = [[by_side[0][parts] for parts in parts_of]]
    if len(sides) > 1:
        # Of groups in a row one is turned and one is not: different ranks own what they need
        choices.append([by_side[group % 2][parts] for group, parts in enumerate(parts_of)])
        choices.append([by_side[1][parts] for parts in parts_of])
    # Turning all is only of use where the bands themselves are better
    whole = [sum(pattern.cost for pattern in patterns) for patterns in choices]
    return choices[:2] + choices[2:] * (whole[-1] < whole[0])


class _Plan(NamedTuple):
    """A choice of patterns, and of ranks for them.

    cost: bytes that it moves.
    patterns: of each group.
    rank_of: the rank of each slot.
    """

    cost: int
    patterns: list[_Pattern]
    rank_of: dict[int, int]


def _plan(
    shares: Sequence[Sequence[_Share]], patterns: list[_Pattern], kinds: Mapping[int, list[_Kind]] | None
) -> _Plan:
    """With these patterns of the groups.

    kinds: of the tiles of patterns, by their numbers; None for no choice of ranks.
    """
    slots: dict[int, list[tuple[int, int]]] = {}
    for pattern, of_group in zip(patterns, shares):
        for tile, share in enumerate(pattern.order):
            slots.setdefault(of_group[share].slot, []).append((pattern.number, tile))
    cost = sum(pattern.cost for pattern in patterns)
    if kinds is None:
        return _Plan(cost, patterns, {slot: rank for rank, slot in enumerate(slots)})
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
    unknown = np.zeros(0, np.int64)
    sides = [_Side(mask, row_bytes, key_bytes, *(owned or (unknown, unknown)))]
    if choose and groups > 1 and mask.closed_form:  # other masks take long to tell which queries see a key
        sides.append(_Side.turned(sides[0], mask))
    shares = _shares(ranks, groups)
    choices = _patterns(sides, [tuple(share.parts for share in of_group) for of_group in shares])
    kinds = None
    if choose:
        by_number = {pattern.number: pattern for patterns in choices for pattern in patterns}
        kinds = {number: _kinds(pattern) for number, pattern in by_number.items()}
    plan = min((_plan(shares, patterns, kinds) for patterns in choices), key=lambda plan: plan.cost)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    alike: dict[int, list[int]] = {}
    for group, pattern in enumerate(plan.patterns):
        alike.setdefault(pattern.number, []).append(group)
    for of_pattern in alike.values():
        pattern = plan.patterns[of_pattern[0]]
        ranks_of = {}
        for group in of_pattern:
            inside = (shares[group][share] for share in pattern.order)
            ranks_of[group] = [(plan.rank_of[share.slot], share.parts) for share in inside]
        for group, rank, part in _rectangles(pattern, ranks_of):
            pieces[rank].append(pattern.side.piece(group, part))
    return tuple(tuple(sorted(of_rank)) for of_rank in pieces)


def _rectangles(
    pattern: _Pattern, tiles_of: Mapping[int, Sequence[tuple[int, int]]]
) -> Iterator[tuple[int, int, _Rectangle]]:
    """Of groups of a pattern: the group, the rank and the rectangle of each piece.

    tiles_of: of each group the rank of each tile, and how many parts of the work it gets.
    """
    side, step = pattern.side, pattern.side.step
    if pattern.corner:
        for tile, parts in enumerate(pattern.corner.tiles(side.mask.seqlen_k)):
            for group, tiles in tiles_of.items():
                for part in parts:
                    yield group, tiles[tile][0], part
    for band in pattern.bands:
        if band.top == band.bottom:
            continue
        striped, plain = pattern.striped(band), _plain(side.mask, band)
        for group, of_group in tiles_of.items():
            tiles, of_tiles = of_group[band.first : band.first + band.tiles], plain
            if striped:
                tiles = sorted(tiles)[::step]
                of_tiles = _striped(side, band, tiles)
            for tile, first, last in of_tiles:
                yield group, tiles[tile][0], (band.top, band.bottom, first, last)
