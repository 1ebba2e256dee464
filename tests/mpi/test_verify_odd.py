"""Odd calls whose results are right pass a verification, and a planted error in them does not."""

import numpy as np
import pytest
from dense import draw_all, largest
from runs import attend, my_chunks, problem_of
from test_agreement import same_error

from mpiattn import MeshAttention, VerificationError

SHAPE = {"batch": 2, "seqlen": 37, "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6}


def with_numbers(**changed):
    """A change of inputs: functions of arrays by name."""
    return lambda inputs: inputs._replace(**{name: change(getattr(inputs, name)) for name, change in changed.items()})


def poisoned(value, tokens=(5,)):
    """A change of an array: the value in one number of some tokens."""

    def change(array):
        array = array.copy()
        array[0, list(tokens), 0, 1] = value
        return array

    return change


def centred(array):
    """Numbers whose sum over the tokens is 0, but for rounding."""
    return array - array.mean(axis=1, keepdims=True, dtype=array.dtype)


def alike(array):
    """All tokens are the first."""
    return np.repeat(array[:, :1], array.shape[1], axis=1)


def nothing(array):
    return np.zeros_like(array)


def times(factor):
    return lambda array: (array * np.float64(factor)).astype(array.dtype)


def lowest(array):
    return np.full_like(array, -np.inf)


def same(inputs):
    return inputs


CASES = {
    "negative scale": ({"scale": -0.2, "causal": True}, same),
    "negative scale, a key each": ({"scale": -0.2, "window": (0, 0)}, with_numbers(dlse=nothing, sinks=lowest)),
    "scale 0": ({"scale": 0.0}, same),
    "tiny scale": ({"scale": 1e-30}, same),
    "a key each": ({"window": (0, 0)}, with_numbers(dlse=nothing, sinks=lowest)),
    "NaN in a query": ({"causal": True}, with_numbers(q=poisoned(np.nan))),
    "NaN in a key": ({"causal": True}, with_numbers(k=poisoned(np.nan))),
    "NaN in a value": ({"window": (3, 2), "softcap": 2.0}, with_numbers(v=poisoned(np.nan, (5, 30)))),
    "NaN in dout": ({"causal": True}, with_numbers(dout=poisoned(np.nan))),
    "NaN everywhere": ({}, with_numbers(k=lambda array: np.full_like(array, np.nan))),
    "infinite query": ({"causal": True}, with_numbers(q=poisoned(np.inf))),
    "infinite value": ({"window": (3, 2)}, with_numbers(v=poisoned(np.inf))),
    "infinite sinks": ({"causal": True}, with_numbers(sinks=lowest)),
    "queries of zeros": ({}, with_numbers(q=nothing)),
    "keys of zeros": ({"causal": True}, with_numbers(k=nothing)),
    "values of zeros": ({"causal": True}, with_numbers(v=nothing)),
    "dout of zeros": ({"causal": True}, with_numbers(dout=nothing, dlse=nothing)),
    "keys alike": ({}, with_numbers(k=alike)),
    "values alike": ({}, with_numbers(v=alike)),
    "values that cancel": ({}, with_numbers(q=nothing, v=centred)),
    "gradients that cancel": ({}, with_numbers(q=nothing, dout=centred)),
    "all cancel": ({}, with_numbers(q=nothing, k=alike, v=centred, dout=centred, dlse=nothing)),
    "small numbers": ({}, with_numbers(q=times(1e-15), k=times(1e-15), v=times(1e-15), dout=times(1e-10))),
    "large numbers": ({"causal": True}, with_numbers(v=times(1e15), dout=times(1e10))),
    "large scores": ({"causal": True}, with_numbers(q=times(30))),
    "one number large": ({"causal": True}, with_numbers(v=poisoned(1e6), dout=poisoned(1e4))),
    "rows without keys": ({"causal": True, "seqlen_k": 20}, same),
    "one token": ({"seqlen": 1}, same),
    "two keys": ({"seqlen_k": 2, "causal": True}, same),
    "one dimension": ({"head_dim": 1, "value_dim": 1}, same),
    "wide": ({"head_dim": 200, "value_dim": 3, "causal": True}, same),
}


def results(plan, arguments, change):
    """This rank's inputs and results, as arguments of `verify`."""
    problem = problem_of(arguments)
    inputs = change(draw_all(problem, sinks=True))
    chunks = my_chunks(plan, *inputs)
    done = attend(plan, chunks)
    grads = [done.dq, done.dk, done.dv, done.dsinks]
    given = {"out": done.out, "lse": done.lse, "dout": chunks.dout, "dlse": chunks.dlse, "grads": grads}
    return {"q": chunks.q, "k": chunks.k, "v": chunks.v, "sinks": chunks.sinks, **given}


@pytest.mark.many
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_right(comm, case, dtype):
    more, change = CASES[case]
    arguments = {**SHAPE, "dtype": dtype, **more}
    with MeshAttention(comm, **arguments) as plan:
        given = results(plan, arguments, change)
        for samples in (3, None):
            assert plan.verify(**given, samples=samples).passed


def planted(given, name, term):
    """The arguments with an error in the last token of one result; None where that is not finite anyway.

    term: how large the terms are that the result is a sum of.
    """
    given, gradients = dict(given), dict(zip(("dq", "dk", "dv", "dsinks"), given["grads"]))
    array = (gradients if name in gradients else given)[name].copy()
    place = (..., -1) if name == "lse" else (-1, -1, -1, -1)
    if not array.size or not np.isfinite(array[place]).all():
        return None
    array[place] += 0.01 * (max(largest(array), term / 10) or 1)
    if name in gradients:
        given["grads"] = list((gradients | {name: array}).values())
    else:
        given[name] = array
    return given


@pytest.mark.draw(12)
@pytest.mark.parametrize("case", CASES)
def test_planted_errors(comm, case):
    """On the last rank alone."""
    more, change = CASES[case]
    arguments = {**SHAPE, "dtype": "float32", **more}
    with MeshAttention(comm, **arguments) as plan:
        p, given = plan.problem, results(plan, arguments, change)
        q, k, v, dout = (max(comm.allgather(largest(given[name]))) for name in ("q", "k", "v", "dout"))
        score = abs(p.scale) * dout * v * p.value_dim**0.5
        terms = {"out": v, "lse": 1, "dq": score * k, "dk": score * q, "dv": dout * max(1, p.seqlen / p.seqlen_k)}
        for name, term in terms.items():
            wrong = planted(given, name, term) if comm.rank == comm.size - 1 else given
            if comm.bcast(wrong is None, comm.size - 1):
                continue
            text = same_error(comm, lambda wrong=wrong: plan.verify(**wrong, samples=None), VerificationError)
            assert f"{name} off by" in text, text


@pytest.mark.many
@pytest.mark.parametrize("low", [-1e9, -65504.0, float(np.finfo(np.float32).min), -np.inf])
@pytest.mark.parametrize("kind", ["bias", "key_bias", "relative_bias"])
def test_rows_hidden_by_finite_biases(comm, low, kind):
    """`verify` says so, and finds errors of the other rows; of -inf it says nothing."""
    with MeshAttention(comm, **SHAPE, key_bias=kind == "key_bias", tile=(1, comm.size)) as plan:
        chunks = my_chunks(plan, *draw_all(plan.problem))
        rows, columns = plan.bias_positions
        arrays = {
            "bias": np.zeros((1, 1, len(rows), len(columns)), np.float32),
            "key_bias": np.zeros(len(plan.positions_k), np.float32),
            "relative_bias": np.zeros((1, 3), np.float32),
        }
        for hides in (False, True):
            if hides and kind == "bias":
                arrays[kind][:, :, rows == 7] = low
            elif hides:
                arrays[kind][...] = low
            call = {kind: arrays[kind]}
            out, lse = plan.forward(*chunks[:3], **call)
            text = str(plan.verify(*chunks[:3], out, lse, **call, samples=None))
            hint = "queries see only keys whose biases hide them but are finite, such as -1e9"
            assert (hint in text) == (hides and low > -np.inf), text
            if kind == "bias" and len(rows) and rows[0] == 0:  # on one rank or a few
                out[0, 0, 0, 0] += 1e-3
            if kind == "bias":
                wrong = {"out": out, "lse": lse, **call}
                said = same_error(
                    comm, lambda wrong=wrong: plan.verify(*chunks[:3], **wrong, samples=None), VerificationError
                )
                assert "out off by" in said and (hint in said) == (hint in text)
            assert not hides or low == -np.inf or f" {2 if kind == 'bias' else 2 * 37} queries see only" in text


def test_a_large_negative_score_is_no_hidden_row(comm):
    """Without biases, or with slopes alone, nothing is said of it."""
    with MeshAttention(comm, **SHAPE, scale=1.0) as plan:
        chunks = my_chunks(plan, *draw_all(plan.problem))
        chunks.q[...], chunks.k[...] = 100.0, -100.0
        for call in ({}, {"alibi_slopes": np.ones(4, np.float32)}):
            out, lse = plan.forward(*chunks[:3], **call)
            assert (lse < -6e4).all() and "hide" not in str(plan.verify(*chunks[:3], out, lse, **call))
