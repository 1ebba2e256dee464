"""Masks as row intervals, against the definition written out pair by pair."""

import numpy as np
import pytest

from mpiattn import ArgumentError
from mpiattn.problem.columns import columns_of
from mpiattn.problem.documents import documents, padding_of
from mpiattn.problem.layout import LAYOUTS, Layout
from mpiattn.problem.mask import Mask
from mpiattn.problem.problem import Problem
from mpiattn.verify.reference import visible_keys

SHAPES = [(6, 6), (2, 4), (4, 2), (1, 9), (9, 1), (5, 0), (0, 5), (31, 17), (17, 31)]


def may_see(i, j, seqlen, seqlen_k, causal):
    return not causal or j <= i + seqlen_k - seqlen


def test_drawings_of_the_docstring():
    for shape, drawing in (((2, 4), ["1110", "1111"]), ((4, 2), ["00", "00", "10", "11"])):
        (lo,), (hi,) = Mask(*shape, causal=True).key_interval(np.arange(shape[0]))
        rows = ["".join("1" if a <= j < b else "0" for j in range(shape[1])) for a, b in zip(lo, hi)]
        assert rows == drawing


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_are_the_definition(shape, causal):
    pairs = [(i, j) for i in range(shape[0]) for j in range(shape[1]) if may_see(i, j, *shape, causal)]
    mask = Mask(*shape, causal=causal)
    assert mask.pairs() == len(pairs)
    (lo,), (hi,) = mask.key_interval(np.arange(shape[0]))
    assert [(i, j) for i in range(shape[0]) for j in range(lo[i], hi[i])] == pairs


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_every_layout(shape, causal, kind):
    """The local intervals of all blocks give each visible pair once, and only those."""
    mask, chunks = Mask(*shape, causal=causal), 4
    q_layout, k_layout = Layout(kind, shape[0], chunks), Layout(kind, shape[1], chunks)
    seen = []
    for q in range(chunks):
        for k in range(chunks):
            rows, keys = q_layout.positions(q), k_layout.positions(k)
            (begin,), (end,) = mask.key_interval(rows, None, columns_of(keys))
            assert begin.dtype == end.dtype == np.int32
            assert (begin <= end).all() and (begin >= 0).all() and (end <= len(keys)).all()
            seen += [(rows[x], keys[y]) for x in range(len(rows)) for y in range(begin[x], end[x])]
    assert sorted(seen) == [(i, j) for i in range(shape[0]) for j in range(shape[1]) if may_see(i, j, *shape, causal)]


def test_striped_causal_blocks_are_half_full():
    """Block (i, j) of local rows and columns: allowed iff y < x, or y == x and j <= i (arXiv 2512.20968)."""
    layout = Layout("striped", 20, 4)
    for i in range(4):
        for j in range(4):
            _, (end,) = Mask(20, 20, True).key_interval(layout.positions(i), None, columns_of(layout.positions(j)))
            assert end.tolist() == [x + (j <= i) for x in range(5)]


def test_interval_of_windows():
    """Any interval, not only those from 0: empty, inside a gap of the chunk's keys, beyond its ends."""
    keys = np.array([2, 5, 6, 11])
    lo, hi = np.array([0, 3, 3, 7, 12, 6, 8]), np.array([3, 5, 12, 11, 40, 6, 4])
    begin, end = map(columns_of(keys), (lo, np.maximum(lo, hi)))
    expected = [[x for x, key in enumerate(keys) if a <= key < b] for a, b in zip(lo, hi)]
    assert [list(range(a, b)) for a, b in zip(begin, end)] == expected


# Prefixes, causal blocks, and a kind by document

WINDOWS = [(None, None), (3, None), (None, 1), (2, 0), (5, 6)]


def sees(i, j, shape, window=(None, None), prefix=0, block=1, causal=True):
    """Whether query i sees key j of one document, by the definition: query i stands on key i + shape[1] - shape[0]."""
    place = i + shape[1] - shape[0]
    left, right = (1000 if side is None else side for side in window)
    in_block = any(
        place in range(first, first + block) and j in range(first + block)
        for first in range(-block * 99, shape[1], block)
    )
    inside = j <= place or in_block or j < prefix or not causal
    return inside and place - left <= j <= place + right


@pytest.mark.parametrize("n", [2**31 - 1, 2**31, 2**40])
def test_pairs_of_very_long_sequences(n):
    """In closed form, also where products do not fit an int64."""
    assert Mask(n, n, causal=True).pairs() == n * (n + 1) // 2 and Mask(n, n).pairs() == n * n
    assert Mask(n, n, True, (n, n), prefix=n).pairs() == n * n


def seen(mask, queries, group=None):
    """Pairs of a mask's intervals."""
    (lo,), (hi,) = mask.key_interval(np.arange(queries), group and (group,))
    return [(i, j) for i in range(queries) for j in range(lo[i], hi[i])]


