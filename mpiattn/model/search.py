"""The choice of tile, schedule, route and layout by predicted time.  Pure arithmetic.

This is the paper's loop over every factorisation of the number of ranks (Mesh-Attention, arXiv 2512.20968, section 3).
"""

from numbers import Integral
from typing import NamedTuple

from ..errors import ArgumentError
from ..problem.layout import LAYOUTS, Layout
from ..schedule.route import ROUTES, passed_on
from ..schedule.tile import Tile, tiles
from ..schedule.travels import token_bytes
from . import cost, memory
from .machine import DEFAULT
from .simulate import simulate
from .workload import Load, block_pairs

# The passes that a plan is optimised for.
DIRECTIONS = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}
# Layouts that "auto" may choose, simplest first: the earlier wins a tie.
AUTO_LAYOUTS = ("contiguous", "zigzag", "striped")
# Predicted times within this share of the least count as equal, because the model is no more accurate.  Exact bytes
# decide then.
SAME_TIME = 0.05


class Choice(NamedTuple):
    """A tile, a schedule kind, a route and layouts, with their predicted costs.

    layouts: of queries and of keys.
    ahead: how many steps ahead transfers may be posted.
    balance: work of the busiest rank / mean work.
    seconds: predicted time of all passes of the direction.
    waiting: share of that time that a rank waits, mean over ranks.
    sent: {direction: {kind: bytes that a rank sends, mean over ranks}}.
    nbytes: bytes of memory on the rank that needs the most.
    """

    tile: Tile
    schedule: str
    route: str
    layouts: tuple
    ahead: int
    balance: float
    seconds: float
    waiting: float
    sent: dict
    nbytes: int

    @property
    def sent_bytes(self):
        """Bytes that a rank sends in all passes, mean over ranks."""
        return sum(sum(kinds.values()) for kinds in self.sent.values())


def layouts(argument, problem, ranks):
    """The pairs of layouts, (of queries, of keys), that an argument allows.  Raises ArgumentError.

    argument: a kind, "auto", a `Layout` or a pair of them.  "auto" without a mask allows "contiguous" only, because all
        kinds balance equally well then.
    """
    if isinstance(argument, str):
        if argument not in (*LAYOUTS, "auto"):
            raise ArgumentError(f"layout is {argument!r}; it may be {', '.join(LAYOUTS)}, auto")
        masked = problem.causal or problem.window != (None, None)
        kinds = [argument] if argument != "auto" else AUTO_LAYOUTS if masked else AUTO_LAYOUTS[:1]
        return [(Layout(kind, problem.seqlen, ranks), Layout(kind, problem.seqlen_k, ranks)) for kind in kinds]
    pair = (argument, argument) if isinstance(argument, Layout) else argument
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(layout, Layout) for layout in pair)):
        raise ArgumentError(f"layout is {argument!r}; it may be auto, {', '.join(LAYOUTS)}, a Layout or a pair of them")
    if [(layout.seqlen, layout.chunks) for layout in pair] != [(problem.seqlen, ranks), (problem.seqlen_k, ranks)]:
        raise ArgumentError(
            f"layout is {argument!r}; it must be of {problem.seqlen} queries and {problem.seqlen_k} "
            f"keys on {ranks} ranks"
        )
    return [pair]


def routes(route, problem, machine):
    """The routes that an argument allows.  Raises ArgumentError.

    "auto" considers the ring route only if the ranks of a node share its card: neighbours cross nodes less often.
    Otherwise both routes cost the same.  Partials that are rounded for the wire cannot take the ring route.
    """
    if route not in (*ROUTES, "auto"):
        raise ArgumentError(f"route is {route!r}; it may be {', '.join(ROUTES)}, auto")
    lowered = problem.wire_dtype != problem.partial_dtype
    if lowered and passed_on(route):
        raise ArgumentError(
            f"wire_dtype is {problem.wire_dtype!r}; on the ring route, where partials are rounded at "
            f"every hop, it must be {problem.partial_dtype!r}"
        )
    if route != "auto":
        return [route]
    return [name for name in ROUTES if not passed_on(name) or not (lowered or machine.node_bandwidth is None)]


