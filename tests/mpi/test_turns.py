"""A cache that grows in turns, each a prefill that stays where it is, then some tokens: case 35."""

import numpy as np
import pytest
from calls import calls
from runs import BACKENDS, agreed, on, settle, subcomm
from test_decode import Mirror

from mpiattn import ArgumentError, KVCache, Layout, query_ring_decode, ring_decode, tree_decode
from mpiattn.arguments.arrays import on_host
from mpiattn.backends import pages
from mpiattn.decode import cache_file, token_owners
from mpiattn.problem import layout
from mpiattn.verify import reference

TOKENS, HEADS, DIM = 1600, 2, 8
DECODE = (tree_decode, ring_decode, query_ring_decode)


def grow(cache, k, v, turns):
    """Append tokens in turns, the last three of each dealt."""
    for start in range(0, TOKENS, TOKENS // turns):
        stop = start + TOKENS // turns
        layout = Layout("zigzag", stop - 3 - start, cache.ranks)
        own = start + layout.positions(cache.rank)
        cache.append(k[:, own], v[:, own], layout=layout, check=False)
        cache.append(k[:, stop - 3 : stop], v[:, stop - 3 : stop], check=False)


def step(cache):
    """One token more, seen by two queries, and it is taken back."""
    token, q = np.zeros((1, 1, HEADS, DIM), cache.dtype), np.zeros((1, 2, HEADS, DIM), cache.dtype)
    cache.append(token, token)
    for decode in DECODE:
        decode(q, cache, window=(40, 0))
    cache.truncate(TOKENS)


@on(1, 2, 3, 4)
def test_case_35_turns(group):
    """The same tokens in 1, 10 and 400 turns: the same result on every rank, at the same cost."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, HEADS, DIM), np.float32) for n in (2, TOKENS, TOKENS))
    counted = []
    for turns in (1, 10, 400):
        with KVCache(group, capacity=2 * TOKENS, kv_heads=HEADS, head_dim=DIM, backend=BACKENDS[0]) as cache:
            grow(cache, k, v, turns)
            assert cache.lengths == (TOKENS,) and sum(group.allgather(cache.local_lengths[0])) == TOKENS
            for window in (None, (700, 0)):
                ref = reference.attention(q, k, v, causal=True, window=window or (None, None))
                for decode in DECODE:
                    got = map(on_host, decode(q, cache, window=window))
                    right = all(np.allclose(array, whole, rtol=1e-5, atol=1e-5) for array, whole in zip(got, ref))
                    agreed(group, None if right else f"{decode.__name__} after {turns} turns is wrong")
            step(cache)  # the first counts what there is, and keeps it
            counted.append(calls(lambda: step(cache), token_owners, layout, pages))
    agreed(group, None if max(counted) <= 1.2 * min(counted) else f"calls after 1, 10 and 400 turns: {counted}")


@on(3)
def test_what_does_not_fit_leaves_no_trace(group):
    """Of a cache that is full nothing changes, however often it is tried."""
    with KVCache(group, capacity=60, kv_heads=HEADS, head_dim=DIM, page_size=4, backend=BACKENDS[0]) as cache:
        small, large = (np.ones((2, 1, n, HEADS, DIM), np.float32) for n in (7, 100))
        cache.append(*small)
        at, used = cache.positions(0), []

        def refused():
            with pytest.raises(ArgumentError, match="the cache is full"):
                cache.append(*large)

        for _ in range(3):
            used.append(calls(refused, token_owners, layout))
        assert len(set(used)) == 1 and cache.lengths == (7,) and (cache.positions(0) == at).all()
        cache.append(*small)
        assert max(group.allgather(cache.local_lengths[0])) == 5, "dealt on as if nothing had been tried"


@on(1, 3, 4)
@pytest.mark.parametrize("run", [1, 3])
def test_decoding_what_was_loaded(group, monkeypatch, tmp_path_factory, run):
    """In runs of several tokens: windows that end anywhere in them, tokens more, and fewer than were loaded."""
    path = group.bcast(str(tmp_path_factory.mktemp("runs") / "cache.h5") if group.rank == 0 else None)
    mirror = Mirror(group, 2, 16, sequences=3, capacity=200)
    mirror.append(61, counts=[61, 13, 40])
    mirror.cache.save(path)
    mirror.cache.close()
    monkeypatch.setattr(cache_file, "RUN_BYTES", run * 2 * 16 * 4)
    mirror.cache = KVCache.load(group, path, capacity=200, backend=BACKENDS[0])
    held = mirror.cache.storage.ledgers[0].ranges(0)
    assert held[0] == (range(run) if run > 1 and group.size > 1 else range(0, 61, group.size))
    for step in range(6):
        for window in ((None, None), (2, None), (11, None), (30, 0)):
            mirror.check(2, algorithms=("butterfly", "ring"), window=window)
        if step % 2:
            mirror.truncate([max(0, length - 9) for length in mirror.cache.lengths])
        else:
            mirror.append(3, counts=[1, 3, 2])
    mirror.cache.close()


@on(3)
def test_turns_as_a_file(group, tmp_path_factory):
    """What came in many turns is saved in order and loaded by fewer ranks."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, HEADS, DIM), np.float32) for n in (2, TOKENS, TOKENS))
    path = group.bcast(str(tmp_path_factory.mktemp("turns") / "cache.h5") if group.rank == 0 else None)
    with KVCache(group, capacity=2 * TOKENS, kv_heads=HEADS, head_dim=DIM, backend=BACKENDS[0]) as cache:
        grow(cache, k, v, 100)
        expected = [on_host(array) for array in tree_decode(q, cache)]
        cache.save(path)
    with subcomm(group, 2) as fewer:
        if fewer is not None:
            with KVCache.load(fewer, path, backend=BACKENDS[0]) as cache:
                for got, array in zip(map(on_host, tree_decode(q, cache)), expected):
                    assert np.allclose(got, array, rtol=1e-5, atol=1e-5)
    settle(group)
