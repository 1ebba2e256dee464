"""Back ends alone: blocks, accumulation and merging against the reference, no MPI."""

import ctypes
import itertools
import tracemalloc

import numpy as np
import pytest
from blocks import chunks, dense, everything, partial, windows
from dense import bits, error, largest

from mpiattn import backends
from mpiattn.backends.block import BlockInputs
from mpiattn.backends.numpy import backend as numpy_backend
from mpiattn.backends.numpy import tiles
from mpiattn.backends.wire import blocks_of, in_memory
from mpiattn.problem.problem import dtype_name

NAMES = ("numpy", "deferred", "cpu")
LIMIT = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-6}  # of max|reference|; float16 accumulates in float32
WORK = {"float64": "float64", "float32": "float32", "float16": "float32"}


@pytest.fixture(params=NAMES)
def backend(request):
    if why := backends.find(request.param).missing():
        pytest.skip(why)
    made = backends.get(request.param)
    yield made
    made.close()


def attend(backend, q, k, v, begin, end, scale=0.3, into=None):
    """A finished partial."""
    out, lse = into or partial(backend, *q.shape[:2], v.shape[2], WORK[q.dtype.name])
    backend.wait(backend.attend(BlockInputs(q, k, v, begin, end, scale), out, lse))
    return out, lse


def assert_right(got, ref, dtype):
    for array, other in zip(got, ref):
        assert (np.isneginf(array) == np.isneginf(other)).all()
        assert error(array, other) <= LIMIT[dtype] * max(largest(other), 1e-300)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 1)])
def test_blocks(backend, dtype, heads, kv_heads):
    for queries, keys in ((33, 47), (1, 5), (5, 1), (0, 4), (4, 0)):
        q, k, v = chunks(queries, keys, heads, kv_heads, dtype=dtype)
        causal = (np.zeros((1, queries), np.int32), np.minimum(np.arange(1, queries + 1), keys)[None].astype(np.int32))
        for begin, end in (everything(queries, keys), causal, windows(queries, keys)):
            assert_right(attend(backend, q, k, v, begin, end), dense(q, k, v, begin, end, 0.3), dtype)


def test_groups_of_heads_have_their_own_intervals(backend):
    """The batch is folded into the heads: two sequences of two heads, each with its rows' intervals."""
    for groups, heads, kv_heads in ((2, 4, 2), (4, 4, 4), (2, 4, 4), (3, 6, 3)):
        q, k, v = chunks(21, 34, heads, kv_heads)
        begin, end = windows(21, 34, groups)
        assert_right(attend(backend, q, k, v, begin, end), dense(q, k, v, begin, end, 0.3), "float64")


SIZES = [tiles.ROWS + 3, tiles.COLUMNS + 5, numpy_backend.PANEL + tiles.COLUMNS + 7]


@pytest.mark.parametrize("keys", SIZES)
@pytest.mark.parametrize("kind", ["full", "causal", "windows"])
def test_beyond_the_tiles(keys, kind):
    """Sizes that are not multiples of the tiles and lie beyond them; windows skip and cross tile borders."""
    queries, backend = tiles.ROWS + 9, backends.get("numpy")
    q, k, v = chunks(queries, keys, dtype="float32")
    begin, end = everything(queries, keys) if kind == "full" else windows(queries, keys)
    if kind == "causal":
        begin, end = np.zeros_like(begin), np.maximum(np.arange(keys - queries, keys)[None] + 1, 0).astype(np.int32)
    assert_right(attend(backend, q, k, v, begin, end), dense(q, k, v, begin, end, 0.3), "float32")


def test_small_tiles(monkeypatch):
    """The same code with tiles of a few rows and columns: every border case in a small problem."""
    q, k, v = chunks(29, 41, 4, 2)
    for rows, columns, panel in itertools.product((1, 4, 64), (1, 3, 64), (5, 7, 64)):
        monkeypatch.setattr(tiles, "ROWS", rows)
        monkeypatch.setattr(tiles, "COLUMNS", columns)
        monkeypatch.setattr(numpy_backend, "PANEL", panel)
        for begin, end in (everything(29, 41), windows(29, 41, seed=rows)):
            got = attend(backends.get("numpy"), q, k, v, begin, end)
            assert_right(got, dense(q, k, v, begin, end, 0.3), "float64")


