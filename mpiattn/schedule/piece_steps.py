"""The order in which a rank computes its pieces while their tokens arrive.  No MPI, no NumPy.

The queries of a piece come in portions, and so do its keys; a portion has the parcels of a few owners.  A block is a
portion of queries against one of keys.  As in the paper's greedy rule, the next portion is the one that unlocks most
work for its bytes (Mesh-Attention, arXiv 2512.20968, algorithm 2).  Blocks run while the next portion is under way.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from .kinds import IN_COLUMNS, REDUCED
from .ranges import union
from .remembered import Remembered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .division import Need, Parcel, RankPieces
    from .ranges import Ranges

PORTIONS = 8  # of a side of a piece at most: with as many of the other side, a sixty-fourth of it is not hidden
MERGING = 4  # partials of own tokens that a rank receives at a time
LEAST = 256  # tokens of a portion: in each launch a query takes the time of a hundred keys more than it sees


class Portion(NamedTuple):
    """Consecutive tokens of a need, [start, stop) among them, and the parcels in which they come."""

    start: int
    stop: int
    parcels: tuple[Parcel, ...]


class PieceBlock(NamedTuple):
    """Portion `row` of the queries of a need against portion `column` of its keys; all are numbers."""

    need: int
    row: int
    column: int


class BlockPart(NamedTuple):
    """A rectangle of a block that belongs to a piece.

    rows, keys: where its queries and its keys lie among the tokens of the need, as slices.
    at_rows, at_keys: their positions, as `Ranges`.
    """

    rows: slice
    keys: slice
    at_rows: Ranges
    at_keys: Ranges


class PortionName(NamedTuple):
    """Portion `number` of the keys of a need, with `column`, or of its queries."""

    need: int
    column: bool
    number: int


class PieceStep(NamedTuple):
    """Blocks, then a portion that must be here before the next step.

    complete: the portions whose partials are complete after these blocks, and leave.
    arrival: None in the last step.
    """

    blocks: tuple[PieceBlock, ...]
    complete: tuple[PortionName, ...]
    arrival: PortionName | None


class PieceSteps:
    """The steps of a rank.

    row_bytes, key_bytes: that move for a query and for a key of a KV head.  most: portions of a side of a need.
    overlap: whether blocks run while portions are under way; else all of them run when all portions are here.
    portions: by need and `column`, its portions.
    arrivals: all portions, in the order in which they are waited for.
    parts: parts[block] is `parts_of` a block, made once.
    """

    def __init__(
        self,
        pieces: RankPieces,
        direction: str,
        row_bytes: int,
        key_bytes: int,
        most: int = PORTIONS,
        overlap: bool = True,
    ) -> None:
        self.pieces = pieces
        reduced = {kind in IN_COLUMNS for kind in REDUCED[direction]}
        self.portions: dict[tuple[int, bool], list[Portion]] = {}
        self.arrivals: list[PortionName] = []
        self.parts = Remembered(self._parts)
        steps: list[PieceStep] = []
        blocks: list[PieceBlock] = []
        complete: list[PortionName] = []
        for number in range(len(pieces.needs)):
            for column in (False, True):
                self.portions[number, column] = _portions(pieces.taken[column][number], most)
            for arrival, unlocked in self._unlocked(number, row_bytes, key_bytes):
                self.arrivals.append(arrival)
                steps.append(PieceStep(tuple(blocks), tuple(complete), arrival))
                blocks = [PieceBlock(number, *block) for block in unlocked]
                complete = self._complete(number, arrival, reduced)
        steps.append(PieceStep(tuple(blocks), tuple(complete), None))
        self.steps = tuple(steps) if overlap else _apart(steps)

    def _parts(self, *block: int) -> list[BlockPart]:
        """As `parts`."""
        need, row, column = block
        return parts_of(self.pieces.needs[need], self.portions[need, False][row], self.portions[need, True][column])

    def _starts(self, number: int, column: bool) -> list[int]:
        """The portions of one side of a need in the order in which they come: from that with own tokens on."""
        portions = self.portions[number, column]
        rank = self.pieces.rank
        first = rank % len(portions)
        for place, portion in enumerate(portions):
            if any(parcel.peer == rank for parcel in portion.parcels):
                first = place
                break
        return [(first + ahead) % len(portions) for ahead in range(len(portions))]

    def _unlocked(self, number: int, row_bytes: int, key_bytes: int) -> list[tuple[PortionName, list[tuple[int, int]]]]:
        """The arrivals of a need in turn, and the (row, column) of the blocks that each unlocks."""
        waiting = {column: self._starts(number, column) for column in (False, True)}
        nbytes = {False: row_bytes, True: key_bytes}
        here: dict[bool, list[int]] = {False: [], True: []}
        lengths = {
            column: [portion.stop - portion.start for portion in self.portions[number, column]]
            for column in (False, True)
        }

        def gain(column: bool) -> float:
            """Pairs for a byte that the next portion of a side unlocks; less than nothing if there is none."""
            if not waiting[column]:
                return -1.0
            return sum(lengths[not column][other] for other in here[not column]) / nbytes[column]

        arrivals = []
        while waiting[False] or waiting[True]:
            # The first of either side unlocks nothing by itself
            column = gain(True) > gain(False)
            portion = waiting[column].pop(0)
            here[column].append(portion)
            others = here[not column]
            unlocked = [(other, portion) if column else (portion, other) for other in others]
            arrivals.append((PortionName(number, column, portion), unlocked))
        return arrivals

    def _complete(self, number: int, arrival: PortionName, reduced: set[bool]) -> list[PortionName]:
        """The portions of a need whose partials are complete with the blocks that an arrival unlocks."""
        missing = {
            column: len(self.portions[number, column])
            - sum(name.need == number and name.column == column for name in self.arrivals)
            for column in (False, True)
        }
        complete = []
        for column in sorted(reduced):
            if missing[not column]:
                continue  # of all portions of this side, blocks are still to come
            if arrival.column == column:
                complete.append(arrival)
                continue
            # The last of the other side completes all that are here
            complete += [name for name in self.arrivals if name.need == number and name.column == column]
        return complete


def _apart(steps: Sequence[PieceStep]) -> tuple[PieceStep, ...]:
    """The same arrivals without blocks, then all blocks."""
    blocks = tuple(block for step in steps for block in step.blocks)
    complete = tuple(name for step in steps for name in step.complete)
    return (*(PieceStep((), (), step.arrival) for step in steps[:-1]), PieceStep(blocks, complete, None))


def parts_of(need: Need, rows: Portion, keys: Portion) -> list[BlockPart]:
    """The parts of a block: its pieces, those with the same queries and adjacent keys as one."""
    by_queries: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for of_queries, of_keys in need.pieces:
        by_queries.setdefault(of_queries, []).append(of_keys)
    parts = []
    for of_queries, each in by_queries.items():
        for row_slice, key_slice in product(_inside(need.queries, [of_queries], rows), _inside(need.keys, each, keys)):
            at_rows, at_keys = _at(need.queries, row_slice), _at(need.keys, key_slice)
            parts.append(BlockPart(row_slice, key_slice, at_rows, at_keys))
    return parts


def _inside(tokens: Ranges, some: Sequence[tuple[int, int]], portion: Portion) -> list[slice]:
    """Where those of `some` positions that a portion has lie among the tokens of a need."""
    places = []
    for ends in some:
        start, stop = (_below(tokens, position) for position in ends)
        places.append((max(start, portion.start), min(stop, portion.stop)))
    return [slice(start, stop) for start, stop in union(places)]


def _below(tokens: Ranges, position: int) -> int:
    """How many of some tokens come before a position."""
    return sum(min(max(position - start, 0), stop - start) for start, stop in tokens)


def _at(tokens: Ranges, part: slice) -> Ranges:
    """The positions of a slice of some tokens."""
    some, before = [], 0
    for start, stop in tokens:
        first, last = max(part.start - before, 0), min(part.stop - before, stop - start)
        if first < last:
            some.append((start + first, start + last))
        before += stop - start
    return tuple(some)


def _portions(parcels: Sequence[Parcel], most: int) -> list[Portion]:
    """The portions of one side of a need, at most so many."""
    parcels = sorted(parcels, key=lambda parcel: parcel.places[0].start)
    ends = [max(place[-1] + 1 for place in parcel.places) for parcel in parcels]
    count = sum(parcel.length for parcel in parcels)
    pieces = max(1, min(most, count // LEAST))
    portions: list[Portion] = []
    start, some = 0, []
    for number, (parcel, end) in enumerate(zip(parcels, ends)):
        some.append(parcel)
        last = number == len(parcels) - 1
        apart = not last and parcels[number + 1].places[0].start == end == start + sum(each.length for each in some)
        if last or (apart and end * pieces >= count * (len(portions) + 1)):
            portions.append(Portion(start, count if last else end, tuple(some)))
            start, some = end, []
    return portions
