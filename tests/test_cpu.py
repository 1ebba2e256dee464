"""The compiled kernels of the back end cpu against float64, on every instruction set that this processor has."""

import functools

import numpy as np
import pytest
from blocks import (
    EPSILON,
    MASKS,
    NOISE,
    assert_rounded,
    chunks,
    dense,
    dense_gradients,
    everything,
    of_backward,
    partial,
    windows,
)
from cpu_kernels import EMULATED, PAIRS, SETS, WORK, compiled, kernels_of
from dense import bits, error, largest

from mpiattn import ArgumentError, backends
from mpiattn.backends.block import BlockInputs, Gradients
from mpiattn.backends.cpu import library, speeds

pytestmark = compiled


@pytest.fixture(params=(*SETS, *EMULATED))
def backend(request, monkeypatch):
    with kernels_of(request.param, monkeypatch) as made:
        yield made


def attend(backend, q, k, v, begin, end, scale=0.3, softcap=None, into=None, **options):
    out, lse = into or partial(backend, *q.shape[:2], v.shape[2], WORK[q.dtype.name])
    backend.attend(BlockInputs(q, k, v, begin, end, scale, softcap), out, lse, **options)
    return out, lse


def rounds(backend, dtype):
    """Whether it rounds weights."""
    return backend.version.split()[0] in PAIRS and dtype == "bfloat16"


def assert_right(backend, got, ref, v):
    """Half types are exact in the float32 in which kernels compute, but for weights of those that round them."""
    if rounds(backend, v.dtype.name):
        assert_rounded(got, ref, v)
        return
    assert (np.isneginf(got[1]) == np.isneginf(ref[1])).all()
    limit = 1e-13 if v.dtype == np.float64 else NOISE
    assert error(got[0], ref[0]) <= limit * max(largest(ref[0]), 1e-300)
    assert error(got[1], ref[1]) <= limit * max(largest(ref[1]), 1)


# dtype, head dim, value dim, heads, KV heads, queries, keys
SHAPES = [
    ("float32", 64, 64, 4, 2, 150, 170),
    ("bfloat16", 128, 128, 2, 2, 200, 150),
    ("float64", 40, 24, 4, 2, 100, 70),
    ("float16", 96, 32, 6, 2, 70, 90),
    ("float64", 1, 1, 2, 1, 7, 300),
    ("bfloat16", 192, 128, 1, 1, 150, 100),
    ("float32", 320, 257, 1, 1, 30, 300),
    ("float32", 40, 20, 3, 1, 65, 33),
    ("float16", 20, 36, 2, 1, 33, 150),
    ("bfloat16", 33, 17, 7, 1, 20, 40),
    ("float32", 8, 6, 8, 1, 1, 70),
]


@functools.cache
def forward_case(shape, mask, scale=0.1, softcap=None):
    """Arguments of attend up to the partial, and the right one; computed once for all instruction sets."""
    dtype, head_dim, value_dim, heads, kv_heads, queries, keys = shape
    inputs = *chunks(queries, keys, heads, kv_heads, head_dim, value_dim, dtype), *mask(queries, keys)
    return inputs, dense(*inputs, scale, softcap)


@pytest.mark.draw(slow=3)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_forward(backend, shape):
    for mask in MASKS.values():
        inputs, ref = forward_case(shape, mask)
        assert_right(backend, attend(backend, *inputs, 0.1), ref, inputs[2])


def test_beyond_the_tiles(backend):
    """Sizes just past the rows of a tile and the keys of a block and of a panel; windows skip and cross their edges."""
    for queries, keys in ((200, 2100), (13, 4097)):
        for mask in (MASKS["full"], MASKS["causal"], MASKS["windows"]):
            inputs, ref = forward_case(("float32", 16, 16, 1, 1, queries, keys), mask)
            assert_right(backend, attend(backend, *inputs, 0.1), ref, inputs[2])


@pytest.mark.draw(slow=4)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("scale", "softcap"), [(0.3, 4.0), (-0.3, None), (0.0, None), (-0.3, 4.0), (0.3, 0.5), (0.3, 1e4)]
)
def test_scores(backend, dtype, scale, softcap):
    shape = dtype, 64, 64, 2, 2, 60, 70
    inputs, ref = forward_case(shape, windows, scale, softcap)
    assert_right(backend, attend(backend, *inputs, scale, softcap), ref, inputs[2])
    arguments = gradient_arguments(shape, windows, scale, softcap)
    assert_gradients(backend, arguments, gradients(backend, arguments, scale, softcap), scale, softcap)


