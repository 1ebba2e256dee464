"""Tiles: their names, and who is in a rank's row and column."""

import re

import numpy as np
import pytest

from mpiattn import ArgumentError
from mpiattn.schedule.tile import Tile, parse_tile, tiles


@pytest.mark.parametrize("n", [1, 6, 12])
def test_groups(n):
    """Chunks 0 .. hops back in the row and column are the tile's (arXiv 2512.20968): block (i, i) is the rank's own."""
    for tile in tiles(n):
        a, computed = tile.a, {}
        for rank in range(n):
            row, column = tile.row(rank), tile.column(rank)
            assert sorted(row) == [a * (rank // a) + x for x in range(a)]
            assert sorted(column) == [rank % a + a * x for x in range(tile.b)]
            assert row[0] == column[0] == rank
            computed.update({(q, kv): rank for q in row for kv in column})
        assert computed == {(q, kv): a * (q // a) + kv % a for q in range(n) for kv in range(n)}


def test_hops_go_back_and_around():
    tile = Tile(1, 3, 2)  # rows 0 1 2 and 3 4 5
    assert tile.row(4) == [4, 3, 5] and tile.column(4) == [4, 1]
    assert [tile.in_group("Q", 4, hop) for hop in (-1, 0, 3)] == [5, 4, 4]
    assert [tile.in_group("dKV", 4, hop) for hop in (-1, 0, 2)] == [1, 4, 4]
    assert [tile.place(rank) for rank in (0, 4)] == [(0, 0), (1, 1)]
    assert [tile.extent(kind) for kind in ("Q", "O", "KV", "dKV")] == [3, 3, 2, 2]


def test_all_ranks_at_once():
    for tile in (*tiles(12), Tile(2, 3, 2)):
        ranks = np.arange(tile.ranks)
        assert np.array(tile.row(ranks)).T.tolist() == [tile.row(rank) for rank in range(tile.ranks)]
        assert np.array(tile.column(ranks)).T.tolist() == [tile.column(rank) for rank in range(tile.ranks)]


def test_planes_are_apart():
    """Rows and columns of a plane are those of the first, further on."""
    tile, plane = Tile(3, 4, 2), Tile(1, 4, 2)
    assert tile.ranks == 24
    for rank in range(24):
        first = rank // 8 * 8
        assert tile.row(rank) == [first + other for other in plane.row(rank % 8)]
        assert tile.column(rank) == [first + other for other in plane.column(rank % 8)]
        assert tile.place(rank) == plane.place(rank % 8)


def test_every_tile_of_some_ranks():
    assert [str(tile) for tile in tiles(12)] == ["1x12", "2x6", "3x4", "4x3", "6x2", "12x1"]
    assert all(tile.ranks == 12 for tile in tiles(12))


def test_names():
    assert parse_tile("auto", 6) is None
    names = ("ring", "qring", "2x3", " 3x2 ", (3, 2), [6, 1], np.array([2, 3]), Tile(1, 2, 3))
    assert list(map(str, (parse_tile(tile, 6) for tile in names))) == [
        "1x6",
        "6x1",
        "2x3",
        "3x2",
        "3x2",
        "6x1",
        "2x3",
        "2x3",
    ]
    assert parse_tile("2x3", 6) == Tile(1, 2, 3) != Tile(1, 3, 2)
    assert str(Tile(2, 3, 4)) == "2x3x4"


@pytest.mark.parametrize(
    "wrong",
    [
        "2x2",
        "2*3",
        "",
        None,
        6,
        (1, 2, 2),
        "1x2x2",
        "1x1x2x3",
        "0x0x3",
        ("a", "b"),
        "6",
        "-2x-3",
        (2, 4),
        (2.7, 3),
        (float("inf"), 1),
        Tile(1, 2, 2),
        Tile(3, 2, 2),
    ],
)
def test_what_is_refused(wrong):
    tiles = "1x6, 2x3, 3x2, 6x1, HxAxB with H * A * B = 6, ulysses, ring, qring, bands, dealt, mesh or auto"
    may_be = f"for 6 ranks it may be {tiles}"
    with pytest.raises(ArgumentError, match=f"^tile is .*{re.escape(may_be)}$"):
        parse_tile(wrong, 6)
