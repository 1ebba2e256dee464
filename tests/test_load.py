"""Work and transfers of all ranks at once, against masks and activity one by one."""

import random

import divisions
import numpy as np
import pytest
from interval_masks import random_mask

from mpiattn.model import pairs as counting
from mpiattn.model.pairs import Pairs
from mpiattn.model.workload import Load, Work, balance
from mpiattn.problem.columns import columns_of
from mpiattn.problem.layout import LAYOUTS, Layout
from mpiattn.problem.problem import Problem
from mpiattn.schedule import travels
from mpiattn.schedule.needed import Activity
from mpiattn.schedule.tile import Tile, tiles


def draw(rng, several):
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
        mask=random_mask(rng, seqlen, seqlen_k) if several else None,
    )
    kind, mask = rng.choice(LAYOUTS), problem.whole_mask
    if seqlen == seqlen_k and rng.random() < 0.7:  # documents, and padding before and after them
        cuts = sorted(rng.randint(0, seqlen) for _ in range(rng.randint(2, 7)))
        mask = problem.mask_of(tuple(cuts))
    layouts = Layout(kind, seqlen, ranks), Layout(rng.choice([kind, *LAYOUTS]), seqlen_k, ranks)
    if rng.random() < 0.3:
        layouts = divisions.either(rng, seqlen, ranks), rng.choice([layouts[1], divisions.either(rng, seqlen_k, ranks)])
    return problem, mask, *layouts


@pytest.mark.draw(120)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("seed", range(240))
def test_random(seed, several, monkeypatch):
    monkeypatch.setattr(counting, "PIECE", 11)
    problem, mask, q_layout, k_layout = draw(random.Random(seed), several)
    work, ranks = Work(mask, q_layout, k_layout), q_layout.chunks
    pairs = work.pairs
    for i in range(ranks):
        for j in range(ranks):
            begin, end = mask.key_intervals(q_layout.positions(i), None, columns_of(k_layout.positions(j)))
            assert pairs[i, j] == (end - begin).sum()
    assert pairs.sum() == mask.pairs()
    for tile in tiles(ranks):
        of_mesh = Load(work, tile)
        assert of_mesh.rank_pairs.sum() == mask.pairs()
        activity = Activity(mask, q_layout, k_layout, tile)
        for direction in ("forward", "backward"):
            for route, collective in (("direct", False), ("direct", True), ("ring", False)):
                sent = [
                    travels.sent(
                        problem,
                        (q_layout.lengths, k_layout.lengths),
                        tile,
                        rank,
                        route,
                        direction,
                        activity,
                        collective,
                    ).total
                    for rank in range(ranks)
                ]
                moved = {
                    kind: of_mesh.moved(kind, route, collective) * nbytes
                    for kind, nbytes in travels.token_bytes(problem, direction).items()
                }
                assert sum(sent) == sum(nbytes.sum() for nbytes in moved.values())


@pytest.mark.parametrize("kind", LAYOUTS)
def test_long_documents_are_estimated(kind, monkeypatch):
    """From few queries, about the same."""
    mask = Problem(30_000, 1, 1, causal=True).mask_of((100, 4000, 4000, 17_000, 29_000))
    layout = Layout(kind, 30_000, 6)
    exact = Pairs(mask, layout, layout).table
    monkeypatch.setattr(counting, "SAMPLED", 1000)
    estimated = Pairs(mask, layout, layout).table
    assert exact.sum() == mask.pairs() and (exact != estimated).any()
    assert np.abs(exact - estimated).max() < 0.05 * exact.max()


@pytest.mark.parametrize("ranks", [4, 8, 60, 64])
def test_no_stripe_is_left_out(ranks, monkeypatch):
    """However the number of stripes and the distance of what is looked at divide each other."""
    monkeypatch.setattr(counting, "SAMPLED", 2**14)
    for seqlen in (2**20, 960_000):
        layout = Layout("striped", seqlen, ranks)
        mask = Problem(seqlen, 1, 1, causal=True).mask_of(tuple(range(0, seqlen + 1, seqlen // 64)))
        assert balance(Pairs(mask, layout, layout).table.sum(axis=1)) < 1.1


def test_a_long_sequence_by_blocks_and_prefix():
    """Of a million tokens, in pieces; no array of queries times keys."""
    layout = Layout("striped", 2**20, 64)
    problem = Problem(2**20, 1, 1, causal_block=512, prefix=1000)
    pairs = Pairs(problem.whole_mask, layout, layout).table
    assert pairs.sum() == problem.pairs == 512 * 512 * (2048 * 2049 // 2) + 512 * (1000 - 512)


def test_work_of_a_rank_is_that_of_its_tile():
    layout = Layout("contiguous", 60, 6)
    work = Work(Problem(60, 1, 1, causal=True).whole_mask, layout, layout)
    of_mesh, pairs = Load(work, Tile(1, 2, 3)), work.pairs
    assert of_mesh.rank_pairs[0] == pairs[np.ix_([0, 1], [0, 2, 4])].sum()
    assert of_mesh.rank_pairs[5] == pairs[np.ix_([4, 5], [1, 3, 5])].sum()
    assert of_mesh.balance == of_mesh.rank_pairs.max() / of_mesh.rank_pairs.mean()


def test_a_query_takes_time_for_keys_beside_those_it_sees():
    """A row does in every launch where it sees any key: once for every block, or once where all are fused."""
    n, tile = 6400, Tile(1, 1, 2)

    def timed(edge, kind="contiguous", **mask):
        problem, layout = Problem(n, 1, 1, **mask), Layout(kind, n, 2)
        load = Load(Work(problem.whole_mask, layout, layout), tile)
        assert np.array_equal(load.timed_pairs(0), load.pairs) and np.array_equal(load.fused_pairs(0), load.rank_pairs)
        once = n * edge / (1 if mask else 2)
        assert load.fused_pairs(edge).sum() == pytest.approx(load.rank_pairs.sum() + once, rel=0.02)
        return load.timed_pairs(edge).sum()

    for mask in ({"causal": True, "window": (63, None)}, {"window": (32, 31)}, {"causal": True, "window": (63, 0)}):
        assert timed(128, **mask) == pytest.approx(n * (64 + 128), rel=0.02)
        assert timed(128, "striped", **mask) == pytest.approx(n * (64 + 2 * 128), rel=0.02)  # of both chunks
    assert timed(128) == n * (n + 2 * 64)  # of whole blocks half
    assert timed(128, causal=True) == pytest.approx(n * (n / 2 + 128 + 64 / 2), rel=1e-3)


def test_balance_of_nothing():
    assert balance([0, 0]) == balance([3, 3]) == 1 and balance([0, 2]) == 2
