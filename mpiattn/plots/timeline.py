"""Timelines of ranks in a pass, predicted (`mpiattn.model.simulate`) or measured (the executor's trace), at one scale.

For one rank: a lane of blocks and waiting, and a lane for each kind of transfer.  For several ranks: a row each.  The
input is a `schedule.timeline.Timeline` with times as arrays over ranks or, if measured, a dict of Timelines by rank.
"""

import math
from typing import NamedTuple

from ..console.table import duration, percent
from ..errors import ArgumentError
from ..schedule.kinds import GATHERED, NAMES, REDUCED
from ..schedule.timeline import Moved, StepTimes, Timeline
from .style import COLORS, HATCH, INK, POINTS, box, centred, new_figure, styled, time_axis

LANE, ROW = 0.26, 0.42  # heights of a lane and of a rank's row in inches, about
WHOLE = 0.8  # height of the bars in a lane, relative to the lane
NARROW = 3.0  # points; narrower bars are drawn without edges, which would cover them
SAME_TIME = 0.1  # overlap of two transfers, as a share of the later one, that is ignored

LABEL = "time since the pass began; hatched: waiting for what arrives and what leaves"
LANES_LABEL = f"{LABEL}; lanes of kinds: what arrives"
HOPS_LABEL = f"{LANES_LABEL}, #n: from the rank n hops away"


class Bar(NamedTuple):
    """A bar of a lane, in seconds since the pass began.  level: its row among bars that overlap in time."""

    what: str
    start: float
    stop: float
    text: str = ""
    level: int = 0


def of_rank(timeline, rank):
    """The timeline of one rank, with numbers as times; ArgumentError if the timeline does not have this rank."""
    if isinstance(timeline, dict):
        if rank not in timeline:
            raise ArgumentError(f"rank is {rank}; the timeline is of {', '.join(map(str, timeline))}")
        return timeline[rank]

    def pick(times):
        if getattr(times, "ndim", 0) == 0:
            return float(times)
        if not 0 <= rank < len(times):
            raise ArgumentError(f"rank is {rank}; the timeline is of {len(times)} ranks")
        return float(times[rank])

    steps = tuple(StepTimes(*map(pick, step)) for step in timeline.steps)
    moves = tuple(
        Moved(kind, hop, step, pick(begun), pick(arrived)) for kind, hop, step, begun, arrived in timeline.moves
    )
    return Timeline(timeline.direction, steps, moves, timeline.seconds)


def slowest(timeline):
    """The rank that ends last; 0 for a timeline of one rank."""
    if isinstance(timeline, dict):
        return max(timeline, key=lambda rank: timeline[rank].steps[-1].ended)
    ended = timeline.steps[-1].ended
    return int(ended.argmax()) if getattr(ended, "ndim", 0) else 0


def lanes(timeline):
    """The bars of one rank's timeline by lane: "blocks" (with the waiting of each step), then kinds of transfers."""
    by_lane = {"blocks": []}
    for posted, computed, ended in timeline.steps:
        if computed > posted:
            by_lane["blocks"].append(Bar("blocks", posted, computed))
        if ended > computed:
            by_lane["blocks"].append(Bar("waiting", computed, ended))
    for kind in (*GATHERED, *REDUCED[timeline.direction]):
        bars, until = [], []  # until: when each level is free
        for move in sorted(
            (move for move in timeline.moves if move.kind == kind and not math.isnan(move.begun)),
            key=lambda move: move.begun,
        ):
            after = move.begun + SAME_TIME * (move.arrived - move.begun)
            level = next((i for i, end in enumerate(until) if end <= after), len(until))
            until[level : level + 1] = [move.arrived]
            bars.append(Bar(kind, move.begun, move.arrived, f"#{move.hop}" if move.hop else "all", level))
        if bars:
            by_lane[kind] = bars
    return by_lane


def summary(timeline):
    """Seconds and waiting of one rank's timeline, as text."""
    seconds, waiting = timeline.steps[-1].ended, sum(step.ended - step.computed for step in timeline.steps)
    return f"{duration(seconds)}, of which {duration(waiting) if waiting else 'none'} waiting" + (
        f" ({percent(waiting / seconds)})" if waiting else ""
    )


def _draw_bars(axes, bars, bottom, height):
    """Draw bars between heights, with their texts where there is room."""
    levels = 1 + max((bar.level for bar in bars), default=0)
    points = 0.85 * POINTS * axes.figure.get_size_inches()[0] / axes.get_xlim()[1]  # per second, about
    for bar in bars:
        waits, length = bar.what == "waiting", points * (bar.stop - bar.start)
        y, tall = bottom + height * (1 - (bar.level + 1) / levels), height / levels
        edge = INK if waits else "white"
        if length <= NARROW:  # an edge of its own color keeps a short transfer visible
            edge = "none" if bar.what in ("blocks", "waiting") else COLORS[bar.what]
        look = {"facecolor": COLORS[bar.what], "edgecolor": edge, "hatch": HATCH if waits else None}
        box(axes, (bar.start, y), bar.stop - bar.start, tall, linewidth=0.4, label=bar.what, **look)
        if bar.text and height == WHOLE and levels <= 2 and length > 5.5 * len(bar.text):
            middle = (bar.start + bar.stop) / 2
            centred(axes, middle, y + tall / 2, bar.text, color=INK, fontsize=7 if levels == 1 else 6)