def test_drawings_of_prefix_and_blocks():
    for mask, drawing in (
        (Mask(4, 4, True, prefix=2), ["1100", "1100", "1110", "1111"]),
        (Mask(4, 4, True, causal_block=2), ["1100", "1100", "1111", "1111"]),
    ):
        pairs = seen(mask, 4)
        assert ["".join("1" if (i, j) in pairs else "0" for j in range(4)) for i in range(4)] == drawing


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("prefix", "block"), [(0, None), (3, None), (100, None), (0, 3), (4, 3)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_queries_that_see_keys(shape, causal, prefix, block, window):
    mask = Mask(*shape, causal or bool(prefix or block), window, prefix, block)
    (lo,), (hi,) = mask.key_interval(np.arange(shape[0]))
    keys = np.arange(shape[1])
    first, end = mask.queries_seeing(keys, keys + 1)
    assert first.tolist() == [next((i for i, stop in enumerate(hi) if stop > key), shape[0]) for key in keys]
    assert end.tolist() == [next((i for i, start in enumerate(lo) if start > key), shape[0]) for key in keys]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("prefix", "block"), [(0, None), (3, None), (100, None), (0, 1), (0, 3), (0, 100), (4, 3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefix_and_blocks_are_the_definition(shape, prefix, block, window):
    mask = Mask(*shape, True, window, prefix, block)
    pairs = [(i, j) for i in range(shape[0]) for j in range(shape[1]) if sees(i, j, shape, window, prefix, block or 1)]
    assert seen(mask, shape[0]) == pairs and mask.pairs() == len(pairs)
    oracle = visible_keys(
        np.arange(shape[0]), np.arange(shape[1]), shape, True, window, prefix=prefix, causal_block=block
    )
    assert list(map(tuple, np.argwhere(oracle))) == pairs
    problem = Problem(
        seqlen=shape[0],
        seqlen_k=shape[1],
        heads=1,
        head_dim=1,
        causal=True,
        window=window,
        prefix=prefix,
        causal_block=block,
    )
    assert problem.pairs == len(pairs)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block", [None, 2])
@pytest.mark.parametrize("prefixes", [None, [0, 2, 5, 100]])
@pytest.mark.parametrize("kinds", [None, [True, False, False, True]])
@pytest.mark.parametrize("causal", [True, False])
def test_a_kind_by_document(causal, kinds, prefixes, block, window):
    """Each as it is alone, its blocks and prefix counted from its own first key; the third holds nothing."""
    cuts, cuts_k = [1, 6, 14, 14, 20], [0, 7, 11, 11, 22]
    problem = Problem(
        seqlen=21,
        seqlen_k=23,
        heads=1,
        head_dim=1,
        causal=causal,
        window=window,
        prefix=3 * causal,
        causal_block=block if causal else None,
    )
    if prefixes and not causal and not kinds:
        with pytest.raises(ArgumentError, match="prefixes are given, but nothing is causal"):
            documents(problem, cuts, cuts_k, prefixes=prefixes, padding=True)
        return
    (group,) = documents(problem, cuts, cuts_k, prefixes=prefixes, causal_documents=kinds, padding=True)
    pairs = []
    for d in range(4):
        shape = cuts[d + 1] - cuts[d], cuts_k[d + 1] - cuts_k[d]
        how = {
            "prefix": problem.prefix if prefixes is None else prefixes[d],
            "block": problem.causal_block or 1,
            "causal": causal if kinds is None else kinds[d],
        }
        pairs += [
            (cuts[d] + i, cuts_k[d] + j)
            for i in range(shape[0])
            for j in range(shape[1])
            if sees(i, j, shape, window, **how)
        ]
    assert seen(problem.whole_mask, 21, group) == pairs
    oracle = visible_keys(
        np.arange(21),
        np.arange(23),
        (21, 23),
        causal,
        window,
        problem.causal_block,
        cu_seqlens=cuts,
        cu_seqlens_k=cuts_k,
        prefix=problem.prefix,
        prefixes=prefixes,
        causal_documents=kinds,
    )
    assert list(map(tuple, np.argwhere(oracle))) == pairs


@pytest.mark.parametrize("prefix", [4, 2**62, np.iinfo(np.int64).max, np.iinfo(np.uint64).max])
def test_a_prefix_longer_than_any_document(prefix):
    problem = Problem(seqlen=8, heads=1, head_dim=1, causal=True)
    (group,) = documents(problem, [0, 4, 8], prefixes=np.array([prefix, prefix]))
    assert seen(problem.whole_mask, 8, group) == [(i, j) for i in range(8) for j in range(8) if i // 4 == j // 4]


def test_shapes_of_what_documents_see():
    """For all entries alike, for each entry, and for entries that are one document."""
    problem = Problem(seqlen=9, heads=1, head_dim=1, batch=2, causal=True)
    alike = documents(problem, [0, 4, 9], prefixes=[1, 2], causal_documents=np.array([True, False]))
    assert [group.as_lists() for group in alike] == [([0, 4, 9], [0, 4, 9], [1, 2], [True, False])]
    of_each = documents(problem, [0, 4, 9], prefixes=[[1, 2], (3, 4)])
    assert [group.as_lists() for group in of_each] == [
        ([0, 4, 9], [0, 4, 9], prefixes, None) for prefixes in ([1, 2], [3, 4])
    ]
    cut_each = documents(problem, [[0, 9], [0, 4, 9]], prefixes=[[7], [1, 2]])
    assert [group.as_lists()[2] for group in cut_each] == [[7], [1, 2]]
    padded = documents(problem, lengths=[5, 9], causal_documents=[1, 0])
    assert [group.as_lists()[1:] for group in padded] == [([0, 5], None, [True]), ([0, 9], None, [False])]
    whole = documents(problem, prefixes=np.array([3, 5], np.int32))
    assert [group.as_lists() for group in whole] == [([0, 9], [0, 9], [prefix], None) for prefix in (3, 5)]
    assert documents(problem) is None


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"prefixes": [1]}, "prefixes has 1 entries; it must have 2, one for each of the batch"),
        ({"prefixes": 3}, "prefixes is 3; it must be a sequence"),
        ({"prefixes": [-1, 0]}, "at least 0"),
        ({"prefixes": [1.5, 0]}, "whole numbers"),
        ({"prefixes": [[1], [2]]}, "it must have a value for each of 1 documents"),
        ({"causal_documents": [2, 0]}, "causal_documents is [2]; it must hold True or False"),
        ({"causal_documents": ["no", "yes"]}, "True or False"),
        ({"cu_seqlens": [0, 4, 9], "prefixes": [1, 2, 3]}, "prefixes is [1 2 3]; it must have a value for each of 2"),
        (
            {"cu_seqlens": [0, 4, 9], "prefixes": [[1, 2]]},
            "must have 2, one for each of the batch, or be alike for all",
        ),
        ({"cu_seqlens": [[0, 9], [0, 4, 9]], "prefixes": [1, 2]}, "it must have a value for each of 1 documents"),
        ({"lengths": np.ones((2, 9), bool)}, "lengths is an array (2, 9) of bool, a padding mask; it must be 2 "),
        ({"lengths": [[1] * 9, [1] * 4 + [0] * 5]}, "lengths is an array (2, 9) of int64, a padding mask"),
        ({"lengths": [True, False]}, "lengths is an array (2,) of bool, a padding mask"),
        ({"lengths": [3, 4], "prefixes": [1, 2, 3]}, "prefixes has 3 entries"),
        ({"cu_seqlens": [0, 4, 8]}, "cu_seqlens is [0 4 8]; it must begin with 0 and end with 9, the number of tokens"),
        ({"cu_seqlens": [[0, 9], [1, 9]]}, "cu_seqlens is [1 9]; it must begin with 0"),
        ({"cu_seqlens": [0, 9], "cu_seqlens_k": [0, 8]}, "cu_seqlens_k is [0 8]; it must begin with 0 and end with 9"),
        ({"cu_seqlens": [0, 6, 4, 9]}, "cu_seqlens is [0 6 4 9]; it must be two or more positions from 0 to 9 that"),
        ({"cu_seqlens": [0, 4], "padding": 1}, "padding is 1; it must be True or False"),
        ({"lengths": [3, 4], "padding": True}, "padding is given without cu_seqlens"),
    ],
)
def test_wrong_arguments_of_documents(call, says):
    with pytest.raises(ArgumentError) as caught:
        documents(Problem(seqlen=9, heads=1, head_dim=1, batch=2, causal=True), **call)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        {"cu_seqlens": [0, 4, 9], "cu_seqlens_k": [0, 9, 9], "prefixes": [1, 2], "causal_documents": [True, False]},
        {"cu_seqlens": [[0, 4, 9], [0, 0, 9]], "prefixes": [[1, 2], [3, 4]]},
        {"lengths": [3, 4], "lengths_k": [9, 0], "causal_documents": [False, True]},
    ],
)
def test_documents_in_arrays(call):
    """They are those in lists."""
    problem = Problem(seqlen=9, heads=1, head_dim=1, batch=2, causal=True)
    in_arrays = documents(problem, **{name: np.array(values) for name, values in call.items()})
    assert [group.as_lists() for group in in_arrays] == [group.as_lists() for group in documents(problem, **call)]


def test_padding_is_counted():
    problem = Problem(seqlen=9, seqlen_k=5, heads=1, head_dim=1, batch=2)
    for cuts, cuts_k, counted in (
        ([0, 9], [0, 5], (0, 0)),
        ([2, 3, 8], [0, 1, 4], (6, 2)),
        ([[0, 9], [1, 1]], [1, 5], (9, 2)),
    ):
        groups = documents(problem, cuts, cuts_k, padding=True)
        assert padding_of(groups, 2, 9, 5) == counted, cuts
    groups = documents(problem, lengths=[3, 9], lengths_k=[5, 5])
    assert padding_of(groups, 2, 9, 5) == (6, 0) and padding_of(None, 2, 9, 5) == (0, 0)
