"""Which blocks have work under a mask, and therefore which tokens of chunks and partials have to travel.

A rank needs the keys of a chunk that some query of its tile sees, and the queries of a chunk that see some key of its
tile.  It returns partials of the same rows.  What travels is, of each run of tokens that the layout gives the chunk
(two in zigzag), the part from the first to the last token that is needed; nothing if none is.  Under a mask of several
intervals only the tokens that are needed travel, in as many ranges as that takes.  If queries or keys are
striped, a whole chunk travels, or nothing of it.  An MPI collective sends one range of a chunk to all of a group.
These are pure functions of masks, layouts and documents, so both ends of a transfer agree.
"""

from functools import cached_property
from itertools import chain

import numpy as np

from ..problem.columns import columns_of
from ..problem.mask import PIECE
from .kinds import IN_COLUMNS
from .ranges import cover, runs_of, total, union, whole
from .remembered import Remembered
from .route import leg_of, passed_on


def _union(lo, hi):
    """Disjoint increasing intervals that cover the same keys as the intervals [lo, hi): their starts and their ends."""
    some = lo < hi
    lo, hi = lo[some], hi[some]
    if len(lo) < 2:
        return lo, hi
    if (lo[1:] < lo[:-1]).any():
        order = np.argsort(lo, kind="stable")
        lo, hi = lo[order], hi[order]
    hi = np.maximum.accumulate(hi)
    gaps = np.flatnonzero(lo[1:] > hi[:-1])
    return lo[np.concatenate([[0], gaps + 1])], hi[np.concatenate([gaps, [-1]])]


def _by_piece(key_intervals, positions, *how):
    """As `key_intervals(positions, *how)` of a `Mask`, of many queries by a look at PIECE at a time."""
    if len(positions) <= PIECE:
        return key_intervals(positions, *how)
    parts = [key_intervals(positions[start : start + PIECE], *how) for start in range(0, len(positions), PIECE)]
    (_, groups, _), dtype = parts[0][0].shape, parts[0][0].dtype
    lists = max(len(lo) for lo, _ in parts)
    both = tuple(np.zeros((lists, groups, len(positions)), dtype) for _ in range(2))
    for number, part in enumerate(parts):
        for whole_side, side in zip(both, part):
            whole_side[: len(side), :, number * PIECE : (number + 1) * PIECE] = side
    return both


