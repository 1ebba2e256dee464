"""The oracle against the definition, written out scalar by scalar."""

import math

import numpy as np
import pytest
from dense import Inputs, error, naive

from mpiattn.verify import reference


def brute_force(q, k, v, causal, scale):
    """Attention by its definition, in Python numbers."""
    (batch, rows, heads, _), (seqlen_k, kv_heads) = q.shape, k.shape[1:3]
    out, lse = np.zeros((batch, rows, heads, v.shape[3])), np.full((batch, heads, rows), -np.inf)
    for b, i, h in np.ndindex(batch, rows, heads):
        g = h // (heads // kv_heads)
        keys = [j for j in range(seqlen_k) if not causal or j <= i + seqlen_k - rows]
        weights = [math.exp(scale * math.fsum(q[b, i, h] * k[b, j, g])) for j in keys]
        if keys:
            lse[b, h, i] = math.log(math.fsum(weights))
            out[b, i, h] = sum(w * v[b, j, g] for w, j in zip(weights, keys)) / math.fsum(weights)
    return out, lse


def inputs(seqlen, seqlen_k, heads=4, kv_heads=2, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((2, seqlen, heads, 3)),
        rng.standard_normal((2, seqlen_k, kv_heads, 3)),
        rng.standard_normal((2, seqlen_k, kv_heads, 5)),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(7, 7), (3, 8), (8, 3), (1, 1), (4, 0), (0, 4)])
def test_definition(shape, causal, monkeypatch):
    q, k, v = inputs(*shape)
    expected = brute_force(q, k, v, causal, 0.7)
    for pairs in (reference.BLOCK_PAIRS, 5):  # in one block of rows, and row by row
        monkeypatch.setattr(reference, "BLOCK_PAIRS", pairs)
        for got, ref in zip(reference.attention(q, k, v, causal, 0.7), expected):
            assert got.dtype == np.float64
            assert error(got, ref) < 1e-13
            assert (np.isneginf(got) == np.isneginf(ref)).all()


def test_default_scale():
    q, k, v = inputs(5, 5)
    assert error(reference.attention(q, k, v)[0], brute_force(q, k, v, False, 3**-0.5)[0]) < 1e-13


def test_a_selection_of_rows():
    q, k, v = inputs(9, 11)
    whole, lse = reference.attention(q, k, v, causal=True)
    rows = np.array([0, 3, 8])
    some, some_lse = reference.attention(q[:, rows], k, v, causal=True, positions=rows, lengths=(9, 11))
    assert (some == whole[:, rows]).all() and (some_lse == lse[..., rows]).all()


def test_scores_that_overflow_exp():
    q, k, v = inputs(6, 6, 1, 1)
    out, lse = reference.attention(q * 1e4, k, v, scale=1.0)
    best = (q[0, :, 0] @ k[0, :, 0].T).argmax(axis=1)
    assert np.isfinite(lse).all() and error(out[0, :, 0], v[0, best, 0]) < 1e-9


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_not_a_number_reaches_who_may_see_it(where):
    arrays = dict(zip("qkv", inputs(8, 8, 1, 1)))
    arrays[where][0, 5, 0, 1] = np.nan
    out, lse = reference.attention(**arrays, causal=True)
    rows = np.arange(8) == 5 if where == "q" else np.arange(8) >= 5
    hit = np.zeros(out.shape, bool)
    hit[0, rows, 0, 1 if where == "v" else slice(None)] = True
    assert (np.isnan(out) == hit).all()
    assert (np.isnan(lse[0, 0]) == (rows & (where != "v"))).all() and not np.isnan(lse[1]).any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(7, 7), (8, 3), (3, 8), (3, 0)])
def test_naive_runs_of_the_tests_are_right_too(shape, causal):
    """They set what half precision may be off by."""
    q, k, v = inputs(*shape)
    expected = brute_force(q, k, v, causal, 0.5)[0]
    rng = np.random.default_rng(1)
    dout, dlse = rng.standard_normal((*q.shape[:3], v.shape[3])), rng.standard_normal(q.shape[:3]).swapaxes(1, 2)
    whole = naive(Inputs(q, k, v, dout, dlse), np.float64, causal=causal, scale=0.5)
    assert error(whole.out, expected) < 1e-13
    for grad, ref in zip(whole[2:5], reference.backward(dout, q, k, v, causal, 0.5, dlse=dlse)):
        assert error(grad, ref) < 1e-13
    half = error(naive(Inputs(q, k, v), np.float16, causal=causal, scale=0.5).out, expected)
    assert half < 1e-2 and (half > 1e-5 or not shape[1])


def drawn(rng, seqlen, seqlen_k):
    """Masks at random, of two batch entries."""
    documents = rng.integers(1, 6)
    masks = {
        "cu_seqlens": np.sort(rng.integers(0, seqlen + 1, (2, documents + 1))),
        "cu_seqlens_k": np.sort(rng.integers(0, seqlen_k + 1, (2, documents + 1))),
        "window": tuple(rng.choice([None, 0, 3], 2)),
    }
    if rng.random() < 0.5:
        masks["prefixes"] = rng.integers(0, 9, (2, documents))
    if rng.random() < 0.5:
        masks["causal_documents"] = rng.random((2, documents)) < 0.5
    if rng.random() < 0.5:
        masks["causal_block"] = rng.integers(1, 9)
    return masks


@pytest.mark.parametrize("seed", range(20))
def test_masks_as_they_are_defined(seed, monkeypatch):
    """The reference takes the interval of keys that a query sees; the naive run looks at every pair."""
    rng = np.random.default_rng(seed)
    q, k, v = inputs(29, 23, seed=seed)
    masks, dout = drawn(rng, 29, 23), rng.standard_normal((2, 29, 4, 5))
    begin, end = reference.bounds(np.arange(29), 2, (29, 23), True, **masks)
    assert (end - begin < 23).any()
    whole = naive(Inputs(q, k, v, dout), np.float64, causal=True, **masks)
    for rows in 1, 7, 64:
        monkeypatch.setattr(reference, "BLOCK_ROWS", rows)
        results = *reference.attention(q, k, v, True, **masks), *reference.backward(dout, q, k, v, True, **masks)
        for got, ref in zip(results, whole):
            assert (np.isneginf(got) == np.isneginf(ref)).all() and error(got, ref) < 1e-13


def test_some_gradients():
    q, k, v = inputs(9, 11)
    dout = np.random.default_rng(1).standard_normal((2, 9, 4, 5))
    out, lse = reference.attention(q, k, v, True)
    given = dout, q, k, v, lse, np.einsum("bqhd,bqhd->bhq", dout, out)
    dq, dk, dv = reference.gradients(*given, causal=True)
    of_queries, of_keys = (reference.gradients(*given, causal=True, of=of) for of in ("q", "kv"))
    assert (of_queries[0] == dq).all() and of_queries[1:] == (None, None)
    assert of_keys[0] is None and (of_keys[1] == dk).all() and (of_keys[2] == dv).all()
