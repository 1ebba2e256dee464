"""Strong scaling: time and speed-up of one problem against the number of ranks, measured and predicted."""

from statistics import median
from typing import NamedTuple

from ..console.table import duration
from ..errors import ArgumentError
from ..system.words import number
from .style import GRAY, INK, against_ranks, label_ends, new_figure, rank_axis, styled, time_axis

# Lines differ in color, dashes and markers.
LOOKS = (
    {"color": "#0072b2", "marker": "s", "linestyle": "-"},
    {"color": INK, "marker": "o", "linestyle": "-"},
    {"color": "#d55e00", "marker": "^", "linestyle": "--"},
    {"color": "#009e73", "marker": "D", "linestyle": "-."},
    {"color": "#cc79a7", "marker": "v", "linestyle": ":"},
    {"color": GRAY, "marker": "P", "linestyle": "--"},
)


class Series(NamedTuple):
    """Times of one method.

    ranks: numbers of ranks, increasing.  seconds: for each of them a list of seconds, one per run, or a number.
    predicted: the line is a prediction; it is drawn thin, dashed and without markers.
    """

    name: str
    ranks: list
    seconds: list
    predicted: bool = False

    @property
    def runs(self):
        """For every number of ranks, the list of seconds of its runs."""
        return [list(seconds) if hasattr(seconds, "__len__") else [seconds] for seconds in self.seconds]

    @property
    def medians(self):
        """For every number of ranks, the median of its runs, seconds."""
        return [median(runs) for runs in self.runs]


def check(series):
    """Raise ArgumentError unless every series has increasing numbers of ranks with positive times."""
    if not series:
        raise ArgumentError("series is empty; it must have at least one Series")
    for line in series:
        ranks = list(line.ranks)
        if not ranks or ranks != sorted(set(ranks)) or ranks[0] < 1 or len(ranks) != len(line.seconds):
            raise ArgumentError(
                f"ranks of {line.name!r} is {ranks}, with {len(line.seconds)} times; it must be "
                "increasing numbers of ranks with the times of each"
            )
        if any(not runs or min(runs) <= 0 for runs in line.runs):
            raise ArgumentError(
                f"seconds of {line.name!r} is {line.seconds}; it must be positive times, at least one "
                "for each number of ranks"
            )


def _look(series, i):
    """How to draw the i-th series; a prediction has the color of the measured series of the same name."""
    names = list(dict.fromkeys(line.name for line in series))
    look = LOOKS[names.index(series[i].name) % len(LOOKS)]
    if series[i].predicted:
        return {**look, "linestyle": (0, (4, 2)), "marker": "", "linewidth": 0.9}
    return {**look, "markersize": 4}


def _draw(axes, series, values, ideal):
    """Draw each series.  values(series): returns (middle, low, high).  ideal: (ranks, value) of both ends of a line."""
    axes.plot(*zip(*ideal), color=GRAY, linewidth=0.7, linestyle=":", label="ideal")
    labels, highest = [], []
    for i, line in enumerate(series):
        middle, low, high = values(line)
        look = _look(series, i)
        name = f"{line.name}, predicted" if line.predicted else line.name
        axes.plot(line.ranks, middle, label=name, **look)
        if any(a < b for a, b in zip(low, high)):
            axes.vlines(line.ranks, low, high, color=look["color"], linewidth=3, alpha=0.5, label=f"{name}: runs")
        labels.append((line.ranks[-1], middle[-1], name, look["color"]))
        highest += [*low, *high]
    highest += [value for _, value in ideal]
    ranks = sorted({count for line in series for count in line.ranks})
    against_ranks(axes)
    rank_axis(axes.xaxis, ranks)
    axes.set(xlim=(ranks[0] * 0.85, ranks[-1] * 1.15), ylim=(min(highest) / 1.2, max(highest) * 1.2))
    label_ends(axes, [*labels, (*ideal[1], "ideal", GRAY)])
    axes.set_xlabel("ranks")


@styled
def scaling(series, title, base=None):
    """A figure with times on the left and speed-ups on the right, logarithmic; bars show the range of the runs.

    series: list of `Series`.  title: the problem and the machine.  base: (ranks, seconds) to which a speed-up of
    `ranks` corresponds; default: the shortest median on the fewest ranks, of the measured series if there are any.
    """
    check(series)
    measured = [line for line in series if not line.predicted] or series
    if base is None:
        fewest = min(line.ranks[0] for line in measured)
        base = fewest, min(line.medians[0] for line in measured if line.ranks[0] == fewest)
    first, seconds = base
    last = max(line.ranks[-1] for line in series)
    figure = new_figure(8.4, 3.4, title)
    left, right = figure.subplots(1, 2)

    def times(line):
        return line.medians, [min(runs) for runs in line.runs], [max(runs) for runs in line.runs]

    def speedups(line):
        middle, low, high = times(line)
        return [[first * seconds / time for time in some] for some in (middle, high, low)]

    _draw(left, series, times, [(first, seconds), (last, seconds * first / last)])
    time_axis(left.yaxis)
    left.set_title("Time: median; bars: all runs")
    _draw(right, series, speedups, [(first, first), (last, last)])
    rank_axis(right.yaxis, [2**i for i in range(int(last).bit_length())])
    right.set_title(f"Speed-up, {first} of {number(first, 'rank')} in {duration(seconds)}")
    return figure