class Activity:
    """The blocks of one call that have work.

    documents: the documents of this call (`mpiattn.problem.documents`), or None.
    """

    def __init__(self, mask, q_layout, k_layout, tile, documents=None):
        self.mask, self.q_layout, self.k_layout = mask, q_layout, k_layout
        self.tile, self.documents = tile, documents
        self.striped = q_layout.striped or k_layout.striped
        self.exact = mask.mask is not None and not self.striped  # only what is needed travels
        self.full = documents is None and mask.full
        self._of_sequences = {}  # by their slice of the batch, the activities of some sequences
        self.seen, self._rows = Remembered(self._seen), Remembered(self._rows_of)
        self.keys, self.queries = Remembered(self._keys), Remembered(self._queries)
        self.needed, self.travelling = Remembered(self._needed), Remembered(self._travelling)

    @cached_property
    def as_lists(self):
        """The documents as tuples of lists, which can be compared with ==; None without documents."""
        return self.documents and tuple(group.as_lists() for group in self.documents)

    def with_documents(self, documents):
        """The activity of a call with other documents."""
        return Activity(self.mask, self.q_layout, self.k_layout, self.tile, documents)

    def of_sequences(self, some):
        """The activity of some sequences of the batch, a slice; the same object each time.

        It is this one if all sequences have the same documents, or are meant.
        """
        groups, key = len(self.documents or (None,)), (some.start, some.stop)
        if groups == 1 or key == (0, groups):
            return self
        if key not in self._of_sequences:
            self._of_sequences[key] = self.with_documents(self.documents[some])
        return self._of_sequences[key]

    def trim(self):
        """Forget the intervals of single queries, which are large: the tokens that travel are known."""
        self._rows.clear()

    def intervals(self, chunk):
        """The keys [lo, hi) that each query of a chunk sees, as positions: two int64 arrays (lists, groups, tokens)."""
        return _by_piece(self.mask.key_intervals, self.q_layout.positions(chunk), self.documents)

    def columns(self, chunk, keys, rows=None):
        """The keys [begin, end) that each query of a chunk sees, as columns of some keys: int32, as of `intervals`.

        keys: their positions, as for `columns_of`.
        rows: `Ranges` of the chunk's queries; None for all.
        """
        positions = self.q_layout.positions(chunk)
        if rows is not None and rows != whole(len(positions)):
            positions = np.concatenate([positions[:0], *(positions[start:stop] for start, stop in rows)])
        return _by_piece(self.mask.key_intervals, positions, self.documents, columns_of(keys))

    @cached_property
    def _reach(self):
        """The keys [lo, hi) that parts of each chunk see, chunk after chunk, and where each chunk's begin.

        None if each query must be asked.
        """
        pieces = self.mask.pieces(self.documents)
        if pieces is None or self.q_layout.striped:
            return None
        cuts, owners = self.q_layout.owners
        lo, hi, piece = self.mask.reach(cuts, pieces, self.documents)
        owner = owners[piece]
        order = np.argsort(owner, kind="stable")
        return lo[order], hi[order], owner[order].searchsorted(np.arange(self.q_layout.chunks + 1)).tolist()

    def _seen(self, chunk):
        """The union of the keys that the queries of a chunk see, as disjoint intervals: their starts and their ends."""
        if self._reach is not None:  # of all chunks at once: a call asks for those of most
            lo, hi, starts = self._reach
            return _union(lo[starts[chunk] : starts[chunk + 1]], hi[starts[chunk] : starts[chunk + 1]])
        positions, unions = self.q_layout.positions(chunk), []
        for start in range(0, len(positions), PIECE):
            ends = self.mask.key_intervals(positions[start : start + PIECE], self.documents)
            unions.append(_union(*(side.ravel() for side in ends)))
        return unions[0] if len(unions) == 1 else _union(*map(np.concatenate, zip((positions[:0],) * 2, *unions)))

    def has_work(self, i, j):
        """Whether any query of chunk i sees any key of chunk j."""
        return bool(self.keys(i, j))

    def _keys(self, i, j):
        """The keys of chunk j that queries of chunk i see, as `Ranges`."""
        if self.full:
            return whole(self.k_layout.length(j)) if self.q_layout.length(i) else ()
        lo, hi = self.seen(i)
        seen, runs = [], runs_of(self.k_layout, j)
        for tokens, (before, _) in zip(self.k_layout.ranges(j), runs):
            if tokens.step > 1:
                first, last = (-(-(bound - tokens.start) // tokens.step) for bound in (lo, hi))
                if (first.clip(0) < last.clip(None, len(tokens))).any():
                    return whole(len(tokens))
                continue
            at, end = np.searchsorted(hi, tokens.start, "right"), np.searchsorted(lo, tokens.stop, "left")
            if tokens and at < end:
                shift, begins, ends = before - tokens.start, lo[at:end], hi[at:end]
                if not self.exact:
                    begins, ends = begins[:1], ends[-1:]
                begins, ends = (side.clip(tokens.start, tokens.stop) + shift for side in (begins, ends))
                seen += zip(begins.tolist(), ends.tolist())
        return whole(self.k_layout.length(j)) if self.striped and seen else self._travels_of(runs, seen)

    def _travels_of(self, runs, ranges):
        """The tokens of a chunk that travel if those in `ranges` are needed.  runs: of the chunk."""
        return union(ranges) if self.exact else cover(runs, ranges)

    def _rows_of(self, chunk):
        """By list and group of documents: the queries of a chunk that see anything, and the keys [lo, hi) they see.

        These increase from query to query, also from one document to the next, unless the mask has several intervals.
        """
        by_group = []
        for lo, hi in zip(*(side.reshape(-1, side.shape[-1]) for side in self.intervals(chunk))):
            rows = np.flatnonzero(lo < hi)
            by_group.append((rows, lo[rows], hi[rows]))
        return by_group

    def _queries(self, i, j):
        """The queries of chunk i that see keys of chunk j, as `Ranges`."""
        if self.striped or self.full:
            return whole(self.q_layout.length(i)) if self.has_work(i, j) else ()
        if not self.has_work(i, j):
            return ()
        if self.exact:
            before, some = columns_of(self.k_layout.ranges(j)), np.zeros(self.q_layout.length(i) + 2, bool)
            for rows, lo, hi in self._rows(i):
                some[1 + rows[before(lo) < before(hi)]] = True
            ends = np.flatnonzero(some[1:] != some[:-1]).tolist()
            return tuple(zip(ends[::2], ends[1::2]))
        seeing, runs = [], runs_of(self.q_layout, i)
        for rows, lo, hi in self._rows(i):
            for tokens in filter(len, self.k_layout.ranges(j)):
                begin, end = np.searchsorted(hi, tokens.start, "right"), np.searchsorted(lo, tokens.stop, "left")
                for first, last in np.searchsorted(rows, runs).clip(begin, end).tolist():
                    if first < last:
                        seeing.append((int(rows[first]), int(rows[last - 1]) + 1))
        return cover(runs, seeing)

    def pairs(self, rank):
        """Number of attended (query, key) pairs in a rank's tile, summed over the groups of documents."""
        total = 0
        for chunk in self.tile.row(rank):
            for other in self.tile.column(rank):
                if self.has_work(chunk, other):
                    begin, end = self.columns(chunk, self.k_layout.ranges(other))
                    total += int((end - begin).sum(dtype=np.int64))
        return total

    def _needed(self, in_columns, chunk, rank):
        """The queries of a chunk, or its keys with `in_columns`, that the tile of `rank` has work on, as `Ranges`."""
        if in_columns:
            parts, layout = (self.keys(i, chunk) for i in self.tile.row(rank)), self.k_layout
        else:
            parts, layout = (self.queries(chunk, j) for j in self.tile.column(rank)), self.q_layout
        return self._travels_of(runs_of(layout, chunk), chain.from_iterable(parts))

    def _travelling(self, kind, rank, hop, route="direct", collective=False):
        """The tokens that a rank sends in the transfer of one hop of a kind, as `Ranges`; () if it sends nothing."""
        in_columns = kind in IN_COLUMNS
        _, leaves, _, users = leg_of(kind, hop, self.tile.extent(kind), route, collective)
        owner = self.tile.in_group(kind, rank, leaves)
        runs = runs_of(self.k_layout if in_columns else self.q_layout, owner)
        parts = (self.needed(in_columns, owner, self.tile.in_group(kind, owner, -ahead)) for ahead in users)
        if collective and not passed_on(route):
            return cover(whole(total(runs)), chain.from_iterable(parts))
        return self._travels_of(runs, chain.from_iterable(parts))

    def landing(self, kind, rank, hop, route="direct", collective=False):
        """The tokens that a rank receives in the transfer of one hop of a kind: those that its sender sends."""
        ahead = leg_of(kind, hop, self.tile.extent(kind), route, collective).ahead
        return self.travelling(kind, self.tile.in_group(kind, rank, ahead), hop, route, collective)
