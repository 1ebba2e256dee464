"""Large scores, low precision and non-finite inputs across ranks."""

import numpy as np
import pytest
from dense import draw, error, largest, naive
from runs import agreed, problem_of, run

from mpiattn import reference

SHAPE = {"batch": 1, "seqlen": 70, "heads": 2, "head_dim": 16, "layout": "striped"}
WAYS = [("greedy", "direct"), ("greedy", "ring"), ("collective", "direct")]
BACKENDS = ("numpy", "deferred")


def rows_of(inputs, at, causal, scale=None):
    q, k, v = inputs
    options = {"causal": causal, "scale": scale, "positions": at, "lengths": (q.shape[1], k.shape[1])}
    return (q[:, at], k, v), options


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("schedule", "route"), WAYS)
@pytest.mark.parametrize(("dtype", "spread", "scale"), [
    ("float32", 50, 1.0),                    # scores of +-1e4
    ("float16", 120, 1.0),                   # scores far beyond 65504, the largest float16
    ("float64", 1000, 1.0),
])
def test_large_scores(comm, dtype, spread, scale, schedule, route, causal):
    arguments = {**SHAPE, "dtype": dtype, "scale": scale, "causal": causal}
    inputs = draw(problem_of(arguments), seed=3, spread=spread)
    scores = np.abs(np.einsum("bihd,bjhd->bhij", *[x.astype(np.float64) for x in inputs[:2]])) * scale
    assert scores.max() > (65504 if dtype == "float16" else 1e4)
    out, lse, at = run(comm, inputs=inputs, **arguments, schedule=schedule, route=route)
    rows, options = rows_of(inputs, at, causal, scale)
    ref, ref_lse = reference.attention(*rows, **options)
    work = "float64" if dtype == "float64" else "float32"
    allowed = 2 * error(naive(*rows, work, **options).astype(dtype), ref) + largest(ref) * np.finfo(dtype).eps / 2
    off = error(out, ref)
    complaint = f"out is off by {off:.3g}, allowed {allowed:.3g}" if not off <= allowed else None
    if not error(lse, ref_lse) <= largest(ref_lse) * 10 * np.finfo(work).eps:
        complaint = f"lse is off by {error(lse, ref_lse):.3g}"
    agreed(comm, complaint)


def misplaced(out, lse, at, where, token, head, causal):
    """Whether the NaN of one token, head and dimension 3 is anywhere but where it belongs, as text."""
    hit = np.zeros(out.shape, bool)
    rows = at == token if where == "q" else (at >= token) | (not causal)
    hit[rows, head, 3 if where == "v" else slice(None)] = True
    if not (np.isnan(out) == hit).all():
        return f"NaN in {where} is in the wrong places of out"
    hit = hit.all(axis=2)                              # a value is no part of lse
    return None if (np.isnan(lse.T) == hit).all() else f"NaN in {where} is in the wrong places of lse"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_not_finite(comm, where, value, causal, backend):
    """A NaN in a query stays in its row; in a key or a value it reaches exactly the rows that may see it."""
    token, head = 33, 1
    for dtype in ("float32", "float16"):
        arguments = {**SHAPE, "dtype": dtype, "causal": causal, "backend": backend}
        inputs = draw(problem_of(arguments))
        inputs["qkv".index(where)][0, token, head, 3] = value
        for schedule, route in WAYS:
            out, lse, at = run(comm, inputs=inputs, **arguments, schedule=schedule, route=route)
            if np.isnan(value):
                agreed(comm, misplaced(out[0], lse[0], at, where, token, head, causal))
            rows, options = rows_of(inputs, at, causal)
            ref, _ = reference.attention(*rows, **options)
            off = error(out, ref)
            agreed(comm, None if off <= 2e-3 else f"{value} in {where}: off by {off}, {schedule} {route}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_is_kept(comm, backend):
    out, lse, _ = run(comm, **SHAPE, dtype="float16", backend=backend)
    assert out.dtype == np.float16 and lse.dtype == np.float32
