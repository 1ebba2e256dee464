"""The blocks of a call that have work, and the tokens that each rank sends and receives in it.

These are pure functions of masks, layouts and documents, so both ends of a transfer agree.
"""

from functools import cached_property

import numpy as np

from ..problem.columns import columns_of
from ..problem.mask import PIECE
from .kinds import IN_COLUMNS
from .ranges import union, whole
from .remembered import Remembered
from .route import leg_of, passed_on
from .table import Lines, Needs, Table


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
    The attribute `table` has what is needed, of which `needed`, `travelling` and `landing` are parts.
    """

    def __init__(self, mask, q_layout, k_layout, tile, documents=None):
        self.mask, self.q_layout, self.k_layout = mask, q_layout, k_layout
        self.tile, self.documents = tile, documents
        self.table = Table(mask, q_layout, k_layout, documents)
        self._of_sequences = {}  # by their slice of the batch, the activities of some sequences
        self._needs, self._needed = Remembered(self._needs_of), Remembered(self._needed_by)

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
        """Forget the arrays of needs, which are large: the tokens that travel are known."""
        self._needs.clear()

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
        return self.columns_at(positions, keys)

    def columns_at(self, positions, keys):
        """As `columns`, of the queries at some positions, which increase."""
        return _by_piece(self.mask.key_intervals, positions, self.documents, columns_of(keys))

    def has_work(self, i, j):
        """Whether any query of chunk i sees any key of chunk j."""
        return bool(self.table.sees(i)[j])

    def pairs(self, rank):
        """Number of attended (query, key) pairs in a rank's tile, summed over the groups of documents."""
        total = 0
        for chunk in self.tile.row(rank):
            for other in self.tile.column(rank):
                if self.has_work(chunk, other):
                    begin, end = self.columns(chunk, self.k_layout.ranges(other))
                    total += int((end - begin).sum(dtype=np.int64))
        return total

    def _needs_of(self, in_columns, line):
        """By owner, the `Needs` of the chunks of a row of ranks or, with `in_columns`, a column.  line: its number."""
        tile = self.tile
        chunks = tile.column(line) if in_columns else tile.row(line * tile.a)
        needs = Lines(self.table.side(in_columns, chunks), tile, in_columns).needs(owners=chunks)
        order = np.lexsort((needs.run, needs.hop, needs.owner))
        needs = Needs(*(of_needs[order] for of_needs in needs))
        begins, ends = (needs.owner.searchsorted(chunks, side) for side in ("left", "right"))
        return {
            chunk: Needs(*(of_needs[begin:end] for of_needs in needs))
            for chunk, begin, end in zip(chunks, begins, ends)
        }

    def _needed_by(self, in_columns, owner, hops, together=False):
        """The tokens of an owner's chunk that ranks need, as `Ranges`.

        hops: distances of these ranks ahead of the owner, a range.  together: whether one range of the chunk travels.
        """
        line = owner % self.tile.a if in_columns else owner // self.tile.a
        hop, _, run, first, last = self._needs(in_columns, line)[owner]
        some = slice(*hop.searchsorted((hops.start, hops.stop)))
        run, first, last = run[some], first[some], last[some]
        if len(run) and (together or len(hops) > 1):  # else each run has one need
            order = np.argsort(run, kind="stable")
            run, first, last = run[order], first[order], last[order]
            begins = np.append(0, () if together else np.flatnonzero(run[1:] != run[:-1]) + 1).astype(int)
            first, last = np.minimum.reduceat(first, begins), np.maximum.reduceat(last, begins)
        return union(zip(first.tolist(), last.tolist()))

    def needed(self, in_columns, chunk, rank):
        """The queries of a chunk, or its keys with `in_columns`, that the tile of `rank` has work on, as `Ranges`."""
        (row, column), (own_row, own_column) = self.tile.place(rank), self.tile.place(chunk)
        hop = (row - own_row) % self.tile.b if in_columns else (column - own_column) % self.tile.a
        return self._needed(in_columns, chunk, range(hop, hop + 1))

    def travelling(self, kind, rank, hop, route="direct", collective=False):
        """The tokens that a rank sends in the transfer of one hop of a kind, as `Ranges`; () if it sends nothing."""
        _, leaves, _, users = leg_of(kind, hop, self.tile.extent(kind), route, collective)
        owner = self.tile.in_group(kind, rank, leaves)
        return self._needed(kind in IN_COLUMNS, owner, users, collective and not passed_on(route))

    def landing(self, kind, rank, hop, route="direct", collective=False):
        """The tokens that a rank receives in the transfer of one hop of a kind: those that its sender sends."""
        ahead = leg_of(kind, hop, self.tile.extent(kind), route, collective).ahead
        return self.travelling(kind, self.tile.in_group(kind, rank, ahead), hop, route, collective)
