"""The list of work of a decoding launch: every key once, long sequences cut, the longest item first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiattn.backends.cuda.decode_work import MOST_ITEMS, NO_END, decode_work, in_units, spans_of

COLUMNS, HEADS, PLACES = 32, 8, 792  # as of head dim 128 on an H100


def rounded(begin, end):
    return spans_of(*in_units(begin, end))


def of_lengths(lengths):
    end = np.array(lengths, np.int32)[:, None]
    return decode_work(rounded(np.zeros_like(end), end), COLUMNS, HEADS, PLACES)


def longest(work, lengths):
    """The most keys of an item, of sequences of which all keys are seen."""
    return int((np.minimum(work.items[:, 2], np.array(lengths)[work.items[:, 0]]) - work.items[:, 1]).max())


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_every_key_is_in_one_item(data):
    """Whatever the lengths are by now; partials are those of their sequence, in the order of its keys."""
    queries = data.draw(st.integers(1, 3))
    bounds = st.lists(st.integers(0, 5000), min_size=2 * queries, max_size=2 * queries)
    pairs = data.draw(st.lists(bounds, min_size=1, max_size=9))
    begin, end = np.array(pairs, np.int32).reshape(-1, 2, queries).swapaxes(0, 1)
    columns, blocks, places = data.draw(st.sampled_from([(16, 1, 3), (32, 8, 792), (64, 3, 264)]))
    spans = rounded(begin, end)
    for sees, first, last, begins, ends in zip(begin < end, *spans, begin, end):
        assert not sees.any() or (first <= begins[sees].min() and last >= ends[sees].max())
    work = decode_work(spans, columns, blocks, places, data.draw(st.sampled_from(["decode", "forward"])))
    for sequence in range(len(begin)):
        items = work.items[work.items[:, 0] == sequence]
        items = items[np.argsort(items[:, 1], kind="stable")]
        first, last = work.firsts[sequence : sequence + 2]
        assert items[0, 1] == 0 and items[-1, 2] == NO_END
        assert (items[1:, 1] == items[:-1, 2]).all() and (items[:, 1] < items[:, 2]).all()
        assert items[:, 3].tolist() == ([-1] if len(items) == 1 else list(range(first, last)))
    assert work.firsts[-1] * blocks <= MOST_ITEMS * places, "scratch_bytes promises this"


def test_lengths_are_rounded():
    """So that a list serves many calls: by up to an eighth, outwards."""
    end = np.array([[1000, 1001, 60_000, 3, 0]], np.int32).T
    begin = np.array([[0, 0, 100, 0, 0]], np.int32).T
    assert rounded(begin, end).tolist() == [[0, 0, 0, 0, 0], [1024, 1024, 61_440, 32, 0]]
    later = end + 1
    assert (rounded(begin, later)[:, :4] == rounded(begin, end)[:, :4]).all()


def test_a_long_sequence_among_short_ones():
    """It is cut so that no thread block reads much more than another; equal splits gave it 8 blocks of 128k keys."""
    lengths = [131072] + [2048] * 63
    work, share = of_lengths(lengths), sum(lengths) * HEADS / PLACES
    assert longest(work, lengths) < 1.1 * share
    assert (work.items[:, 0] == 0).sum() > 40
    reads = np.minimum(work.items[:, 2], np.array(lengths)[work.items[:, 0]]) - work.items[:, 1]
    assert (np.diff(reads) <= 0).all(), "the longest are first"


def test_equal_sequences_that_nearly_fill_the_gpu():
    """800 thread blocks in 792 places would leave 8 of them for a second wave: they are cut."""
    work = of_lengths([4096] * 100)
    assert len(work.items) > 100 and longest(work, [4096] * 100) <= 2048


def test_many_short_sequences_are_not_cut():
    work = of_lengths([512] * 1000)
    assert len(work.items) == 1000 and not work.firsts[-1]


def test_a_window_is_cut_by_what_it_sees():
    """Not by the keys before it."""
    end = np.full((1, 1), 100_000, np.int32)
    work = decode_work(rounded(end - 1000, end), COLUMNS, HEADS, PLACES)
    cuts = np.sort(work.items[:, 1])[1:]
    assert len(cuts) >= 14 and cuts[0] > 98_000


@pytest.mark.parametrize("lengths", [[0], [0, 0], [0, 5000]])
def test_sequences_without_keys_have_an_item(lengths):
    """Which writes their empty partial."""
    assert {*of_lengths(lengths).items[:, 0]} == {*range(len(lengths))}
