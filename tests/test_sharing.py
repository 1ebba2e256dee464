"""Memory that buffers of a pass share: none that a step needs together, and no more than the fullest step needs."""

import random
from itertools import combinations, product

import numpy as np
import pytest

from mpiattn.backends.numpy.backend import NumpyBackend
from mpiattn.engine.buffers import Buffers
from mpiattn.engine.passes import Backward, Forward
from mpiattn.engine.pool import Pool
from mpiattn.problem.layout import Layout
from mpiattn.problem.problem import Problem
from mpiattn.schedule.collective import collective
from mpiattn.schedule.greedy import greedy
from mpiattn.schedule.kinds import GATHERED, IN_COLUMNS, KINDS, arena_of
from mpiattn.schedule.needed import Activity
from mpiattn.schedule.places import Places
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
            for names in combinations(order, 2):
                if steps_of(lives[names[0]]) & steps_of(lives[names[1]]):
                    first, second = sorted(names, key=lambda name: (starts[name], starts[name] + sizes[name]))
                    assert starts[first] + sizes[first] <= starts[second], (*names, str(schedule))
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


def test_a_wire_array_lives_from_the_cast_to_the_end_of_the_send():
    """A transfer may be posted, and its partial cast, steps before the one that completes it."""
    early = 0
    for (a, b), direction in product(TILES, KINDS):
        for schedule in schedules(a, b, direction):
            fused = 3 if schedule.name == "collective" else 1
            wires = [kind for kind in KINDS[direction] if kind not in GATHERED and schedule.slots[arena_of(kind)]]
            lives = lives_of(schedule, wires)
            for number, step in enumerate(schedule.steps):
                for transfer in (transfer for transfer in step.transfers if transfer.kind in wires):
                    early += transfer.earliest < number
                    posted = range(fused * transfer.earliest, fused * number + fused)
                    for slot in transfer.slots:
                        alive = steps_of(lives["wire", transfer.kind, 0 if fused == 3 else slot])
                        assert set(posted) <= alive, (transfer, str(schedule))
    assert early


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("a, b", TILES)
def test_what_a_fused_launch_reads_and_writes_lies_apart(a, b, route):
    """Keys are sorted into other memory, the launch reads and writes, gradients are put back into other memory."""
    schedule = collective(Tile(1, a, b), route, "backward")
    token_bytes = {("arena", arena): 2 for arena in schedule.slots}

    def apart(ordered, *names):
        order = below(schedule, token_bytes, ordered)
        places, _ = stack(order, dict.fromkeys(order, 1))
        used = [places[name] for name in names if name in places]
        return len(set(used)) == len(used)

    arena, ordered = ({kind: (part, kind, 0) for kind in ("Q", "KV", "dQ", "dKV")} for part in ("arena", "ordered"))
    assert apart((), *arena.values())  # all that the launch uses
    if b > 1:
        columns = "KV", "dKV"
        assert apart(columns, arena["Q"], arena["dQ"], ordered["KV"], ordered["dKV"])
        assert apart(columns, arena["KV"], ordered["KV"])
        assert apart(columns, arena["dKV"], ordered["dKV"])


def plans(count):
    """Random schedules of small problems, their activities, and layouts with rows that are not in order."""
    rng = random.Random(1)
    for _ in range(count):
        ranks = rng.randint(2, 8)
        a = rng.choice([a for a in range(1, ranks + 1) if ranks % a == 0])
        tile, direction, route = Tile(1, a, ranks // a), rng.choice(list(KINDS)), rng.choice(ROUTES)
        seqlen = rng.choice([5, 17, 31, 97, 150])
        problem = Problem(
            seqlen=seqlen,
            heads=rng.choice([1, 2, 3]),
            head_dim=rng.choice([4, 8, 13, 32]),
            value_dim=rng.choice([1, 4, 8, 32]),
            dtype=rng.choice(["bfloat16", "float32"]),
            wire_dtype=rng.choice([None, "bfloat16"]) if route == "direct" else None,
            window=rng.choice([None, (20, 0)]),
        )
        layout = Layout(rng.choice(["contiguous", "zigzag"]), seqlen, ranks)
        if rng.random() < 0.3:
            schedule = collective(tile, route, direction)
        else:
            schedule = greedy(tile, [rng.choice([0.1, 1, 3]) for _ in range(4)], route, direction, rng.choice([0, 2]))
        yield schedule, problem, layout


def test_arrays_that_share_memory_are_never_needed_together_and_order_each_others_receives():
    """In the pool's memory, where arrays begin at multiples of 256 bytes."""
    shared = 0
    for schedule, problem, layout in plans(400):
        work = (Forward if schedule.direction == "forward" else Backward)(problem, None)
        activity = Activity(problem.whole_mask, layout, layout, schedule.tile)
        for rank in range(schedule.tile.ranks):
            places = Places(schedule, rank, activity)
            sorts = places.packed and places.rows["KV"] and layout.kind != "contiguous"
            ordered = [kind for kind in KINDS[schedule.direction] if kind in IN_COLUMNS] if sorts else []
            buffers = Buffers(Pool(NumpyBackend()), work.shapes(), schedule)
            buffers.fit(places, {kind: [True] * len(work.shapes()[kind]) for kind in buffers.reduced}, ordered)
            arrays = {("arena", *name): held for name, held in buffers.arena.items()}
            arrays |= {("wire", *name): held for name, held in buffers.wire.items()}
            arrays |= {("ordered", kind, 0): held for kind, held in buffers.ordered.items()}
            lives = lives_of(schedule, [kind for kind in buffers.reduced if buffers.casts(kind)], ordered)
            for first, second in combinations(arrays, 2):
                if overlap(arrays[first], arrays[second]):
                    shared += 1
                    assert not steps_of(lives[first]) & steps_of(lives[second]), (first, second, str(schedule))
                    if first[0] == second[0] == "arena":
                        assert first[1:] in buffers._beside[second[1:]], (first, second, str(schedule))
            own = [array for held in buffers._own_memory.values() for array in held]
            assert not any(overlap(own, held) for held in arrays.values())
    assert shared > 1000


def overlap(arrays, others):
    """Whether any of some arrays shares memory with any of others; None is no array."""
    pairs = product(present(arrays), present(others))
    return any(np.may_share_memory(array, other) for array, other in pairs)


def present(arrays):
    return [array for array in arrays if array is not None and array.size]
