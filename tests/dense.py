"""Whole-problem helpers of the tests: inputs, dense attention in low precision, and how far a result is off."""

from itertools import pairwise
from typing import NamedTuple

import ml_dtypes
import numpy as np

from mpiattn.problem.mask import MASK_FIELDS
from mpiattn.verify import reference

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}  # of max|reference|
FORWARD, BACKWARD = 2, 3  # half types: how many times a naive run's error is allowed


class Inputs(NamedTuple):
    """Arrays of a whole problem or of one rank; dlse and sinks in lse's dtype, the others in the problem's.

    v: None where a value is the first numbers of its key, as many as dout has.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray | None
    dout: np.ndarray = None
    dlse: np.ndarray = None
    sinks: np.ndarray = None


class Result(NamedTuple):
    """What forward and backward return."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray = None
    dk: np.ndarray = None
    dv: np.ndarray = None
    dsinks: np.ndarray = None


def draw(problem, seed=0, spread=1.0):
    """Random q, k, v of a whole problem, the same on every rank."""
    return draw_all(problem, seed, spread)[:3]


def draw_all(problem, seed=0, spread=1.0, sinks=False, dlse=True):
    """Random inputs of a whole problem, forward and backward, the same on every rank."""
    rng, p = np.random.default_rng(seed), problem
    shapes = (
        (p.batch, p.seqlen, p.heads, p.head_dim),
        (p.batch, p.seqlen_k, p.kv_heads, p.head_dim),
        (p.batch, p.seqlen_k, p.kv_heads, p.value_dim),
    )
    q, k, v = ((spread * rng.standard_normal(shape)).astype(p.dtype) for shape in shapes)
    dout = rng.standard_normal((p.batch, p.seqlen, p.heads, p.value_dim)).astype(p.dtype)
    of_lse = (rng.standard_normal(shape).astype(p.partial_dtype) for shape in ((p.batch, p.heads, p.seqlen), p.heads))
    v = None if p.shared_kv else v
    return Inputs(q, k, v, dout, *(array if wanted else None for array, wanted in zip(of_lse, (dlse, sinks))))


def separate(inputs):
    """Inputs with an array v."""
    return inputs if inputs.v is not None else inputs._replace(v=inputs.k[..., : inputs.dout.shape[3]])


def joined(inputs, result):
    """A result of `separate(inputs)` as one of `inputs`: dk takes dv where keys hold the values."""
    if inputs.v is not None or result.dv is None:
        return result
    dk = result.dk.copy()
    dk[..., : result.dv.shape[-1]] += result.dv
    return result._replace(dk=dk, dv=None)


def masks(problem, call=None):
    """The reference's arguments for a problem and the documents or padding of one call."""
    p, call = problem, call or {}
    cuts = (
        {
            "cu_seqlens" + name[7:]: [[0, end] for end in ends] if name.startswith("lengths") else ends
            for name, ends in call.items()
            if name.startswith(("lengths", "cu"))
        }
        if "lengths" in call
        else {name: value for name, value in call.items() if name != "padding"}
    )
    for name in {"prefixes", "causal_documents"} & set(call):  # without cu_seqlens one for each batch entry
        cuts[name] = call[name] if "cu_seqlens" in call else [[value] for value in call[name]]
    return {
        **{name: getattr(p, name) for name in MASK_FIELDS if not name.startswith("seqlen")},
        "scale": p.scale,
        "softcap": p.softcap,
        **cuts,
    }


def expected(inputs, backward=True, **options):
    """The reference's result; options as `masks` makes them."""
    q, k, v, dout, dlse, sinks = separate(inputs)
    forward = reference.attention(q, k, v, sinks=sinks, **options)
    grads = reference.backward(dout, q, k, v, dlse=dlse, sinks=sinks, **options) if backward else ()
    return joined(inputs, Result(*forward, *grads))


def gradients_at(inputs, lse, delta, causal, rows, keys):
    """dq of some rows, dk and dv of some keys, float64, of a long problem with as many keys as queries.

    lse, delta: the reference's of the whole problem, delta = rowsum(dout * out) - dlse.
    """
    q, k, v, dout = (array.astype(np.float64) for array in inputs[:4])
    scale, tokens = q.shape[3] ** -0.5, np.arange(q.shape[1])
    dq, dk, dv = (
        np.zeros((array.shape[0], len(at), *array.shape[2:])) for array, at in ((q, rows), (k, keys), (v, keys))
    )

    def pairs(b, h, i, j):
        """P and dS of queries i and keys j."""
        score = q[b, i, h] @ k[b, j, h].T * scale
        weight = np.where((j <= i[:, None]) | (not causal), np.exp(score - lse[b, h, i, None]), 0)
        return weight, weight * (dout[b, i, h] @ v[b, j, h].T - delta[b, h, i, None]) * scale

    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        dq[b, :, h] = pairs(b, h, rows, tokens)[1] @ k[b, :, h]
        weight, dscore = pairs(b, h, tokens, keys)
        dk[b, :, h], dv[b, :, h] = dscore.T @ q[b, :, h], weight.T @ dout[b, :, h]
    return dq, dk, dv


