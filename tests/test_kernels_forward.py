"""The CUDA kernels' sources on the CPU: attention, and what is done to partials, against float64."""

import itertools
from itertools import product

import numpy as np
import pytest
from blocks import EPSILON, MASKS, NOISE, assert_rounded, chunks, dense, everything, partial, windows
from dense import bits, error, largest

from mpiattn import backends
from mpiattn.backends.block import BackwardInputs, BlockInputs, Gradients
from mpiattn.backends.cuda.kernels import KernelLaunches
from mpiattn.backends.cuda.launches import merge_kernel
from mpiattn.backends.numpy.backend import NumpyBackend
from mpiattn.backends.testing import emulated
from mpiattn.errors import ArgumentError

pytestmark = [
    pytest.mark.workshop,
    pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler"),
]


def attend(backend, q, k, v, begin, end, scale=0.3, softcap=None, into=None):
    out, lse = into or partial(backend, *q.shape[:2], v.shape[2], "float32")
    backend.attend(BlockInputs(q, k, v, begin, end, scale, softcap), out, lse)
    return out, lse


# dtype, head dim, value dim, heads, KV heads, queries, keys
SHAPES = [
    ("float32", 64, 64, 4, 2, 150, 170),
    ("bfloat16", 128, 128, 2, 2, 200, 150),
    ("float16", 96, 32, 6, 2, 70, 90),
    ("bfloat16", 192, 128, 1, 1, 150, 100),
    ("bfloat16", 256, 256, 1, 1, 90, 130),
    ("float16", 64, 64, 2, 2, 140, 200),
    ("float32", 40, 20, 3, 1, 65, 33),
    ("float16", 20, 36, 2, 1, 33, 150),
    ("bfloat16", 33, 17, 7, 1, 20, 40),
]


@pytest.mark.draw(8)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_forward(backend, shape):
    dtype, head_dim, value_dim, heads, kv_heads, queries, keys = shape
    q, k, v = chunks(queries, keys, heads, kv_heads, head_dim, value_dim, dtype)
    for name, mask in MASKS.items():
        begin, end = mask(queries, keys)
        assert_rounded(attend(backend, q, k, v, begin, end), dense(q, k, v, begin, end, 0.3), v), name


DIMS = (32, 64, 96, 128, 160, 192, 224, 256)


@pytest.mark.draw(4)
@pytest.mark.parametrize("dim, architecture, dtype", list(product(DIMS, (80, 89, 90), ("bfloat16", "float32"))))
def test_every_tile(backend, dim, architecture, dtype):
    """Of every entry of the tile table, and of each architecture."""
    backend.architecture = architecture
    q, k, v = chunks(90, 150, 3, 1, dim, dim, dtype)
    begin, end = MASKS["windows"](90, 150)
    scale = dim**-0.5
    assert_rounded(attend(backend, q, k, v, begin, end, scale), dense(q, k, v, begin, end, scale), v)


@pytest.mark.parametrize(("scale", "softcap"), [(0.3, 4.0), (-0.3, None), (0.0, None), (-0.3, 4.0)])
def test_scores(backend, scale, softcap):
    q, k, v = chunks(130, 70, 2, 2, 64, 64, "float16")
    begin, end = windows(130, 70)
    assert_rounded(attend(backend, q, k, v, begin, end, scale, softcap), dense(q, k, v, begin, end, scale, softcap), v)


