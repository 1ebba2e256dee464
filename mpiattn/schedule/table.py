"""One table of what is needed: of each chunk, the tokens that the ranks of a mesh have work on.  No MPI.

A rank needs the keys of a chunk that some query of its tile sees, and the queries of a chunk that see some key of its
tile.  It returns partials of the same rows.  So all ranks of a row need the same keys, and all of a column the same
queries: these are the groups that need.  The table has (owner, group) -> ranges of the owner's tokens, of one rank's
line or of the whole mesh, in arrays.  It follows from masks, layouts and documents alone, so both ends of a transfer
agree.

What travels is, of each run of tokens, the part from the first to the last that is needed.  A layout gives a chunk its
runs (two in zigzag).  Three kinds of mask and layout differ in their runs only:

- Under a mask of several intervals, runs are also cut wherever the need of any chunk begins or ends.  Exactly what is
  needed travels then.
- If queries or keys are striped, a chunk is one run, and its need is all of it.
- What an MPI collective sends of a chunk is one range for all of a group.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..problem.mask import PIECE
from .remembered import Remembered

EVERY = slice(None)  # in place of some numbers


class Side(NamedTuple):
    """The queries or the keys of a problem, and which of them the chunks of the other side need.

    Tokens have their numbers in the sequence or, where whole chunks travel, are numbered chunk after chunk.
    cuts: where runs of consecutive tokens begin, and at last where the sequence ends: (runs + 1,).  No run is empty.
    owners: the chunk of every run.  shift: from a token's number to its place in its chunk.  Both (runs,).
    users, start, stop: a chunk of the other side and the tokens [start, stop) that it needs: each (needs,).
    """

    cuts: np.ndarray
    owners: np.ndarray
    shift: np.ndarray
    users: np.ndarray
    start: np.ndarray
    stop: np.ndarray


class Needs(NamedTuple):
    """The runs of which a group needs tokens, by owner and run: arrays (needs,).

    hop: distance from the owner ahead to the group that needs.  first, last: the places [first, last) in the chunk.
    """

    hop: np.ndarray
    owner: np.ndarray
    run: np.ndarray
    first: np.ndarray
    last: np.ndarray


def united(start, stop):
    """Disjoint increasing intervals of the same tokens as the intervals [start, stop): their starts and their stops."""
    some = start < stop
    start, stop = start[some], stop[some]
    if len(start) < 2:
        return start, stop
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, stop = start[order], stop[order]
    stop = np.maximum.accumulate(stop)
    gaps = np.flatnonzero(start[1:] > stop[:-1])
    return start[np.append(0, gaps + 1)], stop[np.append(gaps, -1)]


def united_of(numbers, start, stop, tokens):
    """The union of the intervals of every number: numbers, starts and stops, by number.

    tokens: no stop is above.
    """
    apart = tokens + 1  # one sort does for all, if the tokens of a number follow those of the number before
    start, stop = united(start + numbers * apart, stop + numbers * apart)
    numbers = start // apart
    return numbers, start - numbers * apart, stop - numbers * apart


def _expanded(starts, stops):
    """The numbers of every range [start, stop) one after another, and for each the number of its range."""
    counts = stops - starts
    ranges = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(ranges)) - np.repeat(np.cumsum(counts) - counts - starts, counts), ranges


def _among(numbers, some, count):
    """Whether each of some numbers below `count` is in `some`, which may be EVERY: bool."""
    among = np.zeros(count, bool)
    among[some] = True
    return among[numbers]


def _summed(places, amounts, shape):
    """The sum of the amounts at each place of an array of that shape: int64."""
    sums = np.bincount(np.ravel_multi_index(places, shape), amounts, int(np.prod(shape)))
    return np.rint(sums).astype(np.int64).reshape(shape)  # below 2 ** 53 they are exact in float64


def _runs(layout, by_chunk):
    """`cuts`, `owners` and `shift` of a `Side`.  by_chunk: whether tokens are numbered chunk after chunk."""
    before = np.cumsum([0, *layout.lengths])  # tokens of the chunks before each
    cuts, owners = (before, np.arange(layout.chunks)) if by_chunk else layout.owners
    lengths, place = np.diff(cuts), np.empty(len(owners), np.int64)
    order = np.argsort(owners, kind="stable")
    place[order] = np.cumsum(lengths[order]) - lengths[order]
    some = lengths > 0
    shift = place - before[owners] - cuts[:-1]
    return np.append(cuts[:-1][some], cuts[-1:]), owners[some], shift[some]


class Table:
    """The needs of the chunks of two layouts of each other under a mask.

    documents: those of a call (`mpiattn.problem.documents`), or None.
    has_pairs: a function that returns whether queries of a chunk see keys of a chunk: bool (chunks of queries, chunks
        of keys).  It is asked where whole chunks travel.  None: the mask is asked, query by query.
    The attribute `exact` tells whether only what is needed travels, `whole_chunks` whether all of a chunk or nothing.
    `sees(chunk)` tells of which chunks the queries of a chunk see keys: bool (chunks,).
    """

    def __init__(self, mask, q_layout, k_layout, documents=None, has_pairs=None):
        self._mask, self._layouts, self._documents = mask, (q_layout, k_layout), documents
        self._chunks = q_layout.chunks
        self._has_pairs = has_pairs or self._see
        self.sees = Remembered(self._sees)
        self.whole_chunks = q_layout.striped or k_layout.striped
        self.exact = mask.mask is not None and not self.whole_chunks

    @cached_property
    def _all_see(self):
        """Whether queries of every chunk surely see keys of every chunk.

        The last query of each does if keys are striped and it sees as many keys in a row as there are chunks.
        """
        mask, (q_layout, k_layout) = self._mask, self._layouts
        if self._documents is not None or not min(*q_layout.lengths, *k_layout.lengths):
            return False
        if mask.full:
            return True
        if not k_layout.striped or mask.mask is not None:
            return False
        starts, lengths, step = q_layout.all_ranges()
        last = np.sort(np.where(lengths > 0, starts + (lengths - 1) * step, 0).max(axis=0))
        start, stop = mask.key_interval(last)
        return bool((stop - start >= k_layout.chunks).all())

    @cached_property
    def _seen(self):
        """The chunks of queries, and the keys [start, stop) that each sees, disjoint and in order: three arrays."""
        mask, (layout, _), documents = self._mask, self._layouts, self._documents
        pieces = mask.pieces(documents)
        if pieces is not None and not layout.striped:
            cuts, owners = layout.owners
            start, stop, part = mask.reach(cuts, pieces, documents)
            return united_of(owners[part], start, stop, mask.seqlen_k)
        seen = [(np.zeros(0, np.int64),) * 3]
        for chunk in range(layout.chunks):
            positions = layout.positions(chunk)
            for at in range(0, len(positions), PIECE):
                ends = mask.key_intervals(positions[at : at + PIECE], documents)
                start, stop = united(*(side.ravel() for side in ends))
                seen.append((np.full(len(start), chunk), start, stop))
        return united_of(*map(np.concatenate, zip(*seen)), mask.seqlen_k)

    def seen(self, chunk):
        """The keys that the queries of a chunk see, as disjoint increasing intervals: their starts and their stops."""
        users, start, stop = self._seen
        some = slice(*users.searchsorted([chunk, chunk + 1]))
        return start[some], stop[some]

    def _sees(self, chunk):
        """As `sees`."""
        layout, sees = self._layouts[True], np.full(self._chunks, self._all_see)
        if self._all_see:
            return sees
        start, stop = self.seen(chunk)
        if layout.striped and (stop - start >= layout.chunks).any():
            sees[:] = True  # as many keys in a row are of all chunks
        elif layout.striped:
            keys, _ = _expanded(start, stop)
            sees[layout.owner(keys)] = True
        else:
            cuts, owners, _ = self._k_runs
            runs, _ = _expanded(cuts.searchsorted(start, "right") - 1, cuts.searchsorted(stop, "left"))
            sees[owners[runs]] = True
        return sees

    def _see(self):
        """Whether queries of a chunk see keys of a chunk, as `has_pairs` says it."""
        return np.stack([self.sees(chunk) for chunk in range(self._chunks)])

    @cached_property
    def _k_runs(self):
        """`_runs` of the keys."""
        return _runs(self._layouts[True], False)

    def side(self, column, chunks=EVERY):
        """The `Side` of the keys, with `column`, or else of the queries.

        chunks: those whose tokens are asked for, which is quicker where queries must be asked.
        """
        cuts, owners, shift = _runs(self._layouts[column], self.whole_chunks)
        if self._all_see:
            every = np.arange(self._chunks)
            return Side(cuts, owners, shift, every, np.zeros_like(every), np.full_like(every, cuts[-1]))
        if self.whole_chunks:
            has_pairs = self._has_pairs() if column else self._has_pairs().T
            changes = np.diff(has_pairs.astype(np.int8), axis=1, prepend=0, append=0)
            (users, first), (_, last) = np.nonzero(changes > 0), np.nonzero(changes < 0)
            before = np.cumsum([0, *self._layouts[column].lengths])
            return Side(cuts, owners, shift, users, before[first], before[last])
        users, start, stop = self._seen if column else self._seeing(cuts, owners, chunks)
        if self.exact:
            finer = np.unique(np.concatenate([cuts, start, stop]))
            run = cuts.searchsorted(finer[:-1], "right") - 1
            cuts, owners, shift = finer, owners[run], shift[run]
        return Side(cuts, owners, shift, users, start, stop)

    def _seeing(self, cuts, owners, chunks):
        """The chunks of keys, and the queries [start, stop) that see keys of each, as of `_seen`.

        cuts, owners: the runs of the queries.  chunks: as of `side`.
        """
        k_cuts, k_owners, _ = self._k_runs
        if self._mask.mask is None and self._documents is None:
            start, stop = self._mask.queries_seeing(k_cuts[:-1], k_cuts[1:])
            return united_of(k_owners, start, stop, self._mask.seqlen)
        asked = _among(owners, chunks, self._chunks)
        seeing = [(np.zeros(0, np.int64),) * 3]
        for begins, ends in self._parts(cuts[:-1][asked], cuts[1:][asked], k_cuts):
            runs_seen = self._runs_seen(begins, k_cuts)
            changes = (runs_seen[:, :, 1:] != runs_seen[:, :, :-1]).any(axis=(0, 1)) | (begins[1:] > ends[:-1])
            begins, ends = begins[np.append(True, changes)], ends[np.append(changes, True)]
            runs, which = _expanded(*runs_seen[:, :, np.append(True, changes)].reshape(2, -1))
            part = which % len(begins)
            seeing.append((k_owners[runs], begins[part], ends[part]))
        return united_of(*map(np.concatenate, zip(*seeing)), self._mask.seqlen)

    def _runs_seen(self, queries, k_cuts):
        """The runs [first, last) of keys that queries see in every list: (2, lists, queries); 0 for none."""
        start, stop = (ends.reshape(-1, len(queries)) for ends in self._mask.key_intervals(queries, self._documents))
        return np.stack([k_cuts.searchsorted(start, "right") - 1, k_cuts.searchsorted(stop, "left")]) * (start < stop)

    def _parts(self, begins, ends, k_cuts):
        """Parts [begin, end) of queries all of which see the same runs of keys, in order, some at a time.

        begins, ends: the runs of the queries.
        """
        pieces = self._mask.pieces(self._documents)
        if pieces is None:
            queries, _ = _expanded(begins, ends)
            for at in range(0, len(queries), PIECE):
                yield queries[at : at + PIECE], queries[at : at + PIECE] + 1
            return
        if not len(begins):
            return
        cuts = np.unique(np.concatenate([begins, ends, pieces, *(group.q_cuts for group in self._documents or ())]))
        run = begins.searchsorted(cuts[:-1], "right") - 1
        inside = (run >= 0) & (cuts[:-1] < ends[run])
        begins, ends, alike_parts = cuts[:-1][inside], cuts[1:][inside], []
        while len(begins):  # of a part whose first and last query see the same, all do
            runs_seen = self._runs_seen(np.stack([begins, ends - 1], axis=1).ravel(), k_cuts)
            alike = (runs_seen[:, :, ::2] == runs_seen[:, :, 1::2]).all(axis=(0, 1))
            alike_parts.append((begins[alike], ends[alike]))
            begins, ends = begins[~alike], ends[~alike]
            middle = (begins + ends) // 2
            begins, ends = (np.stack(sides, axis=1).ravel() for sides in ((begins, middle), (middle, ends)))
        if alike_parts:
            yield tuple(np.sort(np.concatenate(side)) for side in zip(*alike_parts))


class Lines:
    """The needs of the groups of a mesh: of its rows for keys, with `column`, or of its columns for queries.

    side: of these keys or queries.  tile: of one plane.
    The attribute `place` has the group that each rank is in, which is its place in the line that the tokens move in.
    """

    def __init__(self, side, tile, column):
        self._side, self._extent, self._chunks = side, tile.b if column else tile.a, tile.chunks
        chunks, tokens = np.arange(tile.chunks), int(side.cuts[-1])
        self.place = chunks // tile.a if column else chunks % tile.a
        group, start, stop = united_of(self.place[side.users], side.start, side.stop, tokens)
        # Of a run, what lies between two needs of a group travels too
        before, after = (side.cuts.searchsorted(ends, "right") - 1 for ends in (stop[:-1] - 1, start[1:]))
        apart = (before != after) | (group[1:] != group[:-1])
        begins, ends = np.append(True, apart)[: len(start)], np.append(apart, True)[: len(start)]
        self._group, self._start, self._stop = group[begins], start[begins], stop[ends]

    def needs(self, owners=EVERY, groups=EVERY):
        """The `Needs` of all groups, or of some `groups` alone, of all chunks or those of some `owners` alone."""
        side, some = self._side, _among(self._group, groups, self._extent)
        group, start, stop = self._group[some], self._start[some], self._stop[some]
        runs = np.flatnonzero(_among(side.owners, owners, self._chunks))
        at, need = _expanded(
            side.cuts[1:][runs].searchsorted(start, "right"), side.cuts[:-1][runs].searchsorted(stop, "left")
        )
        run = runs[at]
        owner, shift = side.owners[run], side.shift[run]
        first, last = (
            np.maximum(start[need], side.cuts[run]) + shift,
            np.minimum(stop[need], side.cuts[run + 1]) + shift,
        )
        return Needs((group[need] - self.place[owner]) % self._extent, owner, run, first, last)

    @cached_property
    def total(self):
        """Tokens that travel on the direct route, of all ranks."""
        if not len(self._start):
            return 0
        side, lengths = self._side, self._stop - self._start
        apart = int(side.cuts[-1]) + 1  # between the tokens of one group and those of the next
        ends = np.stack([self._start, self._stop], axis=1) + self._group[:, None] * apart
        until = np.cumsum(lengths)
        needed = np.stack([until - lengths, until], axis=1)  # tokens before each of these ends
        own = self.place[side.owners] * apart
        first, last = (np.interp(cuts + own, ends.ravel(), needed.ravel()) for cuts in (side.cuts[:-1], side.cuts[1:]))
        return int(until[-1] - (last - first).sum())

    def tokens(self, needs):
        """The number of tokens of every chunk in some `Needs`, by hop: int64 (hops, chunks)."""
        return _summed((needs.hop, needs.owner), needs.last - needs.first, (self._extent, self._chunks))

    def moved(self, earlier, later, together):
        """Tokens of every chunk, or of its partials, that travel in each hop: int64 (hops, chunks).

        earlier, later: whether a hop also carries what the groups of the hops before it need, of those after it.
        together: whether it carries one range of a chunk.
        """
        needs = self.needs()
        needs = Needs(*(of_needs[needs.hop > 0] for of_needs in needs))
        if not (earlier or later or together):
            return self.tokens(needs)
        hop, owner, run, first, last = needs
        if earlier and later:  # the last hop carries what all need, and so do those before it
            hop, earlier = np.full_like(hop, self._extent - 1), False
        # A segment is what travels as one range.  Its needs follow each other in the order in which hops carry more.
        segment, step = owner if together else run, 1 if earlier else -1
        if not (earlier or later):
            segment = segment * self._extent + hop
        order = np.argsort(segment * self._extent + step * hop, kind="stable")
        hop, owner, first, last, segment = (of_needs[order] for of_needs in (hop, owner, first, last, segment))
        begins = np.append(True, segment[1:] != segment[:-1])[: len(segment)]
        # With segments far apart, the least and the greatest so far are those of a segment alone
        apart = np.cumsum(begins) * (last.max(initial=0) + 1)
        carried = np.maximum.accumulate(last + apart) - np.minimum.accumulate(first - apart) - 2 * apart
        more = np.diff(carried, prepend=0)
        more[begins] = carried[begins]
        tokens = _summed((hop, owner), more, (self._extent, self._chunks))
        if earlier or later:
            tokens = tokens[::step].cumsum(axis=0)[::step]
            tokens[:1] = 0
        return tokens
