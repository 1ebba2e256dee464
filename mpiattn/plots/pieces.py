"""A division of the scores: which rank computes which queries and keys of each KV head, and its plan on one page."""

import numpy as np

from ..model.piece_map import middles, name_of, ranks_at, seen_at
from .listed import BAR, draw_sent, draw_times, rows
from .style import INK, centred, new_figure, styled
from .timeline import LABEL, LANE, draw_lanes, lanes, of_rank, slowest, summary

CELLS = 256  # of the image of a KV head, per side
MOST_HEADS = 4  # that are drawn
MOST_NUMBERED = 48  # with up to so many ranks pieces have their numbers
LIGHT, HIDDEN = 0.75, 0.15  # share of a rank's color where queries see keys, and where they do not
WIDTH, TOP = 13.0, 3.9  # inches
NEXT = 0.61803  # of all colors, between those of a rank and the next one: neighbours differ much


def _colors(ranks):
    """A color of each rank: (ranks, 3)."""
    from matplotlib import colormaps

    return colormaps["cividis_r"](np.arange(ranks) * NEXT % 1)[:, :3]


def draw_pieces(axes, division, group, problem, mask):
    """Draw the scores of one group, a KV head of a sequence: the pieces of every rank, paler where the mask hides."""
    queries, keys = middles(problem.seqlen, CELLS), middles(problem.seqlen_k, CELLS)
    ranks, seen = ranks_at(division, group, queries, keys), seen_at(mask, queries, keys)
    share = np.where(seen, LIGHT, HIDDEN)[..., None]
    image = np.where(ranks[..., None] < 0, 1.0, 1 - share * (1 - _colors(len(division))[ranks]))
    if image.size:
        extent = 0, problem.seqlen_k, problem.seqlen, 0
        axes.imshow(image, extent=extent, interpolation="nearest", aspect="auto")
    for rank, pieces in enumerate(division):
        for piece in pieces:
            if piece.group == group:
                _frame(axes, piece)
        if len(division) <= MOST_NUMBERED:
            _number(axes, rank, queries, keys, (ranks == rank) & seen)
    axes.set(xlim=(0, max(problem.seqlen_k, 1)), ylim=(max(problem.seqlen, 1), 0))
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("key")
    axes.locator_params(nbins=4)
    axes.set_title(name_of(group, problem))
    for spine in axes.spines.values():
        spine.set_visible(True)


def _frame(axes, piece):
    _, top, bottom, left, right = piece
    axes.plot([left, right, right, left, left], [top, top, bottom, bottom, top], color=INK, linewidth=0.5)


def _number(axes, rank, queries, keys, seen):
    """Write a rank's number where its queries see keys.  seen: (queries, keys)."""
    rows, _ = seen.nonzero()
    if len(rows):
        row = rows[len(rows) // 2]
        centred(axes, keys[seen[row]].mean(), queries[row], str(rank), fontsize=6, color=INK)


@styled
def page(problem, mask, division, timelines, title, data):
    """A figure of a plan of pieces: those of the first KV heads, the tiles of the table, and the slowest rank's time.

    division: of the first pass.  timelines: predicted, one per pass.  title: the plan in words.  data: the JSON of
    `mpiattn plan`.
    """
    groups = problem.batch * problem.kv_heads
    shown = min(groups, MOST_HEADS)
    heights = [LANE * len(lanes(of_rank(predicted, slowest(predicted)))) + 0.25 for predicted in timelines]
    bars = [BAR * len(rows(data)) + 0.7] if len(division) > 1 else []
    of_all = f" of {groups}" if shown < groups else ""
    title += (
        f"\nscores of {shown}{of_all} KV heads in the {timelines[0].direction} pass, queries from top to bottom; "
        "a color is a rank, pale: hidden"
    )
    figure = new_figure(WIDTH, TOP + sum(bars) + sum(heights) + 0.6, title, left=0.005)
    grid = figure.add_gridspec(1 + len(bars) + len(timelines), 1, height_ratios=[TOP, *bars, *heights])
    top = grid[0].subgridspec(1, MOST_HEADS)
    for group in range(shown):
        axes = figure.add_subplot(top[group])
        draw_pieces(axes, division, group, problem, mask)
        if group == 0:
            axes.set_ylabel("query")
    if bars:
        beside = grid[1].subgridspec(1, 2, width_ratios=[1.5, 1])
        draw_sent(figure.add_subplot(beside[0]), data)
        draw_times(figure.add_subplot(beside[1]), data)
    until = max(predicted.seconds for predicted in timelines) or None
    for row, predicted in enumerate(timelines, 1 + len(bars)):
        axes, rank = figure.add_subplot(grid[row]), slowest(predicted)
        draw_lanes(axes, predicted, rank, until)
        about = f"Rank {rank}, which ends last in the {predicted.direction} pass"
        axes.set_title(f"{about}: {summary(of_rank(predicted, rank))}")
    axes.set_xlabel(LABEL)
    return figure