def evaluate(
    problem,
    ranks,
    route="direct",
    kinds=cost.SCHEDULES,
    shapes=None,
    pairs=None,
    machine=DEFAULT,
    direction="forward",
    nodes=None,
    overlap=True,
    max_memory=None,
):
    """A `Choice` for every combination of tile, schedule kind, route and pair of layouts, best first.

    shapes: the tiles to try, default all.
    pairs: pairs of layouts (of queries, of keys), default those that "auto" allows.
    direction: a key of DIRECTIONS.
    nodes: the node of every rank; default as in `model.simulate`.
    overlap: as in `model.cost.build`.
    max_memory: bytes a rank.  Choices that need more come last.  Transfers are posted ahead only as far as it allows.

    The best choice has the least predicted time.  Times within SAME_TIME of the least are equal; then the fewest bytes
    sent decide, then the least memory, then the first layout.  Raises ArgumentError.
    """
    max_memory = memory_limit(max_memory)

    def schedules(tile, kind, chosen_route, ahead):
        return [
            cost.build(kind, tile, chosen_route, problem, machine, of_pass, nodes, ahead, overlap)
            for of_pass in DIRECTIONS[direction]
        ]

    made = {
        (tile, kind, chosen_route): schedules(tile, kind, chosen_route, cost.AHEAD)
        for tile in shapes or tiles(ranks)
        for kind in kinds
        for chosen_route in routes(route, problem, machine)
    }
    choices = []
    for pair in pairs or layouts("auto", problem, ranks):
        work, lengths = block_pairs(problem.mask, *pair), [layout.lengths for layout in pair]
        loads = {tile: Load(work, *lengths, tile) for tile in {tile for tile, *_ in made}}
        for (tile, kind, chosen_route), built in made.items():
            load, ahead, nbytes = loads[tile], built[0].ahead, _nbytes(built, problem, pair)
            while ahead and max_memory is not None and nbytes > max_memory:
                ahead -= 1
                built = schedules(tile, kind, chosen_route, ahead)
                nbytes = _nbytes(built, problem, pair)
            runs = [simulate(schedule, problem, load, machine, nodes) for schedule in built]
            seconds = sum(run.seconds for run in runs)
            waiting = sum(float(run.waiting.mean()) for run in runs) / seconds if seconds else 0.0
            sent = {schedule.direction: _sent(schedule, problem, load) for schedule in built}
            choices.append(Choice(tile, kind, chosen_route, pair, ahead, load.balance, seconds, waiting, sent, nbytes))
    fits = [choice for choice in choices if max_memory is None or choice.nbytes <= max_memory]
    least = (1 + SAME_TIME) * min(choice.seconds for choice in fits or choices)
    return sorted(choices, key=lambda c: (bool(fits) and c not in fits, max(c.seconds, least), c.sent_bytes, c.nbytes))


def memory_limit(value):
    """max_memory as an int, or None; raises ArgumentError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral) or value <= 0:
        raise ArgumentError(f"max_memory is {value!r}; it must be a positive number of bytes, or None")
    return int(value)


def check_memory(choices, max_memory):
    """Raise ArgumentError if the best choice needs more than max_memory bytes on any rank; None for no limit."""
    if max_memory is not None and choices[0].nbytes > max_memory:
        least = min(choices, key=lambda choice: choice.nbytes)
        raise ArgumentError(
            f"max_memory is {max_memory} bytes a rank; the least that these arguments leave to choose "
            f"from needs {least.nbytes} (tile {least.tile}, {least.schedule}, {least.route} "
            f"route, {least.layouts[0].kind} layout)"
        )


def times_as_long(seconds, fastest):
    """The ratio seconds / fastest; 1 if the fastest takes no time."""
    return seconds / fastest if fastest else 1.0


def _sent(schedule, problem, load):
    return {
        kind: float(load.moved(kind, schedule.route, schedule.collective).sum() * nbytes / load.pairs.shape[2])
        for kind, nbytes in token_bytes(problem, schedule.direction).items()
    }


def _nbytes(schedules, problem, layouts):
    q_tokens, k_tokens = (max(layout.lengths) for layout in layouts)
    nbytes = memory.chunk_bytes(problem, q_tokens, k_tokens)
    for schedule in schedules:
        nbytes += memory.buffer_bytes(schedule, problem, q_tokens, k_tokens, layouts[1].kind)
        if schedule.direction == "backward":
            nbytes += memory.gradient_bytes(problem, q_tokens, k_tokens)
    return nbytes
