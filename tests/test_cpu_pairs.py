"""What bfloat16 promises on AMX and VDPBF16PS beyond what tests/test_cpu.py holds for every instruction set."""

import numpy as np
import pytest
from blocks import MASKS, NOISE, assert_rounded, chunks, dense, dense_gradients, everything, windows
from cpu_kernels import PAIRS, compiled, kernels_of
from dense import bits, error, largest
from test_cpu import assert_gradients, attend, gradients

from mpiattn import backends
from mpiattn.backends.cpu import library

pytestmark = compiled
SCALE = 0.11


@pytest.fixture(params=PAIRS)
def kernels(request, monkeypatch):
    with kernels_of(request.param, monkeypatch) as made:
        yield made


def arguments_of(queries, keys, heads=1, kv_heads=1, head_dim=64, value_dim=64, mask=everything):
    """Arguments of attend_backward up to the gradients, with the lse and the delta of a forward pass."""
    q, k, v = chunks(queries, keys, heads, kv_heads, head_dim, value_dim, "bfloat16")
    out, lse = dense(q, k, v, *mask(queries, keys), SCALE)
    dout = np.random.default_rng(1).standard_normal(out.shape).astype("bfloat16")
    delta = (dout.astype(np.float64) * out).sum(axis=2)
    return [q, dout, lse.astype(np.float32), delta.astype(np.float32), k, v, *mask(queries, keys)]


def rms(array):
    return np.sqrt(np.mean(np.square(array)))


def test_weights_are_rounded_once(kernels):
    """Errors are those of a computation in float64 which rounds P and dS alone; lse has none of that."""

    def rounded(array):
        return array.astype("bfloat16").astype(np.float64)

    arguments = arguments_of(300, 500)
    q, dout, k, v = (arguments[i][:, 0].astype(np.float64) for i in (0, 1, 4, 5))
    score = q @ k.T * SCALE
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    total = weight.sum(axis=1, keepdims=True)
    p, dp = weight / total, dout @ v.T
    out = p @ v
    ds = p * (dp - (dout * out).sum(axis=1, keepdims=True))
    right = out, ds @ k * SCALE, ds.T @ q * SCALE, p.T @ dout
    once = rounded(weight) @ v / total, rounded(ds) @ k * SCALE, rounded(ds).T @ q * SCALE, rounded(p).T @ dout
    got, lse = attend(kernels, arguments[0], *arguments[4:], SCALE)
    for result, ref, allowed in zip((got, *gradients(kernels, arguments, SCALE)), right, once):
        assert rms(result[:, 0] - ref) <= 1.1 * rms(allowed - ref)
    assert error(lse, arguments[2].astype(np.float64)) <= NOISE * largest(lse)


@pytest.mark.draw(4)
@pytest.mark.parametrize("shape", [(257, 2049, 32), (33, 257, 65), (31, 31, 31), (1, 33, 1), (2100, 40, 8)])
def test_beyond_the_tiles(kernels, shape):
    """Dims, rows and keys just past a tile, a block, a panel and the rows that are packed at a time."""
    queries, keys, dim = shape
    for mask in MASKS.values():
        arguments = arguments_of(queries, keys, head_dim=dim, value_dim=dim, mask=mask)
        q, k, v, *intervals = arguments[0], *arguments[4:]
        assert_rounded(attend(kernels, q, k, v, *intervals, SCALE), dense(q, k, v, *intervals, SCALE), v)
        assert_gradients(kernels, arguments, gradients(kernels, arguments, SCALE), SCALE)


def test_not_finite(kernels):
    """Every infinity and every NaN reaches the gradients of the pairs that it is part of, in odd rows and even."""
    for where in (0, 1, 4, 5):
        for value in (np.nan, np.inf):
            arguments = arguments_of(70, 90, mask=windows)
            arguments[where][[20, 23], 0, 5] = value
            refs, _ = dense_gradients(*arguments, SCALE)
            for got, ref in zip(gradients(kernels, arguments, SCALE), refs):
                assert (np.isfinite(got) == np.isfinite(ref)).all()


def test_any_strides(kernels):
    arguments = arguments_of(70, 90, 4, 2, 40, 24)
    apart = [np.repeat(array, 2, 1)[:, ::2] for array in arguments[:6]]
    apart += arguments[6:]
    got = (bits(*attend(kernels, of[0], *of[4:]), *gradients(kernels, of)) for of in (arguments, apart))
    assert len(set(got)) == 1


def test_threads_change_no_bit(kernels, monkeypatch):
    """Each thread shapes its own tiles."""
    arguments, results = arguments_of(700, 900, 2, 1, mask=MASKS["causal"]), set()
    for threads in (1, 2, 5):
        monkeypatch.setattr(kernels, "threads", threads)
        results.add(bits(*attend(kernels, arguments[0], *arguments[4:]), *gradients(kernels, arguments)))
    assert len(results) == 1


def test_scratch_memory_is_what_it_says(kernels):
    for dims in ((64, 64), (40, 300)):
        for backward in (False, True):
            said = kernels.scratch_bytes(*dims, "bfloat16", backward)
            q, k, v = chunks(3000, 3000, 1, 1, *dims, "bfloat16")
            begin = np.arange(3000, dtype=np.int32)[None]
            kernels.close()
            if backward:
                dout, rows = np.zeros((3000, 1, dims[1]), "bfloat16"), np.zeros((2, 3000, 1), "float32")
                gradients(kernels, [q, dout, *rows, k, v, begin, begin + 1])
            else:
                attend(kernels, q, k, v, begin, begin + 1)
            assert kernels._scratch.nbytes <= said


def test_every_set_computes_other_dtypes_alike(kernels, monkeypatch):
    """As avx512, whose kernels they are."""
    monkeypatch.setenv(library.VARIABLE, "avx512")
    other = backends.get("cpu")
    for dtype in ("float32", "float64", "float16"):
        inputs = *chunks(50, 60, dtype=dtype), *windows(50, 60)
        assert bits(*attend(kernels, *inputs)) == bits(*attend(other, *inputs))


def test_a_launch_while_another_asks(kernels):
    """What is called meanwhile may multiply by the same instructions; both launches have the bits they have alone."""
    arguments, inner, other = arguments_of(700, 1500), arguments_of(40, 50), backends.get("cpu")
    within = []

    def both(on, of, **options):
        return bits(*attend(on, of[0], *of[4:], SCALE, **options), *gradients(on, of, SCALE, **options))

    alone = both(kernels, arguments), both(other, inner)
    assert both(kernels, arguments, meanwhile=lambda _: within.append(both(other, inner))) == alone[0]
    assert len(within) > 2 and set(within) == {alone[1]}
    other.close()
