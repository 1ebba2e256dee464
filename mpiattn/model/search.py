"""The choice of tile, schedule, route and layout by predicted time.  Pure arithmetic.

This is the paper's loop over every factorisation of the number of ranks (Mesh-Attention, arXiv 2512.20968, section 3),
with any number of planes.  Regrouping is part of every case; with one plane in the caller's layouts it is nothing.
"""

from dataclasses import replace
from typing import NamedTuple

from ..errors import ArgumentError
from ..schedule.remembered import Remembered
from ..schedule.tile import Tile
from .cost import SCHEDULES
from .divided import PIECES, DividedCase
from .lower_bounds import ROUNDING
from .planes import Arrangement, aligned, inner_layouts
from .prediction import Predictions, sent_bytes
from .space import pair_of

# Predicted times within this share of the least count as equal, because the model is no more accurate.  Exact bytes
# decide then.
SAME_TIME = 0.05
SAME_TIME_OF_LISTS = 0.15  # under masks of several intervals, whose blocks' times are less well known


def same_time(mask):
    """The share of the least time within which times count as equal under a mask."""
    return SAME_TIME if mask.mask is None else SAME_TIME_OF_LISTS


class LowerBound(NamedTuple):
    """Lower bounds on the choices of a tile.

    layouts: of the case that may be the fastest.  seconds, and sent as of a `Choice`: of that case.
    """

    tile: Tile
    layouts: tuple
    seconds: float
    sent: dict

    @property
    def sent_bytes(self):
        """Bytes that a rank sends in all passes, mean over ranks."""
        return sent_bytes(self.sent)


class Case(NamedTuple):
    """A choice that is not predicted yet.

    schedule: of SCHEDULES.  inner: layouts with the same chunks as those of the arrangement's planes.
    predictions: the `Predictions` of a plane.
    """

    tile: Tile
    schedule: str
    route: str
    inner: tuple
    arrangement: Arrangement
    predictions: Predictions

    def computing(self):
        """A lower bound on the seconds, of computing alone."""
        return self.predictions.bounds(self.inner).computing(self.tile.plane, self.schedule == "collective")

    def sent(self):
        """A lower bound on the bytes that a rank sends, mean over ranks."""
        of_plane = sent_bytes(self.predictions.bounds(self.inner).sent(self.tile.plane))
        return (of_plane + self.arrangement.least_sent) * ROUNDING

    def bound(self, overlap):
        """The `LowerBound` of this case."""
        of_plane, tile, arrangement = self.predictions.bounds(self.inner), self.tile.plane, self.arrangement
        seconds = of_plane.seconds(tile, self.schedule, self.route, overlap) + arrangement.seconds(tile)
        return LowerBound(self.tile, arrangement.pair, seconds, arrangement.sent(of_plane.sent(tile)))

    def choice(self, max_memory):
        """The `Choice` of this case."""
        tile, arrangement = self.tile.plane, self.arrangement
        if max_memory is not None:
            max_memory = max(max_memory - arrangement.nbytes, 1)
        choice = self.predictions.choice(self.inner, tile, self.schedule, self.route, max_memory)
        around = arrangement.seconds(tile)
        seconds, waiting = choice.seconds + around, choice.waiting * choice.seconds + around * arrangement.regrouped
        return choice._replace(
            tile=self.tile,
            layouts=arrangement.pair,
            mesh_layouts=arrangement.inner,
            seconds=seconds,
            waiting=waiting / seconds if seconds else 0.0,
            sent=arrangement.sent(choice.sent),
            nbytes=choice.nbytes + arrangement.nbytes,
        )


