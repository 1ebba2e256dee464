"""What a benchmark measures: every combination of sizes, tiles, schedules and routes, with overlap and without."""

from itertools import product
from typing import NamedTuple

from ..errors import ArgumentError
from ..schedule.tile import parse_tile, tiles


class Case(NamedTuple):
    """One plan to measure: tokens, and what is asked of `mpiattn.MeshAttention`; "auto" leaves it to the plan."""

    seqlen: int
    tile: str
    schedule: str
    route: str
    overlap: bool

    def __str__(self):
        return (f"{self.seqlen} tokens, tile {self.tile}, {self.schedule} schedule, {self.route} route"
                + ("" if self.overlap else ", without overlap"))


def tile_names(asked, ranks):
    """Tiles as "AxB" or "auto", each once, in the order asked; "all" is every tile of the ranks."""
    names = []
    for one in asked:
        shapes = tiles(ranks) if one == "all" else [parse_tile(one, ranks)]
        names += ["auto" if shape is None else "x".join(map(str, shape)) for shape in shapes]
    return list(dict.fromkeys(names))


def cases(ranks, seqlens, tile, schedule, route, no_overlap=False):
    """The cases of every size, a list of lists.  Raises ArgumentError.

    seqlens, tile, schedule, route: lists.  no_overlap: every one without overlap too, but for collective schedules,
    which have none.
    """
    if min(seqlens) < 1:
        raise ArgumentError(f"seqlen is {min(seqlens)}; it must be at least 1")
    names = tile_names(tile, ranks)
    schedules, routes, seqlens = (list(dict.fromkeys(asked)) for asked in (schedule, route, seqlens))
    return [[Case(seqlen, *asked, overlap)
             for *asked, overlap in product(names, schedules, routes, (True, False)[:1 + no_overlap])
             if overlap or asked[1] != "collective"] for seqlen in seqlens]
