"""Branch and bound: the cases of a search that have to be predicted to know the best.  Pure arithmetic."""

from heapq import heapify, heappop, heappush

from .cost import SCHEDULES

# Predicted times within this share of the least count as equal, because the model is no more accurate.  Exact bytes
# decide then.
SAME_TIME = 0.05
SECONDS, SENT = 0, 1  # what a bound is of


def fit(choices, max_memory):
    """The choices that do with max_memory bytes a rank; None for no limit."""
    return [choice for choice in choices if max_memory is None or choice.nbytes <= max_memory]


def merit(choice, equal_up_to):
    """What decides between choices, least first.  equal_up_to: times up to it count as equal."""
    return max(choice.seconds, equal_up_to), choice.sent_bytes, SCHEDULES.index(choice.schedule), choice.nbytes


class _Left:
    """Cases that are not predicted yet, as (least seconds, least bytes, number of the schedule, number)."""

    def __init__(self, cases):
        self._slower, self._equal = list(cases), []  # the second as (bytes, schedule, seconds, number)
        heapify(self._slower)

    def __bool__(self):
        return bool(self._slower or self._equal)

    def __iter__(self):
        return iter(self._slower + [_seconds_first(*case) for case in self._equal])

    def add(self, case):
        """Add a case."""
        heappush(self._slower, case)

    def take(self, equal_up_to):
        """Take out the most promising case: by `merit`, of those that may take no longer than equal times do.

        equal_up_to: as for `merit`.
        """
        while self._slower and self._slower[0][0] <= equal_up_to:
            seconds, sent, schedule, number = heappop(self._slower)
            heappush(self._equal, (sent, schedule, seconds, number))
        while self._equal and self._equal[0][2] > equal_up_to:  # it counted as equal before
            heappush(self._slower, _seconds_first(*heappop(self._equal)))
        return _seconds_first(*heappop(self._equal)) if self._equal else heappop(self._slower)

    def take_soonest(self):
        """Take out the case that may take the least time."""
        self._slower, self._equal = list(self), []
        heapify(self._slower)
        return heappop(self._slower)


def _seconds_first(sent, schedule, seconds, number):
    return seconds, sent, schedule, number


class _Known:
    """What is known of the cases so far.

    made: {number of a case: its choice}, of those that have been predicted.
    """

    def __init__(self, model, cases):
        self._model, self._cases = model, cases
        (_, quickest), *self._closer = model.lower_bounds
        self.made, self._looked = {}, [0] * len(cases)  # of every case, how many closer bounds are known
        self.left = _Left(
            [(quickest(case), 0.0, SCHEDULES.index(case.kind), number) for number, case in enumerate(cases)]
        )
        # orders the cases before one is predicted, nothing else
        self._possible = min(seconds for seconds, *_ in self.left)

    def look(self, among, case):
        """Know a closer bound of a case, which was taken out of `among`, or its choice after the closest."""
        *least, number = case
        if self._looked[number] == len(self._closer):
            self.made[number] = self._model.choice(self._cases[number])
            return
        quantity, bound = self._closer[self._looked[number]]
        least[quantity] = bound(self._cases[number])
        self._looked[number] += 1
        among.add((*least, number))
        if quantity == SECONDS and not self.made:
            self._possible = min(seconds for seconds, *_ in among)

    def _fit(self, tile=None):
        """The choices that do with the memory, the first case first; of a tile if given."""
        of_tile = (number for number in self.made if tile in (None, self._cases[number].tile))
        return fit([self.made[number] for number in sorted(of_tile)], self._model.max_memory)

    def shortest(self):
        """The shortest time so far; before any is known, the shortest that is possible."""
        return min((choice.seconds for choice in self._fit()), default=self._possible)

    def best(self, equal_up_to):
        """The best choice so far, the first of equal ones.  equal_up_to: as for `merit`."""
        return min(self._fit(), key=lambda choice: merit(choice, equal_up_to))

    def settled(self, case, equal_up_to, tile=None):
        """Whether the best is known before this case, the most promising, is predicted; of a tile if given."""
        fits = self._fit(tile)
        return fits and (max(case[0], equal_up_to), *case[1:3]) > min(merit(choice, equal_up_to)[:3] for choice in fits)


def needed(model, cases, of_tiles):
    """The choices by number of their case: enough to know the best of all, with `of_tiles` that of each tile too.

    model: its `lower_bounds` are pairs of SECONDS or SENT and a function of a case, which no choice is below.  Each is
        closer than those of its sort before, and takes longer.
    """
    known = _Known(model, cases)
    left = known.left
    while left:
        equal_up_to = (1 + SAME_TIME) * known.shortest()
        case = left.take(equal_up_to)
        if known.settled(case, equal_up_to):  # unless a shorter time is found to which the best is not equal
            left.add(case)
            best = known.best(equal_up_to)
            case = left.take_soonest()
            # No case left is shorter.  Or one is, but even then the best would count as equally long, and it is ahead
            # by what decides between equal times.
            if case[0] >= known.shortest() or (not of_tiles and best.seconds <= (1 + SAME_TIME) * case[0]):
                left.add(case)
                break
        known.look(left, case)
    for tile in dict.fromkeys(case.tile for case in cases) if of_tiles else ():
        of_tile = _Left([case for case in left if cases[case[-1]].tile == tile])
        while of_tile:
            equal_up_to = (1 + SAME_TIME) * known.shortest()
            case = of_tile.take(equal_up_to)
            if known.settled(case, equal_up_to, tile):
                break
            known.look(of_tile, case)
    return known.made
