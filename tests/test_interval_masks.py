"""Masks of several intervals: intervals against definitions pair by pair, what cuts promise, & and |, the oracle."""

import pickle
import random
from dataclasses import dataclass

import numpy as np
import pytest
from dense import error
from drawn_masks import DRAW, draw_neighborhood

from mpiattn import masks
from mpiattn.errors import ArgumentError
from mpiattn.masks.interval_mask import IntervalMask, disjoint
from mpiattn.masks.pieces import all_cuts
from mpiattn.problem.mask import Mask
from mpiattn.problem.problem import Problem
from mpiattn.verify import reference
from mpiattn.verify.reference_masks import RULES, shown, span

SEEDS = range(200)


def sees(mask, seqlen, seqlen_k, queries=None):
    """What the intervals show, bool (queries, keys); no key is in two of them, and no list is empty for all."""
    queries, keys = np.arange(seqlen) if queries is None else queries, np.arange(seqlen_k)
    begin, end = mask.intervals(queries, seqlen, seqlen_k)
    assert begin.dtype == end.dtype == np.int64 and begin.shape == end.shape == (len(begin), len(queries))
    assert (begin < end).any(axis=1).all()
    times = np.zeros((len(queries), seqlen_k), int)
    for first, last in zip(begin, end):
        times += (first[:, None] <= keys) & (keys < last[:, None])
    assert times.max(initial=0) <= 1
    return times == 1


def test_every_rule_is_drawn():
    assert set(DRAW) == set(RULES)


@pytest.mark.draw(20)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_mask_is_its_definition(seed):
    """A mask of each kind."""
    for kind, draw in DRAW.items():
        rng = random.Random(f"{kind} {seed}")
        check(*draw(rng), rng)


def check(mask, seqlen, seqlen_k, rng):
    mask.check(seqlen, seqlen_k)
    as_it_was = pickle.dumps(mask)
    queries, keys = np.arange(seqlen), np.arange(seqlen_k)
    expected = shown(mask, queries, keys, seqlen, seqlen_k)
    assert (sees(mask, seqlen, seqlen_k) == expected).all(), mask
    some = np.sort(rng.choices(range(seqlen), k=min(seqlen, 7)) if seqlen else []).astype(np.int64)
    assert (sees(mask, seqlen, seqlen_k, some) == expected[some]).all(), mask
    assert (shown(mask, some, keys[3::2], seqlen, seqlen_k) == expected[some][:, 3::2]).all()
    begin, end = span(mask, queries, seqlen, seqlen_k)
    assert not expected[(keys < begin[:, None]) | (keys >= end[:, None])].any(), "out of bounds"
    again = pickle.loads(as_it_was)
    assert pickle.dumps(mask) == as_it_was
    assert again == mask and hash(again) == hash(mask) and repr(again) == repr(mask) and len(repr(mask)) < 600
    assert (sees(again, seqlen, seqlen_k) == expected).all() and 2 < len(str(mask)) < 400
    keeps_its_promise(mask, seqlen, seqlen_k)


def keeps_its_promise(mask, seqlen, seqlen_k):
    """What `IntervalMask.cuts` says of the queries of a piece, query by query."""
    cuts = mask.cuts(seqlen, seqlen_k)
    if cuts is None:
        return
    assert cuts.tolist() == sorted({0, *cuts.tolist()}) if seqlen else not len(cuts)
    begin, end = mask.intervals(np.arange(seqlen), seqlen, seqlen_k)
    assert cuts.tolist() == all_cuts(mask, seqlen, seqlen_k).tolist(), "too many or too few"
    pieces = list(zip(cuts, [*cuts[1:], seqlen]))
    for first, last in zip(begin, end):
        for start, stop in pieces:
            of_piece = first[start:stop], last[start:stop]
            some = of_piece[0] < of_piece[1]
            assert some.all() or not some.any(), (mask, start)
            if some.all():
                assert (np.diff(of_piece) >= 0).all() and (of_piece[0][1:] <= of_piece[1][:-1]).all(), (mask, start)


