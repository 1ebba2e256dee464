"""One block of attention alone: inputs, row intervals, and dense attention of them in float64."""

import numpy as np


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


def partial(backend, tokens, heads, value_dim, dtype):
    out, lse = backend.empty((tokens, heads, value_dim), dtype), backend.empty((tokens, heads), dtype)
    backend.clear(out, lse)
    return out, lse
