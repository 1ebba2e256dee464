"""The cost model, memory, and the choice that follows."""

import pytest
from searches import choices, flat_choices

from mpiattn import ArgumentError
from mpiattn.masks import neighborhood
from mpiattn.model import cost, memory, search
from mpiattn.model.machine import Link, Machine
from mpiattn.model.simulate import simulate
from mpiattn.model.space import DIRECTIONS, SearchSpace, layouts
from mpiattn.model.workload import Load, Work
from mpiattn.problem.layout import Layout
from mpiattn.problem.problem import Problem
from mpiattn.schedule.tile import Tile, divided, tiles
from mpiattn.schedule.travels import mean_sent


def machine(flops, bandwidth, latency=0.0, launch=0.0, **more):
    """Ranks of one kind, each a node."""
    link = Link(latency, bandwidth)
    return Machine("test", link, link, {"float32": flops, "float16": flops}, launch=launch, merging=1e30, **more)


PROBLEM = Problem(seqlen=1 << 20, heads=32, head_dim=128, dtype="float16")


def test_every_tile_with_every_schedule_best_first():
    choices = flat_choices(PROBLEM, 12, machine=machine(flops=1e15, bandwidth=1e9))  # on which they differ by much
    assert sorted((str(c.tile), c.schedule) for c in choices) == sorted(
        (str(tile), kind) for tile in tiles(12) for kind in cost.SCHEDULES
    )
    least = min(c.seconds for c in choices)
    assert choices[0].seconds <= (1 + search.SAME_TIME) * least
    slower = [c.seconds for c in choices if c.seconds > (1 + search.SAME_TIME) * least]
    assert len(slower) > 5
    assert slower == sorted(slower) == [c.seconds for c in choices[len(choices) - len(slower) :]]


def test_pieces_under_a_mask_of_several_intervals():
    """Every interval takes launches and edges, in pieces as in the blocks of a mesh."""
    problem = Problem(128 * 256, heads=4, head_dim=32, mask=neighborhood((128, 256), 15))
    pieces, mesh = (
        choices(problem, 16, tiles=[tile], direction="both")[0] for tile in (divided("bands", 16), Tile(1, 4, 4))
    )
    assert 0.8 < pieces.seconds / mesh.seconds < 1.5  # all of its blocks are counted, also those that see nothing


@pytest.mark.parametrize("lengths", [(0, 0), (8, 0), (0, 8)])
def test_a_machine_that_takes_no_time_for_nothing(lengths):
    """Latency and launches may be 0, and so may the tokens of a side."""
    problem = Problem(lengths[0], 2, 8, seqlen_k=lengths[1])
    for choice in flat_choices(problem, 4, machine=machine(1e9, 1e9)):
        assert choice.seconds >= 0


def test_ties_go_to_the_least_traffic():
    """Where compute hides all transfers, times are equal, and the tile with the least traffic is chosen."""
    best = flat_choices(PROBLEM, 16, machine=machine(flops=1e6, bandwidth=1e15))[0]
    assert mean_sent(PROBLEM, best.tile) == min(mean_sent(PROBLEM, tile) for tile in tiles(16))


def test_a_slow_network_wants_little_traffic():
    slow = machine(flops=60e9, bandwidth=1e6)
    best = flat_choices(PROBLEM, 64, machine=slow)[0]
    assert mean_sent(PROBLEM, best.tile) == min(mean_sent(PROBLEM, tile) for tile in tiles(64))
    ring = flat_choices(PROBLEM, 64, machine=slow, tiles=[Tile(1, 1, 64)])[0]
    assert ring.seconds > 3 * best.seconds


@pytest.mark.parametrize(
    ("mask", "second"),
    [({"window": (4, 4)}, 7), ({"window": (None, 4)}, 7), ({"window": (4, None)}, 7)]
    + [({}, 2), ({"causal": True, "window": (4, 4)}, 2), ({"window": (4, 0)}, 2)],
    ids=str,
)
def test_a_window_that_opens_ahead_takes_chunks_of_both_sides(mask, second):
    problem = Problem(seqlen=80, heads=1, head_dim=4, **mask)
    schedule = cost.build("greedy", Tile(1, 1, 8), "direct", problem)
    assert [t.hops[0] for step in schedule.steps for t in step.transfers][:2] == [1, second]


