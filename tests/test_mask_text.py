"""Masks from text and as text, and what masks refuse."""

import random

import numpy as np
import pytest
from drawn_masks import DRAW

from mpiattn import masks
from mpiattn.errors import ArgumentError

GRID = (6, 8)
TEXTS = {
    "neighborhood 3": masks.neighborhood(GRID, 3),
    "neighborhood 3x5 cyclic=1": masks.neighborhood(GRID, (3, 5), cyclic=(False, True)),
    "neighborhood 2x2 grid=9x9 dilation=1x3 causal=0,1 edge=clipped": masks.neighborhood(
        (9, 9), 2, (1, 3), causal=True, edge="clipped"
    ),
    "sphere 0.5": masks.sphere([8] * 6, 0.5),
    "sphere 0.5 grid=4x9": masks.sphere([9] * 4, 0.5),
    "sphere 0.5 rows=4,8,4": masks.sphere([4, 8, 4], 0.5),
    "window 128,0": masks.window(128, 0),
    "window ,5": masks.window(None, 5),
    "causal": masks.causal(),
    "global 4": masks.global_tokens(4),
    "chunked 256": masks.chunked(256),
    "blocks 64 0:0,1:2": masks.blocks(64, [(0, 0), (1, 2)]),
    "blocks 64": masks.blocks(64, []),
    "ranges 0:10:0:10:causal,10:20:0:20:full": masks.ranges([(0, 10, 0, 10, "causal"), (10, 20, 0, 20, "full")]),
    "ranges 0:9:0:9:bi_causal": masks.ranges([(0, 9, 0, 9, "bidirectional_causal")]),
    "tree -1,0,0,1": masks.tree([-1, 0, 0, 1]),
    "share-question 20,10,10": masks.share_question(20, [10, 10]),
    "global 4 | window 128,0": masks.global_tokens(4) | masks.window(128, 0),
    "global 4|window 8,0&chunked 9": masks.global_tokens(4) | masks.window(8, 0) & masks.chunked(9),
    "(global 4 | window 8,0) & (chunked 9)": (masks.global_tokens(4) | masks.window(8, 0)) & masks.chunked(9),
    "causal & chunked 9 & chunked 4": masks.causal() & masks.chunked(9) & masks.chunked(4),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text):
    mask = masks.parse(text, GRID)
    assert mask == TEXTS[text] and hash(mask) == hash(TEXTS[text]) and repr(mask) == repr(TEXTS[text])
    if "sphere" not in text:  # whose rows are not named
        assert masks.parse(str(mask)) == mask


@pytest.mark.draw(10)
@pytest.mark.parametrize("seed", range(100))
def test_text_of_a_mask_is_the_mask(seed):
    for kind in ("Neighborhood", "Window", "Global", "Chunked", "ShareQuestion"):
        mask, *_ = DRAW[kind](random.Random(seed))
        assert masks.parse(str(mask)) == mask


def test_every_mask_has_a_form():
    assert {text.split()[0] for text in TEXTS if text[0] != "("} == set(masks.text.FORMS)
    assert all(line.startswith(word) and line[:120] in masks.text.HELP for word, line in masks.text.FORMS.items())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a mask is missing; masks are neighborhood"),
        ("neighbourhood 3", "'neighbourhood' is no mask.*did you mean neighborhood?"),
        ("global 4 |", "a mask is missing"),
        ("global 4 window 3,0", "'global 4 window 3,0' is not understood; write global 4"),
        ("(global 4", r"a \( has no \)"),
        ("global 4) | causal", r"'\)' is one too many"),
        ("global four", "write global 4"),
        ("global -1", "n is -1; it must be a whole number, at least 0"),
        ("global", "'global' is not understood"),
        ("tree -1,0,", "'-1,0,' has a ',' too many, after '-1,0'"),
        ("share-question 3,,4", "'3,,4' has a ',' too many, after '3'"),
        ("blocks 4 ,0:0", "',0:0' has a ',' too many, before the first word"),
        ("blocks 4 0:0,1:", "'1:' has a ':' too many, after '1'"),
        ("ranges 0:3:0:3:full,", "has a ',' too many, after '0:3:0:3:full'"),
        ("neighborhood 3x grid=9x9", "'3x' has a 'x' too many, after '3'"),
        ("neighborhood 3 grid=9x9 causal=0,", "'0,' has a ',' too many, after '0'"),
        ("sphere 1 rows=3,,4", "'3,,4' has a ',' too many, after '3'"),
        ("window 3", "write window 128,0"),
        ("chunked 3 size=4", "chunked has 'size=4'; it may have no name=value"),
        ("neighborhood 3 cylic=1", "neighborhood has 'cylic=1'; it may have grid= or dilation= or causal= or cyclic="),
        ("neighborhood 3 cyclic=1 cyclic=0", "each once"),
        ("neighborhood 3 cyclic=2", "cyclic= names axes of a grid of 2, which are counted from 0"),
        ("neighborhood 3 edge=mirror", "edge is 'mirror'; it may be shifted, clipped"),
        ("neighborhood 9", "kernel_size is 9 and dilation 1 for axis 0, .* has 6 points"),
        ("neighborhood 3x3x3", "kernel_size is .*one for each of the 2 axes"),
        ("sphere 1 grid=4", "2 axes; this one has 1"),
        ("sphere 0", "radius is 0.0; it must be a number of radians above 0 and at most 1.01 pi$"),
        ("sphere 25", "radius is 25.0; .* at most 1.01 pi; 25 degrees are 0.436332"),
        ("tree 0", r"parents\[0\] is 0; it must be -1"),
        ("ranges 0:9:0:9:casual", r"kind of entries\[0\] is 'casual'; .*did you mean causal?"),
    ],
)
def test_texts_that_are_wrong(text, why):
    with pytest.raises(
        ArgumentError,
        match=f"mask is {text!r}: ".replace("(", r"\(").replace(")", r"\)").replace("|", r"\|") + f".*{why}",
    ):
        masks.parse(text, GRID)


