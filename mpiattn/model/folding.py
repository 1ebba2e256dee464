"""What it costs to fold a batch into the heads, where other ranks of the mesh need a chunk too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..schedule.kinds import IN_COLUMNS, KINDS
from ..schedule.travels import size_of
from .simulate import COPYING

if TYPE_CHECKING:
    from ..problem.layout import Layout
    from ..problem.problem import Problem
    from ..schedule.tile import Tile
    from .machine import Machine


def folding_seconds(
    problem: Problem, tile: Tile, layouts: tuple[Layout, Layout], machine: Machine, direction: str
) -> float:
    """Seconds in which the longest chunks are copied before a pass, and their results after it; 0 with a batch of 1.

    Chunks that no other rank needs are read where the caller has them.
    """
    if problem.batch == 1:
        return 0.0
    longest = [max(layout.lengths) for layout in layouts]
    nbytes = sum(
        longest[name in IN_COLUMNS] * size_of(array.held(problem) for array in kind.arrays_of(problem))
        for name, kind in KINDS[direction].items()
        if tile.extent(name) > 1
    )
    return nbytes / (COPYING * machine.merging)