def test_both_neighbours_come_while_a_rank_computes_its_own():
    """A window of half a chunk to both sides: nothing waits for a block besides the rank's own."""
    on = machine(flops=1e9, bandwidth=1e6)
    problem = Problem(seqlen=16 * 64, heads=1, head_dim=64, window=(32, 32))
    layout = Layout("contiguous", problem.seqlen, 16)
    load = Load(Work(problem.whole_mask, layout, layout), Tile(1, 1, 16))
    schedule = cost.build("greedy", Tile(1, 1, 16), "direct", problem, on)
    halo = 2 * 32 * 2 * 64 * 4 / 1e6
    edges = problem.flops_per_pair * 2 * (32 * 33 / 2) / 1e9  # the blocks of the neighbours' keys
    assert simulate(schedule, problem, load, on).seconds == pytest.approx(halo + edges, rel=0.05)


def test_a_step_takes_the_longer_of_transfer_and_blocks():
    on = machine(flops=1e12, bandwidth=1e9, latency=1e-3, launch=1e-2)
    problem = Problem(seqlen=400, heads=2, head_dim=5)
    block = 1e-2 + problem.flops / 16 / 1e12
    hop = 2 * 1e-3 + 100 * 2 * 10 * 4 / 1e9
    layout = Layout("contiguous", 400, 4)
    load = Load(Work(problem.whole_mask, layout, layout), Tile(1, 1, 4))
    schedule = cost.build("greedy", Tile(1, 1, 4), "direct", problem, on)
    assert simulate(schedule, problem, load, on).seconds == pytest.approx(3 * max(block, hop) + block)
    fused = cost.build("collective", Tile(1, 1, 4), "direct", problem, on)
    expected = 3 * (hop - 1e-3) + 1e-2 + problem.flops / 4 / 1e12  # k and v are two collectives, but one message
    assert simulate(fused, problem, load, on).seconds == pytest.approx(expected)
    backward = cost.build("greedy", Tile(1, 1, 4), "direct", problem, on, "backward")
    at_least = 4 * 1e-2 + 2.5 * problem.flops / 4 / 1e12
    assert simulate(backward, problem, load, on).seconds >= at_least


def test_the_slowest_rank_counts():
    """Causal attention in contiguous chunks: the last rank of a ring computes twice the mean."""
    slow = machine(flops=1e6, bandwidth=1e15)
    problem = Problem(seqlen=800, heads=2, head_dim=5, causal=True)
    seconds = {}
    for kind in ("contiguous", "zigzag", "striped"):
        best = flat_choices(problem, 8, tiles=tiles(8)[:1], layout_pairs=layouts(kind, problem, 8), machine=slow)[0]
        seconds[kind] = best.seconds
        assert best.seconds == pytest.approx(best.balance * problem.flops / 8 / 1e6)
    assert seconds["contiguous"] > 1.8 * seconds["zigzag"]
    assert seconds["striped"] == pytest.approx(seconds["zigzag"], rel=0.02)


def test_auto_balances_work_and_sends_little():
    def best(ranks=8, **mask):
        choice = search.survey(SearchSpace(Problem(seqlen=8000, heads=4, head_dim=16, **mask), ranks))[0][0]
        assert choice.balance < 1.02
        assert choice.layouts[0].kind == "contiguous"
        return choice

    best()
    best(causal=True)
    best(ranks=7, causal=True)
    windowed = best(causal=True, window=(100, 0))
    everything = mean_sent(Problem(seqlen=8000, heads=4, head_dim=16), Tile(1, 2, 4))
    assert windowed.sent_bytes < 0.2 * everything
    best(ranks=1, causal=True)


def test_both_passes_are_the_sum_of_each():
    best = {
        direction: flat_choices(PROBLEM, 16, tiles=[Tile(1, 4, 4)], schedules=("greedy",), direction=direction)[0]
        for direction in DIRECTIONS
    }
    assert best["both"].seconds == best["forward"].seconds + best["backward"].seconds
    assert best["both"].sent_bytes == best["forward"].sent_bytes + best["backward"].sent_bytes
    assert best["backward"].sent_bytes == mean_sent(PROBLEM, Tile(1, 4, 4), "backward")
    assert best["both"].nbytes > best["forward"].nbytes


def test_costs_are_blocks_that_hide_a_hop():
    on = machine(flops=1e9, bandwidth=1e9)
    problem = Problem(seqlen=64, heads=4, kv_heads=2, head_dim=8, dtype="float16")
    block = 16 * 16 * 2 * 4 * 16 / 1e9
    costs = cost.transfer_costs(problem, Tile(1, 2, 2), on)
    assert costs.q == pytest.approx(16 * 4 * 8 * 2 / 1e9 / block)
    assert costs.kv == pytest.approx(16 * 2 * 16 * 2 / 1e9 / block)
    assert costs.o == pytest.approx(16 * 4 * 9 * 4 / 1e9 / block)


