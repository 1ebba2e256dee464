"""Layouts: which tokens a chunk holds."""

import numpy as np
import pytest

from mpiattn import ArgumentError, Layout
from mpiattn.model.space import layouts
from mpiattn.problem.layout import LAYOUTS, even_part, within
from mpiattn.problem.problem import Problem


def test_positions_by_hand():
    by_hand = {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
        "striped": [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]],
        "zigzag": [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]],
    }
    for kind, chunks in by_hand.items():
        layout = Layout(kind, 12, 3)
        assert [layout.positions(chunk).tolist() for chunk in range(3)] == chunks


def test_own_sizes():
    layout = Layout("contiguous", 9, 4, (0, 5, 0, 4))
    assert [layout.positions(chunk).tolist() for chunk in range(4)] == [[], [0, 1, 2, 3, 4], [], [5, 6, 7, 8]]
    assert layout.lengths == (0, 5, 0, 4)


def test_sizes_as_an_argument():
    """Of a plan: for both, or for queries and for keys; whatever holds whole numbers."""
    problem = Problem(seqlen=9, heads=1, head_dim=1)
    uneven = Layout("contiguous", 9, 2, (4, 5))
    for given in ((4, 5), [4, 5], tuple(np.array([4, 5])), (uneven, (4, 5)), ((4, 5), [4, 5])):
        assert layouts(given, problem, 2) == [(uneven, uneven)], given
    (pair,) = layouts(((4, 5), (0, 7)), Problem(seqlen=9, seqlen_k=7, heads=1, head_dim=1), 2)
    assert [layout.sizes for layout in pair] == [(4, 5), (0, 7)]
    for given, says in (
        ((4, 4), r"layout is \(4, 4\), of 8 queries and 8 keys on 2 ranks; it must be of 9 queries and 9 keys on 2"),
        ((Layout("contiguous", 9, 2), Layout("contiguous", 8, 3)), "of 9 queries and 8 keys on 2 to 3 ranks; it must"),
        ((4, 5, 0), r"layout is \(4, 5, 0\); as sizes of chunks it must be 2 numbers from 0, one a rank"),
        ((-1, 10), "it must be 2 numbers from 0"),
        ((), "it must be 2 numbers from 0"),
        (((4, 5), 3), r"layout is \(\(4, 5\), 3\); it may be auto, .* a tuple of the ranks' numbers of tokens, or"),
        ((4.0, 5.0), "it may be auto"),
        ((True, 8), "it may be auto"),
    ):
        with pytest.raises(ArgumentError, match=says):
            layouts(given, problem, 2)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_token_once_in_increasing_order(kind):
    for seqlen in (*range(0, 20), 97, 1000):
        for chunks in (1, 2, 3, 7, 8, 16):
            layout = Layout(kind, seqlen, chunks)
            held = [layout.positions(chunk) for chunk in range(chunks)]
            assert all(at.dtype == np.int64 and (np.diff(at) > 0).all() for at in held)
            assert sorted(np.concatenate(held)) == list(range(seqlen))
            assert [len(at) for at in held] == [layout.length(chunk) for chunk in range(chunks)] == list(layout.lengths)
            spread = max(layout.lengths) - min(layout.lengths)
            assert spread <= (2 if kind == "zigzag" else 1)


@pytest.mark.parametrize("order", [None, (2, 0, 1)])
@pytest.mark.parametrize(
    "kind, n, sizes", [*((kind, n, None) for kind in LAYOUTS for n in range(8)), ("contiguous", 9, (0, 5, 4))]
)
def test_ranges_of_all_chunks(kind, n, sizes, order):
    layout = Layout(kind, n, 3, sizes, order)
    starts, lengths, step = layout.all_ranges()
    for chunk in range(3):
        of_chunk = [(tokens.start, len(tokens), tokens.step) for tokens in layout.ranges(chunk)]
        assert of_chunk == [(*ends, step) for ends in zip(starts[:, chunk], lengths[:, chunk])]


