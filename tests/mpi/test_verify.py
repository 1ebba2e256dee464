"""The verification itself: it must pass what is right, refuse what is wrong, and say how much it looked at."""

import numpy as np
import pytest
from mpi4py import MPI

from mpiattn.comm.peers import Peers
from mpiattn.problem.layout import Layout
from mpiattn.problem.problem import Problem
from mpiattn.verify import reference
from mpiattn.verify.compare import Source, choose, verify


def checked(problem, scale_q=1.0, scale_v=1.0, damage=None, limit=2e11):
    """Verify the rounded reference itself, damaged or not, on one rank."""
    rng = np.random.default_rng(0)
    p = problem
    source = {
        "q": scale_q * rng.standard_normal((p.batch, p.seqlen, p.heads, p.head_dim)),
        "k": rng.standard_normal((p.batch, p.seqlen_k, p.kv_heads, p.head_dim)),
        "v": scale_v * rng.standard_normal((p.batch, p.seqlen_k, p.kv_heads, p.value_dim)),
    }
    source = {name: array.astype(p.dtype) for name, array in source.items()}
    out, lse = reference.attention(*source.values(), p.causal, p.scale)
    out, lse = out.astype(p.dtype), lse.astype(p.partial_dtype)
    if damage:
        damage(out, lse)
    layout = Layout("contiguous", p.seqlen, 1)
    inputs = Source(p, lambda name, i, j: source[name][:, i:j])
    return verify(Peers(MPI.COMM_SELF), inputs, layout, out, lse, limit)


def tiny(**more):
    return Problem(**{"seqlen": 50, "heads": 4, "kv_heads": 2, "head_dim": 8, "batch": 2, "causal": True, **more})


def zero(out, lse):
    out[...] = 0


def one_element(out, lse):
    out[0, 7, 1, 3] += 0.03


def one_lse(out, lse):
    lse[1, 2, 33] += 0.01


def not_finite(out, lse):
    out[1, 49, 0, 0] = np.nan


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("seqlen_k", [50, 31, 80])
def test_right_passes(dtype, seqlen_k):
    report = checked(tiny(dtype=dtype, seqlen_k=seqlen_k))
    assert report.passed and report.rows == report.of_rows == 50


@pytest.mark.parametrize("damage", [zero, one_element, one_lse, not_finite])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_wrong_fails(dtype, damage):
    assert not checked(tiny(dtype=dtype), damage=damage).passed


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_large_scores_do_not_excuse_a_wrong_result(dtype):
    assert checked(tiny(dtype=dtype), scale_q=3000).passed
    assert not checked(tiny(dtype=dtype), scale_q=3000, damage=zero).passed


def test_values_that_float16_can_hardly_hold():
    assert checked(tiny(dtype="float16"), scale_v=1e-6).passed


def test_sample_holds_every_edge():
    problem = Problem(seqlen=1000, heads=1, head_dim=8)
    work = problem.flops_per_pair * problem.seqlen_k
    layout = Layout("zigzag", 1000, 4)
    rows = choose(Source(problem, None), layout, 1, limit=20 * work)
    assert 20 <= len(rows) <= 24
    assert {0, 124, 125, 249} <= set(rows.tolist())  # of its two pieces of 125 tokens
    assert (np.diff(rows) > 0).all()
    assert len(choose(Source(problem, None), layout, 1, limit=250 * work)) == 250
    report = checked(Problem(seqlen=200, heads=1, head_dim=8), limit=20 * 32 * 200)
    assert report.passed and 20 <= report.rows <= 22 and report.of_rows == 200 and "sample" in str(report)
