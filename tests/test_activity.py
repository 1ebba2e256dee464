"""The work that masks leave to each rank, compared with a count by the definition."""

import random
from itertools import pairwise

import divisions
import numpy as np
import pytest

from mpiattn.problem.group import Group
from mpiattn.problem.layout import Layout
from mpiattn.problem.mask import PIECE, Mask
from mpiattn.schedule.needed import Activity
from mpiattn.schedule.ranges import increasing
from mpiattn.schedule.tile import Tile
from mpiattn.verify.reference import visible_keys

CUTS = Group(np.array([0, 7, 7, 20]), np.array([2, 9, 15, 17]))
OTHER = Group(np.array([1, 3, 11, 23]), np.array([0, 4, 5, 17]), np.array([9, 0, 2]), np.array([True, False, True]))
ARGUMENTS = ("cu_seqlens", "cu_seqlens_k", "prefixes", "causal_documents")


@pytest.mark.parametrize("kind", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("a, b", [(1, 1), (1, 4), (4, 1), (2, 3)])
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"causal": True},
        {"window": (3, 1)},
        {"causal": True, "prefix": 5},
        {"causal": True, "causal_block": 4, "window": (9, None)},
    ],
)
@pytest.mark.parametrize("documents", [None, (CUTS,), (CUTS, OTHER)])
def test_pairs(kind, a, b, masks, documents):
    q_layout, k_layout = Layout(kind, 23, a * b), Layout(kind, 17, a * b)
    mask = Mask(23, 17, **masks)
    activity = Activity(mask, q_layout, k_layout, Tile(1, a, b), documents)
    pairs_of_ranks = [activity.pairs(rank) for rank in range(a * b)]
    assert sum(pairs_of_ranks) == mask.pairs(documents)
    for rank, pairs in enumerate(pairs_of_ranks):
        row, column = divmod(rank, a)
        queries = np.concatenate([q_layout.positions(row * a + u) for u in range(a)])
        keys = np.concatenate([k_layout.positions(w * a + column) for w in range(b)])
        assert pairs == sum(
            visible_keys(queries, keys, (23, 17), **masks, **dict(zip(ARGUMENTS, group or ()))).sum()
            for group in documents or [None]
        )


@pytest.mark.parametrize("seed", range(60))
def test_keys_that_a_chunk_sees(seed):
    """All keys of its queries' intervals, and no others; where queries are consecutive, only some are looked at."""
    rng = np.random.default_rng(seed)
    seqlen, seqlen_k, chunks = (int(n) for n in rng.integers(1, (40, 40, 5)))
    blocks = {"causal": True, "causal_block": int(rng.integers(1, 9))}
    masks = [{}, {"causal": True}, {"causal": True, "prefix": 3}, blocks]
    window = tuple(None if side > 9 else int(side) for side in rng.integers(0, 14, 2))

    def group():
        count = int(rng.integers(1, 6))
        cuts = [np.sort(rng.integers(0, tokens + 1, count + 1)) for tokens in (seqlen, seqlen_k)]
        kinds = rng.integers(0, 6, count), rng.random(count) < 0.5
        return Group(*cuts, *(kind if rng.random() < 0.5 else None for kind in kinds))

    documents = [None, (group(),), (group(), group())][seed % 3]
    mask = Mask(seqlen, seqlen_k, window=window, **masks[seed // 3 % 4])
    both = [[Layout(kind, n, chunks) for n in (seqlen, seqlen_k)] for kind in ("contiguous", "striped", "zigzag")]
    for layout, of_keys in (*both, [divisions.either(random.Random(seed), n, chunks) for n in (seqlen, seqlen_k)]):
        activity = Activity(mask, layout, of_keys, Tile(1, chunks, 1), documents)
        for chunk in range(chunks):
            lo, hi = (bound.ravel() for bound in activity.intervals(chunk))
            by_query = {key for a, b in zip(lo, hi) for key in range(a, b)}
            seen = list(zip(*activity.table.seen(chunk)))
            assert {key for a, b in seen for key in range(a, b)} == by_query
            assert all(a < b for a, b in seen) and all(b < c for (_, b), (c, _) in pairwise(seen)), "disjoint, in order"
            assert not any(bound.any() for bound in activity.columns(chunk, increasing([])))
            for other in range(chunks):
                keys = activity.k_layout.positions(other)
                expected = [np.searchsorted(keys, bound) for bound in activity.intervals(chunk)]
                assert np.array_equal(expected, activity.columns(chunk, activity.k_layout.ranges(other)))
                assert np.array_equal(expected, activity.columns(chunk, keys))


def test_columns_of_many_queries():
    """More than are looked at at a time, over the chunks of a tile."""
    tokens = 5 * PIECE // 2 + 7
    cuts = np.array([0, PIECE - 1, PIECE, 2 * PIECE + 3, tokens - 5])
    for kind in ("contiguous", "striped", "zigzag"):
        layout = Layout(kind, tokens, 2)
        activity = Activity(Mask(tokens, tokens, True), layout, layout, Tile(1, 1, 2), (Group(cuts, cuts),))
        keys = increasing(layout.ranges(chunk) for chunk in range(2))
        for chunk in range(2):
            begin, end = activity.columns(chunk, keys)
            lo, hi = activity.intervals(chunk)
            assert np.array_equal(begin, lo) and np.array_equal(end, hi), "all keys: columns are positions"
