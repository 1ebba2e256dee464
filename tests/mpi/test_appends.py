"""What a cache holds after appends and truncates in any order, against plain lists of what was appended; no cache."""

import numpy as np
import pytest
from test_decode import RINGS, Mirror

from mpiattn import ArgumentError, KVCache, MeshAttention, tree_decode
from mpiattn.arguments.arrays import on_host
from mpiattn.errors import KeywordError


def test_random_appends_and_truncates(comm):
    """Contents of the pages, whatever was done before: a token is its sequence and a number of its own."""
    rng = np.random.default_rng(comm.size)
    cache = KVCache(comm, capacity=600, sequences=3, kv_heads=2, head_dim=1, dtype="float64", page_size=4)
    plain, number = [[] for _ in range(3)], 0
    for step in range(2000):
        sequence, count = int(rng.integers(3)), int(rng.choice([1, 1, 1, 7]))
        if rng.random() < 0.55 and sum(map(len, plain)) + count <= cache.capacity:
            new = np.arange(number, number + count, dtype=np.float64).reshape(1, count, 1, 1) * [[1], [-1]]
            cache.append(new, 2 * new, sequences=[sequence], check=False)
            plain[sequence] += range(number, number + count)
            number += count
        else:
            length = max(0, len(plain[sequence]) - count) if rng.random() < 0.98 else 0
            cache.truncate([length], sequences=[sequence], check=False)
            del plain[sequence][length:]
        if step % 50 == 0 or step == 1999:
            assert cache.lengths == tuple(map(len, plain))
            for s, tokens in enumerate(plain):
                k, v = cache.local(s)
                expected = np.array(tokens, np.float64)[cache.positions(s)].reshape(-1, 1, 1) * [[1], [-1]]
                assert np.array_equal(k, expected) and np.array_equal(v, 2 * expected)
    cache.close()


@pytest.mark.draw(1)
@pytest.mark.parametrize("page_size, dtype", [(1, "float64"), (4, "bfloat16"), (64, "float32")])
def test_random_appends_to_some_sequences(comm, page_size, dtype):
    """Contents of the pages, and what windows see, after equal and ragged numbers of tokens of some sequences."""
    rng, sequences = np.random.default_rng([comm.size, page_size]), 6
    mirror = Mirror(comm, 2, 4, 3, capacity=900, sequences=sequences, dtype=dtype, page_size=page_size)
    cache = mirror.cache
    for step in range(200):
        some = rng.permutation(sequences)[: rng.integers(1, sequences + 1)].tolist()
        some = range(sequences) if rng.random() < 0.4 else some
        tokens = int(rng.choice([1, 1, 1, 1, 2, 4, 40]))
        if rng.random() < 0.8 and sum(cache.lengths) + len(some) * tokens <= 700:
            how = {"counts": rng.integers(0, tokens + 1, len(some)).tolist()} if rng.random() < 0.3 else {}
            layout = rng.choice(["zigzag", "any"]) if rng.random() < 0.1 and not how else None
            mirror.append(tokens, layout, sequences=list(some), **how)
        else:
            cut = rng.choice([0, 1, 5, 50], sequences)
            mirror.truncate([max(0, length - n) for length, n in zip(cache.lengths, cut.tolist())])
        assert cache.lengths == tuple(len(k) for k, _ in mirror.whole)
        used = sum(-(-n // page_size) for n in cache.local_lengths)
        assert (
            cache.free_pages == cache.pages - used == cache.pages - sum(len(cache.table(s)) for s in range(sequences))
        )
        for s, whole in enumerate(mirror.whole):
            assert all(
                np.array_equal(local, array[cache.positions(s)])
                for local, array in zip(map(on_host, cache.local(s)), whole)
            )
        if step % 40 == 0 and any(cache.lengths):
            mirror.check(3, algorithms=("butterfly", *RINGS), window=(int(rng.integers(0, 60)), 0))
    cache.close()


def test_no_cache_is_given(comm):
    """Arguments in another order, or a plan, for example."""
    q, plan = np.zeros((1, 1, 2, 4), np.float32), MeshAttention(comm, seqlen=9, heads=2, head_dim=4)
    with KVCache(comm, capacity=9, kv_heads=2, head_dim=4) as cache, plan:
        for decode in (tree_decode, *RINGS.values()):
            with pytest.raises(ArgumentError, match="cache is a ndarray; it must be a KVCache: the queries come first"):
                decode(cache, q)
            with pytest.raises(ArgumentError, match="cache is a MeshAttention; it must be a KVCache"):
                decode(q, plan)
            with pytest.raises(KeywordError, match=r"scales is not an argument of .*; did you mean scale"):
                decode(cache, q, scales=1)
