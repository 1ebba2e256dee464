"""Strong scaling: time and speed-up of one problem against the number of ranks, measured and predicted."""

from statistics import median
from typing import NamedTuple

from ..console.table import duration
from ..errors import ArgumentError
from .style import GRAY, INK, label_ends, new_figure, rank_axis, styled, time_axis

# Lines differ in color, dashes and markers.
LOOKS = ({"color": "#0072b2", "marker": "s", "linestyle": "-"}, {"color": INK, "marker": "o", "linestyle": "-"},
         {"color": "#d55e00", "marker": "^", "linestyle": "--"}, {"color": "#009e73", "marker": "D", "linestyle": "-."},
         {"color": "#cc79a7", "marker": "v", "linestyle": ":"}, {"color": GRAY, "marker": "P", "linestyle": "--"})


class Series(NamedTuple):
    """Times of one method.

    ranks: numbers of ranks, increasing.  seconds: for each of them the list of its runs' seconds, or one number.
    predicted: the line is a prediction, and drawn thin, dashed and without markers.
    """

    name: str
    ranks: list
    seconds: list
    predicted: bool = False

    @property
    def runs(self):
        """The list of every number of ranks' runs."""
        return [list(seconds) if hasattr(seconds, "__len__") else [seconds] for seconds in self.seconds]

    @property
    def medians(self):
        """Seconds of every number of ranks, median of its runs."""
        return [median(runs) for runs in self.runs]


def check(series):
    """Raise ArgumentError unless every series has the times of increasing numbers of ranks."""
    if not series:
        raise ArgumentError("series is empty; it must be one Series at least")
    for one in series:
        ranks = list(one.ranks)
        if not ranks or ranks != sorted(set(ranks)) or ranks[0] < 1 or len(ranks) != len(one.seconds):
            raise ArgumentError(f"ranks of {one.name!r} is {ranks}, with {len(one.seconds)} times; it must be "
                                "increasing numbers of ranks with the times of each")
        if any(not runs or min(runs) <= 0 for runs in one.runs):
            raise ArgumentError(f"seconds of {one.name!r} is {one.seconds}; it must be positive times, one at least "
                                "for each number of ranks")


def _look(series, i):
    """How to draw the i-th series; a prediction looks as what is measured under the same name."""
    names = list(dict.fromkeys(one.name for one in series))
    look = LOOKS[names.index(series[i].name) % len(LOOKS)]
    return {**look, "linestyle": (0, (4, 2)), "marker": "", "linewidth": 0.9} if series[i].predicted else \
        {**look, "markersize": 4}


def _draw(axes, series, values, ideal):
    """Draw each series by `values`, which gives (middle, low, high) of a series; ideal: (ranks, value) of two ends."""
    axes.plot(*zip(*ideal), color=GRAY, linewidth=0.7, linestyle=":", label="ideal")
    labels, highest = [], []
    for i, one in enumerate(series):
        middle, low, high = values(one)
        look = _look(series, i)
        name = f"{one.name}, predicted" if one.predicted else one.name
        axes.plot(one.ranks, middle, label=name, **look)
        if any(a < b for a, b in zip(low, high)):
            axes.vlines(one.ranks, low, high, color=look["color"], linewidth=3, alpha=0.5, label=f"{name}: runs")
        labels.append((one.ranks[-1], middle[-1], name, look["color"]))
        highest += [*low, *high]
    highest += [value for _, value in ideal]
    ranks = sorted({count for one in series for count in one.ranks})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    rank_axis(axes.xaxis, ranks)
    axes.set(xlim=(ranks[0] * 0.85, ranks[-1] * 1.15), ylim=(min(highest) / 1.2, max(highest) * 1.2))
    label_ends(axes, [*labels, (*ideal[1], "ideal", GRAY)])
    axes.set_xlabel("ranks")
    axes.grid(axis="y", linewidth=0.3, color=GRAY, alpha=0.5)


@styled
def scaling(series, title, base=None):
    """A figure of times, beside it of speed-ups, both logarithmic; bars from the fastest to the slowest run.

    series: list of `Series`.  title: what was run on what machine.  base: (ranks, seconds) that a speed-up of `ranks`
    belongs to; default: the least median, of those measured if any, on the fewest ranks.
    """
    check(series)
    measured = [one for one in series if not one.predicted] or series
    if base is None:
        fewest = min(one.ranks[0] for one in measured)
        base = fewest, min(one.medians[0] for one in measured if one.ranks[0] == fewest)
    first, seconds = base
    last = max(one.ranks[-1] for one in series)
    figure = new_figure(8.4, 3.4)
    figure.suptitle(title, x=0.008, ha="left", fontsize=9, weight="bold")
    left, right = figure.subplots(1, 2)
    _draw(left, series, lambda one: (one.medians, [min(runs) for runs in one.runs], [max(runs) for runs in one.runs]),
          [(first, seconds), (last, seconds * first / last)])
    time_axis(left.yaxis)
    left.set_title("Time: median; bars: all runs")
    speed = first * seconds

    def speedups(one):
        return ([speed / middle for middle in one.medians], [speed / max(runs) for runs in one.runs],
                [speed / min(runs) for runs in one.runs])
    _draw(right, series, speedups, [(first, first), (last, last)])
    rank_axis(right.yaxis, [2 ** i for i in range(int(last).bit_length())])
    right.set_title(f"Speed-up, {first} of {first} rank{'s' * (first > 1)} in {duration(seconds)}")
    return figure
