"""Large scores, non-finite inputs and low precision across ranks: cases 13 and 15 of the list in conftest.py."""

import numpy as np
import pytest
from dense import draw_all, epsilon, error, expected, largest, masks, naive, sizes
from runs import BACKENDS, agreed, check, narrow, on, problem_of, run, tiles

from mpiattn.verify import reference

SHAPE = {"batch": 1, "seqlen": 70, "heads": 2, "head_dim": 16, "layout": "striped"}
FLOAT32, FLOAT64 = (float(np.finfo(dtype).max) for dtype in ("float32", "float64"))
WAYS = [("greedy", "direct"), ("greedy", "ring"), ("collective", "direct")]


@on(8)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("schedule", "route"), WAYS)
@pytest.mark.parametrize(
    ("dtype", "spread", "scale"),
    [
        ("float32", 50, 1.0),  # scores of +-1e4
        ("float16", 120, 1.0),  # scores far beyond 65504, the largest float16
        ("bfloat16", 120, 1.0),
        ("float64", 1000, 1.0),
    ],
)
def test_case_13_large_scores(group, dtype, spread, scale, schedule, route, causal):
    """Off by at most twice what a naive run in float32 is, result rounded; gradients 3 times, of small dout.

    Gradients start from exp(S - lse): where a row has one key, and a naive run no error, they have that of the lse.
    """
    arguments = {**SHAPE, "dtype": dtype, "scale": scale, "causal": causal}
    problem = problem_of(arguments)
    inputs = draw_all(problem, seed=3, spread=spread)
    inputs = inputs._replace(dout=(inputs.dout / 64).astype(dtype))  # or gradients pass 65504
    scores = np.abs(np.einsum("bihd,bjhd->bhij", *[x.astype(np.float64) for x in inputs[:2]])) * scale
    assert scores.max() > (65504 if dtype == "float16" else 1e4)
    result, at, at_k = run(group, inputs, **arguments, schedule=schedule, route=route)
    ref = expected(inputs, **masks(problem))
    work = "float64" if dtype == "float64" else "float32"
    low, terms = naive(inputs, work, **masks(problem)), sizes(inputs, **masks(problem))
    complaint = None
    for name, times, rows in (("out", 2, at), ("dq", 3, at), ("dk", 3, at_k), ("dv", 3, at_k)):
        whole, array = getattr(ref, name), getattr(result, name)
        allowed = times * error(getattr(low, name).astype(dtype), whole) + largest(whole) * epsilon(dtype) / 2
        if name != "out":
            allowed += epsilon(work) * largest(ref.lse) * getattr(terms, name)
        off = error(array, whole[:, rows])
        if not off <= allowed:
            complaint = f"{name} is off by {off:.3g}, allowed {allowed:.3g}"
    if not error(result.lse, ref.lse[..., at]) <= largest(ref.lse) * 10 * epsilon(work):
        complaint = f"lse is off by {error(result.lse, ref.lse[..., at]):.3g}"
    agreed(group, complaint)


def poisoned(visible, where, token, head, dim):
    """Where the NaN of one token, head and dimension belongs in out, lse and the gradients, with one batch entry.

    visible (queries, keys).  A NaN of a query or of dout stays in its row, and reaches what its keys add up; one of a
    key or of a value is in all rows that may see it, and by their gradients in all keys that these see.
    """
    queries, keys = visible.shape
    rows = np.arange(queries) == token if where in ("q", "dout") else visible[:, token]
    seen = visible[rows].any(axis=0)
    out, dq, dk, dv = (np.zeros((n, *SIZES), bool) for n in (queries, queries, keys, keys))
    lse = np.zeros((SIZES[0], queries), bool)
    column = dim if where in ("v", "dout") else slice(None)
    if where != "dout":
        out[rows, head, column] = True
    if where in "qk":
        lse[head, rows] = True
    dq[rows, head] = dk[seen, head] = True
    if where != "v":  # probabilities are as they were
        dv[seen, head, column] = True
    return out, lse, dq, dk, dv


SIZES = SHAPE["heads"], SHAPE["head_dim"]


