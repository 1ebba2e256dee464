"""The cases of a benchmark: every combination of sizes, tiles, schedules and routes, with and without overlap."""

from itertools import product
from typing import NamedTuple

from ..errors import ArgumentError
from ..model.piece_options import allows_pieces
from ..schedule.regroup import every_tile
from ..schedule.tile import DIVISIONS, parse_tile


class Case(NamedTuple):
    """A plan to measure: tokens, and arguments of `mpiattn.MeshAttention`; "auto": the plan chooses."""

    seqlen: int
    tile: str
    schedule: str
    route: str
    overlap: bool

    def __str__(self):
        return f"{self.seqlen} tokens, tile {self.tile}, {self.schedule} schedule, {self.route} route" + (
            "" if self.overlap else ", without overlap"
        )


def tile_names(asked, ranks, heads=1, kv_heads=1, batch=1, pieces=True):
    """Tiles as "AxB", "HxAxB", "bands", "mesh" or "auto", each once, in the given order.

    "all" means every tile of the ranks, with `pieces` bands too.
    """
    names = []
    for text in asked:
        if text == "all":
            names += [*map(str, every_tile(ranks, heads, kv_heads, batch)), *["bands"] * pieces]
            continue
        shape = parse_tile(text, ranks)
        names.append(text.strip() if shape is None else str(shape))
    return list(dict.fromkeys(names))


def _has(tile, schedule, route):
    """Whether there are plans of a tile with this schedule and this route."""
    return tile not in DIVISIONS or allows_pieces(schedule=schedule, route=route)


def cases(ranks, seqlens, tile, schedule, route, no_overlap=False, planes=(1, 1, 1), pieces=True):
    """The cases of every size, a list of lists.  Raises ArgumentError.

    seqlens, tile, schedule, route: lists.  no_overlap: add every case without overlap, except those with a collective
    schedule, which has none.  planes: heads, KV heads and sequences, by which "all" has tiles of several planes.
    pieces: whether "all" has bands.  These have no schedules and routes to choose from.
    """
    if min(seqlens) < 1:
        raise ArgumentError(f"seqlen is {min(seqlens)}; it must be at least 1")
    names = tile_names(tile, ranks, *planes, pieces)
    schedules, routes, seqlens = (list(dict.fromkeys(asked)) for asked in (schedule, route, seqlens))
    for name in tile:
        if not any(_has(name, *how) for how in product(schedules, routes)):
            raise ArgumentError(
                f"--tile is {name}, whose ranks have pieces of the scores in place of chunks, and --schedule is "
                f"{' '.join(schedules)}, --route {' '.join(routes)}; auto must be among the schedules, and auto or "
                "direct among the routes"
            )
    return [
        [
            Case(seqlen, *asked, overlap)
            for *asked, overlap in product(names, schedules, routes, (True, False)[: 1 + no_overlap])
            if _has(*asked) and (overlap or asked[1] != "collective")
        ]
        for seqlen in seqlens
    ]
