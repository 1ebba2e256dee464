"""Divisions into bands and tiles: each pair once, equal work, few bytes, for any number of ranks and any mask."""

import random

import numpy as np
import pytest

from mpiattn import masks
from mpiattn.problem.mask import Mask
from mpiattn.schedule.bands import bands


def drawn(rng):
    """A mask of a short sequence."""
    seqlen, seqlen_k = rng.randint(1, 40), rng.randint(1, 40)
    window = rng.choice([None, rng.randint(0, 9)]), rng.choice([None, rng.randint(0, 9)])
    causal = rng.random() < 0.5
    prefix, block = 0, None
    if causal:
        prefix, block = rng.choice([0, rng.randint(0, seqlen_k)]), rng.choice([None, rng.randint(1, 7)])
    intervals = None
    if rng.random() < 0.3:
        seqlen = seqlen_k = 6 * rng.randint(1, 6)
        intervals = masks.neighborhood((6, seqlen // 6), (3, 1))
        prefix = min(prefix, seqlen_k)
    return Mask(seqlen, seqlen_k, causal, window, prefix, block, intervals)


def assert_exact(division, groups, mask):
    """Each pair of a query and a key of each group is in one piece: they share none, and have the area of all."""
    pieces = np.array([piece for pieces in division for piece in pieces])
    group, first_row, last_row, first_key, last_key = pieces.T
    assert first_row.min() >= 0 and last_row.max() <= mask.seqlen
    assert first_key.min() >= 0 and last_key.max() <= mask.seqlen_k
    assert ((last_row - first_row) * (last_key - first_key)).sum() == groups * mask.seqlen * mask.seqlen_k
    shared = group[:, None] == group
    shared &= (first_row[:, None] < last_row) & (first_row < last_row[:, None])
    shared &= (first_key[:, None] < last_key) & (first_key < last_key[:, None])
    assert shared.sum() == len(pieces)  # each with itself


def pairs_of(pieces, mask):
    """The visible pairs of some pieces, asked row by row."""
    total = 0
    for piece in pieces:
        begin, end = (side[:, 0] for side in mask.key_intervals(np.arange(piece.first_row, piece.last_row)))
        total += np.clip(np.minimum(end, piece.last_key) - np.maximum(begin, piece.first_key), 0, None).sum()
    return int(total)


@pytest.mark.parametrize("seed", range(10))
def test_each_pair_is_in_one_piece(seed):
    rng = random.Random(seed)
    for _ in range(20):
        mask, ranks, groups = drawn(rng), rng.randint(1, 30), rng.randint(1, 5)
        division = bands(mask, ranks, groups, rng.randint(1, 9), rng.randint(1, 9))
        assert len(division) == ranks
        times = np.zeros((groups, mask.seqlen, mask.seqlen_k), int)
        for piece in (piece for pieces in division for piece in pieces):
            times[piece.group, piece.first_row : piece.last_row, piece.first_key : piece.last_key] += 1
        assert (times == 1).all(), mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks, groups", [(1, 1), (7, 1), (13, 3), (64, 1), (127, 32), (300, 8)])
def test_work_is_equal(ranks, groups, causal):
    """But for whole rows and keys: of short sequences these are much of a rank's work."""
    mask = Mask(20_000, 20_000, causal)
    division = bands(mask, ranks, groups, 1, 1)
    assert_exact(division, groups, mask)
    work = [pairs_of(pieces, mask) for pieces in division]
    assert sum(work) == groups * mask.pairs()
    assert max(work) < 1.03 * sum(work) / ranks


@pytest.mark.parametrize(
    "ranks, row_bytes, key_bytes, shape",
    [(16, 1, 1, (4, 4)), (4, 1, 4, (1, 4)), (4, 4, 1, (4, 1)), (7, 1, 60, (1, 7)), (7, 60, 1, (7, 1))],
)
def test_the_bands_that_move_fewest_bytes(ranks, row_bytes, key_bytes, shape):
    """Of one matrix without a mask: (bands, tiles of each); Ring has a band for each rank, Q-ring one for all."""
    division = bands(Mask(1600, 1600), ranks, 1, row_bytes, key_bytes)
    tops = [pieces[0].first_row for pieces in division]
    assert (len(set(tops)), tops.count(0)) == shape


def test_very_long_sequences():
    """Of more pairs than an int64 counts."""
    mask = Mask(2**31, 2**31)
    division = bands(mask, 7, 8, 1, 1)
    areas = [sum((p.last_row - p.first_row) * (p.last_key - p.first_key) for p in pieces) for pieces in division]
    assert sum(areas) == 8 * 2**62 and max(areas) < 1.001 * sum(areas) / 7
