"""The verification of gradients: it must pass what is right, refuse what is wrong, and say how it looked."""

import numpy as np
import pytest

from mpiattn.comm.peers import Peers
from mpiattn.problem.layout import Layout
from mpiattn.problem.problem import Problem
from mpiattn.verify import reference, sweep
from mpiattn.verify.compare import Source
from mpiattn.verify.gradients import choose, verify_both


def tiny(**more):
    return Problem(
        **{"seqlen": 50, "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6, "batch": 2, "causal": True, **more}
    )


def checked(comm, problem, scale_q=1.0, damage=None, limit=2e11, kind="zigzag", documents=None, progress=None):
    """Verify the rounded reference itself, one element of one array damaged or not, spread over the ranks."""
    p, rng = problem, np.random.default_rng(0)
    queries, keys = (p.batch, p.seqlen, p.heads), (p.batch, p.seqlen_k, p.kv_heads)
    source = {
        "q": scale_q * rng.standard_normal((*queries, p.head_dim)),
        "k": rng.standard_normal((*keys, p.head_dim)),
        "v": rng.standard_normal((*keys, p.value_dim)),
        "dout": rng.standard_normal((*queries, p.value_dim)),
    }
    source = {name: array.astype(p.dtype) for name, array in source.items()}
    q, k, v, dout = source.values()
    how = {"causal": p.causal, "scale": p.scale, "window": p.window, "softcap": p.softcap, **(documents or {})}
    out, lse = reference.attention(q, k, v, **how)
    out, lse = out.astype(p.dtype), lse.astype(p.partial_dtype)
    delta = np.einsum("bqhd,bqhd->bhq", dout.astype(float), out.astype(float))  # of the rounded out, as a run has it
    grads = [grad.astype(p.dtype) for grad in reference.gradients(dout, q, k, v, lse.astype(float), delta, **how)]
    if damage:
        which, at, change = damage
        grads[which][at] += change
    q_layout, k_layout = (Layout(kind, tokens, comm.size) for tokens in (p.seqlen, p.seqlen_k))
    at, at_k = q_layout.positions(comm.rank), k_layout.positions(comm.rank)
    own_grads = [grad[:, tokens] for grad, tokens in zip(grads, (at, at_k, at_k))]
    return verify_both(
        Peers(comm),
        Source(p, lambda name, i, j: source[name][:, i:j], documents),
        (q_layout, k_layout),
        out[:, at],
        lse[..., at],
        own_grads,
        limit,
        progress,
    )[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "more",
    [{}, {"seqlen_k": 31}, {"seqlen_k": 80, "causal": False}, {"window": (5, 0)}, {"window": (0, 0)}, {"softcap": 2.0}],
)
def test_right_passes(comm, dtype, more):
    report = checked(comm, tiny(dtype=dtype, **more))
    assert report.passed and report.independent, report
    assert report.rows == report.of_rows == 50 and report.keys == report.of_keys == more.get("seqlen_k", 50)


@pytest.mark.parametrize(
    "documents",
    [
        {"cu_seqlens": [0, 20, 20, 47]},
        {"cu_seqlens": [[0, 9, 50], [3, 30, 50]]},
        {"cu_seqlens": [0, 30, 50], "cu_seqlens_k": [5, 25, 50]},
    ],
)
def test_documents(comm, documents):
    assert checked(comm, tiny(), documents=documents, kind="striped").passed
    assert not checked(comm, tiny(), documents=documents, damage=(1, (1, 10, 0, 2), 1e-3)).passed


@pytest.mark.parametrize("dtype, change", [("float16", 0.05), ("bfloat16", 0.2), ("float32", 1e-3), ("float64", 1e-8)])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("token", [0, 17, 49])
def test_one_wrong_element_fails(comm, dtype, change, which, token):
    assert not checked(comm, tiny(dtype=dtype), damage=(which, (1, token, 1, 3), change)).passed


@pytest.mark.parametrize("which", [0, 1, 2])
def test_not_finite_fails(comm, which):
    report = checked(comm, tiny(), damage=(which, (0, 7, 0, 0), np.nan))
    assert report.differing == 1 and not report.passed


@pytest.mark.parametrize("which", [0, 1, 2])
def test_large_scores_do_not_excuse_a_wrong_result(comm, which):
    assert checked(comm, tiny(), scale_q=3000).passed
    assert not checked(comm, tiny(), scale_q=3000, damage=(which, (slice(None),), 1e6)).passed


def test_sample(comm):
    """Where all is too much work: rows and keys with every edge, the keys by the run's own lse and out."""
    problem = Problem(seqlen=200, heads=1, head_dim=8)
    layout, limit = Layout("contiguous", 200, comm.size), 40 * 32 * 200 / comm.size
    rows, keys, _ = choose(Peers(comm), Source(problem, None), (layout, layout), limit)
    assert {0, layout.length(comm.rank) - 1} <= set(rows.tolist()) & set(keys.tolist())
    report = checked(comm, problem, limit=limit, kind="contiguous")
    assert report.passed and not report.independent
    assert 0 < report.rows < report.keys < report.of_keys == report.of_rows == 200
    assert "sample" in str(report) and "own lse and out" in str(report)
    for which in (0, 1, 2):  # the first row and the first key are edges
        assert not checked(comm, problem, limit=limit, kind="contiguous", damage=(which, (0, 0, 0, 0), 0.1)).passed


MASKS = [
    {},
    {"causal": False},
    {"window": (7, 0)},
    {"causal": False, "window": (2, 5)},
    {"documents": {"cu_seqlens": [[0, 9, 50], [3, 30, 50]]}},
    {"documents": {"cu_seqlens": [0, 30, 50], "cu_seqlens_k": [5, 25, 50]}},
]


@pytest.fixture
def small_turns(monkeypatch):
    """Turns of few keys, and steps of few rows."""
    monkeypatch.setattr(sweep, "TURN_BYTES", 7 * sweep.row_bytes(tiny(), 2))
    steps = sweep.steps
    monkeypatch.setattr(sweep, "steps", lambda count, size, limit=0: steps(count, size, limit or 3 * size))


@pytest.mark.draw(2)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_every_row_and_key_is_compared_in_turns(comm, small_turns, mask, kind):
    more = {name: value for name, value in mask.items() if name != "documents"}
    problem, documents, done = tiny(dtype="float64", **more), mask.get("documents"), []
    assert len(sweep.key_turns(problem, [np.arange(problem.seqlen_k)])) > 5
    report = checked(comm, problem, kind=kind, documents=documents, progress=done.append)
    assert report.passed and report.independent and max(report[4:7]) < 1e-12, report
    assert comm.allreduce(sum(done)) == 3 * 50  # rows of out, rows of dq, keys
    for which in (0, 1, 2):
        for token in (0, 13, 26, 49):
            damage = which, (1, token, 0, 0), 1e-8
            assert not checked(comm, problem, kind=kind, documents=documents, damage=damage).passed


def test_sample_in_turns(comm, small_turns):
    problem, limit = tiny(dtype="float64"), 3e5 / comm.size
    report = checked(comm, problem, limit=limit)
    assert report.passed and not report.independent and report.rows < 50 and 7 < report.keys < 50, report
    for which in (0, 1, 2):
        assert not checked(comm, problem, limit=limit, damage=(which, (1, 0, 0, 0), 0.1)).passed


@pytest.mark.parametrize("sizes", [{"seqlen": 1}, {"seqlen": 2, "seqlen_k": 1}, {"seqlen_k": 0}, {"seqlen": 0}])
def test_ranks_without_rows_or_keys(comm, sizes):
    problem = tiny(**sizes)
    report = checked(comm, problem)
    assert report.passed and (report.rows, report.keys) == (problem.seqlen, problem.seqlen_k)
    if problem.seqlen:
        assert not checked(comm, problem, damage=(0, (1, 0, 0, 0), 0.1)).passed
