"""Divisions into bands and tiles: each pair once, equal work, few bytes, for any number of ranks and any mask."""

import random

import numpy as np
import pytest

from mpiattn import masks
from mpiattn.problem.mask import Mask
from mpiattn.schedule.bands import bands
from mpiattn.schedule.division import Piece, is_exact, trimmed


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


def visible(mask):
    """Which keys each query sees: bool (queries, keys)."""
    sees = np.zeros((mask.seqlen, mask.seqlen_k), bool)
    begin, end = (side[:, 0] for side in mask.key_intervals(np.arange(mask.seqlen)))
    for first, last in zip(begin, end):
        for row, (low, high) in enumerate(zip(first, last)):
            sees[row, low:high] = True
    return sees


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
        assert len(division) == ranks and is_exact(division, groups, mask.seqlen, mask.seqlen_k), mask
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
    assert is_exact(division, groups, mask.seqlen, mask.seqlen_k)
    work = [pairs_of(pieces, mask) for pieces in division]
    assert sum(work) == groups * mask.pairs()
    assert max(work) < 1.03 * sum(work) / ranks


@pytest.mark.parametrize(
    "ranks, row_bytes, key_bytes, shape",
    [(16, 1, 1, (4, 4)), (4, 1, 4, (4, 1)), (4, 4, 1, (1, 4)), (7, 1, 60, (7, 1)), (7, 60, 1, (1, 7))],
)
def test_the_bands_that_move_fewest_bytes(ranks, row_bytes, key_bytes, shape):
    """Of one matrix without a mask: (bands, tiles of each); Ring has a band for each rank, Q-ring one for all."""
    division = bands(Mask(1600, 1600), ranks, 1, key_bytes=row_bytes, row_bytes=key_bytes)
    tops = [pieces[0].first_row for pieces in division]
    assert (len(set(tops)), tops.count(0)) == shape


def test_pieces_that_are_not_exact():
    whole = Piece(0, 0, 4, 0, 6)
    assert is_exact(((whole,), ()), 1, 4, 6) and not is_exact(((whole,), (whole,)), 1, 4, 6)
    assert not is_exact(((whole._replace(last_row=3),),), 1, 4, 6)
    halves = whole._replace(last_row=2), whole._replace(last_row=2)  # the right area, and half of it twice
    assert not is_exact((halves,), 1, 4, 6)
    assert not is_exact(((whole._replace(first_row=1, last_row=5),),), 1, 4, 6)


@pytest.mark.parametrize("seed", range(10))
def test_trimmed(seed):
    """The outermost rows and keys that are left have a visible pair, and none is lost."""
    rng = random.Random(seed)
    for _ in range(30):
        mask = drawn(rng)
        if mask.mask is not None:
            continue
        rows, keys = (sorted(rng.sample(range(n + 1), 2)) for n in (mask.seqlen, mask.seqlen_k))
        sees = visible(mask)
        inside = np.zeros_like(sees)
        inside[slice(*rows), slice(*keys)] = sees[slice(*rows), slice(*keys)]
        left = trimmed(Piece(0, *rows, *keys), mask)
        if not inside.any():
            assert left is None
            continue
        some_rows, some_keys = (np.flatnonzero(inside.any(axis=axis)) for axis in (1, 0))
        assert left == Piece(0, some_rows[0], some_rows[-1] + 1, some_keys[0], some_keys[-1] + 1)