@pytest.mark.parametrize("order", [None, (2, 0, 1)])
@pytest.mark.parametrize(
    "layout", [*((kind, n) for kind in LAYOUTS for n in (0, 1, 2, 17, 18, 100)), (0, 5, 4), (3, 0, 0)]
)
def test_owner_of_positions(layout, order):
    kind, n = layout if isinstance(layout[0], str) else ("contiguous", sum(layout))
    layout = Layout(kind, n, 3, None if isinstance(layout[0], str) else layout, order)
    owners = layout.owner(np.arange(n))
    assert owners.dtype == np.int64 and owners.shape == (n,)
    for chunk in range(3):
        assert np.flatnonzero(owners == chunk).tolist() == layout.positions(chunk).tolist()
    assert layout.owner([]).shape == (0,) and layout.owner(np.zeros((2, 0), int)).shape == (2, 0)
    for wrong in (n, -1, [0, n], 0.0, "0"):
        with pytest.raises(ArgumentError, match="positions"):
            layout.owner(wrong)


def test_owner_of_few_positions_of_many():
    layout = Layout("zigzag", 10**15, 7)
    assert layout.owner([[0, 10**15 - 1], [5 * 10**14, 10**14]]).tolist() == [[0, 0], [6, 1]]


def test_ranges_are_the_positions_and_nothing_large_is_made():
    layout = Layout("striped", 10**15, 7)
    (tokens,) = layout.ranges(3)
    assert (tokens.start, tokens.step) == (3, 7) and layout.length(3) == len(tokens)
    for kind in LAYOUTS:
        layout = Layout(kind, 31, 4)
        for chunk in range(4):
            assert [i for tokens in layout.ranges(chunk) for i in tokens] == layout.positions(chunk).tolist()


@pytest.mark.parametrize("sizes", [np.array([5, 2]), [5, 2], (np.int64(5), 2)])
def test_sizes_are_any_whole_numbers(sizes):
    layout = Layout("contiguous", 7, 2, sizes)
    assert layout.lengths == (5, 2) and layout == Layout("contiguous", 7, 2, (5, 2)) and hash(layout)


@pytest.mark.parametrize("sizes", [7, [5.0, 2.0], ["5", "2"]])
def test_sizes_that_are_not(sizes):
    with pytest.raises(ArgumentError, match="whole numbers"):
        Layout("contiguous", 7, 2, sizes)


def test_even_part():
    assert [even_part(7, 3, i) for i in range(3)] == [range(0, 3), range(3, 5), range(5, 7)]
    assert [len(even_part(2, 4, i)) for i in range(4)] == [1, 1, 0, 0]


def test_within():
    for tokens in (range(3, 40, 7), range(0, 12), range(5, 5), range(2, 3, 9)):
        for start in range(0, 45):
            for stop in range(start, 45):
                first, last = within(tokens, start, stop)
                assert list(tokens[first:last]) == [i for i in tokens if start <= i < stop]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("diagonal", 4, 2), "diagonal.*contiguous, striped, zigzag"),
        (("striped", 4, 2, (2, 2)), "only 'contiguous'"),
        (("contiguous", 4, 2, (2, 3)), "whose sum is 5; it must be 2 numbers from 0, one a chunk, whose sum is .*4"),
        (("contiguous", 4, 2, (4,)), "1 numbers whose sum is 4; it must be 2 numbers"),
        (("contiguous", 4, 2, (5, -1)), "numbers from 0"),
        (("contiguous", 0, 0, ()), ""),
        (("contiguous", 4, 0), ""),
        (("striped", -3, 2), ""),
        (("striped", True, 2), "seqlen is True"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(ArgumentError, match=text or None):
        len(Layout(*arguments).lengths)


@pytest.mark.parametrize("kind", ["contiguous", "striped", "zigzag"])
def test_a_chunk_that_does_not_exist(kind):
    for chunk in (-1, 2):
        with pytest.raises(ArgumentError, match=f"chunk is {chunk}; it must be from 0 to 1"):
            Layout(kind, 8, 2).positions(chunk)


def test_layouts_of_equal_numbers_are_written_alike():
    assert repr(Layout("striped", np.int64(12), np.int32(3))) == repr(Layout("striped", 12, 3))