def test_carry_in(backend):
    """Blocks accumulate: keys in pieces, in any order, give the whole; rows that see nothing keep what they had."""
    q, k, v = chunks(30, 40, 4, 2)
    begin, end = windows(30, 40)
    whole = dense(q, k, v, begin, end, 0.3)
    for order in ((0, 13, 40), (0, 1, 2, 39, 40), (0, 40)):
        pieces = list(itertools.pairwise(order))
        for some in (pieces, pieces[::-1]):
            into = partial(backend, 30, 4, 6, "float64")
            for first, last in some:
                at = [np.clip(edge, first, last) - first for edge in (begin, end)]
                attend(backend, q, k[first:last], v[first:last], *at, into=into)
            assert_right(into, whole, "float64")
    nothing = np.zeros_like(begin)
    before = bits(*into)
    attend(backend, q, k, v, nothing, nothing, into=into)
    assert bits(*into) == before


def test_rows_that_see_nothing(backend):
    q, k, v = chunks(7, 9)
    begin = np.full((1, 7), 4, np.int32)
    out, lse = attend(backend, q, k, v, begin, begin)
    assert not out.any() and np.isneginf(lse).all()


@pytest.mark.parametrize(("dtype", "spread"), [("float32", 60), ("float16", 150), ("float64", 60)])
def test_large_scores(backend, dtype, spread):
    """Scores of +-1e4 and, for float16, beyond 65504: no overflow, and rounding only as of the scores themselves."""
    q, k, v = chunks(40, 60, dtype=dtype, spread=spread, seed=1)
    begin, end = everything(40, 60)
    ref, ref_lse = dense(q, k, v, begin, end, 1.0)
    assert largest(ref_lse) > (65504 if dtype == "float16" else 1e4)
    out, lse = attend(backend, q, k, v, begin, end, 1.0)
    eps = np.finfo(WORK[dtype]).eps
    assert error(lse, ref_lse) <= 4 * eps * largest(ref_lse)
    assert error(out, ref) <= 4 * eps * largest(ref_lse) * largest(ref)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_not_finite(backend, where, value, dtype):
    """What isn't finite reaches exactly the rows that see it; a masked value is not multiplied by zero."""
    arrays = chunks(50, 60, 2, 2, dtype=dtype)
    arrays[where][20, 1, 2] = value
    for begin, end in (everything(50, 60), windows(50, 60, seed=2)):
        sees = (begin[0] <= 20) & (end[0] > 20)
        assert sees.any()
        out, lse = attend(backend, *arrays, begin, end)
        ref, ref_lse = dense(*arrays, begin, end, 0.3)
        assert error(out, ref) <= LIMIT[dtype] * largest(ref)
        assert error(lse, ref_lse) <= LIMIT[dtype] * largest(ref_lse)
        if np.isnan(value):
            hit = np.zeros(out.shape, bool)
            rows = (np.arange(50) == 20) & (begin[0] < end[0]) if where == 0 else sees
            hit[rows, 1, 2 if where == 2 else slice(None)] = True
            assert (np.isnan(out) == hit).all()


def test_many_masked_values_that_are_not_finite():
    """A whole tile of NaN values that no row of a window sees leaves nothing."""
    q, k, v = chunks(20, 3000, dtype="float32")
    begin, end = np.full((1, 20), 900, np.int32), np.full((1, 20), 1100, np.int32)
    ref = dense(q, k, v, begin, end, 0.3)
    k[:900], v[:900], k[1100:], v[1100:] = np.nan, np.inf, np.inf, np.nan
    assert_right(attend(backends.get("numpy"), q, k, v, begin, end), ref, "float32")


# Merging


def partials_of(splits, seed=0, dtype="float64"):
    """One problem's partials, one a piece of its keys, and the whole."""
    rng = np.random.default_rng(seed)
    q, k, v = chunks(25, 60, 4, 2, dtype=dtype, seed=seed)
    edges = [0, *sorted(rng.integers(0, 61, splits - 1)), 60]
    begin, end = windows(25, 60, seed=seed)
    backend = backends.get("numpy")
    pieces = [
        attend(backend, q, k[i:j], v[i:j], np.clip(begin, i, j) - i, np.clip(end, i, j) - i)
        for i, j in itertools.pairwise(edges)
    ]
    return pieces, dense(q, k, v, begin, end, 0.3)


def merged(backend, first, second):
    out, lse = first[0].copy(), first[1].copy()
    backend.wait(backend.merge(out, lse, *second))
    return out, lse


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("splits", [2, 3, 7, 20])
def test_case_16_merge_of_any_splits(backend, splits, dtype):
    pieces, whole = partials_of(splits, seed=splits, dtype=dtype)
    rng = np.random.default_rng(splits)
    for _ in range(5):
        left = [pieces[i] for i in rng.permutation(splits)]
        while len(left) > 1:  # any tree of any order
            i = rng.integers(len(left) - 1)
            left[i : i + 2] = [merged(backend, left[i], left[i + 1])]
        assert_right(left[0], whole, dtype)


