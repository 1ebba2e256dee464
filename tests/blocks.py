"""One block of attention alone: inputs, row intervals, and dense attention of them in float64."""

import ml_dtypes
import numpy as np
from dense import error, largest

from mpiattn.backends.block import BackwardInputs, BlockInputs

EPSILON = {dtype: float(ml_dtypes.finfo(dtype).eps) for dtype in ("float32", "float16", "bfloat16")}
NOISE = 2e-6  # of float32 sums, of max|result|


def dense(q, k, v, begin, end, scale, softcap=None):
    """(out, lse) of rows that see the keys [begin[g, i], end[g, i]), float64, one row at a time."""
    tokens, heads = q.shape[:2]
    out, lse = np.zeros((tokens, heads, v.shape[2])), np.full((tokens, heads), -np.inf)
    with np.errstate(all="ignore"):
        for i, h in np.ndindex(tokens, heads):
            g, kv = h * len(begin) // heads, h * k.shape[1] // heads
            keys = slice(begin[g, i], end[g, i])
            score = k[keys, kv].astype(np.float64) @ q[i, h].astype(np.float64) * scale
            if softcap is not None:
                score = softcap * np.tanh(score / softcap)
            top = score.max(initial=-np.inf)
            if top != -np.inf:
                weight = np.exp(score - top)
                out[i, h] = weight @ v[keys, kv].astype(np.float64) / weight.sum()
                lse[i, h] = top + np.log(weight.sum())
    return out, lse


def chunks(queries, keys, heads=2, kv_heads=1, head_dim=8, value_dim=6, dtype="float64", seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    shapes = ((queries, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, value_dim))
    return [(spread * rng.standard_normal(shape)).astype(dtype) for shape in shapes]


def everything(queries, keys):
    return np.zeros((1, queries), np.int32), np.full((1, queries), keys, np.int32)


def windows(queries, keys, groups=1, seed=0):
    """Arbitrary intervals, a third of them empty, some at the ends and some of one key."""
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.integers(0, keys + 1, (2, groups, queries)), axis=0).astype(np.int32)
    ends[1] = np.where(rng.random((groups, queries)) < 0.3, ends[0], ends[1])
    if queries > 2:
        ends[:, :, 0], ends[0, :, 1], ends[1, :, 1] = keys, 0, keys
    return ends[0], ends[1]


def causal(queries, keys):
    end = np.clip(np.arange(keys - queries, keys) + 1, 0, keys)[None].astype(np.int32)
    return np.zeros_like(end), end


def documents(queries, keys):
    """Three documents that do not begin with tiles, a hole of rows that see nothing between them."""
    begin, end = np.zeros((2, 1, queries), np.int32)
    for first, last in ((0, 0.21), (0.3, 0.34), (0.34, 1)):
        rows = slice(int(first * queries), int(last * queries))
        begin[:, rows], end[:, rows] = int(first * keys), int(last * keys)
    return begin, end


def edges(queries, keys):
    """All keys but those at the edges, where rows differ by one."""
    i = np.arange(queries, dtype=np.int32)[None]
    return (3 + (i % 2 == 0)).astype(np.int32), np.maximum(keys - 2 + i % 2, 0)


MASKS = {"full": everything, "edges": edges, "causal": causal, "windows": windows, "documents": documents}


def partial(backend, tokens, heads, value_dim, dtype):
    out, lse = backend.empty((tokens, heads, value_dim), dtype), backend.empty((tokens, heads), dtype)
    backend.clear(out, lse)
    return out, lse


def assert_rounded(got, ref, v):
    """Rounding a weight moves a row by half an epsilon of its values at most; float32 does not round them."""
    dtype = v.dtype.name
    rounding = 0 if dtype == "float32" else 1.01 * EPSILON[dtype] / 2 * largest(v.astype(np.float64))
    assert (np.isneginf(got[1]) == np.isneginf(ref[1])).all()
    assert error(got[0], ref[0]) <= rounding + NOISE * largest(ref[0])
    assert error(got[1], ref[1]) <= NOISE * max(largest(ref[1]), 1)


def of_backward(arguments, scale, softcap=None):
    """The inputs of a backward pass of (q, dout, lse, delta, k, v, begin, end), as back ends take them."""
    q, dout, lse, delta, k, v, begin, end = arguments
    return BlockInputs(q, k, v, begin, end, scale, softcap), BackwardInputs(dout, lse, delta)


def dense_gradients(q, dout, lse, delta, k, v, begin, end, scale, softcap=None):
    """(dq, dk, dv) of what the rows see, and the sums of their terms' magnitudes, float64, one row at a time.

    lse, delta: of the rows, as the back ends get them.
    """
    grads, sizes = ([np.zeros(array.shape) for array in (q, k, v)] for _ in range(2))
    with np.errstate(all="ignore"):
        for i, h in np.ndindex(*lse.shape):
            g, kv = h * len(begin) // q.shape[1], h * k.shape[1] // q.shape[1]
            keys, row = slice(begin[g, i], end[g, i]), q[i, h].astype(np.float64)
            seen, values, grad = (array.astype(np.float64) for array in (k[keys, kv], v[keys, kv], dout[i, h]))
            score, slope = seen @ row * scale, scale
            if softcap is not None:
                bent = np.tanh(score / softcap)
                score, slope = softcap * bent, scale * (1 - bent**2)
            weight = np.exp(score - (0 if lse[i, h] == -np.inf else lse[i, h]))
            dscore = weight * (values @ grad - delta[i, h]) * slope
            grads[0][i, h] += dscore @ seen
            grads[1][keys, kv] += dscore[:, None] * row
            grads[2][keys, kv] += weight[:, None] * grad
            dscore = np.abs(dscore)
            sizes[0][i, h] += dscore @ np.abs(seen)
            sizes[1][keys, kv] += dscore[:, None] * np.abs(row)
            sizes[2][keys, kv] += weight[:, None] * np.abs(grad)
    return grads, sizes
