"""Layouts of any ranges, and of the blocks of grids on Cartesian communicators."""

import math
import pickle
import random
from itertools import pairwise

import divisions
import numpy as np
import pytest

from mpiattn import ArgumentError, Layout
from mpiattn.schedule import ranges


def check(layout, chunks):
    """Everything that a layout says of its chunks, by their tokens: a list of positions each."""
    assert layout.lengths == tuple(map(len, chunks))
    cuts, owners = layout.owners
    starts, lengths, step = layout.all_ranges()
    assert step == 1 and starts.shape == lengths.shape == (starts.shape[0], layout.chunks)
    assert (np.repeat(owners, np.diff(cuts)) == layout.owner(np.arange(layout.seqlen))).all()
    for chunk, tokens in enumerate(chunks):
        positions, of_chunk = layout.positions(chunk), layout.ranges(chunk)
        assert positions.dtype == np.int64 and positions.tolist() == tokens
        assert [i for part in of_chunk for i in part] == tokens and layout.length(chunk) == len(tokens)
        assert all(of_chunk[1:]) and all(a.stop < b.start for a, b in pairwise(of_chunk)), "not joined"
        padded = [range(start, start + length) for start, length in zip(starts[:, chunk], lengths[:, chunk])]
        assert [i for part in padded for i in part] == tokens
        assert (layout.owner(tokens) == chunk).all()
        ends = np.arange(-2, layout.seqlen + 3).reshape(1, -1)
        assert layout.below(chunk, ends).tolist() == [[sum(token < end for token in tokens) for end in ends[0]]]
        for start in range(0, layout.seqlen + 1, 3):
            for stop in range(start, layout.seqlen + 1, 5):
                before, parts = layout.between(chunk, start, stop)
                assert before == sum(token < start for token in tokens) and all(parts)
                assert [i for part in parts for i in part] == [token for token in tokens if start <= token < stop]


def reordered(layout, chunks, rng):
    order = tuple(rng.sample(range(len(chunks)), len(chunks)))
    given = [layout.order[i] for i in order] if layout.order else order
    pieces = Layout(layout.kind, layout.seqlen, layout.chunks, layout.sizes, tuple(given), layout.pieces)
    check(pieces, [chunks[i] for i in order])


def test_any_ranges():
    rng = random.Random(0)
    for _ in range(60):
        ranks, tokens = rng.randint(1, 6), rng.randint(0, 30)
        owners = [rng.randrange(ranks) for _ in range(tokens)]
        parts = [[(i, i + 1) for i, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]
        layout = Layout.of_ranges(parts)
        chunks = [[i for i, _ in of_rank] for of_rank in parts]
        check(layout, chunks)
        reordered(layout, chunks, rng)
        again = pickle.loads(pickle.dumps(layout))
        joined = Layout.of_ranges([[*map(tuple, of_rank)] for of_rank in parts])
        assert again == layout == joined and hash(again) == hash(layout) == hash(joined) and repr(again) == repr(joined)
        other = Layout.of_ranges([*parts[1:], parts[0]])
        same = [*chunks[1:], chunks[0]] == chunks
        assert (other == layout) == same and (repr(other) == repr(layout)) == same


def test_ways_to_write_ranges():
    by_pairs = Layout.of_ranges(([(0, 2), (2, 3), [7, 9]], (), [np.array([3, 7])]))
    assert by_pairs == Layout.of_ranges([[range(3), range(7, 9)], [range(5, 5)], range(3, 7)])
    assert by_pairs.ranges(0) == (range(3), range(7, 9)) and by_pairs.ranges(1) == (range(0),)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([[(0, 2)], [(3, 4)]], "parts leaves out token 2; "),
        ([[(1, 2)]], "parts leaves out token 0; "),
        ([[(0, 3)], [(2, 4)]], "parts has token 2 on rank 0 and again on rank 1; "),
        ([[(0, 1), (3, 4)], [(0, 3)]], "parts has token 0 on rank 0 and again on rank 1; "),
        ([[(2, 4), (0, 2)]], r"parts has ranges of rank 0 that do not increase: \(0, 2\) comes after .* ends at 4"),
        ([[(0, 3), (2, 4)]], r"parts has ranges of rank 0 that do not increase"),
        ([[range(0, 4, 2)], [range(1, 4, 2)]], r"parts has range\(0, 4, 2\) on rank 0; it must be a range of step 1"),
        ([[(0, 2)], [(4, 2)]], r"parts has \(4, 2\) on rank 1; it must be a range of step 1, or a pair"),
        ([[(0, 2.0)]], r"parts has \(0, 2.0\) on rank 0"),
        ([[(0, True)]], r"parts has \(0, True\) on rank 0"),
        ([[(-1, 2)]], r"parts has \(-1, 2\) on rank 0"),
        ([(0, 2)], "parts has 0 on rank 0"),
        ([3], "parts has 3 on rank 0"),
        (["ab"], "parts has 'ab' on rank 0"),
        ([], r"parts is \[\]; it must be a tuple or list, with the ranges of every rank"),
        (7, "parts is 7"),
    ],
)
def test_wrong_ranges(parts, text):
    with pytest.raises(ArgumentError, match=text):
        Layout.of_ranges(parts)


