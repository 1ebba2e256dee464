"""The simulator: results worked out by hand where that is easy, else bounds and monotonicity."""

from dataclasses import replace

import numpy as np
import pytest
from searches import flat_choices

from mpiattn import ArgumentError
from mpiattn.model import cost, search
from mpiattn.model.machine import DEFAULT, H100, Link, Machine
from mpiattn.model.simulate import simulate
from mpiattn.model.workload import Load, Work
from mpiattn.problem.layout import Layout
from mpiattn.problem.problem import Problem
from mpiattn.schedule.kinds import GATHERED, REDUCED
from mpiattn.schedule.tile import Tile, tiles
from mpiattn.schedule.travels import mean_sent, token_bytes

PROBLEM = Problem(seqlen=6400, heads=4, head_dim=16)


def machine(flops=1e9, bandwidth=1e9, latency=0.0, launch=0.0, merging=1e30, **more):
    link = Link(latency, bandwidth)
    return Machine(
        "test",
        **{"inside": link, "between": link, "flops": {"float32": flops}, "launch": launch, "merging": merging, **more},
    )


def timeline(on, tile, kind="greedy", route="direct", direction="forward", problem=PROBLEM, nodes=None, **how):
    schedule = cost.build(kind, tile, route, problem, on, direction, nodes, **how)
    return simulate(schedule, problem, load_of(problem, tile), on, nodes)


def load_of(problem, tile):
    layout = Layout("zigzag" if problem.causal else "contiguous", problem.seqlen, tile.ranks)
    return Load(Work(problem.whole_mask, layout, layout), tile)


def bounds(on, tile, direction="forward", problem=PROBLEM):
    """Seconds of the blocks of a rank, the least and the most of its bytes on its link.

    At least the busiest rank receives its chunks or sends its partials, at most one after the other.
    """
    work, load = on.compute(problem.flops / tile.ranks, problem.dtype, direction), load_of(problem, tile)
    moved = {
        kind: load.moved(kind).sum(axis=0) * nbytes / on.between.bandwidth
        for kind, nbytes in token_bytes(problem, direction).items()
    }
    gathered = sum(seconds for kind, seconds in moved.items() if kind in GATHERED)
    reduced = sum(seconds for kind, seconds in moved.items() if kind not in GATHERED)
    return work, max(gathered.max(), reduced.max()), sum(seconds.max() for seconds in moved.values())


@pytest.mark.parametrize("direction", REDUCED)
@pytest.mark.parametrize("causal", [False, True])
def test_never_faster_than_its_bounds_nor_much_slower(direction, causal):
    """At any ratio of compute to transfer, full and causal, the greedy schedule stays near the larger of the two."""
    problem = replace(PROBLEM, causal=causal)
    for bandwidth in (1e6, 1e7, 3e7, 1e8, 1e9):
        on = machine(bandwidth=bandwidth)
        for tile in tiles(16):
            work, least, wire = bounds(on, tile, direction, problem)
            seconds = timeline(on, tile, direction=direction, problem=problem).seconds
            assert max(work, least) * (1 - 1e-9) <= seconds <= work + wire + 1e-9
            if min(tile.a, tile.b) > 1 and direction == "forward":
                assert seconds < 1.35 * max(work, wire)
            apart = timeline(on, tile, direction=direction, problem=problem, ahead=None).seconds
            assert apart >= seconds * (1 - 1e-9)


def test_a_ring_by_hand():
    """Blocks of 2, hops of 3 seconds: the link is never idle, and the last block comes after the last hop."""
    on = machine(flops=PROBLEM.flops / 16 / 2, bandwidth=mean_sent(PROBLEM, Tile(1, 1, 4)) / 9)
    late = timeline(on, Tile(1, 1, 4), ahead=0)
    assert late.seconds == pytest.approx(3 * 3 + 2)
    assert [float(step.ended[0]) for step in late.steps] == pytest.approx([3, 6, 9, 11])
    assert late.waiting == pytest.approx(np.full(4, 3.0))
    assert [(moved.kind, moved.hop, moved.step) for moved in late.moves] == [("KV", 1, 0), ("KV", 2, 1), ("KV", 3, 2)]
    three = machine(flops=PROBLEM.flops / 16 / 3, bandwidth=on.between.bandwidth * 3 / 2)
    slow = timeline(three, Tile(1, 1, 4))
    assert slow.seconds == pytest.approx(4 * 3)
    assert [float(m.arrived[0]) for m in slow.moves] == pytest.approx([2, 4, 6])  # ahead of the steps
    late = timeline(three, Tile(1, 1, 4), ahead=0)
    assert [float(m.arrived[0]) for m in late.moves] == pytest.approx([2, 5, 8])