@pytest.mark.draw(20)
@pytest.mark.parametrize("seed", SEEDS)
def test_both_and_either(seed):
    """Chains of masks of one sequence, in any order."""
    rng = random.Random(f"chains {seed}")
    of_grid = rng.random() < 0.5
    mask, seqlen, seqlen_k = (draw_neighborhood if of_grid else DRAW[rng.choice(list(DRAW)[2:])])(rng)
    for _ in range(rng.randint(1, 4)):
        while True:
            other = rng.choice([*DRAW.values()])(rng)[0]
            pair = (mask, other) if rng.random() < 0.5 else (other, mask)
            both = pair[0] & pair[1] if rng.random() < 0.5 else pair[0] | pair[1]
            try:
                both.check(seqlen, seqlen_k)
                break
            except ArgumentError:  # it does not fit the tokens, or has other places
                continue
        mask = both
    queries, keys = np.arange(seqlen), np.arange(seqlen_k)
    expected = shown(mask, queries, keys, seqlen, seqlen_k)
    assert (sees(mask, seqlen, seqlen_k) == expected).all(), mask
    begin, end = span(mask, queries, seqlen, seqlen_k)
    assert not expected[(keys < begin[:, None]) | (keys >= end[:, None])].any()
    assert pickle.loads(pickle.dumps(mask)) == mask and mask.cuts(seqlen, seqlen_k) is None


def test_only_masks_can_be_combined():
    mask, array = masks.causal(), np.ones((3, 3), bool)
    for call, text in (
        (lambda: mask & 3, "causal & int is not defined: & and | combine two masks of mpiattn.masks; masks.intervals"),
        (lambda: mask | None, "causal | NoneType is not defined"),
        (lambda: mask & array, "causal & ndarray is not defined"),
        (lambda: array & mask, "causal & ndarray is not defined"),
        (lambda: array | mask, "causal | ndarray is not defined"),
        (lambda: array[0, 0] & mask, "causal & bool is not defined"),
        (lambda: mask ^ mask, "causal ^ Window is not defined"),
        (lambda: mask - mask, "causal - Window is not defined"),
        (lambda: ~mask, "~ is not defined for masks; say what queries see"),
        (lambda: ~(mask & masks.chunked(2)), "in place of what causal & chunked 2 hides: masks.intervals and"),
    ):
        with pytest.raises(ArgumentError) as raised:
            call()
        assert text in str(raised.value), raised.value


def lists_of(mask, seqlen, queries=None):
    return len(mask.intervals(np.arange(seqlen) if queries is None else queries, seqlen, seqlen)[0])


def test_a_mask_has_no_truth_value():
    """`a and b` would silently be b, and `a or b` a."""
    window, blocks = masks.window(3, 0), masks.chunked(4)
    for wrong in (lambda: window and blocks, lambda: window or blocks, lambda: not window):
        with pytest.raises(ArgumentError, match=r"neither true nor false; combine masks with & and \|, not with"):
            wrong()


def test_few_lists():
    """Launches of a block: one for each list."""
    field = masks.neighborhood((64, 128), 15, cyclic=(False, True))
    assert lists_of(field, 64 * 128) == 17  # a row each, and one where the longitude begins again, either way
    assert lists_of(field, 64 * 128, 128 * 30 + np.arange(40, 80)) == 15
    assert lists_of(masks.neighborhood((64, 128), (15, 128)), 64 * 128) == 1  # whole rows
    assert lists_of(masks.neighborhood((8, 16, 32), (3, 16, 32)), 4096) == 1
    assert lists_of(masks.neighborhood((8, 16, 32), (3, 16, 32), cyclic=True), 4096) == 3  # planes before and after
    assert lists_of(masks.neighborhood((8, 16, 32), (3, 3, 32)), 4096) == 3
    assert lists_of(masks.neighborhood((9, 32), (9, 3), cyclic=True), 288) == 11
    documents = [(i, i + 10, i, i + 10, "causal") for i in range(0, 100, 10)]
    assert lists_of(masks.ranges(documents), 100) == 1 and lists_of(masks.ranges([*documents, documents[0]]), 100) == 1
    assert lists_of(masks.global_tokens(4) | masks.window(8, 0), 100) == 2
    assert lists_of(masks.chunked(16) | masks.window(8, 0), 100) == 1
    assert lists_of(masks.chunked(16) & masks.causal() & masks.window(8, None), 100) == 1
    assert lists_of(field & field & field, 64 * 128) == 17 and lists_of(field | field, 64 * 128) == 17
    assert lists_of(masks.sphere([64] * 32, np.pi / 32), 2048) <= 5