GROUPS = {n: functools.partial(windows, groups=n) for n in (2, 4)}


def test_groups_of_heads_have_their_own_intervals(backend):
    for groups, heads, kv_heads in ((2, 4, 2), (4, 4, 4), (2, 4, 1)):
        shape = "float32", 32, 32, heads, kv_heads, 70, 90
        inputs, ref = forward_case(shape, GROUPS[groups])
        assert_right(backend, attend(backend, *inputs, 0.1), ref, inputs[2])
        arguments = gradient_arguments(shape, GROUPS[groups])
        assert_gradients(backend, arguments, gradients(backend, arguments))


@functools.cache
def not_finite_case(dtype, mask, where, value):
    arrays = chunks(140, 90, 2, 2, 64, 64, dtype)
    arrays[where][20, 1, [2, 5]] = value
    return arrays, *mask(140, 90), dense(*arrays, *mask(140, 90), 0.3)


@pytest.mark.draw(slow=6)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_not_finite(backend, where, value, dtype):
    """What isn't finite reaches exactly the rows that see it; a masked value is not multiplied by zero."""
    for mask in (everything, windows):
        arrays, begin, end, ref = not_finite_case(dtype, mask, where, value)
        sees = (begin[0] <= 20) & (end[0] > 20)
        got = attend(backend, *arrays, begin, end)
        assert_right(backend, got, ref, arrays[2])
        if np.isnan(value):
            hit = np.zeros(got[0].shape, bool)
            rows = (np.arange(140) == 20) & (begin[0] < end[0]) if where == 0 else sees
            hit[rows, 1] = np.isin(np.arange(64), [2, 5]) if where == 2 else True
            assert (np.isnan(got[0]) == hit).all()


def test_every_nan_is_one(backend):
    """Its other bits are not taken for a number."""
    for payload in (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001):
        q, k, v = chunks(30, 40, 1, 1, 8, 8, "float32")
        k[7, 0, 3] = np.array([payload], np.uint32).view(np.float32)[0]
        out, lse = attend(backend, q, k, v, *everything(30, 40))
        assert np.isnan(out).all() and np.isnan(lse).all()


def test_rows_whose_lse_is_not_a_number_keep_it(backend):
    q, k, v = chunks(30, 40, 1, 1, 8, 8, "float32")
    into = partial(backend, 30, 1, 8, "float32")
    into[1][3] = np.nan
    out, lse = attend(backend, q, k, v, *everything(30, 40), into=into)
    assert (np.isnan(lse[:, 0]) == (np.arange(30) == 3)).all() and np.isnan(out[3]).all() and np.isfinite(out[4:]).all()


# Backward


@functools.cache
def gradient_case(shape, mask, scale, softcap):
    """Arguments of attend_backward up to the gradients; lse and delta as of a forward pass over these keys alone."""
    (q, k, v, begin, end), (out, lse) = forward_case(shape, mask, scale, softcap)
    rng = np.random.default_rng(1)
    dout = rng.standard_normal(out.shape).astype(q.dtype)
    delta = (dout.astype(np.float64) * out).sum(axis=2) - rng.standard_normal(lse.shape)
    work = WORK[q.dtype.name]
    return q, dout, lse.astype(work), delta.astype(work), k, v, begin, end


def gradient_arguments(shape, mask, scale=0.1, softcap=None):
    return list(gradient_case(shape, mask, scale, softcap))


def gradient_reference(arguments, scale, softcap, known={}):  # noqa: B006
    """(gradients, sizes) as `blocks.dense_gradients` has them, computed once for the same arrays."""
    key = (*map(id, arguments), scale, softcap)
    if key not in known:
        known[key] = dense_gradients(*arguments, scale, softcap), arguments  # held, so that ids stay theirs
    return known[key][0]


def gradients(backend, arguments, scale=0.1, softcap=None, into=None, **options):
    grads = into or [np.zeros(arguments[i].shape, arguments[2].dtype) for i in (0, 4, 5)]
    backend.attend_backward(*of_backward(arguments, scale, softcap), Gradients(*grads), **options)
    return grads


def assert_gradients(backend, arguments, grads, scale=0.1, softcap=None, before=0):
    """Of the sum of the terms' magnitudes; exp(S - lse) is off by as much as S and lse are."""
    noise = 1e-13 if arguments[2].dtype == np.float64 else NOISE
    noise += 2 * np.finfo(arguments[2].dtype).eps * largest(arguments[2])
    noise += 1.01 * EPSILON["bfloat16"] / 2 * rounds(backend, arguments[0].dtype.name)
    refs, sizes = gradient_reference(arguments, scale, softcap)
    for name, got, ref, size in zip(("dq", "dk", "dv"), grads, refs, sizes):
        assert error(got, ref + before) <= noise * (largest(size) + before), name