def test_links_inside_and_between_nodes():
    """Ranks 0-3 and 4-7: rows of four stay inside; a ring's hop is as slow as its slowest link."""
    on = machine(bandwidth=1e9, ranks_per_node=4, flops=1e15)
    fast = replace(on, inside=Link(0.0, 1e12))
    assert timeline(fast, Tile(1, 4, 2)).seconds == pytest.approx(800 * token_bytes(PROBLEM)["KV"] / 1e9, rel=0.05)
    assert timeline(on, Tile(1, 4, 2)).seconds > 2 * timeline(fast, Tile(1, 4, 2)).seconds
    assert timeline(on, Tile(1, 1, 8)).seconds == pytest.approx(timeline(fast, Tile(1, 1, 8)).seconds, rel=0.01)
    scattered = timeline(fast, Tile(1, 4, 2), nodes=[0, 1, 0, 1, 0, 1, 0, 1])
    assert scattered.seconds > 1.5 * timeline(fast, Tile(1, 4, 2)).seconds


def test_a_card_that_ranks_share():
    """Eight ranks on two nodes with one card each: neighbors cross once a node, the direct route up to four times."""
    on = machine(bandwidth=1e9, ranks_per_node=4, flops=1e15, inside=Link(0.0, 1e12), node_bandwidth=1e9)
    ring, direct = (timeline(on, Tile(1, 1, 8), route=route).seconds for route in ("ring", "direct"))
    assert direct == pytest.approx(ring * (1 + 2 + 3 + 4 + 3 + 2 + 1) / 7, rel=0.01)
    for shared, route in ((1e9, "ring"), (None, "direct")):
        best = flat_choices(
            PROBLEM, 8, route="auto", machine=replace(on, node_bandwidth=shared), tiles=[Tile(1, 1, 8)]
        )[0]
        assert best.route == route
    lowered = replace(PROBLEM, wire_dtype="float16")
    assert flat_choices(lowered, 8, route="auto", machine=on)[0].route == "direct"


def test_what_computing_cannot_hide():
    """Where cores move the bytes, a transfer takes its time besides the blocks."""
    on = machine(flops=PROBLEM.flops / 16, bandwidth=mean_sent(PROBLEM, Tile(1, 1, 4)) / 3)
    busy = replace(on, between=replace_link(on.between, overlap=0.0))
    assert timeline(on, Tile(1, 1, 4)).seconds == pytest.approx(4)
    assert timeline(busy, Tile(1, 1, 4)).seconds == pytest.approx(4 + 3)


def replace_link(link, **changes):
    return link._replace(**changes)


def test_merging_and_collectives():
    on = machine()
    slow, nbytes = replace(on, merging=1e6), token_bytes(PROBLEM)
    merged = 3 * 400 * nbytes["O"]  # three partials of a chunk of 400 tokens
    placed = 400 * (nbytes["Q"] + nbytes["KV"])  # own chunks, copied into the arenas
    usual = timeline(on, Tile(1, 4, 4), "collective").seconds
    by_copies = timeline(slow, Tile(1, 4, 4), "collective").seconds - usual
    assert by_copies == pytest.approx((merged + placed / 2) / 1e6)
    causal = replace(PROBLEM, causal=True)  # zigzag: all keys and values are copied in order of position too
    by_copies = [timeline(to, Tile(1, 4, 4), "collective", problem=causal).seconds for to in (slow, on)]
    assert by_copies[0] - by_copies[1] == pytest.approx((merged + (placed + 4 * 400 * nbytes["KV"]) / 2) / 1e6)
    twice = replace(on, collective=2.0)
    wire = mean_sent(PROBLEM, Tile(1, 4, 4)) / 1e9
    assert timeline(twice, Tile(1, 4, 4), "collective").seconds - usual == pytest.approx(wire)