def test_most_intervals_of_a_query():
    """What predictions take for the launches of a block."""
    for mask, lists in ((None, 1), (masks.window(3, 0), 1), (masks.neighborhood((8, 8), 3), 3)):
        assert Mask(64, 64, mask=mask).lists == lists


def test_lists_go_on_from_query_to_query():
    """A list of a field has the same row of the window for all queries, so that a tile of queries looks at few keys."""
    begin, end = masks.neighborhood((64, 128), 15, cyclic=(False, True)).intervals(
        np.arange(20 * 128, 40 * 128), 64 * 128, 64 * 128
    )
    steps = np.diff(begin[:15]), np.diff(end[:15])  # in the others only queries at the end of a row see keys
    assert all((step >= 0).all() and (step <= 8).all() for step in steps)


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (masks.neighborhood((30, 50), 5), 30 + 1),
        (masks.neighborhood((30, 50), 5, cyclic=(False, True)), 3 * 30),
        (masks.neighborhood((30, 50), (5, 50)), 1),
        (masks.neighborhood((5, 6, 50), 3, cyclic=True), 3 * 30),
        (masks.neighborhood((1500,), 9), 1),
        (masks.global_tokens(4), 2),
        (masks.chunked(10), 1),
        (masks.window(3, 4), 1),
        (masks.ranges([(0, 700, 0, 700, "causal"), (700, 1500, 0, 1500, "full")]), 2),
        (masks.blocks(100, [(i, j) for i in range(15) for j in range(i % 3, 15, 3)]), 15),
        (masks.share_question(500, [500, 500]), 3),
        (masks.tree([-1, 0, 0, 2]), 5),
    ],
    ids=str,
)
def test_few_pieces(mask, most):
    cuts = mask.cuts(1500, 1500)
    assert len(cuts) <= most
    assert cuts.tolist() == all_cuts(mask, 1500, 1500).tolist()


def test_many_queries_are_asked_a_piece_at_a_time(monkeypatch):
    field = masks.neighborhood((20, 60), (7, 9), cyclic=(True, False))
    whole = field.intervals(np.arange(1200), 1200, 1200)
    both = masks.global_tokens(3) | field | masks.chunked(50)
    whole_of_both = both.intervals(np.arange(1200), 1200, 1200)
    monkeypatch.setattr("mpiattn.masks.pieces.PIECE", 70)
    monkeypatch.setattr("mpiattn.masks.interval_mask.PIECE", 80)
    for expected, mask in ((whole, field), (whole_of_both, both)):
        assert (np.stack(mask.intervals(np.arange(1200), 1200, 1200)) == np.stack(expected)).all()
    assert all_cuts(field, 1200, 1200).tolist() == field.cuts(1200, 1200).tolist()