@pytest.mark.parametrize("wire_dtype", [None, "float16"])
def test_memory_is_what_buffers_take(wire_dtype):
    """The predicted memory equals the arenas that a plan allocates, for even chunks."""
    from mpiattn.backends.numpy.backend import NumpyBackend
    from mpiattn.engine.buffers import Buffers
    from mpiattn.engine.passes import Forward
    from mpiattn.engine.pool import Pool
    from mpiattn.schedule.needed import Activity
    from mpiattn.schedule.places import Places

    problem = Problem(
        seqlen=96, heads=4, kv_heads=2, head_dim=8, value_dim=6, batch=2, dtype="float16", wire_dtype=wire_dtype
    )
    layout = Layout("striped", 96, 12)
    for tile in tiles(12):
        for kind in cost.SCHEDULES:
            schedule = cost.build(kind, tile, "direct", problem)
            load, places = (
                Load(Work(problem.whole_mask, layout, layout), tile),
                Places(schedule, 5, Activity(problem.whole_mask, layout, layout, tile)),
            )
            for load.ordered in (True, False):
                buffers = Buffers(Pool(NumpyBackend()), Forward(problem, None).shapes(), schedule)
                sorted_again = not load.ordered and kind == "collective" and tile.b > 1  # keys by position
                buffers.fit(places, {"O": (True, True)}, ("KV",) if sorted_again else ())
                assert memory.buffer_bytes(schedule, problem, load)[5] == buffers.nbytes, (tile, kind)


def test_memory_of_tokens_in_many_ranges():
    """What is packed before it is sent counts, of every rank."""
    from mpiattn.backends.numpy.backend import NumpyBackend
    from mpiattn.engine.buffers import Buffers
    from mpiattn.engine.passes import PASSES
    from mpiattn.engine.pool import Pool
    from mpiattn.schedule import travels
    from mpiattn.schedule.kinds import KINDS
    from mpiattn.schedule.needed import Activity
    from mpiattn.schedule.places import Places
    from mpiattn.schedule.ranges import total

    problem = Problem(seqlen=24 * 36, heads=4, kv_heads=2, head_dim=8, mask=neighborhood((24, 36), (5, 7)))
    layout, packed = Layout.grid((24, 36), (3, 4)), 0
    work = Work(problem.whole_mask, layout, layout)
    for tile in tiles(12):
        load, activity = Load(work, tile), Activity(problem.whole_mask, layout, layout, tile)
        for kind in cost.SCHEDULES:
            for direction in ("forward", "backward"):
                schedule = cost.build(kind, tile, "direct", problem, direction=direction)
                predicted = memory.buffer_bytes(schedule, problem, load)
                for rank in (0, 5):
                    places = Places(schedule, rank, activity)
                    buffers = Buffers(Pool(NumpyBackend()), PASSES[direction](problem, None).shapes(), schedule)
                    sorted_again = kind == "collective" and tile.b > 1  # keys by position
                    ordered = [name for name in ("KV", "dKV") if name in buffers.shapes] if sorted_again else ()
                    arrays = {name: KINDS[direction][name].arrays_of(problem) for name in buffers.reduced}
                    needs_memory = {name: [not array.in_result(problem) for array in of] for name, of in arrays.items()}
                    buffers.fit(places, needs_memory, ordered)
                    unpacked = 0  # few ranges, which travel from where they lie, but are predicted too
                    for of, nbytes in () if kind == "collective" else travels.token_bytes(problem, direction).items():
                        if of in places.outbox:
                            hops = range(1, tile.extent(of))
                            sent = sum(total(activity.travelling(of, rank, hop)) for hop in hops)
                            unpacked += nbytes * (sent - places.outbox[of])
                    assert predicted[rank] == buffers.nbytes + unpacked, (tile, kind, direction, rank)
                    packed += sum(places.outbox.values())
    assert packed > 0


def test_wrong_arguments():
    with pytest.raises(ArgumentError, match="scenic"):
        flat_choices(PROBLEM, 4, route="scenic")
    with pytest.raises(ArgumentError, match=r"lazy.*greedy, collective"):
        cost.build("lazy", Tile(1, 2, 2), "direct", PROBLEM)
