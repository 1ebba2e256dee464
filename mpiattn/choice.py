"""The choice of tile, schedule and layout by predicted time: the paper's loop over every factorisation of n.

(Mesh-Attention, arXiv 2512.20968, section 3.)  Pure arithmetic.
"""

from typing import NamedTuple

from . import cost, memory
from .errors import ArgumentError
from .layout import KINDS, Layout
from .load import Load, block_pairs
from .schedule import ROUTES
from .tiling import tiles
from .traffic import token_bytes

# Which passes a choice is made for.
DIRECTIONS = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}
# Layouts that "auto" may take, the simplest first: it is taken where another is no faster.
AUTO_LAYOUTS = ("contiguous", "zigzag", "striped")
# Predicted times that differ by no more than this share are the same: the model knows no better, and bytes are exact.
SAME_TIME = 0.05


class Choice(NamedTuple):
    """A tile, a schedule kind and a layout, with what they are predicted to need.

    layouts: of queries and of keys.  balance: work of the busiest rank over the mean.  seconds: of the passes asked
    for.  sent: bytes that a rank sends in each pass by kind, mean over ranks.  nbytes: memory of the largest rank.
    """

    a: int
    b: int
    schedule: str
    layouts: tuple
    balance: float
    seconds: float
    sent: dict
    nbytes: int

    @property
    def sent_bytes(self):
        """Bytes that a rank sends in all."""
        return sum(sum(kinds.values()) for kinds in self.sent.values())


def layouts(argument, problem, ranks):
    """The pairs of layouts, of queries and of keys, that an argument leaves to choose from.

    argument: a kind, "auto", a `Layout` or a pair of them.  Where every query sees every key, all kinds are alike.
    """
    if isinstance(argument, str):
        if argument not in (*KINDS, "auto"):
            raise ArgumentError(f"layout is {argument!r}; it may be {', '.join(KINDS)}, auto")
        masked = problem.causal or problem.window != (None, None)
        kinds = [argument] if argument != "auto" else AUTO_LAYOUTS if masked else AUTO_LAYOUTS[:1]
        return [(Layout(kind, problem.seqlen, ranks), Layout(kind, problem.seqlen_k, ranks)) for kind in kinds]
    pair = (argument, argument) if isinstance(argument, Layout) else argument
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(one, Layout) for one in pair)):
        raise ArgumentError(f"layout is {argument!r}; it may be auto, {', '.join(KINDS)}, a Layout or a pair of them")
    if [(one.seqlen, one.chunks) for one in pair] != [(problem.seqlen, ranks), (problem.seqlen_k, ranks)]:
        raise ArgumentError(f"layout is {argument!r}; it must be of {problem.seqlen} queries and {problem.seqlen_k} "
                            f"keys on {ranks} ranks")
    return [pair]


def check_route(route, problem):
    """Raise ArgumentError unless partials can take that route."""
    if route not in ROUTES:
        raise ArgumentError(f"route is {route!r}; it may be {', '.join(ROUTES)}")
    if route == "ring" and problem.wire_dtype != problem.partial_dtype:
        raise ArgumentError(f"wire_dtype is {problem.wire_dtype!r}; on the ring route, where partials are rounded at "
                            f"every hop, it must be {problem.partial_dtype!r}")


def evaluate(problem, ranks, route="direct", kinds=cost.SCHEDULES, shapes=None, pairs=None,
             machine=cost.DEFAULT_MACHINE, direction="forward"):
    """Every tile (or those of `shapes`) with every schedule kind and pair of layouts as a Choice, best first.

    pairs: of layouts, those of queries and of keys; default those of "auto".  direction: of DIRECTIONS.

    Best is the least predicted time; among those that are as fast within SAME_TIME, the fewest bytes sent, then
    the least memory, then the first layout.
    """
    check_route(route, problem)
    schedules_of = {(*shape, kind): [cost.build(kind, *shape, route, problem, machine, one)
                                     for one in DIRECTIONS[direction]]
                    for shape in shapes or tiles(ranks) for kind in kinds}
    choices = []
    for pair in pairs or layouts("auto", problem, ranks):
        work, lengths = block_pairs(problem.mask, *pair), [layout.lengths for layout in pair]
        for a, b in shapes or tiles(ranks):
            load = Load(work, *lengths, a, b)
            for kind in kinds:
                schedules = schedules_of[a, b, kind]
                seconds = sum(cost.predicted_seconds(schedule, problem, load, machine) for schedule in schedules)
                sent = {schedule.direction: _sent(schedule, problem, load) for schedule in schedules}
                choices.append(Choice(a, b, kind, pair, load.balance, seconds, sent,
                                      _nbytes(schedules, problem, pair)))
    least = (1 + SAME_TIME) * min(choice.seconds for choice in choices)
    return sorted(choices, key=lambda c: (max(c.seconds, least), c.sent_bytes, c.nbytes))


def _sent(schedule, problem, load):
    return {kind: float(load.moved(kind, schedule.route, schedule.collective).sum() * nbytes / load.pairs.shape[2])
            for kind, nbytes in token_bytes(problem, schedule.direction).items()}


def _nbytes(schedules, problem, layouts):
    q_tokens, k_tokens = (max(layout.lengths) for layout in layouts)
    nbytes = memory.chunk_bytes(problem, q_tokens, k_tokens)
    for schedule in schedules:
        nbytes += memory.buffer_bytes(schedule, problem, q_tokens, k_tokens, layouts[1].kind)
        if schedule.direction == "backward":
            nbytes += memory.gradient_bytes(problem, q_tokens, k_tokens)
    return nbytes
