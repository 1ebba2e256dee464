"""Packed documents dealt to ranks: each visible pair once, about equal times, for any mask, documents and owners."""

import random
from dataclasses import replace

import numpy as np
import pytest

from mpiattn import masks
from mpiattn.problem.group import Group
from mpiattn.problem.mask import Mask
from mpiattn.schedule.dealing import Costs, dealt

RANKS, CHUNK, HEADS, DIM = 64, 8192, 32, 128


def cuts_of(rng, parts, tokens, padding):
    """Where so many consecutive parts begin and the last ends; some may be empty."""
    inner = sorted(rng.randint(0, tokens) for _ in range(parts + 1))
    if not padding:
        inner[0], inner[-1] = 0, tokens
    return np.array(inner)


def drawn_group(rng, mask):
    """Documents of a sequence."""
    count = rng.randint(1, 6)
    alike = mask.seqlen == mask.seqlen_k and rng.random() < 0.6
    padding = rng.random() < 0.3
    q_cuts = cuts_of(rng, count, mask.seqlen, padding)
    k_cuts = q_cuts if alike else cuts_of(rng, count, mask.seqlen_k, padding)
    prefixes = causal = None
    if rng.random() < 0.3:
        prefixes = np.array([rng.choice([0, 3, 2**62]) for _ in range(count)])
    if rng.random() < 0.3:
        causal = np.array([rng.random() < 0.5 for _ in range(count)])
    return Group(q_cuts, k_cuts, prefixes, causal)


def drawn_mask(rng):
    """A mask of a short sequence."""
    seqlen = rng.randint(1, 60)
    seqlen_k = rng.choice([seqlen, rng.randint(1, 60)])
    window = rng.choice([None, rng.randint(0, 9)]), rng.choice([None, rng.randint(0, 9)])
    window = rng.choice([window, (None, None)])
    causal = rng.random() < 0.7
    prefix, block = 0, None
    if causal:
        prefix, block = rng.choice([0, rng.randint(0, seqlen_k)]), rng.choice([None, rng.randint(1, 7)])
    mask = Mask(seqlen, seqlen_k, causal, window, prefix, block)
    if rng.random() < 0.2:
        seqlen = 6 * rng.randint(1, 8)
        of_caller = masks.neighborhood((6, seqlen // 6), (3, 1))
        mask = replace(mask, seqlen=seqlen, seqlen_k=seqlen, prefix=min(prefix, seqlen), mask=of_caller)
    return mask


def drawn(rng):
    """Arguments of `dealt`."""
    mask = drawn_mask(rng)
    ranks, sequences, kv_heads = rng.randint(1, 13), rng.randint(1, 3), rng.randint(1, 5)
    documents = tuple(drawn_group(rng, mask) for _ in range(rng.choice([1, sequences])))
    owned = tuple(cuts_of(rng, ranks, tokens, padding=False) for tokens in (mask.seqlen, mask.seqlen_k))
    if mask.seqlen == mask.seqlen_k and rng.random() < 0.7:
        owned = owned[0], owned[0]
    costs = Costs(*(rng.choice([0, 1, rng.randint(1, 10**6)]) for _ in range(4)))
    return mask, documents, sequences, kv_heads, owned, costs


def assert_exact(division, mask, documents, sequences, kv_heads):
    """Each visible pair of each group is in one piece, and no pair in several."""
    times = np.zeros((sequences, kv_heads, mask.seqlen, mask.seqlen_k), int)
    for piece in (piece for pieces in division for piece in pieces):
        assert piece.first_row < piece.last_row and piece.first_key < piece.last_key
        sequence, head = divmod(piece.group, kv_heads)
        times[sequence, head, piece.first_row : piece.last_row, piece.first_key : piece.last_key] += 1
    begin, end = (side[..., None] for side in mask.key_intervals(np.arange(mask.seqlen), documents))
    keys = np.arange(mask.seqlen_k)
    visible = ((begin <= keys) & (keys < end)).any(axis=0)[:, None]  # (entries, 1, queries, keys)
    assert (times[np.broadcast_to(visible, times.shape)] == 1).all()
    assert times.max(initial=0) <= 1


@pytest.mark.parametrize("seed", range(10))
def test_each_visible_pair_is_in_one_piece(seed):
    rng = random.Random(seed)
    for _ in range(30):
        mask, documents, sequences, kv_heads, owned, costs = drawn(rng)
        division = dealt(mask, documents, sequences, kv_heads, owned, costs)
        assert len(division) == len(owned[0]) - 1
        assert_exact(division, mask, documents, sequences, kv_heads)
        assert division == dealt(mask, documents, sequences, kv_heads, owned, costs)