@on(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (9, 4)}], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
def test_case_13_not_a_number(group, where, mask, backend):
    """It reaches exactly what depends on it; everything else is as without it."""
    token, head, dim = 33, 1, 3
    for dtype in ("float32", "float16"):
        arguments = {**SHAPE, "dtype": dtype, **mask, "backend": backend}
        problem = problem_of(arguments)
        clean = draw_all(problem)
        ref = expected(clean, **masks(problem))
        inputs = clean._replace(**{where: getattr(clean, where).copy()})
        getattr(inputs, where)[0, token, head, dim] = np.nan
        visible = reference.visible_keys(np.arange(70), np.arange(70), (70, 70), problem.causal, problem.window)
        hits = poisoned(visible, where, token, head, dim)
        for schedule, route in WAYS:
            result, at, at_k = run(group, inputs, **arguments, schedule=schedule, route=route)
            for name, hit in zip(result._fields, hits):
                rows = at_k if name in ("dk", "dv") else at
                got, whole = getattr(result, name)[0], getattr(ref, name)[0]
                hit, whole = (hit[:, rows], whole[:, rows]) if name == "lse" else (hit[rows], whole[rows])
                right = (np.isnan(got) == hit).all() and largest(np.where(hit, 0, got - whole)) <= 2e-2
                agreed(group, None if right else f"NaN in {where}: {name} is wrong, {schedule} {route} {dtype}")


def check_padding(group, value, backends, **arguments):
    """Whatever q, k, v and dout of padding tokens are, the result is as without it, that of sinks too."""
    problem, lengths = problem_of(arguments), [arguments["seqlen"] - 3, 5][: arguments["batch"]]
    inputs = draw_all(problem, sinks=True)
    ref = expected(inputs, **masks(problem, {"lengths": lengths}))
    for array in inputs[:4]:
        for entry, length in enumerate(lengths):
            array[entry, length:] = value
    check(group, inputs=inputs, ref=ref, call={"lengths": lengths}, backends=backends, **arguments)


@pytest.mark.draw(1)
@on(2)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_case_34_padding(group, value):
    for schedule, route in WAYS:
        for dtype, tile, causal in (("float32", "2x1", True), ("float64", "1x2", False)):
            check_padding(
                group,
                value,
                BACKENDS,
                **{**SHAPE, "batch": 2, "dtype": dtype},
                tile=tile,
                causal=causal,
                schedule=schedule,
                route=route,
            )


@on(8)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_infinite(group, where, value, causal):
    for dtype in ("float32", "float16"):
        arguments = {**SHAPE, "dtype": dtype, "causal": causal}
        inputs = draw_all(problem_of(arguments))
        getattr(inputs, where)[0, 33, 1, 3] = value
        ref = expected(inputs, backward=False, **masks(problem_of(arguments)))
        for schedule, route in WAYS:
            result, at, _ = run(group, inputs, backward=False, **arguments, schedule=schedule, route=route)
            off = error(result.out, ref.out[:, at])
            agreed(group, None if off <= 2e-3 else f"{value} in {where}: off by {off}, {schedule} {route}")


@on(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [
        ("float32", 0.99 * FLOAT32 / 16, FLOAT32),
        ("bfloat16", 0.99 * FLOAT32 / 16, 0.99 * FLOAT32),
        ("float64", 0.99 * FLOAT64 / 16, FLOAT64),
        ("float16", 65504, None),
    ],
)
def test_large_values(group, dtype, within, beyond, backend):
    """Values are weighted and added, then divided: 16 keys of one score, as docs/numbers.md tells."""
    arguments = {**SHAPE, "seqlen": 16, "dtype": dtype, "backend": backend}
    if narrow(arguments) != arguments:
        pytest.skip("the back end takes no float64")
    inputs = draw_all(problem_of(arguments))
    inputs.q[:] = 0
    for value, expected_value in ((within, within), (beyond, np.inf)):
        for schedule, route in WAYS if value else ():
            inputs.v[:] = value
            out = run(group, inputs, backward=False, **arguments, schedule=schedule, route=route)[0].out
            right = np.allclose(out.astype(np.float64) / within, expected_value / within, rtol=1e-2)
            agreed(group, None if right else f"{value} became {out.flat[0]}")


@pytest.mark.many
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_case_15_error_does_not_grow_with_the_tile(comm, dtype):
    """RMS error over tiles a = 1 ... n: in half types flat within 10 %, since partials are not rounded."""
    shape = {"batch": 2, "seqlen": 192, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": dtype, "causal": True}
    inputs = draw_all(problem_of(shape))
    ref, errors = expected(inputs, **masks(problem_of(shape))), []
    for tile in tiles(comm.size):
        result, at, at_k = run(comm, inputs, **shape, tile=tile, layout="striped", schedule="greedy")
        squares = [
            float(((getattr(result, name).astype(float) - getattr(ref, name)[:, rows]) ** 2).sum())
            for name, rows in (("out", at), ("dq", at), ("dk", at_k), ("dv", at_k))
        ]
        errors.append(np.sqrt(comm.allreduce(np.array(squares))))
    assert (np.max(errors, axis=0) <= (2 if dtype == "float32" else 1.1) * np.min(errors, axis=0)).all(), errors
