"""Masks as row intervals, against the definition written out pair by pair."""

import numpy as np
import pytest

from mpiattn.layout import KINDS, Layout
from mpiattn.mask import Mask, local_interval

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


@pytest.mark.parametrize("kind", KINDS)
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
            (begin,), (end,) = local_interval(*mask.key_interval(rows), keys)
            assert begin.dtype == end.dtype == np.int32
            assert (begin <= end).all() and (begin >= 0).all() and (end <= len(keys)).all()
            seen += [(rows[x], keys[y]) for x in range(len(rows)) for y in range(begin[x], end[x])]
    assert sorted(seen) == [(i, j) for i in range(shape[0]) for j in range(shape[1]) if may_see(i, j, *shape, causal)]


def test_striped_causal_blocks_are_half_full():
    """Block (i, j) of local rows and columns: allowed iff y < x, or y == x and j <= i (arXiv 2512.20968)."""
    layout = Layout("striped", 20, 4)
    for i in range(4):
        for j in range(4):
            hi = Mask(20, 20, True).key_interval(layout.positions(i))
            _, (end,) = local_interval(*hi, layout.positions(j))
            assert end.tolist() == [x + (j <= i) for x in range(5)]


def test_interval_of_windows():
    """Any interval, not only those from 0: empty, inside a gap of the chunk's keys, beyond its ends."""
    keys = np.array([2, 5, 6, 11])
    lo, hi = np.array([0, 3, 3, 7, 12, 6, 8]), np.array([3, 5, 12, 11, 40, 6, 4])
    begin, end = local_interval(lo, hi, keys)
    expected = [[x for x, key in enumerate(keys) if a <= key < b] for a, b in zip(lo, hi)]
    assert [list(range(a, b)) for a, b in zip(begin, end)] == expected
