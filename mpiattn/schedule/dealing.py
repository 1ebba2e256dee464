"""Dealing: the packed documents of a call as a division, of about equal time for each rank.

A short document stays with the ranks that own it: with one of them, or each computes its own queries, or half of the
heads go one way and half the other.  Of a long document the first queries stay with their owners too, since they see
few keys.  The rest is cut by heads, and where a head is too much for a rank, by bands and tiles.  The documents with
the largest heads go first.  Each rank takes as many heads as it ends in time with, owners of the document before
others.  The time in question rises when heads are left over.

A rank ends when its compute, what it receives and what it sends have ended, each at its own pace.  A few ways to deal
are tried, and the one whose last rank ends first is taken: among them the one that moves no query, where each rank
computes those that it owns.

All numbers are integers, so that all ranks find the same division.  Of long documents some rows stand for all: work is
then equal but for a small part.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..problem.mask import Mask
from .bands import Piece, bands

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..problem.group import Group
    from .bands import Division

    Array = NDArray[np.int64]
    Flags = NDArray[np.bool_]

SAMPLES = 8  # rows of a part that are looked at
TILE_ROWS = 2**10  # rows of a document that are looked at to cut it into bands and tiles
REMEMBERED = 256  # cuts into bands and tiles
SHARE = 2**20  # units of time in the mean of all ranks' times, if all is moved: fine enough, and far from 2^63
FEW = 4  # owners of a short document at most
FAR = 2**62  # a position after all others


class Costs(NamedTuple):
    """The costs of computing and of moving parts of a group, in any unit: whole numbers.

    pair: of computing a visible pair.
    row: of moving a query of the group to a rank.
    partial: of moving the result of a query back to its owner.
    key: of moving a key and its value.
    """

    pair: int
    row: int
    partial: int
    key: int


class Way(NamedTuple):
    """A way to deal long documents, in sixteenths.

    keep: of a rank's share of the work, the most that one of a document's first parts has that stays with its owner.
    most: of the time in which ranks should end, the most that a group of a document takes without being cut.
    soon: of a rank's share, when ranks should end at first.
    """

    keep: int
    most: int
    soon: int


WAYS = (Way(0, 16, 17), Way(8, 8, 17), Way(0, 4, 17), Way(16, 16, 17), Way(0, 16, 20))
WHOLE = 8  # sixteenths of a rank's share: the most work of a short document
GAIN = 14  # sixteenths of the time that documents take as they are: what ends before is worth more messages
STEPS = 120  # of the search, of some 20 us each, besides one for four ranks: no other way is tried after so many
ENOUGH = 18  # sixteenths of a rank's share: what ends then is good enough


class _Documents(NamedTuple):
    """Documents that have queries and keys, in order: arrays (documents,).

    entry: number of the element of `documents` that holds each.
    first_row, last_row, first_key, last_key: its queries [first, last), and its keys.
    causal: whether it is causal.
    prefix: number of its first keys that all queries see.
    """

    entry: Array
    first_row: Array
    last_row: Array
    first_key: Array
    last_key: Array
    causal: Flags
    prefix: Array


class _Parts(NamedTuple):
    """Parts of documents that single ranks own, in order of documents and then of ranks: int64 arrays (parts,).

    document, rank: numbers of both.
    first_row, last_row, first_key, last_key: the rank's queries [first, last) of the document, and its keys.
    low, high: the first key that these queries see, and one past the last; alike if they see none.
    pairs: about as many as these queries see.
    own: about as many as these queries see of these keys.
    """

    document: Array
    rank: Array
    first_row: Array
    last_row: Array
    first_key: Array
    last_key: Array
    low: Array
    high: Array
    pairs: Array
    own: Array


class _Tiles(NamedTuple):
    """Rectangles of documents: int64 arrays (tiles,).

    document: its number.
    first_row, last_row, first_key, last_key: queries [first, last), and keys.
    work: time that all groups' pairs take.
    """

    document: Array
    first_row: Array
    last_row: Array
    first_key: Array
    last_key: Array
    work: Array


class _Given(NamedTuple):
    """Rectangles of consecutive groups that ranks have: int64 arrays (rectangles,)."""

    rank: Array
    group: Array
    groups: Array
    first_row: Array
    last_row: Array
    first_key: Array
    last_key: Array


class Deal(NamedTuple):
    """A division that was tried.

    times: of compute, of what is received and of what is sent, int64 (3, ranks).
    to: the rank that computes all pairs of each part's queries, of the first half of the groups and of the second:
        int64 (2, parts), -1 for those that are in `given`.
    given: the other rectangles.
    """

    times: Array
    to: Array
    given: _Given

    @property
    def end(self) -> int:
        """When the last rank ends."""
        return int(self.times.max())


NOTHING = _Given(*np.zeros((7, 0), np.int64))


def _counting(counts: Array) -> Array:
    """0, 1, up to counts[0] - 1, again 0, 1, up to counts[1] - 1, and so on."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _documents(mask: Mask, groups: Sequence[Group]) -> _Documents:
    counts = [len(group.q_cuts) - 1 for group in groups]
    q_cuts, k_cuts = [group.q_cuts for group in groups], [group.k_cuts for group in groups]
    first_row, first_key = (np.concatenate([cuts[:-1] for cuts in of_side]) for of_side in (q_cuts, k_cuts))
    last_row, last_key = (np.concatenate([cuts[1:] for cuts in of_side]) for of_side in (q_cuts, k_cuts))
    causal, prefix = [], []
    for group, count in zip(groups, counts):
        causal.append(np.full(count, mask.causal) if group.causal is None else group.causal)
        prefix.append(np.full(count, mask.prefix) if group.prefixes is None else group.prefixes)
    entry = np.repeat(np.arange(len(groups)), counts)
    some = (first_row < last_row) & (first_key < last_key)
    return _Documents(
        entry[some],
        first_row[some],
        last_row[some],
        first_key[some],
        last_key[some],
        np.concatenate(causal)[some],
        np.concatenate(prefix)[some],
    )