def test_case_16_merge_is_associative_and_commutative_to_rounding(backend):
    (a, b, c), _ = partials_of(3, seed=5)
    assert_right(merged(backend, a, b), merged(backend, b, a), "float64")
    assert_right(merged(backend, merged(backend, a, b), c), merged(backend, a, merged(backend, b, c)), "float64")


def test_case_16_identity_of_merge(backend):
    (a,), _ = partials_of(1)
    nothing = np.zeros_like(a[0]), np.full_like(a[1], -np.inf)
    assert bits(*merged(backend, a, nothing)) == bits(*a)
    assert bits(*merged(backend, nothing, a)) == bits(*a)
    assert bits(*merged(backend, nothing, nothing)) == bits(*nothing)


def test_merge_beyond_its_rows(backend):
    rows = 2 * numpy_backend.MERGED // 20 + 5
    rng = np.random.default_rng(0)
    a, b = ((rng.standard_normal((rows, 2, 3)), rng.standard_normal((rows, 2)) * 5) for _ in "ab")
    lse = np.logaddexp(a[1], b[1])
    out = a[0] * np.exp(a[1] - lse)[..., None] + b[0] * np.exp(b[1] - lse)[..., None]
    assert_right(merged(backend, a, b), (out, lse), "float64")


def test_merge_of_lse_far_apart(backend):
    a = np.ones((1, 1, 1), np.float32), np.full((1, 1), 3e4, np.float32)
    b = np.full((1, 1, 1), 5, np.float32), np.full((1, 1), -3e4, np.float32)
    for first, second in ((a, b), (b, a)):
        out, lse = merged(backend, first, second)
        assert out == 1 and lse == np.float32(3e4)


def test_not_a_number_is_merged_into_its_row_only(backend):
    (a, b), _ = partials_of(2, seed=3)
    row, head = np.argwhere(np.isfinite(a[1]) & np.isfinite(b[1]))[0]
    b[0][row, head, 2] = np.nan
    out, lse = merged(backend, a, b)
    assert np.isnan(out).sum() == 1 and np.isnan(out[row, head, 2]) and not np.isnan(lse).any()
    a[1][row, head] = np.nan  # a row whose sum is lost
    out, lse = merged(backend, a, b)
    assert np.isnan(lse).sum() == 1 and np.isnan(out).sum() == 6 and np.isnan(out[row, head]).all()


# Memory and protocol


def test_no_array_of_queries_times_keys():
    queries, keys, backend = 3000, 9000, backends.get("numpy")
    q, k, v = chunks(queries, keys, 1, 1, 16, 16, "float32")
    out, lse = partial(backend, queries, 1, 16, "float32")
    begin, end = np.zeros((1, queries), np.int32), np.minimum(np.arange(queries) * 3 + 1, keys)[None].astype(np.int32)
    tracemalloc.start()
    backend.attend(BlockInputs(q, k, v, begin, end, 0.25), out, lse)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * 2**20  # the scores would be 103 MiB
    masks = tiles.ROWS * tiles.COLUMNS * 3  # a tile's mask and the comparisons it is made of
    assert peak < backend.scratch_bytes(16, 16, "float32") + masks + 2**19


def test_inputs_are_not_changed(backend):
    arrays = chunks(40, 50, 4, 2, dtype="float16")
    before = bits(*arrays)
    attend(backend, *arrays, *windows(40, 50))
    assert bits(*arrays) == before


def test_strided_chunks(backend):
    """A caller's chunk may be a view with gaps between tokens or heads."""
    q, k, v = chunks(20, 30, 4, 2)
    wide = [np.repeat(array, 2, axis=0)[::2] for array in (q, k, v)]
    begin, end = windows(20, 30)
    assert bits(*attend(backend, *wide, begin, end)) == bits(*attend(backend, q, k, v, begin, end))


def test_take_and_copy(backend):
    source = np.random.default_rng(0).standard_normal((9, 2, 3))
    rows = np.array([8, 0, 3, 3])
    taken, cast = backend.empty((4, 2, 3), "float64"), backend.empty((9, 2, 3), "float16")
    backend.wait(backend.take(taken, source, rows))
    backend.wait(backend.copy(cast, source))
    assert (taken == source[rows]).all() and (cast == source.astype(np.float16)).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("count", [0, 1, 5, 30])