@pytest.mark.draw(slow=3)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_backward(backend, shape):
    for mask in MASKS.values():
        arguments = gradient_arguments(shape, mask)
        assert_gradients(backend, arguments, gradients(backend, arguments))


def test_backward_beyond_the_tiles(backend):
    """More rows than are packed at a time, and keys just past a block."""
    for mask in (MASKS["causal"], MASKS["windows"]):
        arguments = gradient_arguments(("float32", 8, 8, 2, 1, 800, 390), mask)
        assert_gradients(backend, arguments, gradients(backend, arguments))


def test_gradients_are_added(backend):
    """To what is there; without keys or queries, or where nothing is seen, not a bit changes."""
    arguments = gradient_arguments(("bfloat16", 64, 64, 4, 2, 70, 80), windows)
    grads = [np.ones(arguments[i].shape, np.float32) for i in (0, 4, 5)]
    assert_gradients(backend, arguments, gradients(backend, arguments, into=grads), before=1)
    before = bits(*grads)
    gradients(backend, [*arguments[:6], arguments[6], arguments[6]], into=grads)
    gradients(backend, [*arguments[:4], arguments[4][:0], arguments[5][:0], *arguments[6:]], into=grads)
    assert bits(*grads) == before


@functools.cache
def with_nan(dtype, mask, where):
    arguments = gradient_arguments((dtype, 64, 64, 2, 2, 140, 90), mask)
    arguments[where] = arguments[where].copy()
    arguments[where][20, 1, [2, 5]] = np.nan
    return arguments


@pytest.mark.parametrize("where", [0, 1, 4, 5])
def test_not_finite_backward(backend, where):
    """A NaN reaches exactly the gradients of pairs that it is part of."""
    for dtype, mask in (("float32", everything), ("float32", windows), ("bfloat16", windows), ("float64", windows)):
        arguments = with_nan(dtype, mask, where)
        refs, sizes = gradient_reference(arguments, 0.1, None)
        noise = EPSILON["bfloat16"] / 2 if rounds(backend, dtype) else 2 * NOISE
        for got, ref, size in zip(gradients(backend, arguments), refs, sizes):
            assert (np.isnan(got) == np.isnan(ref)).all() and error(got, ref) <= noise * largest(size)


# What else a launch promises


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_any_strides(backend, dtype):
    """Bits are those of contiguous arrays, also where numbers of a row have gaps; what lies between is not touched."""
    arguments = gradient_arguments((dtype, 24, 16, 4, 2, 50, 60), windows)
    q, k, v = arguments[0], *arguments[4:6]
    expected = bits(*attend(backend, q, k, v, *arguments[6:]), *gradients(backend, arguments))
    for axis in range(3):
        every = (slice(None),) * axis
        second, between = (*every, slice(None, None, 2)), (*every, slice(1, None, 2))
        apart = [np.repeat(array, 2, axis)[second] if array.ndim > axis else array for array in arguments[:6]]
        results = [
            np.zeros((*shape[:axis], 2 * shape[axis], *shape[axis + 1 :]), "float32")
            if len(shape) > axis
            else np.zeros(shape, "float32")
            for shape in ((50, 4, 16), (50, 4), q.shape, k.shape, v.shape)
        ]
        views = [whole[second] if whole.ndim > axis else whole for whole in results]
        views[1].fill(-np.inf)
        attend(backend, apart[0], *apart[4:], *arguments[6:], into=views[:2])
        gradients(backend, [*apart, *arguments[6:]], into=views[2:])
        assert bits(*views) == expected
        assert not results[0][between].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_as_accurate_as_numpy(backend, dtype):
    """Errors from float64, as root mean squares, are at most 1.5 times those of the NumPy back end."""
    if rounds(backend, dtype):
        pytest.skip("it rounds weights")
    numpy, errors = backends.get("numpy"), []
    arguments = gradient_arguments((dtype, 64, 64, 2, 1, 100, 500), MASKS["full"], 0.125)
    refs = (
        *forward_case((dtype, 64, 64, 2, 1, 100, 500), MASKS["full"], 0.125)[1],
        *gradient_reference(arguments, 0.125, None)[0],
    )
    for on in (numpy, backend):
        got = *attend(on, arguments[0], *arguments[4:], 0.125), *gradients(on, arguments, 0.125)
        errors.append([np.sqrt(np.mean((result - ref) ** 2)) for result, ref in zip(got, refs)])
    assert all(own <= 1.5 * other for other, own in zip(*errors)), errors


