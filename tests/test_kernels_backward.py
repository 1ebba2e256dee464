"""The CUDA kernels' sources on the CPU: gradients against float64."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest
from blocks import MASKS, chunks, dense, dense_gradients, everything, of_backward, windows
from dense import bits, error, largest

from mpiattn import backends
from mpiattn.backends.block import Gradients
from mpiattn.backends.testing import emulated

pytestmark = [
    pytest.mark.workshop,
    pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler"),
]

NOISE = 2e-6  # of float32 sums, of the sum of the terms' magnitudes


def block(queries, keys, heads, kv_heads, head_dim, value_dim, dtype, mask, scale=0.3, softcap=None, seed=0):
    """Arguments of attend_backward up to the gradients; lse and delta as of a forward pass over these keys alone."""
    q, k, v = chunks(queries, keys, heads, kv_heads, head_dim, value_dim, dtype, seed)
    rng = np.random.default_rng(seed + 1)
    dout = rng.standard_normal((queries, heads, value_dim)).astype(dtype)
    begin, end = mask(queries, keys)
    out, lse = dense(q, k, v, begin, end, scale, softcap)
    delta = (dout.astype(np.float64) * out).sum(axis=2) - rng.standard_normal(lse.shape)
    return [q, dout, lse.astype(np.float32), delta.astype(np.float32), k, v, begin, end]


def run(backend, arguments, scale=0.3, softcap=None, into=None):
    grads = into or [np.zeros(arguments[i].shape, np.float32) for i in (0, 4, 5)]
    backend.attend_backward(*of_backward(arguments, scale, softcap), Gradients(*grads))
    return grads


def assert_right(arguments, grads, scale=0.3, softcap=None, before=0):
    """Rounding P and dS moves each term by half an epsilon at most; float32 does not round them, but scores and lse."""
    dtype = arguments[0].dtype.name
    noise = NOISE + 2 * np.finfo(np.float32).eps * largest(arguments[2])
    eps = 0 if dtype == "float32" else float(ml_dtypes.finfo(dtype).eps)
    refs, sizes = dense_gradients(*arguments, scale, softcap)
    for name, got, ref, size in zip(("dq", "dk", "dv"), grads, refs, sizes):
        assert error(got, ref + before) <= 0.51 * eps * largest(size) + noise * (largest(size) + before), name


# dtype, head dim, value dim, heads, KV heads, queries, keys
SHAPES = [
    ("float32", 64, 64, 4, 2, 150, 170),
    ("bfloat16", 128, 128, 2, 2, 140, 150),
    ("float16", 96, 32, 6, 2, 70, 90),
    ("bfloat16", 192, 128, 1, 1, 100, 100),
    ("float16", 256, 256, 1, 1, 70, 80),
    ("float32", 40, 20, 3, 1, 65, 33),
    ("float16", 20, 36, 2, 1, 33, 150),
    ("float32", 256, 256, 1, 1, 40, 50),
    ("bfloat16", 33, 17, 7, 1, 20, 40),
]


@pytest.mark.draw(6)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_backward(backend, shape):
    dtype, head_dim, value_dim, heads, kv_heads, queries, keys = shape
    for mask in MASKS.values():
        arguments = block(queries, keys, heads, kv_heads, head_dim, value_dim, dtype, mask)
        assert_right(arguments, run(backend, arguments))


@pytest.mark.parametrize(("scale", "softcap"), [(0.3, 4.0), (-0.3, None), (-0.3, 4.0)])
def test_scores(backend, scale, softcap):
    arguments = block(70, 80, 2, 2, 64, 64, "float32", windows, scale, softcap)
    assert_right(arguments, run(backend, arguments, scale, softcap), scale, softcap)


def test_groups_of_heads_have_their_own_intervals(backend):
    arguments = block(70, 90, 4, 2, 64, 64, "float32", lambda queries, keys: windows(queries, keys, 2))
    assert_right(arguments, run(backend, arguments))


def test_gradients_are_added(backend):
    """To what is there; without keys or queries, or where nothing is seen, not a bit changes."""
    arguments = block(70, 80, 4, 2, 64, 64, "bfloat16", windows)
    grads = [np.ones(arguments[i].shape, np.float32) for i in (0, 4, 5)]
    assert_right(arguments, run(backend, arguments, into=grads), before=1)
    before = bits(*grads)
    run(backend, [*arguments[:6], arguments[6], arguments[6]], into=grads)
    run(backend, [*arguments[:4], arguments[4][:0], arguments[5][:0], *arguments[6:]], into=[grads[0], *grads[1:]])
    assert bits(*grads) == before


@pytest.mark.draw(3)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("dtype", "dim"), [("bfloat16", 128), ("float32", 36), ("float16", 6)])
def test_splits_of_the_queries(backend, monkeypatch, dtype, dim, mask):
    """Many queries and few keys: several thread blocks share the keys, and their sums are added to what is there.

    Rows that are no multiple of 16 bytes are not split.
    """
    launched, launch = [], backend._run
    monkeypatch.setattr(
        backend, "_run", lambda kernel, grid, *rest: (launched.append((kernel.name, grid)), launch(kernel, grid, *rest))
    )
    arguments = block(310, 40, 4, 1, dim, dim, dtype, MASKS[mask])
    all_bits = set()
    for _ in range(2):
        grads = [np.ones(arguments[i].shape, np.float32) for i in (0, 4, 5)]
        assert_right(arguments, run(backend, arguments, into=grads), before=1)
        all_bits.add(bits(*grads))
    grids = dict(launched)
    assert (grids["gradient_kv"][2] > 1) == ("add_splits" in grids) == (dim % 4 == 0)
    assert len(all_bits) == 1


DIMS = (32, 64, 96, 128, 160, 192, 224, 256)


@pytest.mark.draw(4)
@pytest.mark.parametrize("dim, architecture, dtype", list(product(DIMS, (80, 89, 90), ("bfloat16", "float32"))))
def test_every_tile(backend, dim, architecture, dtype):
    """Of every entry of the tile table, and of each architecture."""
    backend.architecture = architecture
    arguments = block(90, 150, 3, 1, dim, dim, dtype, windows)
    assert_right(arguments, run(backend, arguments))


@pytest.mark.draw(6)
@pytest.mark.parametrize("where", [0, 1, 4, 5])
@pytest.mark.parametrize(("dtype", "dim"), [("float32", 64), ("bfloat16", 64), ("bfloat16", 128)])
def test_not_finite(backend, where, dtype, dim):
    """A NaN in q, dout, k or v reaches exactly the gradients of pairs that it is part of."""
    for mask in (everything, windows):
        arguments = block(140, 90, 2, 2, dim, dim, dtype, mask)
        arguments[where] = arguments[where].copy()
        arguments[where][20, 1, [2, 5]] = np.nan
        refs, sizes = dense_gradients(*arguments, 0.3)
        for got, ref, size in zip(run(backend, arguments), refs, sizes):
            assert (np.isnan(got) == np.isnan(ref)).all()
            assert error(got, ref) <= (2 * NOISE + 0.004 * (dtype != "float32")) * largest(size)


@pytest.mark.parametrize("dim", [64, 128])
def test_the_order_of_warps_changes_no_bit(dim):
    arguments = block(150, 170, 4, 2, dim, dim, "float16", windows)
    results = set()
    for descending in (False, True, True):
        backend = backends.get("emulated")
        backend.descending = descending
        results.add(bits(*run(backend, arguments)))
    assert len(results) == 1


@pytest.mark.draw(8)
@pytest.mark.parametrize("dim", [8, 24, 64, 128, 200, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_out_of_delta(backend, dtype, dim):
    """Its rowsum with dout is delta, to half an epsilon as terms have one sign; no row is longer than the real out."""
    rng = np.random.default_rng(dim)
    info = ml_dtypes.finfo(dtype)
    size = np.ones((50, 3, 1))
    least = max(float(info.smallest_subnormal), 2.0**-106)  # kernels take what is no normal float32 for 0
    size[1], size[2], size[3] = float(info.max) / 2048, least * 8, 0
    dout = (rng.standard_normal((50, 3, dim)).clip(-4, 4) * size).astype(dtype)
    real = rng.standard_normal((50, 3, dim)).astype(dtype)
    exact, lengths = dout.astype(np.float64), np.linalg.norm(real.astype(np.float64), axis=-1)
    delta = (exact * real.astype(np.float64)).sum(-1).astype(np.float32)
    delta[4] = 0
    dout[5, 1, 3] = exact[5, 1, 3] = np.nan
    out = np.full_like(dout, np.nan)
    backend._out_of_delta(out, dout, delta)
    got, kept = out.astype(np.float64), np.ones(delta.shape, bool)
    assert np.isnan(got[5, 1]).all() and not got[3:5].any()
    kept[3:6] = False
    largest_of_row = np.abs(exact).max(-1, keepdims=True)
    unit = exact[kept] / largest_of_row[kept]
    expected = unit * (delta[kept][:, None] / largest_of_row[kept] / (unit**2).sum(-1, keepdims=True))
    rounding = np.maximum(0.51 * float(info.eps) * np.abs(expected), float(info.smallest_subnormal))
    assert (np.abs(got[kept] - expected) <= rounding).all()
    assert error(expected, expected.astype(np.float32)) <= NOISE * largest(expected)
    sums = (exact[kept] * got[kept]).sum(-1)
    lost = (np.abs(exact[kept]) * float(info.smallest_subnormal)).sum(-1)  # of numbers too small for the dtype
    assert (np.abs(sums - delta[kept]) <= 0.51 * float(info.eps) * np.abs(delta[kept]) + lost).all()
    assert (np.linalg.norm(got[kept], axis=-1) <= 1.01 * lengths[kept]).all()
