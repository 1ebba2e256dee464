"""A plan on one page: the blocks, what one rank's tile needs, the mesh, the tiles of the table, and the timeline."""

from ..schedule.kinds import IN_COLUMNS
from ..schedule.tile import parse_tile
from ..schedule.travels import token_bytes
from .assignment import draw_assignment, draw_tile
from .listed import BAR, draw_sent, draw_times, rows
from .mesh import draw_mesh
from .style import new_figure, styled
from .timeline import LANE, draw_lanes, lanes, lanes_label, of_rank, slowest, summary

WIDTH, TOP = 13.0, 4.4  # inches
EQUAL = 0.9  # least work of a block over the most, from which on all count as equal


@styled
def page(problem, work, load, schedules, timelines, title, data):
    """A figure of a plan for a `Problem`; it shows the slowest rank of the first pass.

    problem, work, load, schedules, timelines: of one plane.  work, load: the `pairs` of the `Work` of its layouts and
    the `Load` of its mesh.  schedules, timelines: one per pass, with predicted timelines.  title: the plan in words.
    data: the JSON of `mpiattn plan`.
    """
    rank, first, whole = slowest(timelines[0]), schedules[0], parse_tile(data["tile"], data["ranks"])
    heights = [LANE * len(lanes(of_rank(predicted, rank))) + 0.25 for predicted in timelines]
    bars = [BAR * len(rows(data)) + 0.7] if whole.ranks > 1 else []
    title += f"\nshown is rank {rank}: none ends the {first.direction} pass later"
    figure = new_figure(WIDTH, TOP + sum(bars) + sum(heights) + 0.6, title, left=0.005)
    grid = figure.add_gridspec(1 + len(bars) + len(timelines), 1, height_ratios=[TOP, *bars, *heights])
    top = grid[0].subgridspec(1, 3, width_ratios=[1, 1, 0.75])
    needed = work if not work.all() or work.min() < EQUAL * work.max() else None
    draw_assignment(figure.add_subplot(top[0]), first.tile, rank, needed, whole.h)
    of_token = token_bytes(problem, first.direction)
    tokens = {kind: load.moved(kind, first.route, first.collective)[:, rank] for kind in of_token}
    draw_tile(
        figure.add_subplot(top[1]),
        first.tile,
        rank,
        needed,
        first.direction,
        nbytes={kind: float(of_token[kind] * moved.sum()) for kind, moved in tokens.items()},
        moved={kind: moved > 0 for kind, moved in tokens.items()},
        in_part=any((moved[moved > 0] < _chunk(problem, kind, first.tile)).any() for kind, moved in tokens.items()),
    )
    draw_mesh(figure.add_subplot(top[2]), whole, rank)
    if bars:
        beside = grid[1].subgridspec(1, 2, width_ratios=[1.5, 1])
        draw_sent(figure.add_subplot(beside[0]), data)
        draw_times(figure.add_subplot(beside[1]), data)
    until, drawn = max(predicted.seconds for predicted in timelines) or None, []
    for row, predicted in enumerate(timelines, 1 + len(bars)):
        axes = figure.add_subplot(grid[row])
        drawn.append(axes)
        draw_lanes(axes, predicted, rank, until)
        of_plane = " of a plane" if whole.h > 1 else ""
        axes.set_title(f"Rank {rank}{of_plane} in the {predicted.direction} pass: {summary(of_rank(predicted, rank))}")
    axes.set_xlabel(lanes_label(*drawn))
    return figure


def _chunk(problem, kind, tile):
    """Tokens of the shortest chunk that moves as a kind."""
    return (problem.seqlen_k if kind in IN_COLUMNS else problem.seqlen) // tile.chunks