@pytest.mark.parametrize("keys", [8, 50, 300])
def test_launches_of_few_keys(keys):
    """A query takes time for 64 keys more in every launch; where all blocks are one launch, once for both chunks."""
    problem = Problem(seqlen=2 * keys, heads=4, head_dim=16, batch=1000)
    on = machine(edge=128.0, bandwidth=1e30)
    row = keys * problem.flops_per_pair / 1e9
    for kind, timed in (("greedy", 2 * (keys + 64)), ("collective", 2 * keys + 64)):
        assert timeline(on, Tile(1, 1, 2), kind, problem=problem).seconds == pytest.approx(row * timed)
    plain = timeline(replace(on, edge=0.0), Tile(1, 1, 2), problem=problem).seconds
    assert plain == pytest.approx(row * 2 * keys)


def test_memory_bounds_how_far_ahead(monkeypatch):
    """Every step ahead takes a slot; a limit takes them away first, and then the tile."""
    on = machine(bandwidth=3e7)
    free = flat_choices(PROBLEM, 16, machine=on, tiles=[Tile(1, 1, 16)], schedules=("greedy",))[0]
    chunk = 400 * token_bytes(PROBLEM)["KV"]
    assert free.ahead == 2
    for less, ahead in ((0, 2), (1, 1), (chunk, 1), (chunk + 1, 0), (2 * chunk, 0)):
        limited = flat_choices(
            PROBLEM, 16, machine=on, tiles=[Tile(1, 1, 16)], schedules=("greedy",), max_memory=free.nbytes - less
        )[0]
        assert (limited.ahead, limited.nbytes) == (ahead, free.nbytes - (2 - ahead) * chunk)
    everything = flat_choices(PROBLEM, 16, machine=on)
    least = min(choice.nbytes for choice in everything) - 2 * chunk
    limited = flat_choices(PROBLEM, 16, machine=on, max_memory=least)
    assert limited[0].nbytes <= least < everything[0].nbytes and limited[0].seconds >= everything[0].seconds
    search.check_memory(limited, least)
    with pytest.raises(ArgumentError, match=r"max_memory is 1000 bytes a rank; the smallest plan .* needs"):
        search.check_memory(flat_choices(PROBLEM, 16, max_memory=1000), 1000)
    for wrong in (0, -1, 1.5, True, "1X"):
        with pytest.raises(ArgumentError, match="max_memory is"):
            flat_choices(PROBLEM, 16, max_memory=wrong)


def test_machines_for_json():
    for machine in (DEFAULT, H100):
        assert Machine.from_dict(machine.as_dict()) == machine
    assert H100.compute(3.3e12, "bfloat16") == pytest.approx(0.01)  # measured: kernels/README.md
    assert DEFAULT.compute(1.0, "bfloat16") == DEFAULT.compute(1.0, "float32") == DEFAULT.compute(0.5, "float64")
    assert H100.compute(1.0, "float32", "backward") == pytest.approx(2.5 / 0.68 * H100.compute(1.0, "float32"))


def test_the_edge_takes_its_time_where_products_are_faster():
    """Of a short window in a long block: packing rows takes as long in bfloat16 as in float32."""
    machine = replace(DEFAULT, flops={"float32": 1e9, "bfloat16": 4e9, "float64": 0.5e9}, edge=100.0)
    assert [machine.edge_keys(dtype) for dtype in ("float32", "bfloat16", "float64")] == [100, 400, 100]
    seconds = {}
    for dtype in ("float32", "bfloat16"):
        problem = Problem(5000, 1, 64, dtype=dtype, causal=True, window=(9, 0))
        tile = Tile(1, 1, 1)
        schedule = cost.build("greedy", tile, "direct", problem, machine)
        seconds[dtype] = simulate(schedule, problem, load_of(problem, tile), machine).seconds
    assert seconds["bfloat16"] / seconds["float32"] == pytest.approx((10 / 4 + 100) / (10 + 100), rel=1e-2)