def _owners(ranges: Sequence[Array], owned: tuple[Array, Array]) -> tuple[Array, Array, list[Array]]:
    """The ranks that own queries or keys of rectangles, in order of rectangles and then of ranks.

    ranges: first and last row, first and last key: four arrays (rectangles,), of rectangles that are not empty.
    Returns the number of the rectangle, the rank, and what it owns, in the same four arrays.
    """
    sides = (ranges[0], ranges[1]), (ranges[2], ranges[3])
    first = np.minimum(*(cuts.searchsorted(start, "right") for cuts, (start, _) in zip(owned, sides))) - 1
    last = np.maximum(*(cuts.searchsorted(stop, "left") for cuts, (_, stop) in zip(owned, sides)))
    number = np.repeat(np.arange(len(first)), last - first)
    rank = np.repeat(first, last - first) + _counting(last - first)
    bounds = []
    for cuts, (start, stop) in zip(owned, sides):
        for of in (rank, rank + 1):
            bounds.append(np.minimum(np.maximum(cuts[of], start[number]), stop[number]))
    some = (bounds[0] < bounds[1]) | (bounds[2] < bounds[3])
    return number[some], rank[some], [bound[some] for bound in bounds]


def _parts(mask: Mask, groups: Sequence[Group], documents: _Documents, owned: tuple[Array, Array]) -> _Parts:
    document, rank, bounds = _owners(documents[1:5], owned)
    entry = documents.entry[document]
    seen = []
    for number, group in enumerate(groups):
        of_group = slice(*entry.searchsorted([number, number + 1]))
        seen.append(_seen(mask, group, *(bound[of_group] for bound in bounds)))
    low, high, pairs, own = (np.concatenate(arrays) for arrays in zip(*seen))
    # A query that sees nothing may begin later
    high = np.minimum(high, documents.last_key[document])
    first_row, last_row, first_key, last_key = bounds
    low = np.minimum(low, high)
    return _Parts(document, rank, first_row, last_row, first_key, last_key, low, high, pairs, own)


