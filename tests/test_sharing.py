"""Memory that buffers of a pass share: none that a step needs together, and no more than the fullest step needs."""

import random
from itertools import combinations, product

import pytest

from mpiattn.schedule.collective import collective
from mpiattn.schedule.greedy import greedy
from mpiattn.schedule.kinds import KINDS, arena_of
from mpiattn.schedule.route import ROUTES
from mpiattn.schedule.sharing import below, lives_of, stack
from mpiattn.schedule.tile import Tile

TILES = [(1, 2), (2, 1), (1, 4), (4, 1), (2, 2), (2, 4), (4, 4), (1, 8)]


def schedules(a, b, direction):
    tile = Tile(1, a, b)
    for route in ROUTES:
        yield collective(tile, route, direction)
        yield from (greedy(tile, (1, 1, 1, 1), route, direction, ahead) for ahead in (0, 2))


def steps_of(life):
    return {step for first, last in life for step in range(first, last + 1)}


@pytest.mark.parametrize("direction", KINDS)
@pytest.mark.parametrize("a, b", TILES)
def test_what_a_step_needs_together_lies_apart(a, b, direction):
    """For any sizes; for those of even chunks, the memory is that of the step that needs the most."""
    rng = random.Random(0)
    for schedule, cast in product(schedules(a, b, direction), (False, True)):
        fused = schedule.name == "collective"
        kinds = [kind for kind in KINDS[direction] if kind != "Q"]
        columns = [kind for kind in kinds if kind.endswith("KV")]
        token_bytes = {("arena", arena): {"Q": 4, "KV": 4}.get(arena, 2) for arena in schedule.slots}
        reduced = [kind for kind in kinds if kind != "KV"]
        token_bytes |= {("wire", kind): 1 for kind in reduced if cast and schedule.slots[arena_of(kind)]}
        for ordered in ((), columns) if fused and b > 1 else ((),):
            lives = lives_of(schedule, [kind for part, kind in token_bytes if part == "wire"], ordered)
            order = below(schedule, token_bytes, ordered)
            assert set(order) == set(lives)
            sizes = {name: rng.randint(0, 9) for name in order}
            starts, end = stack(order, sizes)
            for one, other in combinations(order, 2):
                if steps_of(lives[one]) & steps_of(lives[other]):
                    first, second = sorted((one, other), key=lambda name: (starts[name], starts[name] + sizes[name]))
                    assert starts[first] + sizes[first] <= starts[second], (one, other, str(schedule))
            assert max(sizes.values(), default=0) <= end <= sum(sizes.values())
            if not fused and not cast:
                even = {name: token_bytes[name[:2]] for name in order}
                fullest = [sum(even[name] for name in order if at in steps_of(lives[name])) for at in range(99)]
                assert stack(order, even)[1] == max(fullest), str(schedule)


def test_partials_land_where_chunks_were():
    """On two ranks: the keys and values of the other one have been read when the gradients of one's own come."""
    schedule = greedy(Tile(1, 1, 2), direction="backward")
    token_bytes = {("arena", arena): 2 for arena in schedule.slots}
    order = below(schedule, token_bytes)
    starts, end = stack(order, dict.fromkeys(order, 2))
    assert starts["arena", "KV", 0] == starts["arena", "+dKV", 0] != starts["arena", "dKV", 0] and end == 4
