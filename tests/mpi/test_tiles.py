"""Every tile, schedule, route and back end gives the right result, and the same bits where it must."""

from functools import partial

import pytest
from dense import bits, draw, draw_all, expected, masks, wrong
from runs import BACKENDS, agreed, attend, check, my_chunks, on, problem_of, run, subcomm, tiles, use_schedule

from mpiattn import MeshAttention
from mpiattn.schedule.greedy import greedy
from mpiattn.schedule.steps import Costs, apart
from mpiattn.schedule.tile import Tile

SHAPE = {"batch": 2, "seqlen": 61, "heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float64", "causal": True}
EXTREME_COSTS = [Costs(0.01, 0.01, 0.01), Costs(100, 0.1, 3), Costs(0.1, 100, 1), Costs(1.5, 2.5, 50)]


@pytest.mark.many
def test_case_21_every_tile_schedule_and_route(comm):
    """Forward and backward; numpy and deferred give the same bits (case 29), as `check` sees to."""
    inputs = draw_all(problem_of(SHAPE))
    ref = expected(inputs, **masks(problem_of(SHAPE)))
    for tile in [*tiles(comm.size), "ring", "qring"]:
        for schedule, route in (("greedy", "direct"), ("greedy", "ring"), ("collective", "direct")):
            check(comm, **SHAPE, inputs=inputs, ref=ref, tile=tile, schedule=schedule, route=route, layout="striped")


@pytest.mark.many
def test_named_tiles(comm):
    for name, tile in (("ring", (1, comm.size)), ("qring", (comm.size, 1)), (f"{comm.size}x1", (comm.size, 1))):
        with MeshAttention(comm, **SHAPE, tile=name) as plan:
            assert (plan.tile.a, plan.tile.b) == tile
    with MeshAttention(comm, **SHAPE) as plan:
        assert plan.tile.ranks == comm.size


@pytest.mark.draw(2)
@pytest.mark.parametrize("costs", EXTREME_COSTS)
def test_any_costs(comm, costs):
    """However the blocks fall on the steps, every slot and event must be right: deferred would show NaN."""
    for a, b in tiles(comm.size):
        for route in ("direct", "ring"):
            make = partial(greedy, Tile(1, a, b), costs, route)
            results = {with_schedules(comm, a, b, route, backend, make) for backend in ("numpy", "deferred")}
            assert len(results) == 1


def with_schedules(comm, a, b, route, backend, make):
    """The bits of this rank's result under the schedules that make(direction) gives; the result is checked too."""
    inputs = draw_all(problem_of(SHAPE))
    ref = expected(inputs, **masks(problem_of(SHAPE)))
    with MeshAttention(comm, **SHAPE, tile=(a, b), route=route, backend=backend, layout="zigzag") as plan:
        for direction in ("forward", "backward"):
            use_schedule(plan, make(direction))
        result = attend(plan, my_chunks(plan, *inputs))
        agreed(comm, wrong(plan.problem, result, ref, inputs, plan.positions, plan.positions_k), (a, b, route))
    return bits(*result)


@on(4, 6)
def test_case_20_overlap_changes_no_bit(group):
    """Transfers beside blocks, ahead of them, never in one step, and all completing late: the same bits."""
    for a, b in tiles(group.size):
        for route in ("direct", "ring"):
            beside, early = (partial(greedy, Tile(1, a, b), Costs(1, 2, 2), route, ahead=ahead) for ahead in (0, 3))
            never = {direction: apart(beside(direction)) for direction in ("forward", "backward")}
            results = {
                with_schedules(group, a, b, route, backend, make)
                for backend, make in (
                    ("numpy", beside),
                    ("numpy", never.get),
                    ("numpy", early),
                    ("deferred", beside),
                    ("deferred", early),
                )
            }
            assert len(results) == 1


def test_messages_move_while_a_rank_computes(comm, at_least):
    """Every launch of a step with transfers lets MPI make progress, and none of a step without; no bit changes."""
    at_least(2)
    with MeshAttention(comm, **SHAPE | {"causal": False}, tile=(1, comm.size), schedule="greedy") as plan:
        inputs, executor = my_chunks(plan, *draw(plan.problem)), plan._passes.executors["forward"]
        expected = bits(*plan.forward(*inputs))
        called, moves, run_block = [], [], executor._run_block

        def counted(complete=executor._look):
            called.append(len(executor.under_way))
            complete()

        def watched(*arguments):
            before = len(called)
            run_block(*arguments)
            moves.append(len(called) > before)

        plan._exchange.due = lambda: True
        executor._look, executor._run_block = counted, watched
        assert bits(*plan.forward(*inputs)) == expected
    assert moves == [True] * (comm.size - 1) + [False]
    assert all(called)


def test_costs_change_no_bit_where_the_order_of_blocks_is_given(comm):
    """Forward, in Ring the keys come in one order and in Q-ring a row is one block, whatever the costs."""
    for a, b in ((1, comm.size), (comm.size, 1)):
        results = set()
        for costs in EXTREME_COSTS:
            with MeshAttention(comm, **SHAPE, tile=(a, b), layout="zigzag") as plan:
                use_schedule(plan, greedy(plan.schedule.tile, costs))
                results.add(bits(*plan.forward(*my_chunks(plan, *draw(plan.problem)))))
        assert len(results) == 1


@on(4)
@pytest.mark.parametrize("schedule", ["greedy", "collective"])
def test_case_19_thirty_repeats(group, schedule):
    inputs = draw_all(problem_of(SHAPE))
    with MeshAttention(group, **SHAPE, schedule=schedule, tile="2x2", backend=BACKENDS[0]) as plan:
        chunks = my_chunks(plan, *inputs)
        results = {bits(*attend(plan, chunks)) for _ in range(30)}
    assert len(results) == 1
    assert bits(*run(group, inputs, **SHAPE, schedule=schedule, tile="2x2")[0]) in results


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
def test_case_30_split_messages(comm, limit):
    for schedule in ("greedy", "collective"):
        for route in ("direct", "ring"):
            arguments = {
                **SHAPE,
                "seqlen": 19,
                "heads": 2,
                "kv_heads": 1,
                "head_dim": 2,
                "schedule": schedule,
                "route": route,
                "tile": tiles(comm.size)[len(tiles(comm.size)) // 2],
            }
            whole = check(comm, **arguments, backends=BACKENDS[:1])
            split, *_ = run(comm, draw_all(problem_of(arguments)), **arguments, max_message=limit)
            assert bits(*whole) == bits(*split)


@on(8)
def test_case_29_deferred_is_numpy_bit_for_bit(group):
    for a, b in tiles(8):
        for schedule in ("greedy", "collective"):
            for wire in (None, "bfloat16"):
                check(
                    group,
                    **{**SHAPE, "dtype": "float32"},
                    window=(20, 3),
                    sinks=True,
                    tile=(a, b),
                    schedule=schedule,
                    layout="contiguous",
                    wire_dtype=wire,
                )


def test_row_and_column_of_a_tile_do_not_depend_on_the_parent(comm, at_least):
    """A plan on a part of the ranks gives what the same plan gives on as many ranks alone."""
    at_least(3)
    with subcomm(comm, comm.size - 1) as sub:
        if sub is not None:
            check(sub, **SHAPE)
    comm.Barrier()