def per_document(inputs, cuts, **options):
    """The reference's result of documents at `cuts`, each run on its own: the tokens of both sides are cut alike."""
    q, k, v, dout, dlse, _ = inputs
    computed = Result(*(np.zeros(shape) for shape in (dout.shape, dlse.shape, q.shape, k.shape, v.shape)))
    computed.lse.fill(-np.inf)
    for start, stop in pairwise(cuts):
        at = slice(start, stop)
        part = expected(Inputs(q[:, at], k[:, at], v[:, at], dout[:, at], dlse[..., at]), **options)
        for name in ("out", "dq", "dk", "dv"):
            getattr(computed, name)[:, at] = getattr(part, name)
        computed.lse[..., at] = part.lse
    return computed


def _weights(inputs, rounded, causal=False, scale=None, softcap=None, **options):
    """Every head's place (b, h, kv head), lse, probabilities, the sink's, and slope of the scores times scale."""
    q, k, sinks = inputs.q, inputs.k, inputs.sinks
    scale = q.shape[3] ** -0.5 if scale is None else scale
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        kv = h // (q.shape[2] // k.shape[2])
        of_entry = {
            name: mask[b] if name in reference.OF_DOCUMENTS and np.ndim(mask[0]) else mask
            for name, mask in options.items()
        }
        visible = reference.visible_keys(
            np.arange(q.shape[1]), np.arange(k.shape[1]), (q.shape[1], k.shape[1]), causal, **of_entry
        )
        score, slope = rounded(rounded(q[b, :, h]) @ rounded(k[b, :, kv]).T * scale), scale
        if softcap is not None:
            bent = rounded(np.tanh(score / softcap))
            score, slope = rounded(softcap * bent), rounded(1 - bent**2) * scale
        score = np.where(visible, score, -np.inf)
        sink = -np.inf if sinks is None else sinks[h]
        base = np.maximum(score.max(axis=1, initial=-np.inf), sink)
        base = np.where(base == -np.inf, 0, base)[:, None]
        weight, sink = rounded(np.exp(score - base)), np.exp(sink - base)
        total = weight.sum(axis=1, keepdims=True) + sink
        some = np.where(total == 0, 1, total)
        yield (b, h, kv), (base + np.log(total))[:, 0], rounded(weight / some), (sink / some)[:, 0], slope


def _complete(inputs):
    return (
        inputs
        if inputs.dout is not None
        else inputs._replace(dout=np.zeros((*inputs.q.shape[:3], inputs.v.shape[3]), inputs.q.dtype))
    )


def naive(inputs, dtype, **options):
    """Textbook attention and gradients in `dtype`; in a half type every intermediate is rounded to it."""
    inputs = _complete(inputs)
    work = np.float64 if dtype in ("float64", np.float64) else np.float32

    def rounded(array):
        return np.asarray(array).astype(dtype).astype(work)

    q, k, v, dout, dlse, _ = separate(inputs)
    shapes = (dout.shape, (q.shape[0], q.shape[2], q.shape[1]), q.shape, k.shape, v.shape, q.shape[2])
    computed = Result(*(np.zeros(shape, work) for shape in shapes))
    with np.errstate(all="ignore"):
        for (b, h, kv), lse, weight, sink, slope in _weights(inputs, rounded, **options):
            queries, keys, values, grad = map(rounded, (q[b, :, h], k[b, :, kv], v[b, :, kv], dout[b, :, h]))
            out = computed.out[b, :, h] = rounded(weight @ values)
            computed.lse[b, h] = lse
            delta = (grad * out).sum(axis=1) - (0 if dlse is None else dlse[b, h])
            dscore = rounded(weight * (rounded(grad @ values.T) - delta[:, None]) * slope)
            computed.dq[b, :, h] = dscore @ keys
            computed.dk[b, :, kv] += dscore.T @ queries
            computed.dv[b, :, kv] += weight.T @ grad
            computed.dsinks[h] -= (sink * delta).sum()
        return Result(
            *(
                rounded(array) if name in ("out", "dq", "dk", "dv") and array is not None else array
                for name, array in zip(Result._fields, joined(inputs, computed))
            )
        )


