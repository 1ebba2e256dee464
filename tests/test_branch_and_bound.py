"""The quick search on made-up cases with small numbers, so that there are ties of every sort."""

import random
from typing import NamedTuple

import pytest

from mpiattn.model import search
from mpiattn.model.branch_and_bound import SECONDS, SENT
from mpiattn.model.cost import SCHEDULES


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


def draw(rng, number, tiles, apart):
    seconds, sent = 1 + apart * rng.randint(0, 6), float(rng.randint(0, 3))
    closest = seconds * rng.choice([1, 1, rng.uniform(0.8, 1)]), sent * rng.choice([1, 1, 1, rng.random()])
    first = closest[0] * rng.choice([1, rng.uniform(0.8, 1)]), closest[1] * rng.choice([1, rng.random()])
    least = first[0], first[1], closest[1], closest[0]
    return Made(number, rng.randint(0, tiles), rng.choice(SCHEDULES), seconds, sent, rng.randint(1, 3), least)


class Model:
    """What a search asks of a model."""

    def __init__(self, max_memory):
        self.max_memory, self.predicted = max_memory, 0
        self.lower_bounds = tuple(
            (quantity, lambda case, number=number: case.least[number])
            for number, quantity in enumerate((SECONDS, SENT, SENT, SECONDS))
        )

    def choice(self, case):
        self.predicted += 1
        return case


@pytest.mark.parametrize("seed", range(20))
def test_the_same_best(seed):
    """Of all cases, and of every tile."""
    predicted, all_cases = 0, 0
    for again in range(200):
        rng = random.Random(1000 * seed + again)
        tiles, apart = rng.choice([0, 2, 4]), rng.choice([0.01, 0.02, 0.03, 0.05, 0.1])
        cases = [draw(rng, number, tiles, apart) for number in range(rng.randint(1, 12))]
        max_memory = rng.choice([None, None, 1, 2, 3])
        everything, _ = search.find(Model(max_memory), cases, "choice")
        model = Model(max_memory)
        assert search.find(model, cases, None)[0][0] == everything[0], (seed, again)
        predicted, all_cases = predicted + model.predicted, all_cases + len(cases)
        by_tile, _ = search.find(Model(max_memory), cases, "tile")
        for tile in {case.tile for case in cases}:
            first, expected = (next(c for c in of_search if c.tile == tile) for of_search in (by_tile, everything))
            assert first == expected, (seed, again, tile)
    assert predicted < 0.8 * all_cases