def blocks(shape, dims, sizes):
    """The tokens of every block in C order, by cutting an array."""
    pieces = [np.arange(math.prod(shape)).reshape(shape)]
    for axis in range(len(shape)):
        parts = dims[axis] if axis < len(dims) else 1
        lengths = sizes and sizes[axis]
        at = np.cumsum(lengths)[:-1] if lengths else parts
        pieces = [piece for array in pieces for piece in np.array_split(array, at, axis)]
    return [piece.ravel().tolist() for piece in pieces]


@pytest.mark.parametrize(
    ("shape", "dims", "sizes"),
    [
        ((11,), (4,), None),
        ((5, 6), (2, 3), None),
        ((5, 6), (3, 1), None),
        ((5, 6), (3,), None),
        ((6, 5), (1, 4), [None, (0, 3, 0, 2)]),
        ((3, 4, 5), (2, 2, 1), None),
        ((3, 4, 5), (1, 2, 2), [None, (4, 0), (1, 4)]),
        ((3, 4, 5), (3, 2), [(0, 1, 2), None, None]),
        ((2, 3, 2, 3), (2, 1, 2, 1), None),
        ((3, 4), (5, 1), None),
        ((0, 4), (2, 2), None),
        ((7, 1), (2, 2), None),
        ((1, 7), (2, 2), None),
    ],
)
def test_blocks_of_grids(shape, dims, sizes):
    chunks = blocks(shape, dims, sizes)
    layout = Layout.grid(shape, dims, sizes)
    check(layout, chunks)
    rng = random.Random(0)
    reordered(layout, chunks, rng)
    order = rng.sample(range(len(chunks)), len(chunks))
    placed = Layout.grid(shape, divisions.Cart(dims, order), sizes)
    check(placed, [chunks[i] for i in order])
    assert Layout.grid(shape, divisions.Cart(dims), sizes) == layout, "ranks in C order are those of a tuple"
    assert pickle.loads(pickle.dumps(placed)) == placed and hash(placed) == hash(pickle.loads(pickle.dumps(placed)))


def test_rows_of_a_grid_are_one_range():
    rows = Layout.grid((721, 1440), (16,))
    assert all(len(rows.ranges(rank)) == 1 for rank in range(16)) and not rows.many
    assert len(Layout.grid((721, 1440), (4, 4)).ranges(5)) == 180
    planes = Layout.grid((10, 6, 7), (2, 3, 1))
    assert planes.ranges(1) == tuple(range(i + 14, i + 28) for i in range(0, 210, 42))


