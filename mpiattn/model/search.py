"""The choice of tile, schedule, route and layout by predicted time.  Pure arithmetic.

This is the paper's loop over every factorisation of the number of ranks (Mesh-Attention, arXiv 2512.20968, section 3).
"""

import copy
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..problem.byte_counts import byte_count
from ..problem.choices import one_of
from ..problem.layout import LAYOUTS, Layout, of_sizes
from ..schedule.remembered import Remembered
from ..schedule.route import ROUTES, passed_on
from ..schedule.tile import Tile, tiles
from ..schedule.travels import token_bytes
from . import cost, memory
from .branch_and_bound import SAME_TIME, SECONDS, SENT, fit, merit, needed
from .launches import Launches
from .lower_bounds import LowerBounds
from .machine import DEFAULT
from .simulate import simulate
from .workload import Load, Work

# The passes that a plan is optimised for.
DIRECTIONS = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}
# Layouts that "auto" may choose, simplest first: the earlier wins a tie.
AUTO_LAYOUTS = ("contiguous", "zigzag", "striped")
LOADS = 4  # kept at a time, because they take memory


class Choice(NamedTuple):
    """A tile, a schedule kind, a route and layouts, with their predicted costs.

    layouts: of queries and of keys, as the caller's ranks hold them.
    mesh_layouts: those with which a plane of the mesh computes; the same unless heads or tokens are regrouped.
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
    layouts: tuple[Layout, Layout]
    mesh_layouts: tuple[Layout, Layout]
    ahead: int
    balance: float
    seconds: float
    waiting: float
    sent: dict
    nbytes: int

    @property
    def sent_bytes(self):
        """Bytes that a rank sends in all passes, mean over ranks."""
        return sent_bytes(self.sent)


def sent_bytes(sent):
    """Bytes of all passes and kinds; choices and bounds are summed in the same order, so that equal ones stay equal."""
    return sum(sum(kinds.values()) for kinds in sent.values())


def balancing(mask, chunks):
    """The kinds of layout that "auto" considers.

    Without a mask, or with one chunk, all balance equally well; then only the simplest.
    """
    return AUTO_LAYOUTS[:1] if mask.full or chunks == 1 else AUTO_LAYOUTS


def pair_of(kinds, problem, chunks):
    """Layouts of queries and of keys of two kinds; one and the same if they are equal, since it keeps its ranges."""
    queries, keys = (Layout(kind, tokens, chunks) for kind, tokens in zip(kinds, (problem.seqlen, problem.seqlen_k)))
    return queries, queries if queries == keys else keys


def layouts(argument, problem, ranks, mask=None):
    """The pairs of layouts, (of queries, of keys), that an argument allows.  Raises ArgumentError.

    argument: a kind, "auto", a `Layout`, sizes of chunks, or a pair of these two.  "auto" without a mask allows
        "contiguous" only, because all kinds balance equally well then.
    """
    if isinstance(argument, str):
        one_of("layout", argument, (*LAYOUTS, "auto"))
        kinds = [argument] if argument != "auto" else balancing(mask or problem.mask, ranks)
        return [pair_of((kind, kind), problem, ranks) for kind in kinds]
    pair = of_sizes(argument, ranks)
    if isinstance(pair, Layout):
        pair = pair, pair
    elif isinstance(pair, tuple):
        pair = tuple(of_sizes(layout, ranks) for layout in pair)
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(layout, Layout) for layout in pair)):
        raise ArgumentError(
            f"layout is {argument!r}; it may be auto, {', '.join(LAYOUTS)}, a Layout, a tuple of the ranks' numbers of "
            "tokens, or a pair of these two"
        )
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
    one_of("route", route, (*ROUTES, "auto"))
    lowered = problem.wire_dtype != problem.partial_dtype
    if lowered and passed_on(route):
        raise ArgumentError(
            f"wire_dtype is {problem.wire_dtype!r}; on the ring route, where partials are rounded at "
            f"every hop, it must be {problem.partial_dtype!r}"
        )
    if route != "auto":
        return [route]
    return [name for name in ROUTES if not passed_on(name) or not (lowered or machine.node_bandwidth is None)]


class LowerBound(NamedTuple):
    """What no choice of a tile is below.

    layouts, seconds: of the case that may be the fastest.  sent: as of a `Choice`, of that case.
    """

    tile: Tile
    layouts: tuple
    seconds: float
    sent: dict

    @property
    def sent_bytes(self):
        """Bytes that a rank sends in all passes, mean over ranks."""
        return sent_bytes(self.sent)


def evaluate(*arguments, **options):
    """The choices of `survey`, best first; arguments as there."""
    return survey(*arguments, **options)[0]


def survey(
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
    every="choice",
    mask=None,
):
    """A `Choice` for every combination of tile, schedule kind, route and pair of layouts, best first; and lower bounds.

    The lower bounds are a function, which takes time: by tile, one `LowerBound` for each of which no choice was needed.
    shapes: the tiles to try, default all.
    pairs: pairs of layouts (of queries, of keys), default those that "auto" allows.
    direction: a key of DIRECTIONS.
    nodes: the node of every rank; default as in `model.simulate`.
    overlap: as in `model.cost.build`.
    max_memory: bytes a rank.  Choices that need more come last.  Transfers are posted ahead only as far as it allows.
    every: "choice", or less for a quick search: "tile" returns the best of each tile at least, None the best at least.
        What is left out cannot be better.
    mask: that of the documents to expect, for times and bytes; memory goes by problem.mask, the default.

    The best choice has the least predicted time.  Times within SAME_TIME of the least are equal; then the fewest bytes
    sent decide, then the first of SCHEDULES, which most often needs less memory, then the least memory, then the first
    layout.  Raises ArgumentError.
    """
    max_memory, shapes = memory_limit(max_memory), shapes or tiles(ranks)
    cases = [
        Case(tile, kind, chosen_route, pair)
        for pair in pairs or layouts("auto", problem, ranks, mask)
        for tile in shapes
        for kind in kinds
        for chosen_route in routes(route, problem, machine)
    ]
    return find(Model(problem, shapes, machine, direction, nodes, overlap, max_memory, mask), cases, every)


def find(model, cases, every):
    """The choices and lower bounds of `survey` for some cases of a model."""
    if every == "choice" or len(cases) == 1:
        made = {number: model.choice(case) for number, case in enumerate(cases)}
    else:
        made = needed(model, cases, every == "tile")
    choices = [made[number] for number in sorted(made)]

    def bounds():
        missing = dict.fromkeys(case.tile for case in cases)
        for choice in choices:
            missing.pop(choice.tile, None)
        return {tile: model.lower_bound([case for case in cases if case.tile == tile]) for tile in missing}

    return sorted(choices, key=_order(choices, model.max_memory)), bounds


class Case(NamedTuple):
    """A choice that is not predicted yet."""

    tile: Tile
    kind: str
    route: str
    pair: tuple


class Model:
    """What the cases of a search have in common, made once.

    shapes: the tiles of all cases.
    """

    def __init__(self, problem, shapes, machine, direction, nodes, overlap, max_memory, mask=None):
        self.problem, self.machine, self.nodes, self.overlap = problem, machine, nodes, overlap
        self.mask = mask or problem.mask
        self.directions, self.max_memory = DIRECTIONS[direction], max_memory
        self._work = Remembered(lambda pair: Work(self.mask, *pair))
        self._load = lru_cache(LOADS)(lambda pair, tile: Load(self._work(pair), tile))
        self._load_without_documents = self._load  # a plan makes its memory for these calls
        if self.mask != problem.mask:
            without_documents = Remembered(lambda pair: Work(problem.mask, *pair))
            self._load_without_documents = lru_cache(LOADS)(lambda pair, tile: Load(without_documents(pair), tile))
        self._launches = Remembered(lambda pair: Launches(problem, self._work(pair), tuple(shapes), machine))
        self._computing = Remembered(lambda pair: self._launches(pair).least_seconds(self.directions))
        self._lower_bounds = Remembered(
            lambda pair, tile: LowerBounds(problem, self._work(pair), tile, machine, nodes, self._launches(pair))
        )
        self._sent, self._schedules = Remembered(self._sent_in), Remembered(self._build)
        self._choices = Remembered(self._choice)
        self.lower_bounds = ((SECONDS, self.computing), (SENT, self.sent), (SECONDS, self.seconds))

    def _build(self, tile, kind, route, ahead):
        return [
            cost.build(kind, tile, route, self.problem, self.machine, of_pass, self.nodes, ahead, self.overlap)
            for of_pass in self.directions
        ]

    def computing(self, case):
        """Seconds that no choice of a case is below, of its computing alone."""
        return self._computing(case.pair)[case.tile, case.kind == "collective"]

    def sent(self, case):
        """Bytes that no choice of a case sends less than."""
        return sent_bytes(self.sent_by_pass(case))

    def sent_by_pass(self, case):
        """{pass: {kind: bytes}} that no choice of a case sends less than."""
        return self._sent(case.pair, case.tile)

    def _sent_in(self, pair, tile):
        bounds = self._lower_bounds(pair, tile)
        return {of_pass: bounds.sent(of_pass) for of_pass in self.directions}

    def seconds(self, case):
        """Seconds that no choice of a case is below."""
        bounds = self._lower_bounds(case.pair, case.tile)
        return sum(bounds.seconds(case.kind, case.route, of_pass, self.overlap) for of_pass in self.directions)

    def limited(self, max_memory):
        """The same model with another limit for memory."""
        other = copy.copy(self)  # what is cached depends on no limit
        other.max_memory = max_memory
        return other

    def lower_bound(self, cases):
        """The `LowerBound` of the cases of a tile."""
        case, seconds = least_of(self, cases)
        return LowerBound(case.tile, case.pair, seconds, self.sent_by_pass(case))

    def choice(self, case):
        """The `Choice` of a case."""
        return self._choices(case, self.max_memory)

    def _choice(self, case, max_memory):
        problem, load = self.problem, self._load(case.pair, case.tile)
        prepared = self._load_without_documents(case.pair, case.tile)
        built = self._schedules(*case[:3], cost.AHEAD)
        ahead, nbytes = built[0].ahead, _nbytes(built, problem, prepared, case.pair)
        while ahead and max_memory is not None and nbytes > max_memory:
            ahead -= 1
            built = self._schedules(*case[:3], ahead)
            nbytes = _nbytes(built, problem, prepared, case.pair)
        runs = [simulate(schedule, problem, load, self.machine, self.nodes) for schedule in built]
        seconds = sum(run.seconds for run in runs)
        waiting = sum(float(run.waiting.mean()) for run in runs) / seconds if seconds else 0.0
        sent = {schedule.direction: _sent(schedule, problem, load) for schedule in built}
        return Choice(*case, case.pair, ahead, load.balance, seconds, waiting, sent, nbytes)


def _order(choices, max_memory):
    """The key that sorts choices, best first."""
    fits = fit(choices, max_memory)
    least = (1 + SAME_TIME) * min(choice.seconds for choice in fits or choices)
    return lambda c: (bool(fits) and not fit([c], max_memory), *merit(c, least))


def least_of(model, cases):
    """The case that may be the fastest, with the fewest bytes of equal ones, and the seconds that it is not below."""
    return min(((case, model.seconds(case)) for case in cases), key=lambda least: (least[1], model.sent(least[0])))


def memory_limit(value):
    """max_memory as an int, or None; raises ArgumentError."""
    return None if value is None else byte_count("max_memory", value)


def check_memory(choices, max_memory):
    """Raise ArgumentError if the best choice needs more than max_memory bytes on any rank; None for no limit."""
    if max_memory is not None and choices[0].nbytes > max_memory:
        least = min(choices, key=lambda choice: choice.nbytes)
        raise ArgumentError(
            f"max_memory is {max_memory} bytes a rank; the smallest plan for these arguments needs {least.nbytes} "
            f"(tile {least.tile}, {least.schedule} schedule, {least.route} route, {least.layouts[0].kind} layout)"
        )


def times_as_long(seconds, fastest):
    """The ratio seconds / fastest; 1 if the fastest takes no time."""
    return seconds / fastest if fastest else 1.0


def _sent(schedule, problem, load):
    return {
        kind: load.moved(kind, schedule.route, schedule.collective).sum().item() * nbytes / schedule.tile.ranks
        for kind, nbytes in token_bytes(problem, schedule.direction).items()
    }


def _nbytes(schedules, problem, load, layouts):
    """Bytes of memory on the rank that needs the most."""
    nbytes = memory.chunk_bytes(problem, *load.lengths)
    buffers = [memory.buffer_bytes(schedule, problem, load, layouts[1].kind) for schedule in schedules]
    nbytes = nbytes + np.max(buffers, axis=0)  # the passes share them
    for schedule in schedules:
        if schedule.direction == "backward":
            nbytes = nbytes + memory.gradient_bytes(problem, *load.lengths)
    return int(nbytes.max())
