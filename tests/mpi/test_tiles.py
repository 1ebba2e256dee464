"""Every tile, schedule, route and back end gives the right result, and the same bits where it must."""

import numpy as np
import pytest
from dense import bits, draw
from runs import agreed, check, my_chunks, problem_of, run, subcomm, tiles, use_schedule

from mpiattn import MeshAttention
from mpiattn.greedy import greedy
from mpiattn.schedule import Costs, Step, with_slots

SHAPE = {"batch": 2, "seqlen": 61, "heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float64", "causal": True}
EXTREME_COSTS = [Costs(0.01, 0.01, 0.01), Costs(100, 0.1, 3), Costs(0.1, 100, 1), Costs(1.5, 2.5, 50)]


@pytest.mark.many
@pytest.mark.parametrize("backend", ["numpy", "deferred"])
def test_every_tile_schedule_and_route(comm, backend):
    for tile in [*tiles(comm.size), "ring", "qring"]:
        for schedule in ("greedy", "collective"):
            for route in ("direct", "ring"):
                check(comm, **SHAPE, tile=tile, schedule=schedule, route=route, layout="striped", backend=backend)


@pytest.mark.many
def test_named_tiles(comm):
    for name, tile in (("ring", (1, comm.size)), ("qring", (comm.size, 1)), (f"{comm.size}x1", (comm.size, 1))):
        with MeshAttention(comm, **SHAPE, tile=name) as plan:
            assert plan.tile == tile
    with MeshAttention(comm, **SHAPE) as plan:
        assert plan.tile in tiles(comm.size)


@pytest.mark.parametrize("costs", EXTREME_COSTS)
def test_any_costs(comm, costs):
    """However the blocks fall on the steps, every slot and event must be right: deferred would show NaN."""
    for a, b in tiles(comm.size):
        for route in ("direct", "ring"):
            reference = with_schedule(comm, greedy(a, b, costs, route), "numpy")
            assert with_schedule(comm, greedy(a, b, costs, route), "deferred") == reference


def with_schedule(comm, schedule, backend):
    """The bits of this rank's result under a given schedule; the result itself is checked too."""
    from dense import wrong
    inputs = draw(problem_of(SHAPE))
    with MeshAttention(comm, **SHAPE, tile=(schedule.a, schedule.b), route=schedule.route, backend=backend,
                       layout="zigzag") as plan:
        use_schedule(plan, schedule)
        out, lse = plan.forward(*my_chunks(plan, *inputs))
        agreed(comm, wrong(plan.problem, out, lse, *inputs, plan.positions), schedule)
    return bits(out, lse)


def without_overlap(schedule):
    """The same blocks and transfers in the same order, but never both in one step."""
    steps = []
    for step in schedule.steps:
        steps += [Step((), step.blocks)] * bool(step.blocks) + [Step(step.transfers)] * bool(step.transfers)
    return with_slots(schedule.name, schedule.direction, schedule.a, schedule.b, schedule.route, steps)


def test_overlap_changes_no_bit(comm):
    for a, b in tiles(comm.size):
        for route in ("direct", "ring"):
            schedule = greedy(a, b, Costs(1, 2, 2), route)
            assert with_schedule(comm, schedule, "numpy") == with_schedule(comm, without_overlap(schedule), "numpy")


def test_costs_change_no_bit_where_the_order_of_blocks_is_given(comm):
    """In Ring the keys come in one order and in Q-ring a row is one block, whatever the costs."""
    for a, b in ((1, comm.size), (comm.size, 1)):
        results = {with_schedule(comm, greedy(a, b, costs), "numpy") for costs in EXTREME_COSTS}
        assert len(results) == 1


def test_thirty_repeats(comm):
    for schedule in ("greedy", "collective"):
        inputs = draw(problem_of(SHAPE))
        with MeshAttention(comm, **SHAPE, schedule=schedule) as plan:
            chunks = my_chunks(plan, *inputs)
            results = {bits(*plan.forward(*chunks)) for _ in range(30)}
        assert len(results) == 1
        assert bits(*run(comm, inputs=inputs, **SHAPE, schedule=schedule)[:2]) in results


def test_results_are_the_callers(comm):
    """A later call must not change what an earlier one returned."""
    with MeshAttention(comm, **SHAPE) as plan:
        first = plan.forward(*my_chunks(plan, *draw(plan.problem, 0)))
        before = bits(*first)
        second = plan.forward(*my_chunks(plan, *draw(plan.problem, 1)))
        assert bits(*first) == before
        if len(plan.positions):
            assert bits(*second) != before


@pytest.mark.parametrize("limit", [1, 100, 1000])
def test_split_messages(comm, limit):
    for schedule in ("greedy", "collective"):
        for route in ("direct", "ring"):
            arguments = {**SHAPE, "seqlen": 19, "heads": 2, "kv_heads": 1, "head_dim": 2, "schedule": schedule,
                         "route": route, "tile": tiles(comm.size)[len(tiles(comm.size)) // 2]}
            whole = check(comm, **arguments)
            split = run(comm, **arguments, max_message=limit)
            assert bits(*whole) == bits(*split[:2])


def test_deferred_is_numpy_bit_for_bit(comm):
    for a, b in tiles(comm.size):
        for schedule in ("greedy", "collective"):
            for layout in ("contiguous", "zigzag"):
                arguments = {**SHAPE, "tile": (a, b), "schedule": schedule, "layout": layout, "dtype": "float32"}
                numpy, deferred = (run(comm, **arguments, backend=name)[:2] for name in ("numpy", "deferred"))
                assert bits(*numpy) == bits(*deferred)


def test_row_and_column_of_a_tile_do_not_depend_on_the_parent(comm, at_least):
    """A plan on a part of the ranks gives what the same plan gives on as many ranks alone."""
    at_least(3)
    with subcomm(comm, comm.size - 1) as sub:
        if sub is not None:
            check(sub, **SHAPE)
    comm.Barrier()


@pytest.mark.many
def test_error_does_not_grow_with_the_tile(comm):
    """RMS error of float16 and float32, tiles a = 1 ... n: flat within 10 %, since partials are not rounded."""
    from mpiattn import reference
    for dtype in ("float16", "float32"):
        shape = {**SHAPE, "seqlen": 192, "heads": 4, "head_dim": 16, "dtype": dtype}
        inputs = draw(problem_of(shape))
        found = []
        for tile in tiles(comm.size):
            out, _, at = run(comm, inputs=inputs, **shape, tile=tile, layout="striped", schedule="greedy")
            ref, _ = reference.attention(inputs[0][:, at], *inputs[1:], causal=True, positions=at, lengths=(192, 192))
            found.append(np.sqrt(comm.allreduce(float(((out - ref) ** 2).sum()))))
        limit = 1.1 if dtype == "float16" else 2
        assert max(found) <= limit * found[0]
