"""Searches as tests ask for them: keywords of `SearchSpace` in place of the record."""

from dataclasses import replace

from mpiattn.model import search
from mpiattn.model.space import SearchSpace
from mpiattn.schedule.tile import tiles


def choices(problem, ranks, every="choice", **allowed):
    """The choices of `search.survey`, best first."""
    return search.survey(SearchSpace(problem, ranks, **allowed), every)[0]


def flat_choices(problem, ranks, every="choice", **allowed):
    """Those of one plane whose mesh computes in the caller's layouts."""
    space = replace(SearchSpace(problem, ranks, **allowed).completed(), fixed=True)
    if "tiles" not in allowed:
        space = replace(space, tiles=tiles(ranks))
    if len(space.layout_pairs) == 1:
        space = replace(space, mesh_layout=space.layout_pairs[0])
    return search.survey(space, every)[0]
