"""Bands and tiles: a division of the scores into pieces of equal work, for any number of ranks and any mask.

The matrices of all groups lie one below the other.  Their rows are cut into bands, which may end within a matrix.  A
band of n ranks is cut into n tiles of its keys.  Every tile has the same work.  A rank needs the rows of its band and
the keys of its tile, so a band costs n times its rows and once the keys that they see.  Dynamic programming over the
number of ranks above each cut finds the bands that move fewest bytes.

Ring is a band for each rank, Q-ring a single band, and an equal mesh has square tiles.

All numbers are integers, so that all ranks find the same division.  Of long sequences some rows stand for all: work is
then equal but for a small part.  Plans do not take this division yet: it is checked and measured by its tests alone.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..problem.mask import Mask

ROWS = 2**14  # rows of a matrix that are looked at: with 1,024 ranks of one matrix 16 of a rank's
TILE_ROWS = 2**8  # rows of a band that are looked at to cut its keys


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


class _Cuts(NamedTuple):
    """Where bands may begin and end: above each rank's share of the work, and at last the end of the last matrix.

    group, row: both (ranks + 1,).  The last is row `seqlen` of the last group.
    """

    group: NDArray[np.int64]
    row: NDArray[np.int64]


def _cuts(sampled: _Sampled, ranks: int, groups: int) -> _Cuts:
    pairs = int(sampled.before[-1])
    # Python's integers: the pairs of all groups may be beyond int64
    shares = [divmod(groups * pairs * rank // ranks, max(pairs, 1)) for rank in range(1, ranks)]
    group, above = np.array(shares, np.int64).reshape(-1, 2).T
    at = np.minimum(sampled.before.searchsorted(above, "right") - 1, len(sampled.low) - 1)
    # The rows for which a looked-at row stands have as many pairs each, as far as is known
    each = np.maximum(np.diff(sampled.before)[at] // np.diff(sampled.start)[at], 1)
    row = np.minimum(sampled.start[at] + (above - sampled.before[at]) // each, sampled.start[at + 1])
    group = np.concatenate([[0], group, [groups - 1]])
    row = np.concatenate([[0], row, sampled.start[-1:]])
    return _Cuts(group, row)


def _bands(sampled: _Sampled, cuts: _Cuts, row_bytes: int, key_bytes: int) -> list[int]:
    """Numbers of the cuts between the bands that move fewest bytes, the first and the last cut included."""
    ranks, seqlen = len(cuts.row) - 1, int(sampled.start[-1])
    rows = np.unique(np.concatenate([cuts.row, [0, seqlen]]))
    at = rows.searchsorted(cuts.row)
    low, high = _of_parts(sampled, rows)
    whole = high.max(initial=0) - low.min(initial=high.max(initial=0))
    below = np.maximum.accumulate(high[::-1])[::-1] - np.minimum.accumulate(low[::-1])[::-1]
    below = np.append(np.maximum(below, 0), 0)[at]  # keys that the rest of each cut's matrix sees
    position = cuts.group * seqlen + cuts.row
    least, previous = np.zeros(ranks + 1, np.int64), np.zeros(ranks + 1, np.int64)
    for last in range(1, ranks + 1):
        first = np.arange(last)
        # From this cut upwards: the keys that the rows from each cut on see, of the same matrix
        part = slice(None, at[last])
        seen = np.maximum.accumulate(high[part][::-1]) - np.minimum.accumulate(low[part][::-1])
        seen = np.append(np.maximum(seen[::-1], 0), 0)
        same = cuts.group[:last] == cuts.group[last]
        between = cuts.group[last] - cuts.group[:last] - 1
        keys = np.where(same, seen[np.where(same, at[:last], 0)], below[:last] + between * whole + seen[0])
        cost = least[:last] + (last - first) * (position[last] - position[:last]) * row_bytes + keys * key_bytes
        previous[last] = cost.argmin()
        least[last] = cost[previous[last]]
    chosen = [ranks]
    while chosen[-1]:
        chosen.append(int(previous[chosen[-1]]))
    return chosen[::-1]


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


def _key_cuts(mask: Mask, first_row: int, last_row: int, shares: Sequence[int], pairs: int) -> NDArray[np.int64]:
    """The keys below which rows have so many of their visible pairs.

    shares: increasing, each from 0 to `pairs`, which is all of them.
    """
    count = min(last_row - first_row, TILE_ROWS)
    rows = first_row + (np.arange(count, dtype=np.int64) * 2 + 1) * (last_row - first_row) // (2 * max(count, 1))
    begin, end = (side[:, 0] for side in mask.key_intervals(rows))
    some = begin < end
    begin, end = np.sort(begin[some]), np.sort(end[some])
    keys = np.unique(np.concatenate([begin, end, [0]]))
    # Between two of these keys as many rows see each key
    seeing = begin.searchsorted(keys, "right") - end.searchsorted(keys, "right")
    before = np.append(0, np.cumsum(seeing[:-1] * np.diff(keys)))
    # Python's integers: of long sequences the products are beyond int64
    wanted = np.array([share * int(before[-1]) // max(pairs, 1) for share in shares], np.int64)
    at = np.minimum(before.searchsorted(wanted, "right") - 1, max(len(keys) - 2, 0))
    cuts = np.minimum(keys[at] + (wanted - before[at]) // np.maximum(seeing[at], 1), mask.seqlen_k)
    # The first and the last key that is seen are not yet the ends of the sequence
    cuts[np.array(shares) >= pairs] = mask.seqlen_k
    cuts[np.array(shares) <= 0] = 0
    return cuts


def _tiles(mask: Mask, sampled: _Sampled, ranks: int, start: tuple[int, int], end: tuple[int, int]) -> Division:
    """The pieces of the ranks of a band from one (group, row) to another: cut by the keys of its parts in turn."""
    (first_group, first_row), (last_group, last_row) = start, end
    parts = []
    for group in range(first_group, last_group + 1):
        top = first_row if group == first_group else 0
        bottom = last_row if group == last_group else mask.seqlen
        if top < bottom:
            parts.append((group, top, bottom))
    pairs = [_pairs(sampled, top, bottom) for _, top, bottom in parts]
    shares = [sum(pairs) * rank // ranks for rank in range(ranks + 1)]
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for (group, top, bottom), own, before in zip(parts, pairs, accumulate(pairs, initial=0)):
        inside = [min(max(share - before, 0), own) for share in shares[1:-1]]
        keys = [0, *_key_cuts(mask, top, bottom, inside, own).tolist(), mask.seqlen_k]
        for of_rank, (first, last) in zip(pieces, pairwise(keys)):
            if first < last:
                of_rank.append(Piece(group, top, bottom, first, last))
    return tuple(map(tuple, pieces))


def _pairs(sampled: _Sampled, top: int, bottom: int) -> int:
    """The visible pairs of the rows [top, bottom)."""
    above = []
    for row in (top, bottom):
        at = min(int(sampled.start.searchsorted(row, "right")) - 1, len(sampled.low) - 1)
        each = (sampled.before[at + 1] - sampled.before[at]) // (sampled.start[at + 1] - sampled.start[at])
        above.append(int(sampled.before[at] + (row - sampled.start[at]) * each))
    return above[1] - above[0]


def bands(mask: Mask, ranks: int, groups: int, row_bytes: int, key_bytes: int) -> Division:
    """The division into bands and tiles that moves fewest bytes.

    mask: of every group, without documents of a call.
    groups: sequences times KV heads.
    row_bytes, key_bytes: bytes that a row of a group moves for each rank that needs it, of all query heads of the
        group, and that a key moves.
    """
    sampled = _sampled(mask)
    cuts = _cuts(sampled, ranks, groups)
    chosen = _bands(sampled, cuts, row_bytes, key_bytes)
    division: Division = ()
    for first, last in pairwise(chosen):
        start, end = ((int(cuts.group[cut]), int(cuts.row[cut])) for cut in (first, last))
        division += _tiles(mask, sampled, last - first, start, end)
    return division
