"""The work that masks leave to each rank, compared with a count by the definition."""

import numpy as np
import pytest

from mpiattn.problem.layout import Layout
from mpiattn.problem.mask import Group, Mask
from mpiattn.schedule.needed import Activity
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
    pairs_of_ranks = [activity.work(rank) for rank in range(a * b)]
    assert sum(pairs_of_ranks) == mask.pairs(documents)
    for rank, pairs in enumerate(pairs_of_ranks):
        row, column = divmod(rank, a)
        queries = np.concatenate([q_layout.positions(row * a + u) for u in range(a)])
        keys = np.concatenate([k_layout.positions(w * a + column) for w in range(b)])
        assert pairs == sum(
            visible_keys(queries, keys, (23, 17), **masks, **dict(zip(ARGUMENTS, group or ()))).sum()
            for group in documents or [None]
        )