def test_a_grid_is_needed():
    for text in ("neighborhood 3", "sphere 0.1"):
        with pytest.raises(ArgumentError, match=f"^mask is '{text}': it needs a grid: --grid 256x512, or grid=256x512"):
            masks.parse(text)
    with pytest.raises(ArgumentError, match="mask is 3; it must be text"):
        masks.parse(3)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: masks.neighborhood((), 3), r"shape is \(\); it must have 1 to 3 axes"),
        (lambda: masks.neighborhood((2, 2, 2, 2), 1), "1 to 3 axes"),
        (lambda: masks.neighborhood("44", 3), "shape is '44'; it must be a list of whole numbers"),
        (lambda: masks.neighborhood((4, 0), 1), r"shape\[1\] is 0; it must be a whole number, at least 1"),
        (lambda: masks.neighborhood((4, 4), 2.5), "kernel_size is 2.5; it must be a whole number"),
        (lambda: masks.neighborhood((4, 4), (2, 2, 2)), "kernel_size is .*; it must be one value, or one for each"),
        (lambda: masks.neighborhood((4, 4), 2, dilation=3), "kernel_size is 2 and dilation 3 for axis 0"),
        (lambda: masks.neighborhood((4, 4), 2, causal=1), "causal is 1; it must be True or False"),
        (lambda: masks.neighborhood((4,), 2, causal=True, cyclic=True), "causal and cyclic are both True for axis 0"),
        (lambda: masks.neighborhood((4,), 5, cyclic=True, edge="clipped"), "which is cyclic and has 4 points"),
        (lambda: masks.sphere([], 1), "row_lengths is empty"),
        (lambda: masks.sphere([4, 0], 1), r"row_lengths\[1\] is 0"),
        (lambda: masks.sphere([4], float("nan")), "radius is nan"),
        (lambda: masks.sphere([4], 4), "radius is 4; .* at most 1.01 pi; 4 degrees are 0.0698132"),
        (lambda: masks.sphere([4], float("inf")), "radius is inf; .* at most 1.01 pi$"),
        (lambda: masks.sphere([4], "wide"), "radius has 'wide'; it must be a number of radians"),
        (lambda: masks.sphere([4, 4], 1, [1]), "latitudes has 1 values; it must have one for each row, 2"),
        (lambda: masks.sphere([4, 4], 1, [1, 1]), "latitudes must increase from row to row, or decrease"),
        (lambda: masks.sphere([4, 4], 1, [90, 45]), "radians from -pi/2 to pi/2; they are 90 to 45"),
        (lambda: masks.sphere([4, 4], 1, 0.5), "latitudes is 0.5; it must have a latitude for each row"),
        (lambda: masks.window(-1, 0), "left is -1; it must be a whole number, at least 0, or None for no limit"),
        (lambda: masks.global_tokens(True), "n is True"),
        (lambda: masks.chunked(0), "size is 0; it must be a whole number, at least 1"),
        (lambda: masks.blocks(4, [(0, -1)]), "pairs is .*it must be a list of"),
        (lambda: masks.blocks(4, [0, 1]), "pairs is .*it must be a list of"),
        (lambda: masks.blocks(4, "0:1"), "pairs is .*it must be a list of"),
        (lambda: masks.blocks(4, [(0, 1), (2,)]), "pairs is .*it must be a list of"),
        (lambda: masks.ranges([(0, 1, 0, 1)]), r"entries\[0\] is .*; it must be \(q0, q1, k0, k1, kind\)"),
        (lambda: masks.ranges(3), "entries is 3; it must be a list"),
        (lambda: masks.ranges([(0, 1, 0, 1, 3)]), r"kind of entries\[0\] is 3; it may be full, causal"),
        (lambda: masks.ranges([(3, 1, 0, 1, "full")]), "a range must not end before it begins"),
        (lambda: masks.tree([-1, 2]), r"parents\[1\] is 2; it must be -1, for the context"),
        (lambda: masks.tree("-1"), "parents is '-1'; it must be a list of whole numbers"),
        (lambda: masks.share_question(3, 4), "answers is 4; it must be a list of whole numbers"),
        (lambda: masks.intervals([0, 1], [1, 2]), r"begin has shape \(2,\) and dtype int64; it must be whole numbers"),
        (lambda: masks.intervals([[0.5]], [[1]]), "begin has shape .*float64; it must be whole numbers"),
        (lambda: masks.intervals([[0]], [[1, 2]]), r"end has shape \(1, 2\); it must have that of begin, \(1, 1\)"),
        (lambda: masks.intervals([[0], [1, 2]], [[1]]), "begin has lists of several lengths"),
        (lambda: masks.intervals([[-1]], [[1]]), r"\[\(-1, 1\)\] for query 0; intervals must not begin before key 0"),
        (
            lambda: masks.intervals([[0, 0], [1, 2]], [[1, 3], [2, 4]]),
            r"begin and end are \[\(0, 3\), \(2, 4\)\] for query 1; intervals must not overlap",
        ),
        (lambda: masks.function(3, 4), "f is 3; it must be a function"),
        (lambda: masks.function(lambda at: at, 4), r"f returns ndarray; it must return \(begin, end\)"),
        (lambda: masks.function(lambda at: ([[1]], [[2]]), 4), r"begin of f has shape \(1, 1\) .*\(lists, 4\)"),
        (
            lambda: masks.function(lambda at: (0 * at[None], at[None] * [[1], [1]]), 10),
            "end of f has shape .*; it must have that of begin",
        ),
        (lambda: masks.function(lambda at: ([at - 2], [at]), 10**4), "for query 0; intervals must not begin before"),
        (
            lambda: masks.function(lambda at: ([0 * at, 2 - (at > 9000)], [0 * at + 2, 0 * at + 3]), 10**4),
            r"begin and end of f are \[\(0, 2\), \(1, 3\)\] for query 9001; intervals must not overlap",
        ),
        (lambda: masks.function(print, -1), "seqlen is -1"),
    ],
)
def test_what_masks_refuse(make, why):
    with pytest.raises(ArgumentError, match=why):
        make()