def natten(q, k, size, kernel, dilation, causal):
    """Whether q sees k on an axis, as NATTEN's Flex back end writes it, of stride 1."""
    group = q % dilation
    padding = 1 - ((group + (dilation - (size % dilation))) // dilation)
    length = size // dilation + padding
    left, right = kernel // 2, kernel // 2 + (kernel % 2 - 1)
    own, key = q // dilation, k // dilation
    if causal:
        return own - key >= 0 and own - key < kernel and group == k % dilation
    center = min(max(min(own, length - 1), left), length - 1 - right)
    return (0 <= center - key <= left or 0 <= key - center <= right) and group == k % dilation


@pytest.mark.draw(6)
@pytest.mark.parametrize("seed", SEEDS)
def test_natten(seed):
    rng = random.Random(f"natten {seed}")
    shape = [rng.randint(1, 9) for _ in range(rng.randint(1, 3))]
    dilation = [rng.randint(1, min(3, size)) for size in shape]
    kernel = [rng.randint(1, size // step) for size, step in zip(shape, dilation)]
    causal = [rng.random() < 0.3 for _ in shape]
    expected = np.ones((1, 1), bool)
    for axis in zip(shape, kernel, dilation, causal):
        table = [[natten(q, k, *axis) for k in range(axis[0])] for q in range(axis[0])]
        expected = np.kron(expected, np.array(table))
    tokens = len(expected)
    assert (sees(masks.neighborhood(shape, kernel, dilation, causal), tokens, tokens) == expected).all()


MAGI = {  # flex_flash_attn_func's documentation: 5 queries and 2 keys, 2 and 5, 5 and 5
    "full": ("11 11 11 11 11", "11111 11111", "11111 11111 11111 11111 11111"),
    "causal": ("00 00 00 10 11", "11110 11111", "10000 11000 11100 11110 11111"),
    "inv_causal": ("11 01 00 00 00", "11111 01111", "11111 01111 00111 00011 00001"),
    "bi_causal": ("00 00 00 00 00", "11110 01111", "10000 01000 00100 00010 00001"),
}


@pytest.mark.parametrize("kind", MAGI)
def test_kinds_of_magi_attention(kind):
    for (seqlen, seqlen_k), drawn in zip([(5, 2), (2, 5), (5, 5)], MAGI[kind]):
        seen = sees(masks.ranges([(0, seqlen, 0, seqlen_k, kind)]), seqlen, seqlen_k)
        assert [[str(int(key)) for key in row] for row in seen] == [list(row) for row in drawn.split()]


def picture(mask, tokens):
    return ["".join("1" if key else "." for key in row) for row in sees(mask, tokens, tokens)]


def test_pictures():
    """Those of the docstrings."""
    assert picture(masks.tree([-1, 0, 0, -1]), 5) == ["1....", "11...", "111..", "11.1.", "1...1"]
    assert picture(masks.share_question(2, [2, 1]), 5) == ["1....", "11...", "111..", "1111.", "11..1"]
    assert picture(masks.global_tokens(1), 4) == ["1111", "1...", "1...", "1..."]
    assert picture(masks.chunked(2), 4) == ["11..", "11..", "..11", "..11"]
    assert picture(masks.window(1, 0), 4) == ["1...", "11..", ".11.", "..11"]
    assert picture(masks.neighborhood((8,), 3), 8)[0] == "111....."
    assert picture(masks.neighborhood((8,), 3, edge="clipped"), 8)[0] == "11......"
    assert picture(masks.neighborhood((8,), 3, cyclic=True), 8)[0] == "11.....1"


def test_longitudes_meet_at_the_poles():
    """Points of the first row are near each other, and the row after it is seen whole from it."""
    seen = sees(masks.sphere([40] * 20, 0.2), 800, 800)
    assert seen[0, :40].all() and not seen[400, 400:440].all()
    assert seen[20, :80].sum() > seen[400, 360:440].sum()


@pytest.mark.parametrize("rows", [3, 7, 10, 49, 180, 721])
def test_rounding_does_not_hide_neighbours(rows):
    """A radius of some steps in latitude shows so many rows; of a step along the equator, a point at either side."""
    for steps in (1, 2):
        mask, tokens = masks.sphere([5] * rows, steps * np.pi / rows), 5 * rows
        begin, end = mask.intervals(np.arange(10, tokens - 10, 5), tokens, tokens)
        own = np.arange(10, tokens - 10, 5)
        for row in range(-steps, steps + 1):
            assert ((begin <= own + 5 * row) & (own + 5 * row < end)).sum(axis=0).all()
    mask = masks.sphere([rows], 2 * np.pi / rows, [0])
    assert sees(mask, rows, rows).sum(axis=1).tolist() == [3] * rows


def test_numbers_in_arrays():
    """Make the same masks as those in lists: ranks compare them by their reprs."""
    lengths, sides, parents = [4, 8, 4], (6, 9), [-1, 0, 0]
    assert repr(masks.sphere(np.array(lengths), 0.5)) == repr(masks.sphere(lengths, 0.5))
    assert repr(masks.neighborhood(np.array(sides), np.array([3, 5]))) == repr(masks.neighborhood(sides, (3, 5)))
    assert repr(masks.tree(np.array(parents))) == repr(masks.tree(parents))


class Window(IntervalMask):
    """A mask that a program wrote, with a name that is one of ours: the key on the diagonal."""

    def intervals(self, queries, seqlen, seqlen_k):
        return queries[None], queries[None] + 1


@pytest.mark.parametrize(
    "mask", [masks.neighborhood((4, 6), 3, cyclic=(False, True)), masks.global_tokens(2) & masks.causal(), Window()]
)
def test_the_oracle_knows_masks(mask, monkeypatch):
    """Attention and gradients, with a window besides, as of scores that are hidden pair by pair."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 2, 24, 2, 3))
    at, window = np.arange(24), (7, 3)
    visible = sees(mask, 24, 24) & (at - at[:, None] >= -7) & (at - at[:, None] <= 3)
    assert (visible == reference.visible_keys(at, at, (24, 24), window=window, mask=mask)).all()
    blind = ~visible.any(axis=1)
    assert (reference.blind(at, 2, (24, 24), window=window, mask=mask) == blind).all()
    score = np.where(visible, np.einsum("bqhd,bkhd->bhqk", q, k) * 3**-0.5, -np.inf)
    with np.errstate(all="ignore"):
        lse = np.log(np.exp(score).sum(axis=3))
        weight = np.where(visible, np.exp(score - lse[..., None]), 0)
    expected = np.einsum("bhqk,bkhd->bqhd", weight, v)
    for pairs in (reference.BLOCK_PAIRS, 5):
        monkeypatch.setattr(reference, "BLOCK_PAIRS", pairs)
        out, got = reference.attention(q, k, v, window=window, mask=mask)
        assert error(out, expected) < 1e-13 and error(got[..., ~blind], lse[..., ~blind]) < 1e-13
        some, _ = reference.attention(q[:, 3::4], k, v, window=window, mask=mask, positions=at[3::4], lengths=(24, 24))
        assert error(some, expected[:, 3::4]) < 1e-13
        dv = reference.backward(dout, q, k, v, window=window, mask=mask)[2]
        assert error(dv, np.einsum("bhqk,bqhd->bkhd", weight, dout)) < 1e-13


@dataclass(frozen=True)
class Said(IntervalMask):
    """A mask of a program that says what it is told to, of as many queries as it is asked about."""

    said: str

    def intervals(self, queries, seqlen, seqlen_k):
        return eval(self.said, {"np": np, "q": queries})


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("q < 3", "Said.intervals returns a ndarray; it must return two arrays, begin and end"),
        (
            "(q, q + 1)",
            r"an array of shape \(9,\) and dtype int64 for 9 queries; begin and end must be int64 \(lists, 9\)",
        ),
        ("(q[None], q[None] + 1.0)", r"an array of shape \(1, 9\) and dtype float64 for 9 queries"),
        ("(q[None], np.stack([q, q]))", r"an array of shape \(2, 9\) and dtype int64"),
        ("(q[None, 1:], q[None, 1:] + 1)", r"an array of shape \(1, 8\) and dtype int64"),
        ("(np.stack([0 * q, q]), np.stack([1 + 0 * q, q + 1]))", "intervals that overlap for query 0; none may"),
        ("(np.stack([0 * q + 4, 0 * q]), np.stack([0 * q + 6, q]))", "intervals that overlap for query 5; none may"),
    ],
)
@pytest.mark.parametrize("of", [lambda mask: mask, lambda mask: masks.causal() & (mask | masks.global_tokens(1))])
def test_a_class_of_a_program_says_it_as_it_must(said, why, of):
    """Otherwise no plan is made, also where it is a part of a mask."""
    with pytest.raises(ArgumentError, match=why):
        Problem(seqlen=9, seqlen_k=7, heads=1, head_dim=1, mask=of(Said(said)))
    fitting = "(np.stack([0 * q - 3, 0 * q + 6]), np.stack([q.clip(0, 2), 0 * q + 99]))"  # also outside of the keys
    assert Problem(seqlen=9, seqlen_k=7, heads=1, head_dim=1, mask=of(Said(fitting)))


@dataclass
class Melted(Window):
    size: int = 1


@pytest.mark.parametrize("mask", [Window(), Melted(), Said(np.arange(3))])
def test_masks_that_ranks_cannot_compare(mask):
    with pytest.raises(ArgumentError, match=f"mask is a {type(mask).__name__}, which ranks cannot compare; its class "):
        Problem(seqlen=9, heads=1, head_dim=1, mask=mask)


def test_disjoint_keeps_lists():
    """Of intervals that touch, the first takes in the others and stays in its list."""
    begin, end = disjoint(np.array([[10, 4], [0, 20], [5, 9]]), np.array([[12, 6], [5, 30], [11, 9]]))
    assert (begin.tolist(), end.tolist()) == ([[0, 4], [0, 20]], [[0, 6], [12, 30]])


def test_names_are_functions_whichever_modules_are_loaded():
    """No module has the name of a function, which it would take the place of when it is loaded."""
    from pkgutil import iter_modules

    assert not {module.name for module in iter_modules(masks.__path__)} & set(masks.__all__)
    assert all(callable(getattr(masks, name)) for name in masks.__all__)
