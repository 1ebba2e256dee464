"""The cost model and the choice that follows from it."""

import pytest

from mpiattn import ArgumentError, cost
from mpiattn.problem import Problem
from mpiattn.tiling import tiles
from mpiattn.traffic import mean_sent

PROBLEM = Problem(seqlen=1 << 20, heads=32, head_dim=128, dtype="float16")


def test_every_tile_with_every_schedule_best_first():
    choices = cost.evaluate(PROBLEM, 12)
    assert sorted((c.a, c.b, c.schedule) for c in choices) == sorted(
        (a, b, kind) for a, b in tiles(12) for kind in cost.SCHEDULES)
    rounded = [float(f"{c.seconds:.3g}") for c in choices]
    assert rounded == sorted(rounded)


def test_ties_go_to_the_least_traffic():
    """Where compute hides everything, times agree, and the tile with the least traffic is taken."""
    slow = cost.Machine(flops=1e6, bandwidth=1e15, latency=0, launch=0)
    best = cost.evaluate(PROBLEM, 16, machine=slow)[0]
    assert mean_sent(PROBLEM, 16, best.a, best.b) == min(mean_sent(PROBLEM, 16, a, b) for a, b in tiles(16))


def test_a_slow_network_wants_little_traffic():
    slow = cost.Machine(bandwidth=1e6)
    best = cost.evaluate(PROBLEM, 64, machine=slow)[0]
    assert mean_sent(PROBLEM, 64, best.a, best.b) == min(mean_sent(PROBLEM, 64, a, b) for a, b in tiles(64))
    ring = cost.evaluate(PROBLEM, 64, machine=slow, shapes=[(1, 64)])[0]
    assert ring.seconds > 3 * best.seconds


def test_a_step_takes_the_longer_of_transfer_and_blocks():
    machine = cost.Machine(flops=1e12, bandwidth=1e9, latency=1e-3, launch=1e-2)
    problem = Problem(seqlen=400, heads=2, head_dim=5)
    block = 1e-2 + problem.flops / 16 / 1e12
    hop = 2 * 1e-3 + 100 * 2 * 10 * 4 / 1e9
    schedule = cost.build("greedy", 1, 4, "direct", problem, machine)
    assert cost.predicted_seconds(schedule, problem, 4, machine) == pytest.approx(3 * max(block, hop) + block)
    fused = cost.build("collective", 1, 4, "direct", problem, machine)
    expected = 3 * hop + 1e-2 + problem.flops / 4 / 1e12
    assert cost.predicted_seconds(fused, problem, 4, machine) == pytest.approx(expected)


def test_costs_are_blocks_that_hide_a_hop():
    machine = cost.Machine(flops=1e9, bandwidth=1e9, latency=0, launch=0)
    problem = Problem(seqlen=64, heads=4, kv_heads=2, head_dim=8, dtype="float16")
    block = 16 * 16 * 2 * 4 * 16 / 1e9
    costs = cost.transfer_costs(problem, 4, machine)
    assert costs.q == pytest.approx(16 * 4 * 8 * 2 / 1e9 / block)
    assert costs.kv == pytest.approx(16 * 2 * 16 * 2 / 1e9 / block)
    assert costs.o == pytest.approx(16 * 4 * 9 * 4 / 1e9 / block)


def test_memory_is_what_buffers_take():
    """Against the arenas that a plan would really make, for even chunks."""
    from types import SimpleNamespace

    from mpiattn.backends.numpy import NumpyBackend
    from mpiattn.buffers import Buffers
    from mpiattn.layout import Layout
    from mpiattn.passes import Forward
    problem = Problem(seqlen=96, heads=4, kv_heads=2, head_dim=8, value_dim=6, batch=2, dtype="float16")
    layout = Layout("striped", 96, 12)
    for a, b in tiles(12):
        for kind in cost.SCHEDULES:
            schedule = cost.build(kind, a, b, "direct", problem)
            buffers = Buffers(NumpyBackend(), Forward(problem, None).shapes(), schedule,
                              SimpleNamespace(a=a, b=b, rank=5), layout, layout)
            assert cost.buffer_bytes(schedule, problem, 8, 8, "contiguous") == buffers.nbytes, (a, b, kind)
            ordered = b * 8 * problem.kv_bytes if kind == "collective" and b > 1 else 0    # keys again, by position
            assert cost.buffer_bytes(schedule, problem, 8, 8, "striped") == buffers.nbytes + ordered, (a, b, kind)


def test_wrong_arguments():
    with pytest.raises(ArgumentError, match="scenic"):
        cost.evaluate(PROBLEM, 4, route="scenic")
    with pytest.raises(ArgumentError, match=r"lazy.*greedy, collective"):
        cost.build("lazy", 2, 2, "direct", PROBLEM)
