"""The cases of a benchmark: every combination of sizes, tiles, schedules and routes, with and without overlap."""

from itertools import product
from typing import NamedTuple

from ..errors import ArgumentError
from ..schedule.regroup import every_tile
from ..schedule.tile import parse_tile


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


def tile_names(asked, ranks, heads=1, kv_heads=1, batch=1):
    """Tiles as "AxB", "HxAxB" or "auto", each once, in the given order; "all" means every tile of the ranks."""
    names = []
    for text in asked:
        shapes = every_tile(ranks, heads, kv_heads, batch) if text == "all" else [parse_tile(text, ranks)]
        names += ["auto" if shape is None else str(shape) for shape in shapes]
    return list(dict.fromkeys(names))


def cases(ranks, seqlens, tile, schedule, route, no_overlap=False, planes=(1, 1, 1)):
    """The cases of every size, a list of lists.  Raises ArgumentError.

    seqlens, tile, schedule, route: lists.  no_overlap: add every case without overlap, except those with a collective
    schedule, which has none.  planes: heads, KV heads and sequences, by which "all" has tiles of several planes.
    """
    if min(seqlens) < 1:
        raise ArgumentError(f"seqlen is {min(seqlens)}; it must be at least 1")
    names = tile_names(tile, ranks, *planes)
    schedules, routes, seqlens = (list(dict.fromkeys(asked)) for asked in (schedule, route, seqlens))
    return [
        [
            Case(seqlen, *asked, overlap)
            for *asked, overlap in product(names, schedules, routes, (True, False)[: 1 + no_overlap])
            if overlap or asked[1] != "collective"
        ]
        for seqlen in seqlens
    ]
