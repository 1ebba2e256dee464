"""What a plan keeps for calls to come: which calls are alike, how much is kept, and that the rest is freed."""

import weakref
from dataclasses import replace

import numpy as np
import pytest

from mpiattn.backends.numpy.backend import NumpyBackend
from mpiattn.engine import call_cache
from mpiattn.engine.call_cache import KEPT_BYTES, RECENT, AlikeCalls, CallCache
from mpiattn.masks import neighborhood
from mpiattn.model import cost
from mpiattn.problem.documents import documents
from mpiattn.problem.layout import Layout
from mpiattn.problem.problem import Problem
from mpiattn.schedule.needed import Activity
from mpiattn.schedule.tile import Tile

TOKENS = 24
PROBLEM = Problem(TOKENS, 2, 4, batch=2, causal=True)
WHOLE = ((0, TOKENS // 2),)
CHUNKS = (((0, WHOLE),), ((0, WHOLE),))  # of queries and of keys
OTHERS = (((0, WHOLE),), ((1, WHOLE),))


class Watched(np.ndarray):
    """An array to which there can be weak references."""


class Backend(NumpyBackend):
    def contiguous(self, array, *args, **kwargs):
        return super().contiguous(array, *args, **kwargs).view(Watched)


def made():
    layout = Layout("zigzag", TOKENS, 2)
    return CallCache(Backend(), Activity(PROBLEM.whole_mask, layout, layout, Tile(1, 1, 2)), slice(1, 2))


@pytest.fixture
def cache():
    return made()


def activity_of(cache, *cuts, arguments=None):
    """That of a call with documents which begin at these cuts, named by `arguments` or else by the cuts."""
    return cache.activity(arguments or cuts, lambda: documents(PROBLEM, cu_seqlens=list(cuts)))


def kept(cache, activity):
    """Weak references to the row intervals of a block, which a call with this activity keeps."""
    return [weakref.ref(bound) for bound in cache.alike(activity).intervals(*CHUNKS)[0][1].values()]


def never():
    pytest.fail("documents are made again")


def test_calls_without_documents(cache):
    own = cache.activity((), lambda: None)
    first = kept(cache, own)
    assert cache.alike(own) is cache.without_documents and kept(cache, own) == first
    assert cache.without_documents.nbytes == sum(bound().nbytes for bound in first) > 0


def test_calls_are_alike_by_their_arguments_or_their_documents(cache):
    first = activity_of(cache, 0, 5, TOKENS)
    other = activity_of(cache, 0, 6, TOKENS)
    assert cache.activity((0, 5, TOKENS), never) is first
    assert activity_of(cache, 0, 6, TOKENS, arguments=("named otherwise",)) is other is not first
    assert cache.activity(("named otherwise",), never) is other
    assert cache.activity((), lambda: documents(PROBLEM, cu_seqlens=[0, 5, TOKENS])) is first


def test_a_plane_computes_some_sequences(cache):
    same = activity_of(cache, 0, 5, TOKENS)
    assert cache.alike(same).activity is same  # both sequences have the same documents
    each = cache.activity(("each",), lambda: documents(PROBLEM, cu_seqlens=[[0, 5, TOKENS], [0, 9, TOKENS]]))
    (group,) = cache.alike(each).activity.documents
    assert group is each.documents[1]


def test_the_oldest_is_freed_even_if_an_executor_refers_to_it(cache):
    activities = [activity_of(cache, 0, 1 + i, TOKENS) for i in range(RECENT)]
    first, arrays_of_first = cache.alike(activities[0]), kept(cache, activities[0])
    oldest, arrays = cache.alike(activities[1]), kept(cache, activities[1])
    assert activity_of(cache, 0, 1, TOKENS) is activities[0]  # in use again
    activity_of(cache, 0, 20, TOKENS)
    assert not any(bound() is not None for bound in arrays) and oldest.nbytes == 0
    assert cache.alike(activities[0]) is first and kept(cache, activities[0]) == arrays_of_first
    assert cache.alike(activities[2])
    with pytest.raises(KeyError):
        cache.alike(activities[1])


def test_bytes_are_limited(cache, monkeypatch):
    """Of the calls that are alike, and of all with documents but those in use."""
    own, first = cache.activity((), lambda: None), activity_of(cache, 0, 5, TOKENS)
    kept(cache, own), kept(cache, first)
    one_block = cache.without_documents.nbytes
    assert cache.alike(first).nbytes == one_block < KEPT_BYTES
    monkeypatch.setattr(call_cache, "KEPT_BYTES", one_block)
    for activity in (own, first):
        calls = cache.alike(activity)
        begin = calls.intervals(*OTHERS)[0][1]["begin"]
        assert calls.nbytes == one_block and begin is not calls.intervals(*OTHERS)[0][1]["begin"]
    second = activity_of(cache, 0, 6, TOKENS)
    kept(cache, second)
    assert cache.alike(first).nbytes == cache.alike(second).nbytes == one_block
    activity_of(cache, 0, 7, TOKENS)  # both are more than may be kept besides it
    assert cache.alike(second)
    with pytest.raises(KeyError):
        cache.alike(first)


def test_a_released_cache_keeps_nothing():
    cache = made()
    own, other = cache.activity((), lambda: None), activity_of(cache, 0, 5, TOKENS)
    arrays = kept(cache, own) + kept(cache, other)
    cache = cache.released()
    assert not any(bound() is not None for bound in arrays)
    assert cache.activity((), lambda: None) is own and cache.without_documents.nbytes == 0


def test_steps_are_those_of_the_schedule(cache):
    """They are made once, here or by another plan, for the schedule that a pass has."""
    schedule = cost.build("greedy", Tile(1, 1, 2), "direct", replace(PROBLEM, batch=1))
    steps = cache.without_documents.steps(schedule, 1)
    assert cache.without_documents.steps(schedule, 1) is steps
    other = cost.build("collective", Tile(1, 1, 2), "direct", replace(PROBLEM, batch=1))
    assert cache.without_documents.steps(other, 1).schedule is other
    cache.without_documents.adopt(steps)
    assert cache.without_documents.steps(schedule, 1) is steps


def test_lists_are_one_launch_where_the_back_end_takes_them_so(monkeypatch):
    """And intervals are narrow; all lists with work are there, in either case."""
    layout = Layout("contiguous", TOKENS, 2)
    mask = replace(PROBLEM, causal=False, mask=neighborhood((4, 6), 3)).whole_mask
    activity, backend = Activity(mask, layout, layout, Tile(1, 1, 2)), Backend()
    each = AlikeCalls(backend, activity).intervals(*CHUNKS)
    backend.takes_lists = True
    ((rows, together),) = AlikeCalls(backend, activity).intervals(*CHUNKS)
    assert len(each) > 1 and together["begin"].shape == (*each[0][1]["begin"].shape, len(each))
    for number, (of_list, fields) in enumerate(each):
        assert of_list == rows and all((together[name][..., number] == fields[name]).all() for name in fields)
    monkeypatch.setattr(call_cache, "NARROW", 0)
    assert len(AlikeCalls(backend, activity).intervals(*CHUNKS)) == len(each)


def test_rows_that_see_a_neighbours_keys():
    """Of a border along columns they lie apart: their numbers where the back end takes such rows, else a slice."""
    shape, backend = (4, 20), Backend()
    layout = Layout.grid(shape, (1, 2))
    activity = Activity(Problem(80, 1, 1, mask=neighborhood(shape, 3)).whole_mask, layout, layout, Tile(1, 1, 2))
    keys = ((1, activity.needed(True, 1, 0)),)
    ((rows, fields), *_) = AlikeCalls(backend, activity).intervals(((0, ((0, 40),)),), keys)
    assert rows == slice(9, 40) and fields["begin"].shape == (1, 31)
    backend.takes_lists = True
    ((rows, fields),) = AlikeCalls(backend, activity).intervals(((0, ((0, 40),)),), keys)
    assert rows.tolist() == [9, 19, 29, 39] and (fields["begin"] < fields["end"]).any(axis=(0, 2)).all()