def lanes_label(*drawn):
    """What the time axis below some axes of lanes says; hops are explained where bars are wide enough to name them."""
    names_hops = any(text.get_text().startswith("#") for axes in drawn for text in axes.texts)
    return HOPS_LABEL if names_hops else LANES_LABEL


def _draw_key(figure, kinds):
    """Draw the colors of blocks, waiting and some kinds below a figure."""
    from matplotlib.patches import Patch

    looks = {
        name: {"facecolor": COLORS[name], "edgecolor": INK, "linewidth": 0.4} for name in ("blocks", "waiting", *kinds)
    }
    looks["waiting"]["hatch"] = HATCH
    handles = [Patch(**look, label=name) for name, look in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _frame(axes, ticks, until):
    axes.set(xlim=(0, until), ylim=(0, len(ticks)))
    axes.set_yticks([len(ticks) - 0.5 - i for i in range(len(ticks))], ticks)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    time_axis(axes.xaxis)


def draw_lanes(axes, timeline, rank=None, until=None):
    """Draw one rank in lanes, by default the slowest; returns the rank.

    until: seconds at which the axis ends; default: the end of the pass.
    """
    rank = slowest(timeline) if rank is None else rank
    shown = of_rank(timeline, rank)
    bars = lanes(shown)
    _frame(axes, list(bars), _end(shown) if until is None else until)
    for i, lane in enumerate(bars.values()):
        _draw_bars(axes, lane, len(bars) - i - (1 + WHOLE) / 2, WHOLE)
    return rank


def draw_ranks(axes, timeline, ranks, until=None):
    """Draw a row for each of some ranks: blocks and waiting above, below them a line for each kind of transfer."""
    by_rank = {rank: lanes(of_rank(timeline, rank)) for rank in ranks}
    _frame(axes, [f"rank {rank}" for rank in ranks], until or max(_end(of_rank(timeline, rank)) for rank in ranks))
    for i, bars in enumerate(by_rank.values()):
        top = len(ranks) - i - 0.05
        blocks, *transfers = bars.values()
        _draw_bars(axes, blocks, top - 0.5, 0.5)
        for j, lane in enumerate(transfers):
            _draw_bars(axes, [bar._replace(level=0) for bar in lane], top - 0.5 - 0.1 * (j + 1), 0.08)


def _end(timeline):
    arrived = [move.arrived for move in timeline.moves if not math.isnan(move.arrived)]
    return max([step.ended for step in timeline.steps] + arrived + [1e-9])


@styled
def timeline(entries, ranks=None, title=None):
    """A figure of one or more timelines, one above the other at the same scale.

    entries: pairs of a name ("predicted", "measured", ...) and a Timeline or, if measured, a dict of Timelines by rank.
    ranks: the ranks to show, a row each.  Default: the slowest rank of each timeline, in lanes.
    """
    if not entries:
        raise ArgumentError("entries is empty; it must be pairs of a name and a Timeline")
    shown = [(name, times, ranks or [slowest(times)]) for name, times in entries]
    until = max(_end(of_rank(times, rank)) for _, times, some in shown for rank in some)
    if ranks:
        heights = [ROW * len(ranks)] * len(shown)
    else:
        heights = [LANE * len(lanes(of_rank(times, some[0]))) for _, times, some in shown]
    figure = new_figure(8.4, sum(heights) + 0.45 * len(shown) + 0.4 + 0.3 * bool(title), title)
    grid = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)
    for (name, times, some), axes in zip(shown, grid[:, 0]):
        last = max(some, key=lambda rank, times=times: of_rank(times, rank).steps[-1].ended)
        if ranks:
            draw_ranks(axes, times, some, until)
        else:
            draw_lanes(axes, times, some[0], until)
        axes.set_title(f"{name}, rank {last}, which ends last: {summary(of_rank(times, last))}")
    if ranks:
        grid[-1, 0].set_xlabel(f"{LABEL}; thin bars: what arrives")
        _draw_key(figure, _kinds(shown))
    else:
        grid[-1, 0].set_xlabel(lanes_label(*grid[:, 0]))
    return figure


def _kinds(shown):
    return [
        kind for kind in NAMES if any(kind in lanes(of_rank(times, rank)) for _, times, some in shown for rank in some)
    ]
