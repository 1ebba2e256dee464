"""Whole-problem helpers of the tests: inputs, dense attention in low precision, and how far a result is off."""

import numpy as np

from mpiattn import reference

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}     # of max|reference|
HALF_ULP = 2.0 ** -11                               # float16: one correct rounding of the result


def draw(problem, seed=0, spread=1.0):
    """Random q, k, v of a whole problem, the same on every rank."""
    rng = np.random.default_rng(seed)
    p = problem
    shapes = ((p.batch, p.seqlen, p.heads, p.head_dim), (p.batch, p.seqlen_k, p.kv_heads, p.head_dim),
              (p.batch, p.seqlen_k, p.kv_heads, p.value_dim))
    return tuple((spread * rng.standard_normal(shape)).astype(p.dtype) for shape in shapes)


def naive(q, k, v, dtype, causal=False, scale=None, positions=None, lengths=None):
    """Textbook attention, every operation in `dtype`; the arguments of reference.attention, only out."""
    positions = np.arange(q.shape[1]) if positions is None else positions
    seqlen = q.shape[1] if lengths is None else lengths[0]
    visible = np.ones((len(positions), k.shape[1]), bool)
    if causal:
        visible = np.arange(k.shape[1]) <= positions[:, None] + k.shape[1] - seqlen
    scale = np.dtype(dtype).type(q.shape[3] ** -0.5 if scale is None else scale)
    out = np.zeros((*q.shape[:3], v.shape[3]), dtype)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(q.shape[0], q.shape[2]):
            kv = h // (q.shape[2] // k.shape[2])
            score = np.where(visible, (q[b, :, h].astype(dtype) @ k[b, :, kv].astype(dtype).T) * scale, -np.inf)
            weight = np.exp(score - score.max(axis=1, keepdims=True, initial=-np.inf)).astype(dtype)
            weight[~visible.any(axis=1)] = 0
            total = weight.sum(axis=1, keepdims=True)
            out[b, :, h] = weight @ v[b, :, kv].astype(dtype) / np.where(total == 0, 1, total)
    return out


def largest(array):
    """max|array| over its finite entries, 0 if there are none."""
    return np.abs(array, where=np.isfinite(array), out=np.zeros(array.shape)).max(initial=0)


def error(got, ref):
    """max|got - ref| where ref is finite; inf if the two are not finite in the same places."""
    got = np.asarray(got, np.float64)
    if got.shape != ref.shape or (np.isfinite(got) != np.isfinite(ref)).any():
        return np.inf
    return largest(np.subtract(got, ref, where=np.isfinite(ref), out=np.zeros(ref.shape)))


def wrong(problem, out, lse, q, k, v, positions, every=1):
    """What is wrong with the rows at `positions` of a whole problem's result, as text; None if nothing is.

    every: look at each `every`-th row only, where the dense reference would take long.
    """
    p = problem
    out, lse, positions = out[:, ::every], lse[..., ::every], positions[::every]
    rows = q[:, positions], k, v
    options = {"causal": p.causal, "scale": p.scale, "positions": positions,
               "lengths": (p.seqlen, p.seqlen_k)}
    ref, ref_lse = reference.attention(*rows, **options)
    if out.dtype != p.dtype or lse.dtype != p.partial_dtype:
        return f"dtypes {out.dtype} and {lse.dtype}"
    blind = np.isneginf(ref_lse)
    if not (np.isneginf(lse) == blind).all() or (out[blind.transpose(0, 2, 1)] != 0).any():
        return "rows that see nothing must have out 0 and lse -inf, and no others"
    off, allowed = error(out, ref), TOLERANCE.get(p.dtype, 0) * largest(ref)
    if not off <= allowed:                    # half precision, or scores so large that their rounding shows
        allowed = max(allowed, 2 * error(naive(*rows, p.dtype, **options).astype(p.dtype), ref)
                      + HALF_ULP * largest(ref) * (p.dtype == "float16"))
    if not off <= allowed:
        return f"out is off by {off:.3g}, allowed {allowed:.3g}"
    off, allowed = error(lse, ref_lse), TOLERANCE[p.partial_dtype] * max(1, largest(ref_lse))
    if not off <= allowed:
        return f"lse is off by {off:.3g}, allowed {allowed:.3g}"
    return None


def bits(*arrays):
    """The bytes of arrays, to be compared."""
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