@pytest.mark.parametrize("order", ["as it lies", "dims apart", "read-only and reversed"])
def test_scatter(backend, dtype, count, order):
    """Tokens of a caller's array of any strides to slots of a pool, all of whose other slots keep what they hold."""
    rng, name = np.random.default_rng(count), dtype_name(dtype)
    pool, expected = backend.empty((3, 40, 99), name), rng.standard_normal((3, 40, 99)).astype(name)
    backend.wait(backend.copy(pool, expected))
    src = rng.standard_normal((30, 4, 3, 99)).astype(name)
    if order == "dims apart":
        src = np.asfortranarray(src)
    elif order == "read-only and reversed":
        src = src[::-1, :, ::-1]
        src.flags.writeable = False
    entries, slots = np.sort(rng.permutation(30)[:count]), rng.permutation(40)[:count]
    for tokens in (rng.integers(0, 4, count), 2):
        backend.wait(backend.scatter(pool, slots, src, entries, tokens))
        for i in range(count):
            expected[:, slots[i]] = src[entries[i], np.broadcast_to(tokens, count)[i]]
        assert bits(pool) == bits(expected)


def test_wire(backend):
    """Bytes out are bytes in; an array can be read after the event of its arrival."""
    sent = np.random.default_rng(0).standard_normal((5, 2, 3))
    received = backend.empty((5, 2, 3), "float64")
    leaving, wire = backend.outgoing(sent), backend.incoming(received)
    ready = leaving.ready and leaving.ready(0, sent.nbytes)
    while ready and not ready():
        backend.idle()
    wire.array[:] = leaving.array
    assert wire.array.dtype == np.uint8 and len(wire.array) == sent.nbytes
    if wire.taken:
        wire.taken(0, sent.nbytes)
    backend.sent(sent)
    backend.wait(backend.arrived(received))
    assert (received == sent).all()


@pytest.mark.parametrize("seed", range(100))
def test_bytes_in_blocks(seed):
    """Those of any view are its bytes in order, or there are none."""
    rng = np.random.default_rng(seed)
    memory = rng.standard_normal((4, 5, 6, 3)).astype(rng.choice(["float32", "float64"])).transpose(rng.permutation(4))
    if seed % 2:
        memory = np.ascontiguousarray(memory)
    view = memory
    for axis in range(4):
        start, step = rng.integers(0, 3), rng.choice([1, 1, 1, 2, -1])
        some = [slice(None)] * 4
        some[axis] = rng.choice([slice(None), slice(start, None, step), slice(start, start + 1)])
        view = view[tuple(some)]
    blocks = blocks_of(view)
    if view.flags.c_contiguous:
        assert blocks == (1, view.nbytes, view.nbytes)
    if blocks is None:
        assert not view.flags.c_contiguous
        return
    starts = view.ctypes.data + np.arange(blocks.number) * blocks.stride
    assert b"".join(ctypes.string_at(int(start), blocks.nbytes) for start in starts) == view.tobytes()
    wire = in_memory(view)
    starts = np.arange(blocks.number) * blocks.stride
    assert b"".join(wire.array[start : start + blocks.nbytes].tobytes() for start in starts) == view.tobytes()
    assert len(wire.array) == starts[-1] + blocks.nbytes and wire.nbytes == view.nbytes


def test_deferred_catches_what_a_gpu_would():
    """It runs late, holds NaN in what has not arrived, and refuses writes to what is being sent."""
    backend = backends.get("deferred")
    q, k, v = chunks(10, 10)
    begin, end = everything(10, 10)
    assert np.isnan(backend.empty((2, 2), "float32")).all()
    out, lse = partial(backend, 10, 2, 6, "float64")
    event = backend.attend(BlockInputs(q, k, v, begin, end, 0.3), out, lse)
    backend.wait(event)
    backend.incoming(k)  # k is given back and has no contents
    backend.wait(backend._copies_in.submit(int))
    assert np.isnan(k).all()
    backend.outgoing(out)
    with pytest.raises(RuntimeError, match="while MPI is sending"):
        backend.merge(out, lse, out.copy(), lse.copy())
    backend.sent(out)
    backend.wait(backend.merge(out, lse, out.copy(), lse.copy()))
    backend.close()


def test_names():
    best = next(name for name in backends.candidates("auto") if not backends.find(name).missing())
    assert [backends.get(name).name for name in ("numpy", "deferred", "auto")] == ["numpy", "deferred", best]
    with pytest.raises(ValueError, match=r"backend is 'abacus'; it may be auto, numpy, cpu\[:THREADS\], cuda"):
        backends.get("abacus")


def test_a_failed_launch_is_told_by_every_later_wait():
    backend = backends.get("deferred")
    try:
        bad = backend.copy(np.zeros(3), np.zeros(4))
        good = backend.copy(np.zeros(3), np.zeros(3))
        for event in (good, bad, None):
            with pytest.raises(ValueError, match="broadcast"):
                backend.wait(event)
    finally:
        backend.close()