def _seen(
    mask: Mask, group: Group, first_row: Array, last_row: Array, first_key: Array, last_key: Array
) -> tuple[Array, Array, Array, Array]:
    """`low`, `high`, `pairs` and `own` of parts."""
    rows = last_row - first_row
    low, high, pairs, own = np.zeros((4, len(rows)), np.int64)
    some = np.flatnonzero(rows)
    if not len(some):
        return low, high, pairs, own
    # By the rules of `Mask.rule` all queries see keys between those of the first and the last
    ends = np.stack([first_row[some], last_row[some] - 1], axis=1).ravel()
    (begin,), (end,) = mask.key_interval(ends, (group,))
    low[some], high[some] = begin[::2], end[1::2]
    counts = np.minimum(rows[some], SAMPLES)
    part, count = (np.repeat(array, counts) for array in (some, counts))
    queries = first_row[part] + (2 * _counting(counts) + 1) * rows[part] // (2 * count)
    begin, end = (side[:, 0] for side in mask.key_intervals(queries, (group,)))
    inside = np.clip(np.minimum(end, last_key[part]) - np.maximum(begin, first_key[part]), 0, None)
    starts = np.cumsum(counts) - counts
    for sums, lengths in ((pairs, end - begin), (own, inside)):
        mean, rest = np.divmod(np.add.reduceat(lengths.sum(axis=0), starts), counts)
        sums[some] = mean * rows[some] + rest * rows[some] // counts
    return low, high, pairs, own


@lru_cache(REMEMBERED)
def _shape(mask: Mask, count: int, row_cost: int, key_cost: int) -> Array:
    """Tiles of one small matrix: (4, tiles)."""
    pieces = [piece[1:] for pieces in bands(mask, count, 1, row_cost, key_cost) for piece in pieces]
    return np.array(pieces, np.int64).reshape(-1, 4).T


