"""Tiles: n ranks form a mesh of h planes of b rows x a columns.

Each plane computes 1/h of the sequences and heads, and each of its ranks a query chunks x b KV chunks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any

from ..errors import ArgumentError
from ..system.closest import of_choices
from ..system.words import number
from .kinds import IN_COLUMNS


@dataclass(frozen=True)
class Tile:
    """The shape of every rank's work, and of the mesh: h planes of b rows x a columns.

    h: groups of sequences and heads, each computed by a plane.
    a: query chunks of a rank, which is the number of columns and of ranks in a row.
    b: KV chunks of a rank, which is the number of rows and of ranks in a column.

    Rank (plane * b + row) * a + column of the mesh is rank row * a + column of its plane, and holds the query chunk and
    the KV chunk of that number.  So in a plane the ranks of a row are also the numbers of its query chunks, and the
    ranks of a column those of its KV chunks.  Methods take arrays of ranks and of hops too.
    """

    h: int
    a: int
    b: int

    def __str__(self) -> str:
        """AxB, or HxAxB with several groups of heads."""
        return "x".join(map(str, (self.h, self.a, self.b)[self.h == 1 :]))

    __repr__ = __str__  # for messages about arguments

    @property
    def divided(self) -> bool:
        """Whether ranks compute pieces of the scores (`mpiattn.schedule.division`) in place of whole chunks."""
        return False

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.h * self.a * self.b

    @property
    def plane(self) -> Tile:
        """The tile of one plane."""
        return self if self.h == 1 else Tile(1, self.a, self.b)

    @property
    def chunks(self) -> int:
        """Number of ranks of a plane, which is the number of its chunks."""
        return self.a * self.b

    def extent(self, kind: str) -> int:
        """Number of ranks in the row or column that a kind moves in, and so of its hops, #0 included."""
        return self.b if kind in IN_COLUMNS else self.a

    def place(self, rank: int) -> tuple[int, int]:
        """Row and column of a rank in its plane."""
        return rank // self.a % self.b, rank % self.a

    def in_row(self, rank: int, hop: int) -> int:
        """The rank `hop` hops back in the row of `rank`."""
        column = rank % self.a
        return rank - column + (column - hop) % self.a

    def in_column(self, rank: int, hop: int) -> int:
        """The rank `hop` hops back in the column of `rank`."""
        row, _ = self.place(rank)
        return rank + ((row - hop) % self.b - row) * self.a

    def in_group(self, kind: str, rank: int, hop: int) -> int:
        """The rank `hop` hops back in the row or column that a kind moves in."""
        return self.in_column(rank, hop) if kind in IN_COLUMNS else self.in_row(rank, hop)

    def row(self, rank: int) -> list[int]:
        """The ranks of the row, by hop: the rank itself comes first."""
        return [self.in_row(rank, hop) for hop in range(self.a)]

    def column(self, rank: int) -> list[int]:
        """The ranks of the column, by hop: the rank itself comes first."""
        return [self.in_column(rank, hop) for hop in range(self.b)]


@dataclass(frozen=True, repr=False)
class Divided(Tile):
    """A division of the scores into pieces: each rank computes some, of any KV heads, queries and keys.

    Its communicator is that of the tile 1xN.
    kind: "bands", or "dealt": as bands, but the documents of each call are dealt to ranks anew.
    """

    kind: str

    def __str__(self) -> str:
        """The kind."""
        return self.kind

    __repr__ = __str__

    @property
    def divided(self) -> bool:
        """As of `Tile`."""
        return True

    @property
    def plane(self) -> Tile:
        """As of `Tile`."""
        return self


def divided(kind: str, ranks: int) -> Divided:
    """The division of a kind among so many ranks."""
    return Divided(1, 1, ranks, kind)


DIVISIONS = ("bands", "dealt")
MESH = "mesh"  # in place of a tile, the fastest of them but divisions


def tiles(ranks: int, planes: int = 1) -> list[Tile]:
    """Every tile of that many ranks with so many planes, from Ring, 1xN, to Q-ring, Nx1."""
    chunks = ranks // planes
    return [Tile(planes, a, chunks // a) for a in range(1, chunks + 1) if chunks % a == 0]


def parse_tile(tile: Any, ranks: int) -> Tile | None:
    """The Tile from "AxB", "HxAxB", a name, numbers or a Tile; None for "auto" and "mesh".  Raises ArgumentError."""
    may_be = (
        f"for {number(ranks, 'rank')} it may be {', '.join(map(str, tiles(ranks)))}, HxAxB with H * A * B = "
        f"{ranks}, ulysses, ring, qring, bands, dealt, mesh or auto"
    )
    named = {
        "auto": None,
        MESH: None,
        "ring": Tile(1, 1, ranks),
        "qring": Tile(1, ranks, 1),
        "ulysses": Tile(ranks, 1, 1),
    }
    named |= {kind: divided(kind, ranks) for kind in DIVISIONS}
    if isinstance(tile, Divided) and tile.ranks == ranks:
        return tile
    if isinstance(tile, str | Tile):
        text = str(tile).strip()
        if text in named:
            return named[text]
        if not re.fullmatch(r"\d+(x\d+)+", text):
            raise ArgumentError(f"tile is {tile!r}; {may_be}{of_choices(text, named)}")
        sides = tuple(map(int, text.split("x")))
    else:
        try:
            sides = tuple(index(side) for side in tile)
        except (TypeError, ValueError):  # not numbers, or an array of more dimensions
            raise ArgumentError(f"tile is {tile!r}; {may_be}") from None
    if len(sides) not in (2, 3) or min(sides) < 1 or prod(sides) != ranks:
        raise ArgumentError(f"tile is {'x'.join(map(str, sides))}; {may_be}")
    return Tile(*(1,) * (3 - len(sides)), *sides)
