"""Tiles: n ranks form a mesh of b rows x a columns, and each computes a query chunks x b KV chunks."""

import re
from operator import index

from ..errors import ArgumentError


def tiles(ranks):
    """Every tile (a, b) with a * b = ranks, from Ring (1, n) to Q-ring (n, 1)."""
    return [(a, ranks // a) for a in range(1, ranks + 1) if ranks % a == 0]


def parse_tile(tile, ranks):
    """The tile (a, b) from "AxB", "ring", "qring" or a pair; None for "auto".  Raises ArgumentError."""
    choices = ", ".join(f"{a}x{b}" for a, b in tiles(ranks))
    may_be = f"for {ranks} rank{'s' * (ranks > 1)} it may be {choices}, ring, qring or auto"
    if tile == "auto":
        return None
    if tile == "ring":
        return 1, ranks
    if tile == "qring":
        return ranks, 1
    if isinstance(tile, str):
        match = re.fullmatch(r"(\d+)x(\d+)", tile.strip())
        if not match:
            raise ArgumentError(f"tile is {tile!r}; {may_be}")
        pair = int(match[1]), int(match[2])
    else:
        try:
            pair = tuple(index(side) for side in tile)
        except (TypeError, ValueError):                # not numbers, or an array of more dimensions
            raise ArgumentError(f"tile is {tile!r}; {may_be}") from None
    if len(pair) != 2 or pair not in tiles(ranks):
        raise ArgumentError(f"tile is {'x'.join(map(str, pair))}; {may_be}")
    return pair
