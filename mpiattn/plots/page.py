"""A plan on one page: the assignment of blocks, what one rank's tile needs, bytes against ranks, and the timeline."""

from ..schedule.travels import token_bytes
from .assignment import draw_assignment, draw_tile
from .style import new_figure, styled
from .timeline import LANE, LANES_LABEL, draw_lanes, lanes, of_rank, slowest, summary
from .traffic import FEWEST, draw_traffic

WIDTH, TOP = 13.0, 4.4  # inches


@styled
def page(problem, work, load, schedules, timelines, title, machine):
    """A figure of a plan for a `Problem`; it shows the slowest rank of the first pass.

    work, load: `model.pairs.Pairs` of its layouts and the `Load` of its mesh.  schedules, timelines: one per
    pass, with predicted timelines.  title: the plan in words.  machine: the machine of the prediction, in words.
    """
    rank, first = slowest(timelines[0]), schedules[0]
    tile, ranks = first.tile, first.tile.ranks
    heights = [LANE * len(lanes(of_rank(predicted, rank))) + 0.25 for predicted in timelines]
    sends = ranks >= FEWEST and problem.seqlen + problem.seqlen_k > 0
    widths = [1, 1, 0.8] if sends else [1, 1]
    figure = new_figure(WIDTH, TOP + sum(heights) + 0.6)
    figure.suptitle(title, x=0.005, ha="left", fontsize=9, weight="bold")
    rows = figure.add_gridspec(1 + len(timelines), 1, height_ratios=[TOP, *heights])
    top = rows[0].subgridspec(1, len(widths), width_ratios=widths)
    shade = work if problem.causal or problem.window != (None, None) or not work.all() else None
    draw_assignment(figure.add_subplot(top[0]), tile, rank, shade)
    nbytes = {
        kind: float(load.moved(kind, first.route, first.collective)[:, rank].sum() * of_token)
        for kind, of_token in token_bytes(problem, first.direction).items()
    }
    draw_tile(figure.add_subplot(top[1]), tile, rank, shade, first.direction, nbytes)
    if sends:
        direction = first.direction if len(schedules) == 1 else "both"
        draw_traffic(figure.add_subplot(top[2]), problem, ranks, direction, tile)
    until = max(predicted.seconds for predicted in timelines) or None
    for row, predicted in enumerate(timelines, 1):
        axes = figure.add_subplot(rows[row])
        draw_lanes(axes, predicted, rank, until)
        axes.set_title(
            f"Rank {rank} in the {predicted.direction} pass, predicted for {machine}: "
            f"{summary(of_rank(predicted, rank))}"
        )
    axes.set_xlabel(LANES_LABEL)
    return figure
