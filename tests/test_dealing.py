"""Packed documents dealt to ranks: each visible pair once, about equal times, for any mask, documents and owners."""

import random
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from mpiattn import masks
from mpiattn.problem.group import Group
from mpiattn.problem.mask import Mask
from mpiattn.schedule.dealing import WAYS, Costs, Dealer, dealt

RANKS, CHUNK, HEADS, DIM = 64, 8192, 32, 128


@dataclass(frozen=True)
class Stairs(Mask):
    """A mask with a rule of its own."""

    def rule(self, queries):
        return None, queries.diagonal // 3 * 3 + 3


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
    mask = rng.choice([Mask] * 9 + [Stairs])(seqlen, seqlen_k, causal, window, prefix, block)
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


@pytest.mark.parametrize("seed", range(8))
def test_each_visible_pair_is_in_one_piece(seed):
    rng = random.Random(seed)
    for _ in range(12):
        mask, documents, sequences, kv_heads, owned, costs = drawn(rng)
        division = dealt(mask, documents, sequences, kv_heads, owned, costs)
        assert len(division) == len(owned[0]) - 1
        assert_exact(division, mask, documents, sequences, kv_heads)
        assert division == dealt(mask, documents, sequences, kv_heads, owned, costs)


@pytest.mark.parametrize("seed", range(6))
def test_each_visible_pair_is_in_one_piece_in_every_way(seed):
    """Also in those that do not win."""
    rng = random.Random(seed)
    for _ in range(5):
        mask, documents, sequences, kv_heads, owned, costs = drawn(rng)
        dealer = Dealer(mask, documents, sequences * kv_heads // len(documents), owned, costs)
        short, before = dealer.short()
        for way in WAYS:
            division = dealer.division(dealer.tried(way, short, before))
            assert_exact(division, mask, documents, sequences, kv_heads)


def lengths(draw, tokens=RANKS * CHUNK):
    """Lengths of documents that fill the tokens, each as drawn."""
    found = []
    while sum(found) < tokens:
        found.append(int(draw()))
    found[-1] -= sum(found) - tokens
    return found


def lognormal(mean, sigma, seed=0):
    rng = np.random.default_rng(seed)
    return lengths(lambda: max(64, rng.lognormal(mean, sigma)))


def costs_of(kv_heads):
    """In femtoseconds, of heads in bfloat16 and partials in float32, at 400 TFLOP/s and 45 GB/s each way."""
    heads = HEADS // kv_heads
    amounts = (4 * DIM * heads / 400e12, *(elements * DIM / 45e9 for elements in (2 * heads, 4 * heads, 4)))
    return Costs(*(round(seconds * 1e15) for seconds in amounts))


def dealt_causal(lens, kv_heads):
    """(division, documents, mask, owned) of consecutive causal documents in even chunks."""
    cuts = np.cumsum([0, *lens])
    mask, documents = Mask(RANKS * CHUNK, RANKS * CHUNK, True), (Group(cuts, cuts),)
    owned = (np.arange(RANKS + 1) * CHUNK,) * 2
    return dealt(mask, documents, 1, kv_heads, owned, costs_of(kv_heads)), documents, mask, owned


def joined(ranges):
    """Ranges that overlap or touch, as one."""
    found = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], stop)
        else:
            found.append([start, stop])
    return found


def times_of(division, documents, mask, owned, costs):
    """Of compute, of what is received and of what is sent, (3, ranks): what a rank has twice it receives once."""
    times = np.zeros((3, len(division)))
    (begin,), (end,) = mask.key_interval(np.arange(mask.seqlen), documents)
    pairs = {}
    for rank, pieces in enumerate(division):
        of_group = defaultdict(list)
        for group, *bounds in pieces:
            of_group[group].append(tuple(bounds))
        alike = defaultdict(int)
        for rectangles in of_group.values():
            alike[tuple(rectangles)] += 1
        for rectangles, groups in alike.items():
            for first, last, start, stop in rectangles:
                if (first, last, start, stop) not in pairs:
                    seen = np.minimum(end[first:last], stop) - np.maximum(begin[first:last], start)
                    pairs[first, last, start, stop] = int(np.clip(seen, 0, None).sum())
                times[0, rank] += groups * costs.pair * pairs[first, last, start, stop]
            for side, (cost, back) in enumerate([(costs.row, costs.partial), (costs.key, 0)]):
                held = np.zeros(len(division))
                for start, stop in joined([bounds[2 * side : 2 * side + 2] for bounds in rectangles]):
                    held += np.diff(np.clip(owned[side], start, stop))
                held[rank] = 0
                times[2] += groups * cost * held
                times[1, rank] += groups * cost * held.sum()
                times[1] += groups * back * held
                times[2, rank] += groups * back * held.sum()
    return times


@pytest.mark.parametrize(
    "mean, sigma, kv_heads, most", [(9.5, 1.6, 8, 1.1), (9.5, 1.6, 32, 1.1), (8.5, 1.2, 8, 1.2), (8.5, 1.2, 32, 1.4)]
)
def test_ranks_end_at_about_the_same_time(mean, sigma, kv_heads, most):
    """Each chunk belongs to few documents: as they are, the busiest rank has over three times the mean work."""
    lens = lognormal(mean, sigma)
    costs = costs_of(kv_heads)
    division, *call = dealt_causal(lens, kv_heads)
    times = times_of(division, *call, costs)
    assert times[0].sum() == sum(n * (n + 1) // 2 for n in lens) * kv_heads * costs.pair
    assert times.max() < most * times[0].mean()


def test_short_documents_stay_as_they_are():
    rng = np.random.default_rng(0)
    division, *_ = dealt_causal(lengths(lambda: rng.uniform(512, 4096)), 8)
    for rank, pieces in enumerate(division):
        assert {piece[1:3] for piece in pieces} == {(rank * CHUNK, (rank + 1) * CHUNK)}


def test_very_long_documents():
    """Of more pairs than an int64 counts."""
    tokens = 2**32
    cuts = [0, tokens // 2, 3 * tokens // 4, tokens]
    documents = (Group(np.array(cuts), np.array(cuts)),)
    owned = (np.arange(8) * tokens // 7,) * 2
    division = dealt(Mask(tokens, tokens), documents, 1, 8, owned, costs_of(8))
    pairs = [0] * 7
    for rank, pieces in enumerate(division):
        for _, first, last, start, stop in pieces:
            for begin, end in pairwise(cuts):
                rows = max(min(last, end) - max(first, begin), 0)
                pairs[rank] += rows * max(min(stop, end) - max(start, begin), 0)
    assert sum(pairs) == 8 * sum((end - begin) ** 2 for begin, end in pairwise(cuts))
    assert max(pairs) < 1.15 * sum(pairs) / 7
