"""The tokens of every chunk by the chunks that need them, under a mask of several intervals.  No MPI.

Under such a mask exactly the tokens that are needed travel.  `schedule.needed` gives the same for one rank and one
call, with documents; `model.spans` for masks of one interval.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..schedule.needed import Activity

PIECE = 2**16  # queries looked at at a time


class _Side(NamedTuple):
    """The queries or the keys of a problem in sets: consecutive tokens of a chunk that the same chunks need.

    first, stop: of every set, the tokens [first, stop) in its chunk.  owners: its chunk.  All int64 (sets,).
    sets, users: every set with every chunk of the other side that needs it: two int64 arrays (needs,).
    """

    first: np.ndarray
    stop: np.ndarray
    owners: np.ndarray
    sets: np.ndarray
    users: np.ndarray


def _distinct(*numbers, below):
    """The distinct tuples of some arrays of numbers in [0, below), as arrays."""
    whole = np.ravel_multi_index(numbers, below)
    return np.unravel_index(np.unique(whole), below)


def _pieces(layout):
    """Where the pieces of a layout begin and the last ends, the chunk of each, and its tokens before the piece."""
    cuts, owners = layout.owners
    lengths, before = np.diff(cuts), np.empty(len(owners), np.int64)
    order = np.argsort(owners, kind="stable")  # pieces of a chunk increase
    ends = np.cumsum(lengths[order])
    first_of_chunk = owners[order].searchsorted(owners[order])
    before[order] = ends - lengths[order] - np.concatenate([[0], ends])[first_of_chunk]
    return cuts, owners, before


def _expanded(starts, stops):
    """The numbers of every range [start, stop) one after another, and for each the number of its range."""
    counts = stops - starts
    ranges = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(ranges)) - np.repeat(np.cumsum(counts) - counts - starts, counts), ranges


class TokenSets:
    """What ranks need of each other's chunks, of all ranks of any mesh at once.

    No layout is striped.
    """

    def __init__(self, mask, q_layout, k_layout):
        self._mask, self._layouts, self._chunks = mask, (q_layout, k_layout), q_layout.chunks
        self._activity = Activity(mask, q_layout, k_layout, None)

    @cached_property
    def _sides(self):
        return self._queries(), self._keys()

    def _keys(self):
        """The `_Side` of the keys: cut wherever what some chunk of queries sees begins or ends."""
        cuts, owners, before = _pieces(self._layouts[True])
        seen = [self._activity.seen(chunk) for chunk in range(self._chunks)]
        bounds = np.unique(np.concatenate([cuts, *(ends for of_chunk in seen for ends in of_chunk)]))
        piece = cuts.searchsorted(bounds[:-1], "right") - 1
        shift = before[piece] - cuts[piece]
        sets, users = [bounds[:0]], [bounds[:0]]
        for chunk, ends in enumerate(seen):
            numbers, _ = _expanded(*(bounds.searchsorted(side) for side in ends))
            sets.append(numbers)
            users.append(np.full(len(numbers), chunk))
        return _Side(
            bounds[:-1] + shift, bounds[1:] + shift, owners[piece], np.concatenate(sets), np.concatenate(users)
        )

    def _queries(self):
        """The `_Side` of the queries: cut wherever a query sees keys of other pieces than the query before it."""
        cuts, owners, before = _pieces(self._layouts[False])
        _, k_owners = self._layouts[True].owners
        sides = [[np.zeros(0, np.int64)] * 5]
        for begins, end in self._parts(cuts):
            piece, seen = cuts.searchsorted(begins, "right") - 1, self._pieces_seen(begins)
            change = np.concatenate([[True], piece[1:] != piece[:-1]])
            change[1:] |= (seen[:, :, 1:] != seen[:, :, :-1]).any(axis=(0, 1))
            begins, piece, seen = begins[change], piece[change], seen[:, :, change]
            shift = (before - cuts[:-1])[piece]
            pieces, which = _expanded(*(side.ravel() for side in seen))
            sets, users = _distinct(which % len(begins), k_owners[pieces], below=(len(begins), self._chunks))
            known = sum(len(side[0]) for side in sides)
            ends = np.append(begins[1:], end)
            sides.append([begins + shift, ends + shift, owners[piece], sets + known, users])
        return _Side(*map(np.concatenate, zip(*sides)))

    def _pieces_seen(self, queries):
        """The pieces [first, stop) of the keys that queries see in every list: (2, lists, queries); 0 for none."""
        lo, hi = (side[:, 0] for side in self._mask.key_intervals(queries))
        some = lo < hi
        return np.stack([self._piece_of[lo * some], self._piece_of[(hi - 1) * some] + 1]) * some

    @cached_property
    def _piece_of(self):
        """The piece of the layout of keys that holds each key."""
        cuts, owners = self._layouts[True].owners
        return np.repeat(np.arange(len(owners)), np.diff(cuts))

    def _parts(self, cuts):
        """Queries where parts begin of which all see the same pieces, and where the last ends, some at a time.

        cuts: where parts begin in any case.
        """
        pieces, seqlen = self._mask.pieces(), self._mask.seqlen
        if pieces is None:
            for start in range(0, seqlen, PIECE):
                yield np.arange(start, min(start + PIECE, seqlen)), min(start + PIECE, seqlen)
            return
        ends = np.unique(np.concatenate([cuts, pieces]))
        begins, ends, known = ends[:-1], ends[1:], []
        while len(begins):  # of a part whose first and last query see the same, all do
            seen = self._pieces_seen(np.stack([begins, ends - 1], axis=1).ravel())
            alike = (seen[:, :, ::2] == seen[:, :, 1::2]).all(axis=(0, 1))
            known.append(begins[alike])
            begins, ends = begins[~alike], ends[~alike]
            middle = (begins + ends) // 2
            begins, ends = (np.stack(sides, axis=1).ravel() for sides in ((begins, middle), (middle, ends)))
        if known:
            yield np.sort(np.concatenate(known)), seqlen

    def _by_group(self, side, group_of):
        """Every set with every group that needs it, two arrays.  group_of: of every chunk; -1 for none."""
        groups = group_of[side.users]
        some = groups >= 0
        return _distinct(side.sets[some], groups[some], below=(len(side.owners), self._chunks))

    def tokens(self, column, chunks, others):
        """As `Work.tokens`; the columns of `others` are the same chunks in any order, or have none in common."""
        side, group_of = self._sides[column], np.full(self._chunks, -1)
        group_of[others] = others.min(axis=0)
        sets, groups = self._by_group(side, group_of)
        counts = np.bincount(groups * self._chunks + side.owners[sets], (side.stop - side.first)[sets], self._chunks**2)
        return np.rint(counts).astype(np.int64)[others.min(axis=0) * self._chunks + chunks]

    def moved(self, column, groups, own):
        """As `Spans.moved`."""
        side, group_of = self._sides[column], np.empty(self._chunks, np.int64)
        group_of[groups] = np.arange(len(groups))[:, None]
        sets, needing = self._by_group(side, group_of)
        travelling = sets[needing != own[side.owners[sets]]]
        return int((side.stop - side.first)[travelling].sum())

    def by_owner(self, column, tile_a, extent, earlier, later, together):
        """Tokens of every chunk that travel in each hop from its owner: (hops, chunks).

        tile_a: query chunks a tile.  extent: of the group that they travel in.  earlier, later, together: as of
        `Load`.
        """
        side = self._sides[column]
        user, owner = side.users, side.owners[side.sets]
        hops = (user // tile_a - owner // tile_a if column else user % tile_a - owner % tile_a) % extent
        sets, hops = _distinct(side.sets[hops > 0], hops[hops > 0], below=(len(side.owners), extent))
        if earlier or later:  # from the first user on, up to the last one
            sets, at = np.unique(sets, return_index=True)
            first, last = hops[at], hops[np.append(at, len(hops))[1:] - 1]
            low, high = np.ones_like(first) if later else first, np.full_like(last, extent - 1) if earlier else last
            hops, which = _expanded(low, high + 1)
            sets = sets[which]
        of = hops, side.owners[sets]
        tokens, first = np.zeros((2, extent, self._chunks), np.int64)
        if together:
            np.maximum.at(tokens, of, side.stop[sets])
            first[:] = tokens
            np.minimum.at(first, of, side.first[sets])
            return tokens - first
        np.add.at(tokens, of, (side.stop - side.first)[sets])
        return tokens