def test_a_large_grid_is_said_in_few_words():
    layout = Layout.grid((721, 1440), (32, 32))
    assert len(repr(layout)) < 500 and len(pickle.dumps(layout)) < 500
    assert layout == Layout("grid", 721 * 1440, 1024, layout.sizes)
    assert layout == Layout.grid((721, 1440), (32, 32), [[23] * 17 + [22] * 15, [45] * 32])
    many = Layout.of_ranges([[(i, i + 1) for i in range(rank, 3000, 3)] for rank in range(3)])
    other = Layout.of_ranges([[(i, i + 1) for i in range(rank, 3000, 3)] for rank in (1, 0, 2)])
    assert len(repr(many)) < 200 and repr(many) != repr(other)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((3, 4), (2, 2, 2)), r"cart has 3 dims, \(2, 2, 2\); it may have at most those of shape, which is \(3, 4\)"),
        (((3, 4), (2, 0)), r"cart is \(2, 0\); it must be whole numbers, at least 1 and below 2.63: the numbers"),
        (((3, 4), 4), "cart is 4"),
        (((3, 4), ()), r"cart is \(\)"),
        (((3, 4), "22"), "cart is '22'"),
        (((3, -4), (2, 2)), r"shape is \(3, -4\); it must be whole numbers, at least 0"),
        ((12, (2, 2)), "shape is 12"),
        (((3, 4), (2, 2), [(1, 2)]), r"sizes is \[\(1, 2\)\]; it must have .* of 2 axes"),
        (
            ((3, 4), (2, 2), [(1, 1), None]),
            r"sizes\[0\] is \(1, 1\), 2 numbers whose sum is 2; it must be 2 numbers, .* 3",
        ),
        (((3, 4), (2, 2), [None, (4,)]), r"sizes\[1\] is \(4,\), 1 numbers whose sum is 4; it must be 2 numbers"),
        (((3, 4), (2, 2), [None, (5, -1)]), r"sizes\[1\] is \(5, -1\); it must be whole numbers, at least 0"),
        (((3, 4), divisions.Cart(())), "cart is a communicator of no dims"),
    ],
)
def test_wrong_grids(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        Layout.grid(*arguments)


def test_a_rank_that_is_not_in_the_cartesian_communicator():
    from mpi4py import MPI

    with pytest.raises(ArgumentError, match=r"cart is MPI\.COMM_NULL; it must be a communicator of all ranks"):
        Layout.grid((3, 4), MPI.Cartcomm())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("grid", 12, 4), "sizes is None; of a grid it must have"),
        (
            ("grid", 13, 4, [(1, 2), (2, 2)]),
            "layout is a grid of 3 x 4 points in 4 blocks; it must have 13 points in 4",
        ),
        (("ranges", 12, 4), "layout is 'ranges' of 12 tokens on 4 ranks, with pieces None; .*Layout.of_ranges"),
        (
            ("zigzag", 2, 1, None, None, Layout.of_ranges([[(0, 2)]]).pieces),
            "layout is 'zigzag' of 2 tokens on 1 ranks, with pieces",
        ),
        (
            ("ranges", 3, 1, None, None, Layout.of_ranges([[(0, 2)]]).pieces),
            "layout is 'ranges' of 3 tokens on 1 ranks, with pieces",
        ),
    ],
)
def test_layouts_that_are_made_by_no_constructor(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        Layout(*arguments)


def draw_ranges(rng, length, most):
    ends = sorted(rng.sample(range(length + 1), 2 * rng.randint(0, min(most, (length + 1) // 2))))
    return tuple(zip(ends[::2], ends[1::2]))


def tokens_of(some):
    return [i for start, stop in some for i in range(start, stop)]


@pytest.mark.parametrize("few", [0, 64, 10**9])
def test_ranges_of_chunks_as_their_tokens_say(monkeypatch, few):
    """Few are compared each with each, many in one walk along both."""
    monkeypatch.setattr(ranges, "FEW", few)
    rng = random.Random(0)
    for _ in range(150):
        layout = divisions.ranges(rng, rng.randint(1, 120), 3, 60)
        length = layout.length(1)
        some, others = draw_ranges(rng, length, 30), draw_ranges(rng, length, 30)
        at = layout.positions(1)
        assert [i for part in ranges.positions(layout, 1, some) for i in part] == at[tokens_of(some)].tolist()
        both = ranges.overlap(some, others)
        assert tokens_of(both) == sorted(set(tokens_of(some)) & set(tokens_of(others)))
        assert tokens_of(ranges.rest(some, both)) == sorted(set(tokens_of(some)) - set(tokens_of(others)))
        joined = ranges.union([*others, *some, *others])
        assert tokens_of(joined) == sorted(set(tokens_of(some)) | set(tokens_of(others)))
        assert all(a[1] < b[0] for a, b in pairwise(joined))