@pytest.mark.draw(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads", "queries"), [(8, 1, 1), (4, 2, 3), (2, 2, 20)])
def test_decode(backend, dtype, heads, kv_heads, queries):
    """Few rows and many keys: the keys are split over thread blocks; a split may see nothing."""
    q, k, v = chunks(queries, 400, heads, kv_heads, 64, 64, dtype)
    for mask in MASKS.values():
        begin, end = mask(queries, 400)
        assert_rounded(attend(backend, q, k, v, begin, end), dense(q, k, v, begin, end, 0.3), v)
    into = attend(backend, q, k[:150], v[:150], *everything(queries, 150))
    attend(backend, q, k[150:], v[150:], *everything(queries, 250), into=into)
    assert_rounded(into, dense(q, k, v, *everything(queries, 400), 0.3), v)


def test_groups_of_heads_have_their_own_intervals(backend):
    for groups, heads, kv_heads in ((2, 4, 2), (4, 4, 4)):
        q, k, v = chunks(70, 90, heads, kv_heads, 64, 64, "float32")
        begin, end = windows(70, 90, groups)
        assert_rounded(attend(backend, q, k, v, begin, end), dense(q, k, v, begin, end, 0.3), v)
    with pytest.raises(ArgumentError, match="3 groups"):
        attend(backend, q, k, v, *np.zeros((2, 3, 70), np.int32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_carry_in(backend, dtype):
    """Blocks accumulate, in any order; rows that see nothing keep their bits."""
    q, k, v = chunks(70, 100, 2, 1, 64, 64, dtype)
    begin, end = windows(70, 100)
    whole = dense(q, k, v, begin, end, 0.3)
    for pieces in ([(0, 37), (37, 38), (38, 100)], [(64, 100), (0, 64)]):
        into = partial(backend, 70, 2, 64, "float32")
        for first, last in pieces:
            at = [np.clip(edge, first, last) - first for edge in (begin, end)]
            attend(backend, q, k[first:last], v[first:last], *at, into=into)
        assert_rounded(into, whole, v)
    before, nothing = bits(*into), np.zeros_like(begin)
    attend(backend, q, k, v, nothing, nothing, into=into)
    attend(backend, q, k[:0], v[:0], nothing, nothing, into=into)
    assert bits(*into) == before


@pytest.mark.draw(12)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_not_finite(backend, where, value, dtype):
    """What isn't finite reaches exactly the rows that see it; a masked value is not multiplied by zero."""
    arrays = chunks(140, 90, 2, 2, 64, 64, dtype)
    arrays[where][20, 1, [2, 5]] = value
    for begin, end in (everything(140, 90), windows(140, 90, seed=2)):
        sees = (begin[0] <= 20) & (end[0] > 20)
        out, lse = attend(backend, *arrays, begin, end)
        ref, ref_lse = dense(*arrays, begin, end, 0.3)
        limit = (NOISE + EPSILON[dtype] * (dtype != "float32")) * largest(ref) * 4
        assert error(out, ref) <= limit and error(lse, ref_lse) <= NOISE * largest(ref_lse)
        if np.isnan(value):
            hit = np.zeros(out.shape, bool)
            rows = (np.arange(140) == 20) & (begin[0] < end[0]) if where == 0 else sees
            hit[rows, 1] = np.isin(np.arange(64), [2, 5]) if where == 2 else True
            assert (np.isnan(out) == hit).all()


@pytest.mark.parametrize(("dtype", "spread"), [("float32", 30), ("float16", 100)])
def test_large_scores(backend, dtype, spread):
    """Scores of +-1e4 and, for float16, beyond 65504: no overflow, and rounding only as of the scores themselves."""
    q, k, v = chunks(140, 60, 2, 2, 64, 64, dtype, spread=spread, seed=1)
    begin, end = everything(140, 60)
    ref, ref_lse = dense(q, k, v, begin, end, 1.0)
    assert largest(ref_lse) > (65504 if dtype == "float16" else 1e4)
    out, lse = attend(backend, q, k, v, begin, end, 1.0)
    eps = EPSILON["float32"]
    assert error(lse, ref_lse) <= 8 * eps * largest(ref_lse)
    assert error(out, ref) <= (8 * eps * largest(ref_lse) + EPSILON[dtype]) * largest(ref)


def test_the_order_of_warps_changes_no_bit():
    """Nor does another run; a missing barrier would."""
    q, k, v = chunks(200, 150, 4, 2, 64, 64, "float16")
    all_bits = set()
    for descending in (False, True, True):
        backend = backends.get("emulated")
        backend.descending = descending
        all_bits.add(bits(*attend(backend, q, k, v, *windows(200, 150))))
    assert len(all_bits) == 1


# Partials


def random_partials(rows=70, heads=3, dim=40):
    """Two; of 16 bytes a thread where dim is a multiple of 8, and by elements else."""
    rng = np.random.default_rng(0)
    for _ in range(2):
        out, lse = rng.standard_normal((rows, heads, dim)), 3 * rng.standard_normal((rows, heads))
        empty = rng.random((rows, heads)) < 0.3
        out[empty], lse[empty] = 0, -np.inf
        yield out.astype(np.float32), lse.astype(np.float32)


@pytest.mark.draw(6)
@pytest.mark.parametrize("dim", [8, 40, 256, 7, 130])
@pytest.mark.parametrize("wire", ["float32", "float16", "bfloat16"])
def test_merge_and_add(backend, wire, dim):
    (out, lse), (out_b, lse_b) = random_partials(dim=dim)
    out_b = out_b.astype(wire)
    with np.errstate(all="ignore"):
        total = np.logaddexp(lse, lse_b, dtype=np.float64)
        weights = [np.where(np.isneginf(each), 0, np.exp(each - total))[..., None] for each in (lse, lse_b)]
    ref = weights[0] * out + weights[1] * out_b.astype(np.float64)
    summed, added = out.copy(), (out + out_b.astype(np.float32))
    backend.merge(out, lse, out_b, lse_b)
    backend.add([summed], [out_b])
    assert error(out, ref) <= NOISE * largest(ref) and error(lse, total) <= NOISE * largest(total)
    assert (summed == added).all()


def test_what_begins_anywhere_is_merged_and_added(backend):
    """By elements: threads read 16 bytes where they can."""
    (out, lse), (out_b, lse_b) = random_partials(dim=16)
    expected, summed = (out.copy(), lse.copy()), out + out_b
    backend.merge(*expected, out_b, lse_b)
    shifted = np.empty(out_b.size + 1, np.float32)[1:].reshape(out_b.shape)
    shifted[:] = out_b
    assert shifted.ctypes.data % 16
    backend.add([shifted], [out])
    assert (shifted == summed).all()
    shifted[:] = out_b
    backend.merge(out, lse, shifted, lse_b)
    assert (out == expected[0]).all() and (lse == expected[1]).all()


def test_out_of_an_empty_row_is_not_read(backend):
    """Merging is limited by memory; and the row may hold anything."""
    (out, lse), (out_b, lse_b) = random_partials()
    empty = np.isneginf(lse)
    out[empty] = np.nan
    backend.merge(out, lse, out_b, lse_b)
    filled = empty & ~np.isneginf(lse_b)
    assert filled.any() and (out[filled] == out_b[filled]).all() and (lse[filled] == lse_b[filled]).all()


@pytest.mark.draw(6)
@pytest.mark.parametrize("dim", [128, 36, 7])
@pytest.mark.parametrize("fresh, parts", [(False, 99), (True, 99), (True, 9)])
def test_merge_of_many_parts(backend, dim, fresh, parts):
    """As one after another: parts that are empty, rows of which all are, weights far apart, and what is not finite.

    If fresh, the rows are of the second of three sequences, of which the others have no parts and keep what they hold.
    """
    rows = 5
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((parts, rows, dim)), 5 * rng.standard_normal((parts, rows))
    lses[rng.random((parts, rows)) < 0.3] = -np.inf
    lses[:, 1], lses[3, 2], outs[4, 3, 0], lses[4, 3] = -np.inf, 3e4, np.nan, 1
    outs[np.isneginf(lses)] = 0
    out, lse = (
        np.full(shape, np.nan, np.float32) if fresh else np.ones(shape, np.float32) for shape in ((rows, dim), (rows,))
    )
    before = [] if fresh else [0]
    all_outs, all_lses = (
        np.concatenate([*(held[None] for _ in before), of]) for held, of in ((out, outs), (lse, lses))
    )
    with np.errstate(all="ignore"):
        total = np.logaddexp.reduce(all_lses, axis=0)
        ref = (np.exp(all_lses - np.where(np.isneginf(total), 0, total))[..., None] * all_outs).sum(axis=0)
    if fresh:
        whole_out, whole_lse = np.full((3 * rows, dim), 7, np.float32), np.full(3 * rows, 7, np.float32)
        whole_out[rows : 2 * rows], whole_lse[rows : 2 * rows] = out, lse
    else:
        whole_out, whole_lse = out, lse
    backend._run(
        merge_kernel(parts),
        (len(whole_out), 1, 1),
        whole_out,
        whole_lse,
        outs.astype(np.float32),
        lses.astype(np.float32),
        np.array([9, 9, 0, 0, parts, parts], np.int32),
        np.int64(2),
        np.int64(rows),
        np.int32(dim),
        np.int32(0 if fresh else parts),
    )
    if fresh:
        out, lse = whole_out[rows : 2 * rows], whole_lse[rows : 2 * rows]
        others = [*range(rows), *range(2 * rows, 3 * rows)]
        assert (whole_out[others] == 7).all() and (whole_lse[others] == 7).all()
    assert (np.isneginf(lse) == np.isneginf(total)).all() and (np.isnan(out) == np.isnan(ref)).all()
    assert error(out, ref) <= NOISE * largest(ref) and error(lse, total) <= NOISE * 100
    assert np.isnan(out[3, 0]) and (not fresh or not out[1].any())


def test_identity_of_merge(backend):
    (out, lse), _ = random_partials()
    for first, second in itertools.permutations([(out, lse), (np.zeros_like(out), np.full_like(lse, -np.inf))]):
        got = [each.copy() for each in first]
        backend.merge(*got, *second)
        assert (got[0] == out).all() and (got[1] == lse).all()
    far = np.ones((1, 1, 1), np.float32), np.full((1, 1), 3e4, np.float32)
    backend.merge(*far, np.full((1, 1, 1), 5, np.float32), np.full((1, 1), -3e4, np.float32))
    assert far[0] == 1 and far[1] == np.float32(3e4)


@pytest.mark.parametrize("dim", [40, 256, 7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_delta_and_sinks(backend, dtype, dim):
    """As the NumPy back end has them."""
    numpy = backends.get("numpy")
    (out, lse), (dout, dlse) = random_partials(dim=dim)
    lse[3], dlse[np.isneginf(dlse)] = -np.inf, 1
    given = dout.astype(dtype), out.astype(dtype)
    sinks = np.array([-np.inf, 0.5, 2], np.float32)
    for each in (None, dlse):
        delta = np.empty_like(lse), np.empty_like(lse)
        for on, to in zip((numpy, backend), delta):
            on.delta(to, *given, each)
        assert error(delta[1], delta[0]) <= NOISE * largest(delta[0])
    results = []
    for on in (numpy, backend):
        partial, gradient = (out.copy(), lse.copy()), np.empty(3, np.float32)
        on.sink(*partial, sinks)
        on.sink_gradient(gradient, sinks, partial[1], delta[0])
        results.append((*partial, gradient))
    for ref, got in zip(*results):
        assert error(got, ref) <= NOISE * largest(ref)
    assert results[1][2][0] == 0


@pytest.mark.parametrize("to", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("of", ["float32", "float16", "bfloat16"])
def test_cast(backend, of, to):
    """Strides as the library has them, rounding to nearest even, overflow, subnormal numbers."""
    source = np.random.default_rng(0).standard_normal((5, 3, 4, 7)).astype(np.float32)
    source.flat[:9] = 1e6, -1e-6, 3e-8, 65519.9, 65520, np.inf, np.nan, 1 + 2**-9, 1 + 3 * 2**-11
    with np.errstate(all="ignore"):
        source = source.astype(of)
        for view in (
            source,
            source.reshape(15, 28),
            source[:, :, :, :4],
            source.swapaxes(0, 1),
            source.transpose(1, 2, 0, 3),
            source[:, :, 1].transpose(2, 0, 1),
        ):
            got = np.empty(view.shape, to)
            backend.copy(got, view)
            np.testing.assert_array_equal(got.astype(np.float32), view.astype(to).astype(np.float32))


def test_a_result_that_begins_anywhere_is_refused():
    """Kernels write several numbers at a time; lse, intervals and inputs may begin at any of theirs."""
    backend = backends.get("emulated")
    q, k, v = chunks(5, 6, 1, 1, 32, 32, "float32")
    begin, end = everything(6, 6)
    memory = np.zeros(5 * 32 + 1, np.float32)
    with pytest.raises(ArgumentError, match=r"out begins at address .* multiple of 16 bytes"):
        attend(backend, q, k, v, begin[:, 1:], end[:, 1:], into=(memory[1:].reshape(5, 1, 32), np.zeros((5, 1), "f4")))
    out, _ = partial(backend, 5, 1, 32, "float32")
    unaligned = np.full((6, 1), -np.inf, np.float32)[1:]
    attend(backend, q, k, v, begin[:, 1:], end[:, 1:], into=(out, unaligned))
    assert_rounded((out, unaligned), dense(q, k, v, begin[:, 1:], end[:, 1:], 0.3), v)


class Recorder(KernelLaunches, NumpyBackend):
    """Records what would be launched."""

    processors, architecture = 132, 90

    def __init__(self):
        super().__init__()
        self.launched = []

    def _address(self, array):
        return 0

    def _run(self, kernel, grid, *arguments):
        self.launched.append((kernel.name, grid))


def test_no_grid_is_too_large():
    """CUDA takes 65535 thread blocks in all dimensions but the first: many heads and batch entries do not meet that."""
    recorder, heads = Recorder(), 70_000
    q = np.zeros((2, heads, 32), np.float16)
    begin, end = np.zeros((2, heads, 2), np.int32)
    out, lse = np.zeros(q.shape, np.float32), np.zeros(q.shape[:2], np.float32)
    block, pool = BlockInputs(q, q, q, begin, end, 1.0), q.swapaxes(0, 1)
    recorder.attend(block, out, lse)
    recorder.attend_backward(block, BackwardInputs(q, lse, lse), Gradients(out, out, out))
    paged = BlockInputs(q, pool, pool, begin[0], end[0], 1.0, pages=np.zeros(1, np.int32), page_size=2)
    recorder.attend_pages(paged, out, lse)
    recorder.merge(out, lse, out, lse)
    assert len(recorder.launched) == 6, recorder.launched
    assert all(0 < max(grid[1:]) <= emulated.GRID_LIMIT and grid[0] < 2**31 for _, grid in recorder.launched)


def test_what_the_kernels_do_not_take():
    backend = backends.get("emulated")
    with pytest.raises(ArgumentError, match="dtype is float64"):
        backend.scratch_bytes(64, 64, "float64")
    with pytest.raises(ArgumentError, match="head_dim is 320"):
        backend.scratch_bytes(320, 64, "float16")
