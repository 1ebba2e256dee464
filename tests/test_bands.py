"""Divisions into bands and tiles: each pair once, equal work, few bytes, for any number of ranks and any mask."""

import math
import random

import numpy as np
import pytest

from mpiattn import masks
from mpiattn.problem.mask import Mask
from mpiattn.problem.problem import Problem
from mpiattn.schedule.bands import bands
from mpiattn.schedule.least_sent import least_sent
from mpiattn.schedule.owners import kinds_of_ranks


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


def owners(seqlen, ranks):
    """Where the tokens of each rank begin, and the last end, in the even split."""
    return np.arange(ranks + 1) * seqlen // ranks


def drawn_owners(rng, mask, ranks):
    """Ranks that own tokens in a row, some of them none; or None."""
    if rng.random() < 0.3:
        return None
    return tuple(
        np.array([0, *sorted(rng.randint(0, length) for _ in range(ranks - 1)), length])
        for length in (mask.seqlen, mask.seqlen_k)
    )


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


def common(ranges):
    """The [first, last) that some ranges cover together, without overlaps, in order."""
    merged = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    return merged


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
        owned = drawn_owners(rng, mask, ranks)
        division = bands(mask, ranks, groups, rng.randint(1, 9), rng.randint(1, 9), owned)
        assert len(division) == ranks
        times = np.zeros((groups, mask.seqlen, mask.seqlen_k), int)
        for piece in (piece for pieces in division for piece in pieces):
            times[piece.group, piece.first_row : piece.last_row, piece.first_key : piece.last_key] += 1
        assert (times == 1).all(), mask


@pytest.mark.parametrize("choose", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks, groups", [(1, 1), (7, 1), (7, 32), (13, 3), (24, 8), (64, 1), (127, 32), (300, 8)])
def test_work_is_equal(ranks, groups, causal, choose):
    """But for whole rows and keys: of short sequences these are much of a rank's work."""
    mask = Mask(20_000, 20_000, causal)
    owned = (owners(20_000, ranks),) * 2 if choose else None
    division = bands(mask, ranks, groups, 1, 1, owned)
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


@pytest.mark.parametrize("ranks, groups", [(31, 8), (7, 32), (24, 8), (13, 5), (100, 8)])
def test_few_ranks_have_work_of_several_groups(ranks, groups):
    """A division in which every group has whole shares alone has as many as ranks, and others have one more a rest."""
    division = bands(Mask(20_000, 20_000), ranks, groups, 1, 1)
    shares = sum(len({piece.group for piece in pieces}) for pieces in division)
    assert shares == ranks + groups - math.gcd(ranks, groups)


def test_a_rank_gets_the_keys_that_it_owns():
    """Of one sequence without a mask each of 16 ranks owns tokens of both its rows and its keys."""
    own = owners(1600, 16)
    for rank, pieces in enumerate(bands(Mask(1600, 1600), 16, 1, 1, 1, (own, own))):
        rows = common((piece.first_row, piece.last_row) for piece in pieces)
        keys = common((piece.first_key, piece.last_key) for piece in pieces)
        for ranges in (rows, keys):
            assert any(first <= own[rank] and own[rank + 1] <= last for first, last in ranges)


@pytest.mark.parametrize("seed", range(20))
def test_no_two_ranks_gain_by_an_exchange(seed):
    """And each kind has its number of ranks."""
    rng = np.random.default_rng(seed)
    ranks_of = rng.integers(1, 5, rng.integers(1, 7))
    ranks = int(ranks_of.sum())
    worth = rng.integers(0, 20, (len(ranks_of), ranks))
    kind_of = kinds_of_ranks(worth, ranks_of)
    assert (np.bincount(kind_of, minlength=len(ranks_of)) == ranks_of).all()
    now = worth[kind_of, np.arange(ranks)]
    gain = worth[kind_of] - now  # by rank whose kind is taken, and rank
    assert (gain + gain.T).max() <= 0


@pytest.mark.parametrize("choose", [False, True])
def test_very_long_sequences(choose):
    """Of more pairs than an int64 counts."""
    mask = Mask(2**31, 2**31)
    division = bands(mask, 7, 8, 1, 1, (owners(2**31, 7),) * 2 if choose else None)
    areas = [sum((p.last_row - p.first_row) * (p.last_key - p.first_key) for p in pieces) for pieces in division]
    assert sum(areas) == 8 * 2**62 and max(areas) < 1.001 * sum(areas) / 7


def seen_parts(piece, mask):
    """The rows of a piece that see keys of it, and the keys that they see: hulls, of a mask of one interval."""
    rows = np.arange(piece.first_row, piece.last_row)
    low, high = mask.keys_seen_by(rows)
    low, high = np.maximum(low, piece.first_key), np.minimum(high, piece.last_key)
    some = low < high
    if not some.any():
        return (0, 0), (0, 0)
    return (int(rows[some][0]), int(rows[some][-1]) + 1), (int(low[some].min()), int(high[some].max()))


def received(division, mask, row_bytes, key_bytes):
    """Bytes that each rank gets from others: rows and keys that it needs, but for those that it owns."""
    own = owners(mask.seqlen, len(division)), owners(mask.seqlen_k, len(division))
    total = []
    for rank, pieces in enumerate(division):
        needed = {}
        for piece in pieces:
            for side, part in enumerate(seen_parts(piece, mask)):
                needed.setdefault((side, piece.group), []).append(part)
        total.append(0)
        for (side, _), ranges in needed.items():
            begin, end = own[side][rank], own[side][rank + 1]
            for first, last in common(ranges):
                others = last - first - max(min(last, end) - max(first, begin), 0)
                total[-1] += int(others) * (key_bytes if side else row_bytes)
    return total


@pytest.mark.parametrize(
    "ranks, heads, kv_heads, causal, mean, busiest",
    [
        (31, 8, 8, False, 1.09, 1.32),
        (31, 8, 8, True, 1.36, 1.54),
        (24, 8, 8, True, 1.31, 1.32),
        (64, 8, 8, False, 1.03, 1.08),
        (64, 8, 8, True, 1.19, 1.31),
        (64, 1, 1, True, 1.10, 1.30),
        (127, 32, 32, False, 1.06, 1.27),
        (127, 32, 32, True, 1.30, 1.45),
        (256, 32, 32, True, 1.17, 1.27),
        (64, 32, 8, True, 1.21, 1.88),
        (100, 32, 8, True, 1.17, 1.86),
        (7, 1, 1, False, 1.05, 1.08),
        (13, 1, 1, False, 1.03, 1.04),
        (16, 1, 1, False, 1.001, 1.001),  # as the mesh of 4 x 4
        (64, 1, 1, False, 1.001, 1.001),
    ],
)
def test_bytes_over_the_least(ranks, heads, kv_heads, causal, mean, busiest):
    """With owners of equal pieces in order.  These are ratios: of longer sequences they are the same."""
    problem = Problem(2**14, heads, 128, kv_heads=kv_heads, causal=causal)
    mask = problem.whole_mask
    row_bytes, key_bytes = heads // kv_heads * (2 * 128 + 1) * 4, 2 * 128 * 4
    division = bands(mask, ranks, kv_heads, row_bytes, key_bytes, (owners(2**14, ranks),) * 2)
    times = np.array(received(division, mask, row_bytes, key_bytes)) / least_sent(problem, ranks, mask.pairs())
    assert times.mean() < mean
    assert times.max() < busiest
