"""What callers of a cache and of decoding do wrong: the same error on every rank, and nothing has changed."""

import numpy as np
import pytest
from runs import on

from mpiattn import ArgumentError, KVCache, Layout, masks, query_ring_decode, ring_decode, tree_decode


@on(3)
def test_errors_are_the_same_on_every_rank(group):
    token = np.zeros((1, 1, 2, 4), np.float32)
    odd = group.rank == 1
    with KVCache(group, capacity=12, kv_heads=2, head_dim=4, page_size=4) as cache:
        cache.append(*np.zeros((2, 1, 9, 2, 4), np.float32))
        q = np.zeros((1, 1, 4, 4), np.float32)
        calls = [
            (lambda: cache.append(token[..., :3] if odd else token, token), r"k has shape \(1, 1, 2, 3\).*rank 1 of 3"),
            (lambda: cache.append(token.astype("float64"), token), "k has dtype float64; it must be float32"),
            (lambda: cache.append(token, token, counts=[int(odd)]), r"counts is \[0\] on rank 0 but \[1\] on rank 1"),
            (
                lambda: cache.append(*np.zeros((2, 1, 2 + odd, 2, 4), np.float32)),
                "the number of tokens of k, which is given without layout, is 2 on rank 0 but 3 on rank 1",
            ),
            (lambda: cache.append(token, token, layout=(0, 1, 0) if odd else None), "layout is left out on rank 0 but"),
            (lambda: cache.append(token, token, sequences=[1]), r"sequences is \[1\]; it must be different numbers"),
            (lambda: cache.append(token, token, layout=Layout("striped", 1, 2)), "it must be a Layout of 3 chunks"),
            (lambda: cache.append(token, token, layout=(1, 0)), r"layout is \(1, 0\); as sizes of chunks it must"),
            (
                lambda: cache.append(*np.zeros((2, 1, 40, 2, 4), np.float32)),
                "the cache is full: rank 0 would need 5 .*there would be 49",
            ),
            (lambda: cache.append(token, token, counts=5), "counts is 5; it must be a sequence of whole numbers"),
            (lambda: cache.truncate(2.0), "lengths is 2.0; it must be a sequence of whole numbers"),
            (lambda: cache.truncate(10), "lengths is .10.; .* which have .9."),
            (lambda: cache.truncate(3 + odd), "lengths is .3. on rank 0 but .4. on rank 1"),
            (
                lambda: tree_decode(q[..., :3], cache),
                r"q has shape \(1, 1, 4, 3\); it must be \(sequences, .*\) = \(1, any, any, 4\)",
            ),
            (lambda: tree_decode(q[:, :, :3], cache), "it must divide heads, which is 3: q has shape .1, 1, 3, 4."),
            (lambda: tree_decode(q.swapaxes(1, 2), cache), "heads, which is 1: .*axes 1 and 2 may be swapped"),
            (
                lambda: tree_decode(q, cache, algorithm="best"),
                "algorithm is 'best'; it may be auto, allreduce, butterfly, levels",
            ),
            (lambda: tree_decode(q, cache, root=3), "root is 3; it must be None or a rank from 0 to 2"),
            (lambda: tree_decode(q, cache, root=True), "root is True; it must be None or a rank from 0 to 2"),
            (lambda: tree_decode(q, cache, root=1.0), "root is 1.0; it must be None or a rank from 0 to 2"),
            (lambda: ring_decode(q, cache, mask=masks.window(1, 0)), "mask is one of .*tree_decode"),
            (lambda: cache.save(None), "path is None; it must be a str or a path"),
            (lambda: cache.save(f"of{group.rank}.h5"), "path is 'of0.h5' on rank 0 but 'of1.h5' on rank 1"),
            (lambda: KVCache.load(group, None), "path is None; it must be a str or a path"),
            (lambda: tree_decode(q, cache, softcap=1.0 + odd), "softcap is 1.0 on rank 0 but 2.0 on rank 1"),
            (lambda: tree_decode(q, cache, sinks=np.zeros(2, np.float32)), r"sinks has shape \(2,\)"),
            (lambda: KVCache(group, capacity=8, kv_heads=1, head_dim=4, page_size=0), "page_size is 0"),
            (lambda: KVCache(group, capacity=8, kv_heads=0, head_dim=4), "^kv_heads is 0"),
            (lambda: KVCache(group, capacity=8 + odd, kv_heads=1, head_dim=4), "capacity is 8 on rank 0 but 9 on"),
        ]
        for call, message in calls:
            with pytest.raises(ArgumentError, match=message) as raised:
                call()
            assert raised.value.everywhere
            assert len(set(group.allgather(str(raised.value)))) == 1
            assert cache.lengths == (9,)
        out, lse = tree_decode(q, cache)
        assert not out.any() and np.allclose(lse, np.log(9)), "what was refused has changed nothing"
        for method in (cache.positions, cache.table, cache.local):
            for number in (1, -1, "first"):
                with pytest.raises(ArgumentError, match=f"sequence is {number!r}; it must be a number from 0 to 0"):
                    method(number)
        with pytest.raises(ArgumentError, match="root is 3; it must be None or a rank from 0 to 2"):
            cache.algorithm(100, 10, root=3)
        cache.free()
        for decode in (tree_decode, ring_decode, query_ring_decode):
            with pytest.raises(ArgumentError, match="cache has no token in any sequence of the call; append the keys"):
                decode(q, cache)
    with pytest.raises(ArgumentError, match="the cache is closed"):
        tree_decode(q, cache)
    assert cache.lengths == (0,) and cache.nbytes == 0