class Dealer:
    """The documents of a call, who owns them, and ways to deal them.

    Times are integers, in a unit of which the mean of all ranks' has fewer than `SHARE`.
    """

    def __init__(self, mask: Mask, groups: Sequence[Group], each: int, owned: tuple[Array, Array], costs: Costs):
        """each: groups of an element of `groups`.  Other arguments as of `dealt`."""
        self._mask, self._each, self._owned, self._costs = mask, each, owned, costs
        self._ranks = len(owned[0]) - 1
        self.documents = documents = _documents(mask, groups)
        self.parts = parts = _parts(mask, groups, documents, owned)
        rows, keys = parts.last_row - parts.first_row, parts.last_key - parts.first_key
        # Python's integers: these are beyond int64
        total = sum(parts.pairs.tolist()) * costs.pair + int(keys.sum()) * costs.key
        total += int(rows.sum()) * (costs.row + costs.partial)
        self._unit = max(total * each // (self._ranks * SHARE), 1)
        self._work, self._own = self._time(parts.pairs, costs.pair), self._time(parts.own, costs.pair)
        self._send = self._time(rows, costs.row) + self._time(keys, costs.key)
        self._back = self._time(rows, costs.partial)
        self._start = np.flatnonzero(np.diff(parts.document, prepend=-1))
        self._end = np.append(self._start[1:], len(parts.document))
        self._of_document = np.add.reduceat(self._work, self._start) if len(self._start) else self._work
        self.share = max(int(self._work.sum()) // self._ranks, 1)
        self.steps = 0  # of all tries

    def _time(self, counts: Array, cost: int) -> Array:
        """Of so many rows, keys or pairs of each group of a document."""
        # Products stay below 2^63, as times are below SHARE * ranks
        shift = max(int(counts.max(initial=0)).bit_length() - 31, 0)
        rate = (cost * self._each << (shift + 24)) // self._unit
        return (counts >> shift) * rate >> 24

    def _sums(self, rank: Array, values: Array) -> Array:
        """Of the values of each rank: (ranks,)."""
        sums = np.zeros(self._ranks, np.int64)
        np.add.at(sums, rank, values)
        return sums

    def as_it_is(self) -> Deal:
        """Each rank computes the queries that it owns."""
        everything = np.ones(len(self.parts.rank), bool)
        return Deal(self._kept(everything), np.stack([self.parts.rank] * 2), NOTHING)

    def _kept(self, some: Flags) -> Array:
        """Times of some parts, whose queries stay with their owners."""
        parts, cuts, cost = self.parts, self._owned[1], self._costs.key
        rank, low, high = parts.rank[some], parts.low[some], parts.high[some]
        home = np.clip(np.minimum(high, parts.last_key[some]) - np.maximum(low, parts.first_key[some]), 0, None)
        received = self._sums(rank, high - low - home)
        # Of each rank's keys parts see those before its last key, less those before its first
        sent = np.diff(_past(low, cuts) - _past(high, cuts)) - self._sums(rank, home)
        return np.stack([self._sums(rank, self._work[some]), self._time(received, cost), self._time(sent, cost)])

    def short(self) -> tuple[Flags, Deal]:
        """Which documents are short, and these dealt."""
        parts, owners = self.parts, self._end - self._start
        short = (self._of_document * 16 <= self.share * WHOLE) & (owners <= FEW)
        short |= (self._of_document <= self.share) & (owners == 1)
        times = self._kept((short & (owners == 1))[parts.document])
        to = np.stack([np.where(short[parts.document], parts.rank, -1)] * 2)
        self._place(np.flatnonzero(short & (owners > 1)), times, to)
        return short, Deal(times, to, NOTHING)

    def _place(self, documents: Array, times: Array, to: Array) -> None:
        """Add documents of several owners to `times` and `to`: those of the owners' choices that end first."""
        if not len(documents):
            return
        choices = self._choices(documents)
        most = choices.shape[-1]
        half = self._each // 2
        # Of two choices, that of the first half of the groups and of the second
        pairs = [(choice, choice) for choice in range(most + 1)]
        if half:
            pairs += list(combinations(range(most + 1), 2))
        first, second = np.array(pairs).T
        choices = (choices[:, first] * half + choices[:, second] * (self._each - half)) // self._each
        rank = self.parts.rank
        for of_document, start, end in zip(choices, self._start[documents].tolist(), self._end[documents].tolist()):
            owners = rank[start:end]
            ends = of_document[:, :, : end - start] + times[:, owners]
            # Of those that end as soon, the one that takes least in all
            least = int((ends.max(axis=(1, 2)) * 16 + ends.sum(axis=(1, 2))).argmin())
            times[:, owners] = ends[least]
            for of_half, choice in zip(to, pairs[least]):
                of_half[start:end] = owners[choice - 1] if choice else owners

    def _choices(self, documents: Array) -> Array:
        """Times that documents add to those of their owners, (documents, choices, 3, owners).

        The first choice is that each owner computes its own queries, the others that one of them computes all.  Of
        owners that a document does not have, times are 0, and choices without end.
        """
        parts = self.parts
        count = self._end[documents] - self._start[documents]
        most = int(count.max())
        numbers = np.arange(most)
        some = numbers < count[:, None]
        at = self._start[documents][:, None] + np.where(some, numbers, 0)
        work, send, back = (np.where(some, array[at], 0) for array in (self._work, self._send, self._back))
        times = np.zeros((len(documents), most + 1, 3, most), np.int64)
        low, high = (np.where(some, array[at], 0)[:, :, None] for array in (parts.low, parts.high))
        first, last = (np.where(some, array[at], 0)[:, None] for array in (parts.first_key, parts.last_key))
        moved = self._time(np.clip(np.minimum(high, last) - np.maximum(low, first), 0, None), self._costs.key)
        moved[:, numbers, numbers] = 0
        times[:, 0, 0], times[:, 0, 1], times[:, 0, 2] = work, moved.sum(axis=2), moved.sum(axis=1)
        for owner in numbers:
            choice = times[:, owner + 1]
            choice[:, 1], choice[:, 2] = back, send
            choice[:, 0, owner] = work.sum(axis=1)
            choice[:, 1, owner] = send.sum(axis=1) - send[:, owner]
            choice[:, 2, owner] = back.sum(axis=1) - back[:, owner]
            choice[~some[:, owner], 0, 0] = FAR >> 24
        return times

    def tried(self, way: Way, short: Flags, before: Deal, limit: int = FAR) -> Deal | None:
        """The documents that are not short, dealt in some way; None if the last rank would end after `limit`.

        short, before: of `short`.
        """
        parts, documents = self.parts, self.documents
        times, to = before.times.copy(), before.to.copy()
        target = self.share * way.soon // 16
        most = max(target * way.most // 16, 1)
        count = -(-self._of_document // (self._each * most))
        uncut = ~short & (count <= 1)
        home, tail = self._at_home(uncut, way)
        times += self._kept(home)
        to[:, home] = parts.rank[home]
        times[0] += self._sums(parts.rank[tail], self._own[tail])
        of_tail = parts.document[tail]
        given = _Given(
            parts.rank[tail],
            documents.entry[of_tail] * self._each,
            np.full(len(tail), self._each),
            parts.first_row[tail],
            parts.last_row[tail],
            parts.first_key[tail],
            parts.last_key[tail],
        )
        first_row, last_key, work = documents.first_row.copy(), documents.last_key.copy(), self._of_document.copy()
        np.maximum.at(first_row, parts.document[home], parts.last_row[home])
        np.subtract.at(work, parts.document[home], self._work[home])
        last_key[of_tail] = parts.first_key[tail]
        work[of_tail] -= self._own[tail]
        chosen = np.flatnonzero(uncut & (first_row < documents.last_row))
        whole = _Tiles(chosen, first_row, documents.last_row, documents.first_key, last_key, work)
        cores = [_Tiles(chosen, *(array[chosen] for array in whole[1:]))]
        for document in np.flatnonzero(~short & (count > 1)).tolist():
            cores.append(self._cut(document, int(count[document])))
        tiles = self._trimmed(_Tiles(*map(np.concatenate, zip(*cores))))
        filled = self._filled(tiles, times, target, limit)
        if filled is None:
            return None
        return Deal(times, to, _Given(*map(np.concatenate, zip(given, filled))))

    def _at_home(self, uncut: Flags, way: Way) -> tuple[Flags, Array]:
        """The work that stays with its owners, of documents that are not cut into tiles.

        Of the parts: whether the owner computes all pairs of its queries, and the numbers of those of which it computes
        the pairs with its own keys, which nobody else sees.
        """
        parts = self.parts
        several = (self._end - self._start > 1) & uncut
        large = self._work * 16 > self.share * way.keep
        # The first part of a document needs no keys of others, where the mask is causal
        alone = (parts.low >= parts.first_key) & (parts.high <= parts.last_key)
        large &= ~alone | (self._work * 16 > self.share * WHOLE)
        before = np.cumsum(large)
        home = several[parts.document] & (before == (before - large)[self._start][parts.document])
        last = self._end[several] - 1
        high = parts.high.copy()
        high[last] = 0
        above = np.maximum.reduceat(high, self._start)[several] if len(high) else last
        apart = (above <= parts.first_key[last]) & (self._own[last] * 16 <= self.share * WHOLE) & ~home[last]
        apart &= (parts.first_row[last] < parts.last_row[last]) & (parts.first_key[last] < parts.last_key[last])
        return home, last[apart]

    def _cut(self, document: int, count: int) -> _Tiles:
        """The bands and tiles of a document."""
        of_document = self.documents
        first_row, first_key = int(of_document.first_row[document]), int(of_document.first_key[document])
        rows = int(of_document.last_row[document]) - first_row
        keys = int(of_document.last_key[document]) - first_key
        # A small matrix stands for it, the same one for most documents
        longest = max(rows, keys)
        small = min(longest, TILE_ROWS)
        few_rows, few_keys = (max(side * small // longest, 1) for side in (rows, keys))
        left, right = (None if side is None else min(side, longest) * small // longest for side in self._mask.window)
        causal = bool(of_document.causal[document])
        prefix = 0
        if causal:
            prefix = min(int(of_document.prefix[document]), keys) * small // longest
        mask = Mask(few_rows, few_keys, causal, (left, right), prefix)
        costs = self._costs
        first, last, start, stop = _shape(mask, count, costs.row + costs.partial, costs.key)
        tiles = len(first)
        return _Tiles(
            np.full(tiles, document),
            first_row + rows * first // few_rows,
            first_row + rows * last // few_rows,
            first_key + keys * start // few_keys,
            first_key + keys * stop // few_keys,
            np.full(tiles, self._of_document[document] // count),
        )

    def _trimmed(self, tiles: _Tiles) -> _Tiles:
        """Tiles without first and last rows and keys that see and are seen by nothing, as far as closed forms tell."""
        mask = self._mask
        if type(mask).rule is not Mask.rule:
            return tiles
        at, first_row, last_row, first_key, last_key, work = tiles
        start, causal = self.documents.first_key[at], self.documents.causal[at]
        shift = self.documents.last_key[at] - self.documents.last_row[at]
        left, right = mask.window
        if causal.any():
            block = mask.causal_block or 1
            seen_by_all = start + self.documents.prefix[at]
            end = start - (start - last_row - shift) // block * block
            end = np.where(causal, np.maximum(end, seen_by_all), FAR)
            first = start + (first_key - start) // block * block - shift
            first = np.where(causal & (first_key >= seen_by_all), first, 0)
            first_row, last_key = np.maximum(first_row, first), np.minimum(last_key, end)
        if right is not None:
            first_row = np.maximum(first_row, first_key - shift - right)
            last_key = np.minimum(last_key, last_row + shift + right)
        if left is not None:
            last_row = np.minimum(last_row, last_key - shift + left)
            first_key = np.maximum(first_key, first_row + shift - left)
        some = (first_row < last_row) & (first_key < last_key)
        return _Tiles(*(array[some] for array in (at, first_row, last_row, first_key, last_key, work)))

    def _filled(self, tiles: _Tiles, times: Array, target: int, limit: int) -> _Given | None:
        """Give groups of tiles to ranks, and add them to `times`; None as of `tried`."""
        each, costs = self._each, self._costs
        order = np.argsort(-tiles.work, kind="stable")
        tiles = _Tiles(*(array[order] for array in tiles))
        if not len(order):
            return NOTHING
        number, owner, (first_row, last_row, first_key, last_key) = _owners(tiles[1:5], self._owned)
        rows, keys = last_row - first_row, last_key - first_key
        back, send = self._time(rows, costs.partial), self._time(rows, costs.row) + self._time(keys, costs.key)
        # Owners send all and get all results back, but for what they compute themselves
        times[1] += self._sums(owner, back)
        times[2] += self._sums(owner, send)
        starts = number.searchsorted(np.arange(len(order)))
        ends = np.append(starts[1:], len(number))
        # What a group adds to a rank that takes it, as a rule and to an owner: (3, tiles) and (3, owners)
        others = np.stack([tiles.work, np.add.reduceat(send, starts), np.add.reduceat(back, starts)])
        owners = others[:, number]
        owners[1:] -= send + back
        others, owners = others // each, owners // each
        taken: list[tuple[Array, Array]] = []
        counts = []
        for of_others, start, end in zip(others.T, starts.tolist(), ends.tolist()):
            at, of_owners = owner[start:end], owners[:, start:end]
            left, already = each, len(taken)
            while left:
                self.steps += 1
                ranks, groups = _takers(_room(target - times, of_others, at, of_owners), at, left)
                given = np.zeros(self._ranks, np.int64)
                given[ranks] = groups
                times += of_others[:, None] * given
                times[:, at] += (of_owners - of_others[:, None]) * given[at]
                taken.append((ranks, groups))
                left -= int(groups.sum())
                if left:
                    later = times + of_others[:, None]
                    later[:, at] = times[:, at] + of_owners
                    soonest = int(later.max(axis=0).min())
                    if soonest > limit:
                        return None
                    target = max(min(target + self.share // 32, limit), soonest)
            counts.append(sum(len(ranks) for ranks, _ in taken[already:]))
        rank, heads = (np.concatenate(arrays) for arrays in zip(*taken))
        at = np.repeat(np.arange(len(order)), counts)
        # Each tile's groups are taken in order
        group = self.documents.entry[tiles.document[at]] * each + np.cumsum(heads) - heads - at * each
        first_row, last_row, first_key, last_key = (bound[at] for bound in tiles[1:5])
        return _Given(rank, group, heads, first_row, last_row, first_key, last_key)

    def division(self, deal: Deal) -> Division:
        """The division."""
        half = self._each // 2
        # Where both halves go the same way, they are one
        alike = (deal.to[0] == deal.to[1]).all()
        halves = [(0, self._each, deal.to[0])] if alike else [(0, half, deal.to[0]), (half, self._each, deal.to[1])]
        rectangles = [deal.given, *(self._rows(first, last, to) for first, last, to in halves)]
        given = _Given(*map(np.concatenate, zip(*rectangles)))
        order = np.lexsort((given.first_key, given.first_row, given.group, given.rank))
        given = _Given(*(array[order] for array in given))
        at = np.repeat(np.arange(len(order)), given.groups)
        group = given.group[at] + _counting(given.groups)
        bounds = (array[at].tolist() for array in given[3:])
        pieces = list(map(Piece, group.tolist(), *bounds))
        cuts = given.rank[at].searchsorted(np.arange(self._ranks + 1)).tolist()
        return tuple(tuple(pieces[start:stop]) for start, stop in pairwise(cuts))

    def _rows(self, first: int, last: int, to: Array) -> _Given:
        """Rectangles of queries with all keys that these see, of some groups: those of one rank joined.

        What two of them see of other documents the mask hides.
        """
        parts = self.parts
        some = parts.low < parts.high
        rank, entry, low, high = to[some], self.documents.entry[parts.document[some]], parts.low[some], parts.high[some]
        begins = np.ones(len(rank), bool)
        begins[1:] = (rank[1:] != rank[:-1]) | (entry[1:] != entry[:-1])
        start = np.flatnonzero(begins)
        if not len(start):
            return NOTHING
        end = np.append(start[1:], len(rank)) - 1
        joined = _Given(
            rank[start],
            entry[start] * self._each + first,
            np.full(len(start), last - first),
            parts.first_row[some][start],
            parts.last_row[some][end],
            np.minimum.reduceat(low, start),
            np.maximum.reduceat(high, start),
        )
        return _Given(*(array[joined.rank >= 0] for array in joined))


def _room(slack: Array, of_others: Array, at: Array, of_owners: Array) -> Array:
    """How many groups of a tile each rank can take, int64 (ranks,): `FAR` where they take no time.

    slack: time that is left, (3, ranks).
    of_others, of_owners: that a group takes, (3,) of most ranks and (3, owners) of the ranks `at`.
    """
    room = np.full(slack.shape[1], FAR)
    for of_kind, added in zip(slack, of_others.tolist()):
        if added > 0:
            room = np.minimum(room, of_kind // added)
    own = slack[:, at] // np.maximum(of_owners, 1)
    own[of_owners <= 0] = FAR
    room[at] = own.min(axis=0)
    return np.maximum(room, 0)


def _takers(room: Array, at: Array, groups: int) -> tuple[Array, Array]:
    """The ranks that take some of these groups, and how many: owners first, then those with most room.

    room: of `_room`.  at: the owners.
    """
    room = np.minimum(room, groups)
    # Short integers are sorted sooner
    key = -room if groups >= 2**14 else (-room).astype(np.int16)
    key[at] -= np.where(room[at] > 0, groups, 0)
    ranks = key.argsort(kind="stable")
    total = room[ranks].cumsum()
    ranks = ranks[: int(total.searchsorted(groups)) + 1]
    taken = room[ranks]
    taken[-1] -= max(int(total[len(ranks) - 1]) - groups, 0)
    some = taken > 0
    return ranks[some], taken[some]


def _past(positions: Array, cuts: Array) -> Array:
    """How far each cut is past the positions before it, summed."""
    positions = np.sort(positions)
    before = positions.searchsorted(cuts)
    sums = np.append(0, np.cumsum(positions))
    return cuts * before - sums[before]


def _best(dealer: Dealer) -> Deal:
    """Of the ways to deal, the one whose last rank ends first, or the first that is good enough.

    As it is wins where others are hardly better: it has fewer messages.
    """
    as_it_is = best = dealer.as_it_is()
    steps = STEPS + (len(as_it_is.times[0]) >> 2)
    if best.end * 16 <= dealer.share * ENOUGH:
        return best
    short, before = dealer.short()
    for way in WAYS:
        deal = dealer.tried(way, short, before, best.end)
        if deal and deal.end < best.end:
            best = deal
        if best.end * 16 <= dealer.share * ENOUGH or dealer.steps > steps:
            break
    return best if best.end * 16 < as_it_is.end * GAIN else as_it_is


def dealt(
    mask: Mask, documents: Sequence[Group], sequences: int, kv_heads: int, owned: tuple[Array, Array], costs: Costs
) -> Division:
    """The packed documents of a call, dealt to ranks.

    Each pair that the mask shows is in one piece of one rank; pieces may have pairs that it hides, and all pairs of no
    document may be in none.

    documents: those of all sequences, or of each.
    sequences, kv_heads: whose product is the number of groups.
    owned: the first query of each rank's consecutive ones and the end of the last's, int64 (ranks + 1,), and of keys.
    costs: of a group.
    """
    dealer = Dealer(mask, documents, sequences * kv_heads // len(documents), owned, costs)
    return dealer.division(_best(dealer))