@pytest.mark.parametrize(
    ("mask", "seqlen", "seqlen_k", "why"),
    [
        (masks.neighborhood((4, 5), 3), 20, 21, "mask is neighborhood 3x3 grid=4x5, whose grid has 20 tokens; .*_k 21"),
        (masks.sphere([4, 5], 3), 9, 10, "mask is sphere 3, 2 rows, 9 points, whose rows hold 9 tokens"),
        (masks.share_question(4, [5]), 10, 10, "mask is share-question 4,5, whose question and answers have 9 tokens"),
        (masks.blocks(4, [(0, 3)]), 12, 12, "has block 3 of keys; 12 keys have 3 blocks of 4, counted from 0"),
        (masks.blocks(4, [(3, 0)]), 12, 12, "has block 3 of queries"),
        (masks.ranges([(0, 9, 0, 12, "full")]), 9, 11, "whose entry 0 ends with 12 keys; there are 11 keys"),
        (masks.tree([-1, 0]), 1, 9, "mask is tree -1,0, of 2 tokens, which are the last; there are 1 queries"),
        (
            masks.intervals([[0, 1]], [[1, 4]]),
            2,
            3,
            "mask has 1 given interval a query, of 2 queries, and 4 is the last",
        ),
        (masks.causal() & (masks.causal() | masks.neighborhood((4,), 3)), 5, 5, "mask is neighborhood 3 grid=4"),
    ],
)
def test_masks_of_other_sequences(mask, seqlen, seqlen_k, why):
    with pytest.raises(ArgumentError, match=why):
        mask.check(seqlen, seqlen_k)


def test_equal_masks_have_equal_reprs():
    """Also those of arrays, which are short; other masks have others."""
    parents = [i // 2 - 1 if i else -1 for i in range(2000)]
    pairs = [(i, j) for i in range(100) for j in range(i)]
    entries = [(i, i + 1, 0, i + 1, "full") for i in range(500)]
    makers = [
        lambda: masks.tree(parents),
        lambda: masks.tree(parents[:-1]),
        lambda: masks.blocks(4, pairs),
        lambda: masks.blocks(4, pairs[1:]),
        lambda: masks.ranges(entries),
        lambda: masks.ranges(entries[1:] + [(0, 1, 0, 1, "causal")]),
        lambda: masks.sphere([30] * 300, 0.1),
        lambda: masks.sphere([30] * 299 + [29], 0.1),
        lambda: masks.sphere([30] * 300, 0.1, np.linspace(-1, 1, 300)),
        lambda: masks.intervals([range(500)], [range(1, 501)]),
        lambda: masks.intervals([range(500)], [range(2, 502)]),
    ]
    texts = {repr(make()) for make in makers}
    assert len(texts) == len(makers) and max(map(len, texts)) < 150
    for make in makers:
        assert make() == make() and repr(make()) in texts and len(str(make())) < 80
