"""What follows from a mask's rule, against the rule asked of every query; of masks that no closed form knows too."""

from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest

from mpiattn.model.pairs import Pairs
from mpiattn.model.workload import Load, Work
from mpiattn.problem.group import Group
from mpiattn.problem.layout import LAYOUTS, Layout
from mpiattn.problem.mask import Mask
from mpiattn.schedule.needed import Activity
from mpiattn.schedule.ranges import runs_of, total, union
from mpiattn.schedule.tile import Tile, tiles

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

SIDES = st.none() | st.integers(0, 30)
drawn = settings(max_examples=60, derandomize=True, deadline=None)


@dataclass(frozen=True)
class Ahead(Mask):
    """A mask more: some keys after the diagonal are seen, as many as `ahead`, whatever hides the others."""

    ahead: int | None = None

    def rule(self, queries):
        begin, end = super().rule(queries)
        return begin, end if self.ahead is None else queries.diagonal + 1 + self.ahead


class Skips(Mask):
    """A rule of its own without a field of its own: the key on the diagonal is hidden, and all after it."""

    def rule(self, queries):
        return super().rule(queries)[0], queries.diagonal


@st.composite
def masks(draw, kinds=(Mask, Ahead, Skips)):
    """A mask, at times of documents, with padding before and after them."""
    kind, seqlen, cuts = draw(st.sampled_from(kinds)), draw(st.integers(0, 25)), None
    seqlen_k = draw(st.just(seqlen) | st.integers(0, 25))
    causal = draw(st.booleans())
    prefix, block = draw(st.tuples(st.integers(0, 30), st.none() | st.integers(1, 30))) if causal else (0, None)
    if seqlen == seqlen_k and draw(st.booleans()):
        cuts = tuple(sorted(draw(st.lists(st.integers(0, seqlen), min_size=2, max_size=6))))
    own = {"ahead": draw(st.none() | st.integers(0, 9))} if kind is Ahead else {}
    window = draw(st.tuples(SIDES, SIDES))
    return kind(seqlen, seqlen_k, causal, window, draw(st.sampled_from([0, prefix])), block, cuts=cuts, **own)


def intervals(mask, documents=None):
    """[lo, hi) of every query, group after group."""
    return zip(*mask.key_interval(np.arange(mask.seqlen), documents))


def sees(mask):
    """Which keys each query sees: bool (queries, keys)."""
    ((lo, hi),), keys = intervals(mask), np.arange(mask.seqlen_k)
    return (lo[:, None] <= keys) & (keys < hi[:, None])


