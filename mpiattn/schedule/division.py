"""A division of the scores, and which tokens of whom each of its pieces needs.  No MPI.

A division is data: for each rank some pieces, each a rectangle of the score matrix of a KV head.  A piece needs the
queries that see any of its keys, and the keys that any of its queries sees.  They come from the ranks that own them.
Partials of the same queries, backward of the keys too, go back.  All of this follows from the division, the mask, the
layouts and the documents of a call alone, so both ends of a message agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..problem.layout import Layout
from .ranges import total, union
from .table import Side, Table, united_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ..problem.group import Group
    from ..problem.mask import Mask
    from .bands import Division, Piece
    from .ranges import Ranges

    Documents = Sequence[Group] | None

FEW_RUNS = 2  # of a parcel, which are a message each: two in zigzag


class Need(NamedTuple):
    """The tokens that a rank needs for its pieces of one KV head.

    sequence, head: of the batch, and its KV head.
    queries, keys: positions in the sequence, as `Ranges`.
    pieces: [first, last) of the queries of each piece, and [first, last) of its keys.
    """

    sequence: int
    head: int
    queries: Ranges
    keys: Ranges
    pieces: tuple[tuple[tuple[int, int], tuple[int, int]], ...]

    def of(self, column: bool) -> Ranges:
        """The keys, with `column`, or the queries."""
        return self.keys if column else self.queries


class Parcel(NamedTuple):
    """The tokens of one rank's chunk that a piece needs, and that travel together.

    peer: the other rank: at the piece the owner of the tokens, at the owner the rank of the piece.
    number: of the parcel among those of one kind from this owner to this rank, by which messages are told apart.
    need: what needs them.  tokens: in the owner's chunk, as `Ranges`.
    places: as many ranges, where they lie among the tokens of the need.
    """

    peer: int
    number: int
    need: Need
    tokens: Ranges
    places: tuple[range, ...]

    @property
    def name(self) -> tuple[int, int]:
        """The peer and the number."""
        return self.peer, self.number

    @property
    def length(self) -> int:
        """The number of tokens."""
        return total(self.tokens)

    @property
    def in_one(self) -> bool:
        """Whether they are one run of tokens at either end."""
        return len(self.places) == 1 and self.places[0].step == 1


def needs_of(
    division: Division, mask: Mask, kv_heads: int, documents: Documents = None
) -> tuple[tuple[Need, ...], ...]:
    """The needs of every rank, without pieces of which the mask shows nothing.

    documents: those of a call: of every sequence of the batch, or one for all.
    """
    by_sequence: dict[int, list[tuple[int, Piece]]] = {}
    alike = documents is None or len(documents) == 1
    for rank, pieces in enumerate(division):
        for piece in pieces:
            sequence = 0 if alike else piece.group // kv_heads
            by_sequence.setdefault(sequence, []).append((rank, piece))
    needs: dict[tuple[int, int], Need] = {}
    for sequence, of_sequence in by_sequence.items():
        group = None if documents is None else documents[sequence : sequence + 1]
        needed = _needed([piece for _, piece in of_sequence], mask, group)
        for (rank, piece), queries, keys in zip(of_sequence, *needed):
            if queries:
                more = Need(*divmod(piece.group, kv_heads), queries, keys, ((piece[1:3], piece[3:5]),))
                before = needs.get((rank, piece.group))
                needs[rank, piece.group] = more if before is None else _joined(before, more)
    of_ranks: list[list[Need]] = [[] for _ in division]
    for (rank, _), need in sorted(needs.items(), key=lambda each: each[0]):
        of_ranks[rank].append(need)
    return tuple(map(tuple, of_ranks))


def _joined(need: Need, more: Need) -> Need:
    """The need of the pieces of two."""
    return need._replace(
        queries=union(need.queries + more.queries), keys=union(need.keys + more.keys), pieces=need.pieces + more.pieces
    )


def _needed(pieces: list[Piece], mask: Mask, documents: Documents) -> tuple[list[Ranges], list[Ranges]]:
    """The queries that each of some pieces needs, and the keys."""
    numbers = np.array(pieces, np.int64).reshape(-1, 5)
    rows, keys = numbers[:, 1:3], numbers[:, 3:5]
    row_cuts, key_cuts = np.unique(np.append(rows, (0, mask.seqlen))), np.unique(np.append(keys, (0, mask.seqlen_k)))
    # The table is asked about parts of the sequence between the ends of pieces, as if each were a rank's chunk
    table = Table(mask, *parts_of(row_cuts, key_cuts), documents)
    of_rows = _met(table.side(False), key_cuts.searchsorted(keys), rows, mask.seqlen)
    of_keys = _met(table.side(True), row_cuts.searchsorted(rows), keys, mask.seqlen_k)
    return of_rows, of_keys


def parts_of(row_cuts: NDArray[np.int64], key_cuts: NDArray[np.int64]) -> tuple[Layout, Layout]:
    """Layouts of as many chunks: the parts of queries and of keys between cuts, and empty ones."""
    chunks = max(len(row_cuts), len(key_cuts))
    of_rows, of_keys = (
        Layout("contiguous", int(cuts[-1]), chunks, tuple(np.pad(lengths, (0, chunks - len(lengths))).tolist()))
        for cuts, lengths in ((row_cuts, np.diff(row_cuts)), (key_cuts, np.diff(key_cuts)))
    )
    return of_rows, of_keys


def _met(side: Side, parts: NDArray[np.int64], ends: NDArray[np.int64], tokens: int) -> list[Ranges]:
    """Of each piece the tokens within its ends that any of its parts of the other side needs.

    side: a `Side` of a `Table`.  parts: [first, last) of each piece: (pieces, 2).  ends: [first, last): (pieces, 2).
    """
    begins, stops = (side.users.searchsorted(parts[:, i]) for i in range(2))
    counts = stops - begins
    piece = np.repeat(np.arange(len(parts)), counts)
    at = np.arange(len(piece)) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
    start, stop = np.maximum(side.start[at], ends[piece, 0]), np.minimum(side.stop[at], ends[piece, 1])
    piece, start, stop = united_of(piece, start, stop, tokens)
    met: list[list[tuple[int, int]]] = [[] for _ in parts]
    for number, *range_ in zip(piece.tolist(), start.tolist(), stop.tolist()):
        met[number].append(tuple(range_))
    return list(map(tuple, met))


class RankPieces:
    """The pieces of one rank in calls with the same documents, and the parcels that it takes and gives.

    needs: of every rank, as of `needs_of`.
    The attribute `needs` has this rank's own.
    taken[column][i]: the parcels of need i, by owner from this rank on: of its keys with `column`, or of its queries.
    given[column]: the parcels that this rank's tokens are in, by rank from the next one on; its own needs come last.
    """

    def __init__(self, needs: Sequence[Sequence[Need]], layouts: tuple[Layout, Layout], rank: int) -> None:
        self.rank, self.needs = rank, needs[rank]
        ranks = len(needs)
        self.taken: dict[bool, list[list[Parcel]]] = {}
        self.given: dict[bool, list[Parcel]] = {}
        for column in (False, True):
            layout = layouts[column]
            numbers = dict.fromkeys(range(ranks), 0)
            self.taken[column] = []
            for need in self.needs:
                parcels = []
                for owner in _owners(layout, need.of(column), rank):
                    for tokens, places in _parcels(layout, owner, need.of(column)):
                        parcels.append(Parcel(owner, numbers[owner], need, tokens, places))
                        numbers[owner] += 1
                self.taken[column].append(parcels)
            self.given[column] = []
            for ahead in range(1, ranks + 1):
                user, number = (rank + ahead) % ranks, 0
                for need in needs[user]:
                    for tokens, places in _parcels(layout, rank, need.of(column)):
                        self.given[column].append(Parcel(user, number, need, tokens, places))
                        number += 1

    def sent(self, column: bool) -> int:
        """Tokens of its own chunk that this rank sends to others, counted once for each KV head."""
        return sum(parcel.length for parcel in self.given[column] if parcel.peer != self.rank)

    def received(self, column: bool) -> int:
        """Tokens that it receives, counted likewise; as many partials leave."""
        return sum(parcel.length for parcels in self.taken[column] for parcel in parcels if parcel.peer != self.rank)


def _owners(layout: Layout, tokens: Ranges, rank: int) -> list[int]:
    """The ranks that may own some of these tokens, from `rank` on, so that not all ask the same one first."""
    owners = set(range(layout.chunks))
    if not layout.striped:
        cuts, of_runs = layout.owners
        ends = np.array(tokens, np.int64).reshape(-1, 2)
        first, last = cuts.searchsorted(ends[:, 0], "right") - 1, cuts.searchsorted(ends[:, 1], "left")
        owners = {int(owner) for begin, end in zip(first, last) for owner in of_runs[begin:end]}
    return sorted(owners, key=lambda owner: (owner - rank) % layout.chunks)


def _parcels(layout: Layout, owner: int, tokens: Ranges) -> Iterator[tuple[Ranges, tuple[range, ...]]]:
    """(tokens, places) of each parcel of an owner's tokens among these: one, or one for each of a few runs."""
    if not layout.length(owner):
        return
    runs, places, before = [], [], 0
    for start, stop in tokens:
        at, parts = layout.between(owner, start, stop)
        for part in parts:
            runs.append((at, at + len(part)))
            places.append(range(before + part.start - start, before + part.stop - start, part.step))
            at += len(part)
        before += stop - start
    if not runs:
        return
    if len(runs) <= FEW_RUNS and all(place.step == 1 for place in places):
        for run, place in zip(runs, places):
            yield (run,), (place,)
    else:
        yield tuple(runs), tuple(places)