def cases_of(space):
    """Every `Case` of a completed `SearchSpace`."""
    predictions = Remembered(lambda planes, regrouped: Predictions(space, planes, regrouped))
    one_chunk = pair_of(("contiguous", "contiguous"), space.problem, 1)  # the same for all kinds of layout
    arrangements = [
        (planes, Arrangement(space, planes, pair if space.fixed else aligned(pair, planes), inner))
        for planes in dict.fromkeys(tile.h for tile in space.tiles if not tile.divided)
        for pair in space.layout_pairs
        for inner in inner_layouts(space, pair, space.ranks // planes)
    ]
    routes = space.routes
    divided = [DividedCase(space, tile, pair) for tile in space.tiles if tile.divided for pair in space.layout_pairs]
    return divided + [
        Case(tile, schedule, route, inner, arrangement, predictions(planes, arrangement.regrouped))
        for planes, arrangement in arrangements
        for inner in [arrangement.inner if arrangement.inner[0].chunks > 1 else one_chunk]
        for tile in space.tiles
        if tile.h == planes and not tile.divided
        # with one chunk there is nothing to collect
        for schedule in (space.schedules if tile.chunks > 1 else space.schedules[:1])
        for route in routes
    ]


def survey(space, every="choice"):
    """The choices of a `SearchSpace`, best first, and lower bounds on others.

    Returns a list of `Choice` and a function.  The function returns {tile: `LowerBound`} of the tiles of which the list
    has no choice; it takes time.
    every: how many choices to predict.  "choice": all.  "tile": as few as tell the best of each tile.  None: as few as
        tell the best.  What is left out cannot be better.

    The best choice has the least predicted time.  Times within `same_time` of the least are equal; then the fewest
    bytes sent decide, then the first of SCHEDULES, which most often needs less memory, then the least memory, then the
    first layout.  Raises ArgumentError.
    """
    space = space.completed()
    cases = cases_of(space)
    whole = every == "choice" or len(cases) == 1
    known = _Known(cases, space, bounded=not whole)
    if whole:
        for number in range(len(cases)):
            known.predict(number)
    else:
        known.predict_best(exact=every == "tile")
        for tile in dict.fromkeys(case.tile for case in cases) if every == "tile" else ():
            known.predict_best([number for number, case in enumerate(cases) if case.tile == tile])

    def bounds():
        missing = dict.fromkeys(case.tile for case in cases)
        for choice in known.choices.values():
            missing.pop(choice.tile, None)
        of_tiles = {tile: [case.bound(space.overlap) for case in cases if case.tile == tile] for tile in missing}
        return {tile: min(of, key=lambda bound: (bound.seconds, bound.sent_bytes)) for tile, of in of_tiles.items()}

    return [known.choices[number] for number in known.in_order() if number in known.choices], bounds


class _Known:
    """What is known of cases: of each its choice, or else lower bounds.

    choices: by number of the case.
    bounded: False to save making the first bounds, where all cases are predicted.
    """

    def __init__(self, cases, space, bounded):
        self.choices, self._cases, self._space, self._same_time = {}, cases, space, same_time(space.mask)
        self._seconds = [float(case.computing()) if bounded else 0.0 for case in cases]
        self._sent, self._nbytes, self._looks = ([0] * len(cases) for _ in range(3))
        order = *SCHEDULES, PIECES
        self._kinds = [order.index(case.schedule) for case in cases]
        self._too_large = [False] * len(cases)

    def predict(self, number):
        """Predict a case."""
        choice = self.choices[number] = self._cases[number].choice(self._space.max_memory)
        self._seconds[number], self._sent[number] = choice.seconds, choice.sent_bytes
        self._nbytes[number], self._too_large[number] = choice.nbytes, not fits(choice, self._space.max_memory)

    def _look(self, number):
        """Know more of a case: a bound on its bytes, then closer bounds, then its choice; each takes longer."""
        case = self._cases[number]
        self._looks[number] += 1
        if self._looks[number] == 1:
            self._sent[number] = case.sent()
        elif self._looks[number] == 2:
            bound = case.bound(self._space.overlap)
            self._seconds[number], self._sent[number] = bound.seconds, bound.sent_bytes
        else:
            self.predict(number)

    def _fastest(self):
        """The least time of those that fit in the memory; before any is predicted, a lower bound on it."""
        return min([self._seconds[number] for number in self.choices if not self._too_large[number]] or self._seconds)

    def _merit(self, fastest):
        """What decides between cases, least first; of equal ones, those first that are not predicted."""
        equal = (1 + self._same_time) * fastest
        return lambda number: (
            self._too_large[number],
            max(self._seconds[number], equal),
            self._sent[number],
            self._kinds[number],
            number in self.choices,
            self._nbytes[number],
        )

    def in_order(self):
        """The numbers of the cases, best first by what is known."""
        return sorted(range(len(self._cases)), key=self._merit(self._fastest()))

    def predict_best(self, among=None, exact=True):
        """Predict cases until the best is known.

        among: numbers of some cases, of which the best is wanted; None for all.
        exact: whether to know the least time of all cases too, by which times count as equal (`same_time`).
        """
        among = range(len(self._cases)) if among is None else among
        while True:
            fastest = self._fastest()
            first = min(among, key=self._merit(fastest))
            if first in self.choices:
                left = [number for number in among if number not in self.choices]
                if not left:
                    return
                # `first` is the best, unless a case that is not predicted is so fast that `first` is no longer within
                # `same_time` of the fastest.  Its lower bound tells.
                soonest = min(left, key=self._seconds.__getitem__)
                enough = fastest if exact else self._seconds[first] / (1 + self._same_time)
                if self._seconds[soonest] >= min(enough, fastest):
                    return
                first = soonest
            self._look(first)


def fits(choice, max_memory):
    """Whether a choice needs no more than max_memory bytes a rank; None for no limit."""
    return max_memory is None or choice.nbytes <= max_memory


def within_memory(space, every=None):
    """As `survey`, with predicted seconds of the best choice without the memory limit, or with it if that is shorter.

    Raises ArgumentError if no choice needs as little memory as the limit.
    """
    space = space.completed()
    choices, bounds = survey(space, every)
    check_memory(choices, space.max_memory)
    fastest = choices[0].seconds
    if space.max_memory is not None:
        fastest = min(fastest, survey(replace(space, max_memory=None), None)[0][0].seconds)
    return choices, bounds, fastest


def without_documents(space, choice):
    """Predicted seconds of a choice if its calls have no documents: the least of any route, whatever its memory."""
    return survey(
        replace(
            space,
            mask=None,
            schedules=[choice.schedule],
            tiles=[choice.tile],
            layout_pairs=[choice.layouts],
            fixed=True,
            mesh_layout=choice.mesh_layouts,
            max_memory=None,
        ),
        every=None,
    )[0][0].seconds


def check_memory(choices, max_memory):
    """Raise ArgumentError if the best choice needs more than max_memory bytes on any rank; None for no limit."""
    if not fits(choices[0], max_memory):
        least = min(choices, key=lambda choice: choice.nbytes)
        raise ArgumentError(
            f"max_memory is {max_memory} bytes a rank; the smallest plan for these arguments needs {least.nbytes} "
            f"(tile {least.tile}, {least.schedule} schedule, {least.route} route, {least.layouts[0].kind} layout)"
        )


def times_as_long(seconds, fastest):
    """The ratio seconds / fastest; 1 if the fastest takes no time."""
    return seconds / fastest if fastest else 1.0
