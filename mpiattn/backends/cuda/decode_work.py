"""The list of work of a decoding launch: which thread blocks read which keys.

Sequences of a batch may differ much in length.  If each were split into equally many parts, a long one would be read by
few thread blocks for a long time while the others had nothing to do.  So a sequence has items by its length.

The list is made for lengths that are rounded, so that it serves many calls while sequences grow.  It is right for any
lengths: the first item of a sequence begins at its first key, the last has no end, and the kernel leaves out what a
query does not see.  As it depends on the rounded lengths alone, a call gives the same bits whatever calls were before.
"""

from typing import NamedTuple

import numpy as np

FILLS = (1, 2, 4)  # how many items there are for each place on the GPU, at most, besides one for each sequence
MOST_ITEMS = 2 * max(
    FILLS
)  # that write partials, for each place; half of them may be there because items are whole tiles
LEAST_TILES = 2  # of an item: shorter ones wait for memory as long as these do
MERGE_TILES = 0.5  # time to write and merge an item's partial, in that of a tile
# A decoding launch reads memory at the full rate with a third of the thread blocks that the GPU holds.
SATURATING = {"decode": 1 / 3, "forward": 1}
UNIT, GRAINS = 5, 4  # lengths are rounded to 2**UNIT keys, and to 1/8 to 1/16 of themselves
NO_END = 2**31 - 1


class Work(NamedTuple):
    """items: int32 (items, 4), the longest first: sequence, first key, end of the keys, number of the partial.

    The partial is -1 if the item has all keys of its sequence.
    firsts: int32 (sequences + 1,): the partials of sequence s are [firsts[s], firsts[s + 1]).
    """

    items: np.ndarray
    firsts: np.ndarray


def in_units(begin, end):
    """The bounds of the keys [begin, end) in units of 32 keys, outwards: all that the list of work depends on."""
    return begin >> UNIT, (end + (2**UNIT - 1)) >> UNIT


def spans_of(first, last):
    """The keys that any query of each sequence sees, rounded outwards: int64 (2, sequences), first and end.

    first, last: bounds (sequences, queries) from `in_units`.
    """
    if first.shape[1] == 1:
        first, last = first[:, 0], last[:, 0]
    else:
        sees = first < last
        first, last = np.where(sees, first, NO_END).min(1), np.where(sees, last, 0).max(1)
    grain = np.maximum(np.frexp(np.maximum(last - first, 0))[1] - GRAINS, 0)
    return np.stack((first >> grain, -(-last.astype(np.int64) >> grain))) << (grain + UNIT)


def decode_work(spans, columns, blocks, places, work="decode"):
    """The `Work` of sequences whose queries see the keys `spans`, from `spans_of`.

    columns: keys of a tile.  blocks: thread blocks of an item, such as one for each KV head.  places: thread blocks
    that the GPU holds at a time.  work: "decode" or "forward", as in `tile_table`.
    """
    first, last = spans
    tiles = np.maximum(0, -(-(last - first) // columns))
    parts = _parts(tiles, blocks, places, SATURATING[work])
    firsts = np.zeros(len(parts) + 1, np.int32)
    np.cumsum(np.where(parts > 1, parts, 0), out=firsts[1:])
    sequence = np.repeat(np.arange(len(parts)), parts)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(parts) - parts, parts)  # within the sequence
    of, begins = parts[sequence], first[sequence]
    cuts = [begins + (number + i) * tiles[sequence] // of * columns for i in (0, 1)]
    items = np.empty((len(sequence), 4), np.int32)
    items[:, 0] = sequence
    items[:, 1] = np.where(number, cuts[0], 0)
    items[:, 2] = np.where(number + 1 < of, cuts[1], NO_END)
    items[:, 3] = np.where(of > 1, firsts[sequence] + number, -1)
    return Work(items[np.argsort(cuts[0] - cuts[1], kind="stable")], firsts)


def _parts(tiles, blocks, places, saturating):
    """The number of items of each sequence, of its number of tiles: those of the choice that takes least time.

    Time is counted in tiles that a thread block reads while the GPU is full.
    """
    total, best, least = int(tiles.sum()) * blocks, None, np.inf
    for fill in FILLS:
        share = max(LEAST_TILES, -(-total // (places * fill)))
        parts = np.maximum(1, -(-tiles // share))
        longest = int((-(-tiles // parts)).max(initial=0))
        alone = longest * places * saturating
        # If all items begin at once, they end at once, or the longest ends last.  If not, it may have begun late.
        time = max(total, alone) if int(parts.sum()) * blocks <= places else total + alone / 2
        time += MERGE_TILES * blocks * int(parts[parts > 1].sum())
        if time < least:
            best, least = parts, time
    return best
