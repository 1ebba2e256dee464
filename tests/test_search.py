"""The quick search against all choices, on random problems and machines."""

import random
from dataclasses import replace

import numpy as np
import pytest
from searches import choices

from mpiattn.model import search
from mpiattn.model.machine import DEFAULT, H100
from mpiattn.model.space import DIRECTIONS, SearchSpace, layouts
from mpiattn.model.workload import Load, Work
from mpiattn.problem.layout import LAYOUTS, Layout
from mpiattn.problem.problem import Problem
from mpiattn.schedule.tile import tiles


def draw(rng):
    ranks = rng.choice([1, 2, 4, 6, 7, 8, 12, 16])
    seqlen = rng.choice([rng.randint(0, 60), rng.randint(100, 5000), 2**15])
    seqlen_k = rng.choice([seqlen, seqlen, rng.randint(0, 5000)])
    heads = rng.choice([1, 4, 8])
    shared_kv = rng.random() < 0.3
    problem = Problem(
        seqlen=seqlen,
        seqlen_k=seqlen_k,
        heads=heads,
        kv_heads=rng.choice([heads, 1]),
        head_dim=rng.choice([8, 128]),
        batch=rng.choice([1, 1, 3]),
        dtype=rng.choice(["float32", "bfloat16"]),
        causal=rng.random() < 0.6,
        window=rng.choice([(None, None), (None, None), (3, None), (100, 0), (1000, 1000), (None, 5)]),
        prefix=rng.choice([0, 0, 50]),
        causal_block=rng.choice([None, None, 7]),
        shared_kv=shared_kv,
    )
    machine = rng.choice([DEFAULT, H100])
    machine = replace(
        machine,
        flops={dtype: rate * 10.0 ** rng.randint(-3, 3) for dtype, rate in machine.flops.items()},
        launch=rng.choice([0, machine.launch, 1e-3]),
        collective=rng.choice([0.5, 1.0, 2.0]),
        merging=rng.choice([1e9, 1e12]),
        ranks_per_node=rng.choice([1, 2, 4, 8]),
        node_bandwidth=rng.choice([None, None, 5e9]),
        inside=machine.inside._replace(overlap=rng.choice([0.0, 0.5, 1.0])),
        between=machine.between._replace(overlap=rng.choice([0.5, 1.0]), latency=rng.choice([1e-5, 1e-3])),
    )
    kind, other = rng.choice(LAYOUTS), rng.choice(LAYOUTS)
    how = {
        "route": rng.choice(["direct", "auto", "ring"]),
        "machine": machine,
        "direction": rng.choice(list(DIRECTIONS)),
        "nodes": rng.choice([None, None, np.sort([rng.randrange(3) for _ in range(ranks)])]),
        "overlap": rng.random() < 0.8,
        "layout_pairs": rng.choice([None, None, [(Layout(kind, seqlen, ranks), Layout(other, seqlen_k, ranks))]]),
    }
    return problem, ranks, how


@pytest.mark.draw(4)
@pytest.mark.parametrize("seed", range(30))
def test_the_same_best_choice(seed):
    """Bit for bit, of all and of every tile, with and without a limit for memory."""
    rng = random.Random(seed)
    problem, ranks, how = draw(rng)
    sizes = sorted(choice.nbytes for choice in choices(problem, ranks, **how))
    for limit in (None, max(1, rng.choice(sizes)), max(1, sizes[0] - 1)):
        everything = choices(problem, ranks, **how, max_memory=limit)
        assert choices(problem, ranks, **how, max_memory=limit, every=None)[0] == everything[0]
        by_tile = choices(problem, ranks, **how, max_memory=limit, every="tile")
        for tile in {choice.tile for choice in everything}:
            first, expected = (next(c for c in of_search if c.tile == tile) for of_search in (by_tile, everything))
            assert first == expected


@pytest.mark.draw(15)
@pytest.mark.parametrize("seed", range(40))
def test_no_choice_is_below_its_bounds(seed):
    """Of any number of planes."""
    problem, ranks, how = draw(random.Random(1000 + seed))
    for case in search.cases_of(SearchSpace(problem, ranks, **how).completed()):
        choice, bound = case.choice(None), case.bound(how["overlap"])
        assert max(case.computing(), bound.seconds) <= choice.seconds
        assert max(case.sent(), bound.sent_bytes) <= choice.sent_bytes


def test_bounds_are_close_where_links_bound():
    """Bounds that left transfers out would be right, too, and of no use."""
    problem = Problem(seqlen=6000, heads=2, head_dim=64)
    inside, between = (link._replace(bandwidth=1e6, overlap=1.0) for link in (DEFAULT.inside, DEFAULT.between))
    space = SearchSpace(problem, 6, machine=replace(DEFAULT, inside=inside, between=between)).completed()
    for case in search.cases_of(space):
        choice = case.choice(None)
        assert 0.5 * choice.seconds < case.bound(True).seconds <= choice.seconds


def test_messages_of_keys_that_hold_the_values():
    """One for each hop: a bound that counted two would leave out the best."""
    problem = Problem(seqlen=64, heads=1, head_dim=64, shared_kv=True)
    inside, between = (link._replace(latency=1e-4) for link in (DEFAULT.inside, DEFAULT.between))
    machine = replace(DEFAULT, inside=inside, between=between, collective=0.8)
    best, quick = (choices(problem, 7, machine=machine, every=every)[0] for every in ("choice", None))
    assert (quick.tile, quick.schedule, quick.seconds) == (best.tile, best.schedule, best.seconds)


@pytest.mark.parametrize("seed", range(30))
def test_tokens_of_all_ranks_together(seed):
    """On the direct route, counted from intervals, as rank by rank."""
    problem, ranks, how = draw(random.Random(seed))
    for pair in how["layout_pairs"] or layouts("auto", problem, ranks):
        work = Work(problem.whole_mask, *pair)
        for tile in tiles(ranks):
            load = Load(work, tile)
            assert work.lines(True, tile).total == load.moved("KV").sum()
            assert work.lines(False, tile).total == load.moved("Q").sum()


def test_ties_by_bytes_that_are_summed_in_another_order():
    """Both kinds send the same bytes, in sums that are rounded: a bound must not be a bit above them."""
    problem = Problem(seqlen=1333, heads=5, kv_heads=1, head_dim=100)
    machine = replace(DEFAULT, flops={"float32": 6e10, "float64": 3e7}, launch=2.4e-4, edge=0.0)
    pair = (Layout("contiguous", 1333, 6, (97, 220, 151, 211, 632, 22)),) * 2
    how = {"machine": machine, "direction": "both", "fixed": True, "layout_pairs": [pair]}
    best, quick = (choices(problem, 6, **how, every=every)[0] for every in ("choice", None))
    assert (quick.tile, quick.schedule, quick.nbytes) == (best.tile, best.schedule, best.nbytes)
