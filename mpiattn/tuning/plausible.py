"""Figures that no machine has: a measurement that other programs or too few cores have disturbed."""

from typing import NamedTuple

from ..system.words import size


class Bound(NamedTuple):
    """What a figure is at most or at least on a machine that does nothing else.

    called: the figure in words.  worst: ten times or more beyond what slow machines have, in seconds or bytes a second.
    """

    called: str
    worst: float


# Ranks of a node hand a short message on in 0.2 to 5 us, those of two nodes in 1 to 100 us, also by TCP.
TIMES = {
    "inside latency": Bound("inside a node: latency", 1e-3),
    "between latency": Bound("between nodes: latency", 1e-2),
    "launch": Bound("overhead of a block", 1e-1),
}
# A core copies 2 to 20 GB a second.
RATES = {
    "inside bandwidth": Bound("inside a node: bandwidth of a rank", 5e7),
    "merging": Bound("merging partials", 5e7),
}


def implausible(samples):
    """What is implausible about measured figures, in words, one text for each.

    samples: the `Sample`s by name, as of `measure.Measured`.
    """
    slow = [
        f"{bound.called} {1e3 * samples[name].typical:.3g} ms, where {1e3 * bound.worst:.3g} ms is much"
        for name, bound in TIMES.items()
        if name in samples and samples[name].typical > bound.worst
    ]
    return slow + [
        f"{bound.called} {size(samples[name].typical)}/s, where {size(bound.worst)}/s is little"
        for name, bound in RATES.items()
        if name in samples and samples[name].typical < bound.worst
    ]
