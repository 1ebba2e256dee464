"""Trees and shared questions over ranks: each path gets what it gets alone, whatever the tile and the layout."""

import numpy as np
import pytest
from mpi4py import MPI
from runs import on

from mpiattn import KVCache, MeshAttention, attention, masks, tree_decode

HEADS, DIM = 2, 8
PARENTS = [-1, 0, 0, -1, 2, 1, 4, 3]
CASES = {"share": (masks.share_question(20, [9, 0, 14, 6]), 49), "tree": (masks.tree(PARENTS), 49)}
BIASES = {"alibi_slopes": np.array([0.4, 0.1]), "relative_bias": np.random.default_rng(5).standard_normal((HEADS, 9))}


def drawn(tokens):
    return np.random.default_rng(3).standard_normal((4, 1, tokens, HEADS, DIM))


def path_of(mask, query, seqlen):
    begin, end = mask.intervals(np.array([query]), seqlen, seqlen)
    return np.concatenate([np.arange(a, b) for a, b in sorted(zip(begin[:, 0], end[:, 0]))])


@on(1, 2, 3, 4)
@pytest.mark.parametrize("window", [None, (5, 0)], ids=["all", "window"])
@pytest.mark.parametrize("biases", [(), ("alibi_slopes",), ("alibi_slopes", "relative_bias")], ids=len)
@pytest.mark.parametrize("name", CASES)
def test_plans(group, name, biases, window):
    mask, seqlen = CASES[name]
    biases = {bias: BIASES[bias] for bias in biases}
    q, k, v, dout = drawn(seqlen)
    shape = {"seqlen": seqlen, "heads": HEADS, "head_dim": DIM, "dtype": "float64", "direction": "both"}
    tiles = {1: ["1x1"], 2: ["1x2", "2x1x1"], 3: ["3x1"], 4: ["2x2"]}[group.size]
    for layout, tile in (("zigzag", tiles[0]), ("contiguous", tiles[-1]), ("striped", tiles[0])):
        with MeshAttention(group, **shape, mask=mask, window=window, layout=layout, tile=tile) as plan:
            of_rank = [np.ascontiguousarray(array[:, plan.positions]) for array in (q, k, v, dout)]
            out, lse = plan.forward(*of_rank[:3], **biases)
            grads = plan.backward(of_rank[3], *of_rank[:3], out, lse, bias_gradients=True, **biases)
            results = {"dout": of_rank[3], "grads": grads}
            assert plan.verify(*of_rank[:3], out, lse, samples=None, bias_gradients=True, **results, **biases).passed
            whole = plan.gather(out)
        if group.rank == 0:
            for query in range(0, seqlen, 3):
                path = path_of(mask, query, seqlen)
                one = attention(
                    *(x[:, path] for x in (q, k, v)), comm=MPI.COMM_SELF, causal=True, window=window, **biases
                )
                np.testing.assert_allclose(whole[:, query], one[0][:, -1], atol=1e-12, err_msg=f"{layout} {query}")


@on(1, 2, 3)
def test_decoding(group):
    """Of sequences of several lengths, of which each has the drafts last."""
    lengths, drafts, capacity = [31, 8, 64], len(PARENTS), 100
    mask, cache = masks.tree(PARENTS), {"kv_heads": HEADS, "head_dim": DIM, "dtype": "float64", "page_size": 4}
    q, k, v = np.random.default_rng(1).standard_normal((3, 3, max(lengths), HEADS, DIM))
    last = np.stack([q[i, n - drafts : n] for i, n in enumerate(lengths)])
    for call in ({"window": (3, 0)}, BIASES, {"window": (6, 0), **BIASES}):
        with KVCache(group, capacity=capacity, sequences=3, **cache) as packed:
            packed.append(k, v, counts=lengths)
            out, _ = tree_decode(last, packed, mask=mask, **call)
        for sequence, length in enumerate(lengths):
            for draft in range(drafts):
                path = path_of(mask, length - drafts + draft, length)
                with KVCache(group, capacity=capacity, **cache) as single:
                    single.append(k[[sequence]][:, path], v[[sequence]][:, path])
                    want, _ = tree_decode(last[[sequence]][:, [draft]], single, **call)
                np.testing.assert_allclose(out[sequence, draft], want[0, 0], atol=1e-12, err_msg=f"{sequence} {draft}")
