"""Casts between the accumulators' dtype and half types: the same numbers as NumPy's and ml_dtypes' own casts give."""

import ml_dtypes
import numpy as np
import pytest
from cpu_kernels import EMULATED, SETS, compiled, kernels_of

from mpiattn import backends
from mpiattn.backends.numpy.backend import NumpyBackend
from mpiattn.backends.numpy.casts import widen

HALVES = np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(params=("numpy", *(pytest.param(name, marks=compiled) for name in SETS), *EMULATED))
def backend(request, monkeypatch):
    if request.param == "numpy":
        yield backends.get("numpy")
        return
    with kernels_of(request.param, monkeypatch) as made:
        yield made


def cast(backend, numbers, half, shape):
    """Numbers as halves by `Backend.copy`, in arrays of some shape whose last numbers are zeros."""
    wide = np.zeros(-(-numbers.size // np.prod(shape)) * np.prod(shape), np.float32)
    wide[: numbers.size] = numbers
    narrow = np.full((len(wide) // np.prod(shape), *shape), 7, half)
    backend.copy(narrow, wide.reshape(narrow.shape))
    return narrow.reshape(-1)[: numbers.size]


def assert_cast(backend, numbers, half, shape=(8, 128)):
    """The bits of NumPy's own cast; of nan, the sign."""
    with np.errstate(all="ignore"):
        wanted = numbers.astype(half)
    got = cast(backend, numbers, half, shape)
    nan = np.isnan(numbers)
    assert (np.isnan(got) == nan).all()
    assert (np.signbit(got) == np.signbit(numbers)).all()
    assert got[~nan].tobytes() == wanted[~nan].tobytes()


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_every_half_and_what_lies_about_the_middle_of_two(backend, half):
    """Also subnormal numbers, the largest, and those that overflow."""
    halves = np.arange(2**16, dtype=np.uint16).view(half)
    with np.errstate(all="ignore"):
        numbers = np.sort(halves[np.isfinite(halves)].astype(np.float32))
        middles = (numbers[1:] / 2 + numbers[:-1] / 2).astype(np.float32)
        past = numbers[-1] + (numbers[-1] - numbers[-2]) / 2  # of two as near, infinity is the even one
    middles = np.concatenate([middles, [past, -past]]).astype(np.float32)
    above, below = (np.nextafter(middles, np.float32(side)) for side in (np.inf, -np.inf))
    assert_cast(backend, np.concatenate([numbers, -numbers]), half)
    assert_cast(backend, np.concatenate([middles, above, below]), half)


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_numbers_of_any_bits(backend, half):
    """Also nan of any bits, and numbers that a half has no exponent for."""
    bits = np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32)
    numbers = bits.view(np.float32)
    assert_cast(backend, numbers, half)
    assert_cast(backend, numbers[np.abs(numbers) < 60000], half)
    edges = np.array([0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 65519.996, 65520, 3.4e38], np.float32)
    for count in range(1, len(edges) + 1):
        assert_cast(backend, edges[:count], half, (1, count))


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_arrays_of_any_strides(backend, half):
    """The memory between rows stays as it is; so does what is not in whole vectors."""
    rng = np.random.default_rng(0)
    for dim in (1, 5, 16, 20, 33, 128):
        memory = np.full((2, 37, 3, dim + 2), 7, half)
        wide = rng.standard_normal((37, 2 * 3, dim), np.float32).reshape(37, 2, 3, dim).swapaxes(0, 1)
        for source in (wide, wide[:, :, ::-1], wide[::-1, ::2].repeat(2, axis=1)[:, :37]):
            backend.copy(memory[..., :dim], source)
            assert memory[..., :dim].tobytes() == source.astype(half).tobytes() and (memory[..., dim:] == 7).all()
        columns = np.full((dim, 3, 37), 7, half).transpose(2, 1, 0)  # numbers of a row lie apart
        backend.copy(columns, wide[0])
        assert columns.tobytes() == wide[0].astype(half).tobytes()


def test_halves_of_partials_are_compiled(monkeypatch):
    """NumPy makes float16 of float32 element by element."""
    pytest.importorskip("mpiattn.backends.cpu.backend")
    if why := backends.find("cpu").missing():
        pytest.skip(why)
    made = backends.get("cpu")
    monkeypatch.setattr(NumpyBackend, "copy", None)
    for half in HALVES:
        for shape in ((5, 2, 8), (1, 5, 2, 8), (3, 1, 2, 8)):
            out = np.zeros(shape, half)
            made.copy(out, np.ones(shape, np.float32))
            assert (out == 1).all()
    made.close()


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_halves_are_added_as_numbers_of_the_accumulators(backend, half):
    rng = np.random.default_rng(0)
    total, other = rng.standard_normal((2, 3000, 3, 20), np.float32)
    with np.errstate(all="ignore"):
        other[0, 0, :3] = np.inf, np.nan, 1e-6
        other = other.astype(half)
    wanted = total + other.astype(np.float32)
    backend.add([total], [other])
    assert total.tobytes() == wanted.tobytes()


def test_widen_every_float16():
    """Also subnormal and infinite ones and every nan, in any shape; the same bits as NumPy's own cast gives."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = halves[np.isfinite(halves)]
    for src in (halves, finite, finite[:0], finite.reshape(2, 62, -1)[:, 3:, 1:], finite[::3], -finite[:5]):
        for dtype in (np.float32, np.float64):
            wide = np.full(src.shape, np.nan, dtype)
            widen(wide, src)
            assert wide.tobytes() == src.astype(dtype).tobytes()
    for infinite in halves[[0x7C00, 0xFC00, 0x7C01, 0xFFFF]]:
        wide = np.empty(3, np.float32)
        widen(wide, np.array([1, infinite, -2], np.float16))
        assert np.array_equal(wide, np.float32([1, infinite, -2]), equal_nan=True)
