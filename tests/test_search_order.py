"""Which cases a search predicts, on made-up ones with small numbers, so that there are ties of every sort."""

import random
from typing import NamedTuple

import pytest

from mpiattn.model import search
from mpiattn.model.cost import SCHEDULES
from mpiattn.model.space import SearchSpace
from mpiattn.problem.problem import Problem


class Made(NamedTuple):
    """A case, and the choice that is predicted of it."""

    number: int
    tile: int
    schedule: str
    seconds: float
    sent_bytes: float
    nbytes: int
    least: tuple

    @property
    def kind(self):
        return self.schedule

    def computing(self):
        return self.least[0]

    def sent(self):
        return self.least[1]

    def bound(self, overlap):
        return search.LowerBound(self.tile, None, self.least[3], {"forward": {"Q": self.least[2]}})

    def choice(self, max_memory):
        return self


def draw(rng, number, tiles, apart):
    seconds, sent = 1 + apart * rng.randint(0, 6), float(rng.randint(0, 3))
    closest = seconds * rng.choice([1, 1, rng.uniform(0.8, 1)]), sent * rng.choice([1, 1, 1, rng.random()])
    first = closest[0] * rng.choice([1, rng.uniform(0.8, 1)]), closest[1] * rng.choice([1, rng.random()])
    least = first[0], first[1], closest[1], closest[0]
    return Made(number, rng.randint(0, tiles), rng.choice(SCHEDULES), seconds, sent, rng.randint(1, 3), least)


@pytest.mark.draw(8)
@pytest.mark.parametrize("seed", range(20))
def test_the_same_best(seed, monkeypatch):
    """Of all cases, and of every tile."""
    predicted, all_cases = [], 0
    monkeypatch.setattr(Made, "choice", lambda self, max_memory: predicted.append(self) or self)
    for again in range(200):
        rng = random.Random(1000 * seed + again)
        tiles, apart = rng.choice([0, 2, 4]), rng.choice([0.01, 0.02, 0.03, 0.05, 0.1])
        cases = [draw(rng, number, tiles, apart) for number in range(rng.randint(1, 12))]
        space = SearchSpace(Problem(1, 1, 1), 1, max_memory=rng.choice([None, None, 1, 2, 3]))
        monkeypatch.setattr(search, "cases_of", lambda space, cases=cases: cases)
        everything, _ = search.survey(space)
        predicted.clear()
        assert search.survey(space, None)[0][0] == everything[0], (seed, again)
        all_cases += len(cases) - len(predicted)
        by_tile, _ = search.survey(space, "tile")
        for tile in {case.tile for case in cases}:
            first, expected = (next(c for c in of_search if c.tile == tile) for of_search in (by_tile, everything))
            assert first == expected, (seed, again, tile)
    assert all_cases > 200  # left out
