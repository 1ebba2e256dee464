"""Work and transfers of all ranks at once, against masks and activity one by one."""

import random

import numpy as np
import pytest

from mpiattn.model import workload
from mpiattn.model.workload import Load, balance, block_pairs
from mpiattn.problem.layout import LAYOUTS, Layout
from mpiattn.problem.mask import local_interval
from mpiattn.problem.problem import Problem
from mpiattn.schedule import travels
from mpiattn.schedule.needed import Activity
from mpiattn.schedule.tile import Tile, tiles


def draw(rng):
    ranks, seqlen = rng.randint(1, 8), rng.randint(0, 40)
    seqlen_k = rng.choice([seqlen, rng.randint(0, 40)])
    problem = Problem(
        seqlen=seqlen,
        seqlen_k=seqlen_k,
        heads=2,
        head_dim=3,
        causal=rng.random() < 0.5,
        window=(rng.choice([None, 0, 3, 9]), rng.choice([None, 0, 3, 9])),
        prefix=rng.choice([0, 0, 1, 7, 20]),
        causal_block=rng.choice([None, None, 1, 2, 7, 30]),
    )
    kind = rng.choice(LAYOUTS)
    return problem, Layout(kind, seqlen, ranks), Layout(rng.choice([kind, *LAYOUTS]), seqlen_k, ranks)


@pytest.mark.parametrize("seed", range(120))
def test_random(seed, monkeypatch):
    monkeypatch.setattr(workload, "RUN_PIECE", 11)
    problem, q_layout, k_layout = draw(random.Random(seed))
    pairs, ranks = block_pairs(problem.mask, q_layout, k_layout), q_layout.chunks
    for i in range(ranks):
        interval = problem.mask.key_interval(q_layout.positions(i))
        for j in range(ranks):
            begin, end = local_interval(*interval, k_layout.positions(j))
            assert pairs[i, j] == (end - begin).sum()
    assert pairs.sum() == problem.pairs
    for tile in tiles(ranks):
        of_mesh = Load(pairs, q_layout.lengths, k_layout.lengths, tile)
        assert of_mesh.work.sum() == problem.pairs
        activity = Activity(problem.mask, q_layout, k_layout, tile)
        for direction in ("forward", "backward"):
            for route, collective in (("direct", False), ("direct", True), ("ring", False)):
                sent = [
                    travels.sent(
                        problem, q_layout.lengths, k_layout.lengths, tile, rank, route, direction, activity, collective
                    ).total
                    for rank in range(ranks)
                ]
                moved = {
                    kind: of_mesh.moved(kind, route, collective) * nbytes
                    for kind, nbytes in travels.token_bytes(problem, direction).items()
                }
                assert sum(sent) == sum(nbytes.sum() for nbytes in moved.values())


def test_a_long_sequence_by_blocks_and_prefix():
    """Of a million tokens, in pieces; no array of queries times keys."""
    layout = Layout("striped", 2**20, 64)
    problem = Problem(2**20, 1, 1, causal_block=512, prefix=1000)
    pairs = block_pairs(problem.mask, layout, layout)
    assert pairs.sum() == problem.pairs == 512 * 512 * (2048 * 2049 // 2) + 512 * (1000 - 512)


def test_work_of_a_rank_is_that_of_its_tile():
    layout = Layout("contiguous", 60, 6)
    pairs = block_pairs(Problem(60, 1, 1, causal=True).mask, layout, layout)
    of_mesh = Load(pairs, layout.lengths, layout.lengths, Tile(1, 2, 3))
    assert of_mesh.work[0] == pairs[np.ix_([0, 1], [0, 2, 4])].sum()
    assert of_mesh.work[5] == pairs[np.ix_([4, 5], [1, 3, 5])].sum()
    assert of_mesh.balance == of_mesh.work.max() / of_mesh.work.mean()


def test_balance_of_nothing():
    assert balance([0, 0]) == balance([3, 3]) == 1 and balance([0, 2]) == 2