def test_large_scores(backend):
    for dtype, spread in (("float32", 30), ("float16", 100)):
        q, k, v = chunks(140, 60, 2, 2, 64, 64, dtype, spread=spread, seed=1)
        ref, ref_lse = dense(q, k, v, *everything(140, 60), 1.0)
        out, lse = attend(backend, q, k, v, *everything(140, 60), 1.0)
        eps = EPSILON["float32"]
        assert error(lse, ref_lse) <= 8 * eps * largest(ref_lse)
        assert error(out, ref) <= 8 * eps * largest(ref_lse) * largest(ref)


@pytest.mark.parametrize(("scale", "softcap"), [(0.3, None), (0.3, 1e12)])
def test_huge_scores(backend, scale, softcap):
    """Of 1e10, where float32 has no digits below 1000: one key counts in a row, with a weight of 1."""
    for dtype in ("float32", "bfloat16"):
        q, k, v = chunks(140, 60, 1, 1, 64, 64, dtype, seed=1)
        q, k = ((1e5 * array.astype(np.float32)).astype(dtype) for array in (q, k))
        intervals = everything(140, 60)
        ref, ref_lse = dense(q, k, v, *intervals, scale, softcap)
        out, lse = attend(backend, q, k, v, *intervals, scale, softcap)
        assert (out == ref).all() and error(lse, ref_lse) <= NOISE * largest(ref_lse)
        dv = gradients(backend, [q, np.ones_like(q), lse, np.zeros_like(lse), k, v, *intervals], scale, softcap)[2]
        score = q[:, 0].astype(np.float64) @ k[:, 0].astype(np.float64).T
        assert (dv[:, 0, 0] == np.bincount(score.argmax(axis=1), minlength=60)).all()


def test_scratch_memory_is_what_it_says(backend):
    """It does not grow with the tokens."""
    for dtype, dims in (("float32", (64, 64)), ("float64", (40, 300))):
        for backward, tokens in ((False, 3000), (True, 2500)):
            scratch = backend.scratch_bytes(*dims, dtype, backward)
            q, k, v = chunks(tokens, tokens, 1, 1, *dims, dtype)
            begin = np.arange(tokens, dtype=np.int32)[None]
            backend.close()
            if backward:
                rows = np.zeros((2, tokens, 1), dtype)
                gradients(backend, [q, np.zeros((tokens, 1, dims[1]), dtype), *rows, k, v, begin, begin + 1])
            else:
                attend(backend, q, k, v, begin, begin + 1)
            assert backend._scratch.nbytes <= scratch


def test_why_it_cannot_run(monkeypatch, tmp_path):
    monkeypatch.setenv(library.VARIABLE, "sse9")
    with pytest.raises(ArgumentError, match=r"MPIATTN_CPU_KERNELS is sse9; on this processor it may be .*plain"):
        backends.get("cpu")
    monkeypatch.delenv(library.VARIABLE)
    monkeypatch.setattr(library, "_digest", lambda: "another")
    assert "compiled from other sources" in backends.find("cpu").missing()
    monkeypatch.setattr(library, "PATH", tmp_path / "none.so")
    assert "install mpiattn where there is a C compiler" in backends.find("cpu").missing()
    assert backends.get().name == "numpy"


def test_the_speed_that_plans_assume(monkeypatch):
    """Every instruction set has one, and threads multiply it."""
    assert set(library.instruction_sets()) <= set(speeds.SPEEDS)
    for name, speed in speeds.SPEEDS.items():
        threads = [speeds.assumed(name, count) for count in (1, 3)]
        assert [machine.flops["float32"] for machine in threads] == [1e9 * speed.float32, 3e9 * speed.float32]
        assert f"with {name};" in threads[0].assumes and set(threads[0].flops) == set(library.ELEMENTS)
    monkeypatch.setenv(library.VARIABLE, "plain")
    assert backends.get("cpu:2").assumed_machine == speeds.assumed("plain", 2)


def test_half_types_round_weights_alone(backend):
    """As the tests of all kernels allow."""
    q, k, v = chunks(30, 40, dtype="bfloat16")
    assert_rounded(attend(backend, q, k, v, *everything(30, 40)), dense(q, k, v, *everything(30, 40), 0.3), v)