@given(masks())
@drawn
def test_what_is_asked_of_few_queries(mask):
    seen, ((lo, hi),) = sees(mask), intervals(mask)
    assert mask.full == seen.all() and mask.pairs() == seen.sum()
    assert mask.widest == seen[mask.seqlen // 2 :].sum(axis=1).max(initial=0)
    starts, stops = (ends.ravel() for ends in np.mgrid[: mask.seqlen_k, 1 : mask.seqlen_k + 1])
    some = starts < stops
    first, end = mask.queries_seeing(starts[some], stops[some])
    for start, stop, i, j in zip(starts[some], stops[some], first, end):
        queries = np.flatnonzero(seen[:, start:stop].any(axis=1)).tolist()
        assert queries == [query for query in range(i, j) if lo[query] < hi[query]], (start, stop)


@given(masks(), st.data())
@drawn
def test_what_rules_must_hold_to(mask, data):
    """Of a call's documents too: ends never decrease inside a document, and leave out no key."""
    count, documents = data.draw(st.integers(1, 4)), None
    if data.draw(st.booleans()):
        q_cuts, k_cuts = (
            np.array(sorted(data.draw(st.lists(st.integers(0, n), min_size=count + 1, max_size=count + 1))))
            for n in (mask.seqlen, mask.seqlen_k)
        )
        prefixes, causal = data.draw(st.tuples(*[st.none() | st.lists(st.integers(0, 9), min_size=4, max_size=4)] * 2))
        documents = (
            Group(
                q_cuts,
                k_cuts,
                None if prefixes is None else np.array(prefixes[:count]),
                None if causal is None else np.array(causal[:count]) > 4,
            ),
        )
    (group,) = documents or mask._whole
    for lo, hi in intervals(mask, documents):
        for start, stop, first, last in zip(group.q_cuts, group.q_cuts[1:], group.k_cuts, group.k_cuts[1:]):
            begin, end = lo[start:stop], hi[start:stop]
            assert ((first <= begin) & (begin <= end) & (end <= last)).all()
            assert (np.diff(begin) >= 0).all() and (np.diff(end) >= 0).all() and (begin[1:] <= end[:-1]).all()


@given(masks((Mask,)), st.sampled_from(LAYOUTS), st.integers(1, 5))
@drawn
def test_closed_forms_are_the_rule(mask, kind, chunks):
    """Whatever they know: pairs of all, and by chunk, and who sees which keys."""
    layouts, starts = (
        [Layout(kind, tokens, chunks) for tokens in (mask.seqlen, mask.seqlen_k)],
        np.arange(mask.seqlen_k),
    )

    def asked():
        return (
            mask.pairs(),
            Pairs(mask, *layouts).table.tolist(),
            np.stack(mask.queries_seeing(starts, starts + 1)).tolist(),
        )

    closed = asked()
    with mock.patch.object(Mask, "closed_form", False):
        assert asked() == closed


def test_what_closed_forms_know():
    """No field and no rule that they were not made for, also of masks to come."""
    assert Mask(9, 7, True, (3, None), 2).closed_form and Ahead(9, 9).closed_form is False
    assert not any(
        mask.closed_form for mask in (Mask(9, 9, True, causal_block=2), Mask(9, 9, cuts=(0, 9)), Skips(9, 9))
    )

    @dataclass(frozen=True)
    class Named(Mask):
        name: str = ""

    assert Named(9, 9).closed_form and not Named(9, 9, name="another").closed_form


def covered(runs, columns):
    """Of each run, the columns from the first of these to the last, as `Ranges`."""
    inside = [columns[(start <= columns) & (columns < stop)] for start, stop in runs]
    return union((some[0], some[-1] + 1) for some in inside if len(some))


@pytest.mark.parametrize(("kind", "of_keys"), [*zip(LAYOUTS, LAYOUTS), ("zigzag", "contiguous"), ("striped", "zigzag")])
@pytest.mark.parametrize(
    ("seqlen", "seqlen_k", "window", "ahead"), [(40, 40, (9, None), 3), (31, 17, (None, None), 2), (17, 31, (0, 1), 50)]
)
def test_a_mask_that_is_new(seqlen, seqlen_k, window, ahead, kind, of_keys):
    """Its rule alone is written: work, tokens that travel and blocks are those of its pairs, for every tile."""
    mask = Ahead(seqlen, seqlen_k, window=window, ahead=ahead)
    queries, keys = np.mgrid[:seqlen, :seqlen_k]
    apart = keys - queries - (seqlen_k - seqlen)
    seen = (apart <= ahead) & (apart >= -(99 if window[0] is None else window[0]))
    assert (sees(mask) == seen).all() and mask.pairs() == seen.sum()
    q_layout, k_layout = layouts = Layout(kind, seqlen, 6), Layout(of_keys, seqlen_k, 6)
    work, ring = Work(mask, *layouts), Activity(mask, *layouts, Tile(1, 1, 6))
    for tile in tiles(6):
        activity, load = Activity(mask, *layouts, tile), Load(work, tile)
        assert load.rank_pairs.tolist() == [activity.pairs(rank) for rank in range(6)]
        moved = {route: load.moved("KV", route).sum() for route in ("direct", "ring")}
        for route, tokens in moved.items():
            sent = [activity.travelling("KV", rank, hop, route) for rank in range(6) for hop in range(1, tile.b)]
            assert sum(map(total, sent)) == tokens
        for i in range(6):
            for j in range(6):
                block = seen[np.ix_(q_layout.positions(i), k_layout.positions(j))]
                assert work.pairs[i, j] == block.sum()
                columns = np.flatnonzero(block.any(axis=0))
                if "striped" in (kind, of_keys):
                    assert bool(ring.needed(True, j, i)) == (len(columns) > 0)
                else:
                    assert ring.needed(True, j, i) == covered(runs_of(k_layout, j), columns)
