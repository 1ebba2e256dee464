"""`mpiattn run` with biases and dropout: right on any tile, datasets of gradients, and clear errors."""

import biased
import h5py
import numpy as np
import pytest
import warm
from dense import Inputs
from files import write_input

from mpiattn.problem.distances import usual_slopes
from mpiattn.problem.problem import Problem

SHAPE = {"batch": 2, "seqlen": 37, "heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 16}
ALIBI = 2.0 ** -np.arange(2, 10, 2)


def run(n, source, out, *options, **how):
    return warm.command(n, ["run", source, out, "--backend", "numpy", *options], **how)


def assert_right(source, result, problem, drawn, gradients, **masks):
    with h5py.File(source) as given, h5py.File(result) as made:
        arrays = [given[name][:].astype(np.float64) for name in ("q", "k", "v")]
        dout = given["dout"][:] if "dout" in given else np.zeros((*arrays[0].shape[:3], arrays[2].shape[3]))
        *right, of_biases, sizes = biased.expected(problem, Inputs(*arrays, dout, None, None), drawn, **masks)
        right = dict(zip(("out", "lse", "dq", "dk", "dv"), right))
        right |= {f"d{name}": gradient for name, gradient in of_biases.items()}
        names = right if gradients else ("out", "lse")
        assert set(made) == set(names)
        for name in names:
            size = max(np.abs(right[name][np.isfinite(right[name])]).max(), 1, sizes.get(name, 0))
            assert made[name].shape == right[name].shape
            np.testing.assert_allclose(made[name][:], right[name], rtol=0, atol=3e-5 * size, err_msg=name)
        return dict(made.attrs)


@pytest.mark.draw(2)
@pytest.mark.parametrize(
    "n, tile, shared", [(1, "1x1", (2, 4)), (3, "1x3", (1, 4)), (4, "2x1x2", (2, 1)), (4, "2x2", (1, 1))]
)
def test_right(tmp_path, n, tile, shared):
    """All kinds at once, with gradients; --verify sees them all."""
    problem, rng = Problem(**SHAPE), np.random.default_rng(0)
    bias, keys = rng.standard_normal((*shared, 37, 37), np.float32), rng.standard_normal((4, 37), np.float32)
    bias[rng.random(bias.shape) < 0.1] = -np.inf
    source = write_input(tmp_path / "in.h5", **SHAPE, backward=True, pair=bias, weights=keys)
    options = "--bias pair --key-bias weights --alibi --dropout 0.3 --seed 11 --layout striped --verify --backward"
    outcome = run(n, source, tmp_path / "out.h5", "--tile", tile, "--causal", *options.split())
    assert outcome.stdout.count("passed") == 3 and "dbias off by" in outcome.stdout
    assert "causal; alibi; bias pair; key_bias weights; dropout 0.3" in outcome.stdout
    drawn = biased.Drawn(bias, keys, ALIBI, dropout=0.3, seed=11)
    made = assert_right(source, tmp_path / "out.h5", problem, drawn, True, causal=True)
    asked = {"bias": "pair", "key_bias": "weights", "alibi": True, "dropout": 0.3, "seed": 11}
    assert {name: made[name] for name in asked} == asked


def test_pieces(tmp_path):
    """Biases of which no rank needs a tile."""
    keys = np.random.default_rng(0).standard_normal((4, 37), np.float32)
    source = write_input(tmp_path / "in.h5", **SHAPE, backward=True, weights=keys)
    options = "--tile bands --causal --key-bias weights --alibi --dropout 0.3 --seed 11 --verify --backward"
    assert run(3, source, tmp_path / "out.h5", *options.split()).stdout.count("passed") == 3
    drawn = biased.Drawn(key_bias=keys, alibi_slopes=ALIBI, dropout=0.3, seed=11)
    assert_right(source, tmp_path / "out.h5", Problem(**SHAPE), drawn, True, causal=True)


def test_bfloat16_and_heads_before_tokens(tmp_path):
    """A bias has the same order of dimensions whatever --axes says."""
    problem = Problem(**SHAPE | {"kv_heads": 4})
    bias = np.random.default_rng(0).standard_normal((1, 4, 37, 37), np.float32)
    source = write_input(tmp_path / "in.h5", **SHAPE | {"kv_heads": 4}, backward=True, pair=bias)
    with h5py.File(source, "r+") as file:
        for name in ("q", "k", "v", "dout"):
            data = file[name][:].swapaxes(1, 2)
            del file[name]
            file[name] = data
    run(2, source, tmp_path / "out.h5", *"--bias pair --axes bhsd --backward --tile 2x1 --verify".split())
    with h5py.File(source) as given, h5py.File(tmp_path / "out.h5") as made:
        arrays = [given[name][:].swapaxes(1, 2).astype(np.float64) for name in ("q", "k", "v", "dout")]
        *_, of_biases, _ = biased.expected(problem, Inputs(*arrays, None, None), biased.Drawn(bias))
        np.testing.assert_allclose(made["dbias"][:], of_biases["bias"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "options, says",
    [
        (
            "--bias q",
            "--bias is 'q', of shape (2, 37, 4, 16); it must be (batch or 1, heads or 1, seqlen, seqlen_k) = ",
        ),
        ("--bias none", "--bias is 'none'; IN has no dataset of that name; it has\n"),
        ("--bias wide", "--bias is 'wide', in float64; it must be in float32"),
        (
            "--key-bias pair",
            "--key-bias is 'pair', of shape (1, 1, 37, 37); it must be (seqlen_k,) or (heads or 1, seqlen_k)",
        ),
        ("--bias pair --tile bands", "--bias is 'pair' and --tile 'bands', whose ranks compute pieces of the scores"),
        ("--dropout 1.5 --seed 3", "dropout is 1.5; it must be a number from 0, without 1"),
        ("--seed 5", "--seed is given without --dropout, which alone depends on it"),
        ("--dropout 0.5", "seed is None; with dropout it must be a whole number"),
    ],
)
def test_errors(tmp_path, options, says):
    pair = np.zeros((1, 1, 37, 37), np.float32)
    source = write_input(tmp_path / "in.h5", **SHAPE, pair=pair, wide=pair.astype(np.float64))
    outcome = run(2, source, tmp_path / "out.h5", *options.split(), check=False)
    assert outcome.returncode == 1 and outcome.stderr.count(says) == 1, outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5"]


def test_usual_slopes():
    """ALiBi's own numbers of 8 heads, and of 12, which take four of those of 16."""
    assert np.array_equal(usual_slopes(8), 2.0 ** -np.arange(1, 9))
    assert np.allclose(usual_slopes(12), [*2.0 ** -np.arange(1, 9), *2.0 ** -np.arange(0.5, 4, 1)])
    assert np.array_equal(usual_slopes(1), [2.0**-8])