def sizes(inputs, slope_error=0, **options):
    """The largest sum of the magnitudes of the terms of each result: rounding each term moves it by no more.

    slope_error: what is added to the slope of softcap, 1 - tanh^2, whose rounding does not become smaller with it.
    """
    added = 0 if options["softcap"] is None else slope_error * options["scale"]
    inputs = _complete(inputs)
    arrays = separate(inputs)
    q, k, v, dout, dlse, _ = (None if array is None else np.abs(np.asarray(array, np.float64)) for array in arrays)
    shapes = dout.shape, dout.shape[:3], q.shape, k.shape, v.shape, q.shape[2]
    computed = Result(*map(np.zeros, shapes))
    with np.errstate(all="ignore"):
        for (b, h, kv), lse, weight, sink, slope in _weights(inputs, lambda x: np.asarray(x, np.float64), **options):
            out = computed.out[b, :, h] = weight @ v[b, :, kv]
            delta = (dout[b, :, h] * out).sum(axis=1) + (0 if dlse is None else dlse[b, h])
            dscore = weight * (dout[b, :, h] @ v[b, :, kv].T + delta[:, None]) * (np.abs(slope) + added)
            computed.lse[b, :, h] = np.abs(lse)
            computed.dq[b, :, h] = dscore @ k[b, :, kv]
            computed.dk[b, :, kv] += dscore.T @ q[b, :, h]
            computed.dv[b, :, kv] += weight.T @ dout[b, :, h]
            computed.dsinks[h] += (sink * delta).sum()
    return Result(*(None if array is None else largest(array) for array in joined(inputs, computed)))


def epsilon(dtype):
    """The distance from 1 to the next number of a dtype."""
    return float(ml_dtypes.finfo(dtype).eps)


def largest(array):
    """max|array| over its finite entries, 0 if there are none."""
    return np.abs(array, where=np.isfinite(array), out=np.zeros(array.shape)).max(initial=0)


def error(got, ref):
    """max|got - ref| where ref is finite; inf if the two are not finite in the same places."""
    got = np.asarray(got, np.float64)
    if got.shape != ref.shape or (np.isfinite(got) != np.isfinite(ref)).any():
        return np.inf
    return largest(np.subtract(got, ref, where=np.isfinite(ref), out=np.zeros(ref.shape)))


def wrong(problem, got, ref, inputs, at, at_k, call=None, terms=False, flushed=0.0):
    """The first error of one rank's result, as text; None if it is right.

    got: of the queries at `at` and the keys at `at_k`.  ref, inputs: of the whole problem.  terms: allow also the
    rounding of the terms of each sum, for problems whose results may cancel to nothing, and of the lse in exp(S - lse).
    flushed: what a back end takes for 0.
    """
    p, allowance = problem, {}

    def limit(name):
        """More than TOLERANCE, computed where that is not enough."""
        if not allowance:
            options = masks(p, call)
            slope_error = epsilon(p.partial_dtype) / epsilon(p.dtype)
            allowance.update(low=naive(inputs, p.dtype, **options), sizes=sizes(inputs, slope_error, **options))
        times = FORWARD if name == "out" else BACKWARD
        off, size = error(getattr(allowance["low"], name), getattr(ref, name)), getattr(allowance["sizes"], name)
        half = epsilon(p.dtype) if p.itemsize == 2 else 0
        narrow = epsilon(p.wire_dtype) if p.wire_dtype != p.partial_dtype else 0
        least = half / 2 * largest(getattr(ref, name))  # the right result, rounded
        return (
            max(least, times * off if np.isfinite(off) else 0)
            + 1.01 * narrow * size
            + (narrow > 0) * 1e-6
            + terms * (half + epsilon(p.partial_dtype) * (4 + allowance["sizes"].lse)) * size
        )

    blind = np.isneginf(got.lse)
    if (blind != np.isneginf(ref.lse[..., at])).any() or got.out[blind.transpose(0, 2, 1)].any():
        return "rows that see nothing must have out 0 and lse -inf, and no others"
    places = {"lse": (..., at), "dk": (slice(None), at_k), "dv": (slice(None), at_k), "dsinks": ...}
    for name, array in got._asdict().items():
        whole = getattr(ref, name)
        if array is None:
            if whole is not None and got.dq is not None:  # there is a backward pass
                return f"{name} is missing"
            continue
        dtype = p.partial_dtype if name in ("lse", "dsinks") else p.dtype
        if array.dtype != dtype:
            return f"{name} has dtype {array.dtype}"
        off = error(array, whole[places.get(name, (slice(None), at))])
        allowed = TOLERANCE.get(dtype, 0) * max(largest(whole), name == "lse") + flushed
        if not off <= allowed and name != "lse":
            allowed = max(allowed, limit(name))
        if not off <= allowed:
            return f"{name} is off by {off:.3g}, allowed {allowed:.3g}"
    return None


def bits(*arrays):
    """The bytes of arrays, to be compared."""
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays if array is not None)
