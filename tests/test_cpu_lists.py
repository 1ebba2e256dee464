"""Rows that see several intervals, all lists in one launch of the back end cpu, against NumPy's one launch a list."""

import numpy as np
import pytest
from blocks import chunks, partial
from cpu_kernels import EMULATED, PAIRS, SETS, WORK, compiled, kernels_of
from dense import bits, error, largest

from mpiattn import backends
from mpiattn.backends.block import BackwardInputs, BlockInputs, Gradients

pytestmark = compiled
SCALE = 0.2
ROUNDING = {"float64": 1e-12, "float32": 5e-6, "float16": 5e-6, "bfloat16": 5e-6}  # of the largest value
ROUNDED = 2e-2  # where weights are rounded to bfloat16


@pytest.fixture(params=(*SETS, *EMULATED))
def backend(request, monkeypatch):
    with kernels_of(request.param, monkeypatch) as made:
        yield made


def anywhere(rng, lists, groups, queries, keys):
    """Disjoint intervals of any length, in any order of the lists; a third are empty."""
    ends = np.sort(rng.integers(0, keys + 1, (2 * lists, groups, queries)), axis=0).astype(np.int32)
    begin, end = ends[::2], np.where(rng.random((lists, groups, queries)) < 0.3, ends[::2], ends[1::2])
    order = rng.permutation(lists)
    return begin[order], end[order]


def neighborhood(rng, lists, groups, queries, keys, width=None):
    """A grid of rows of `width` tokens, queries and keys from its start on: a list for each row of keys."""
    width, near = width or int(rng.integers(2, 40)), int(rng.integers(0, 9))
    y, x = divmod(np.arange(queries, dtype=np.int32), width)
    rows = (y + np.arange(lists, dtype=np.int32)[:, None] - lists // 2) * width
    begin, end = rows + np.maximum(x - near, 0), rows + np.minimum(x + near + 1, width)
    return tuple(np.repeat(side.clip(0, keys)[:, None], groups, axis=1) for side in (begin, end))


def apart(rng, lists, groups, queries, keys):
    """Some keys at the start, which all see, and some further on."""
    first = (np.arange(queries) * keys // (queries + 1)).astype(np.int32)
    begin = np.stack([np.zeros_like(first), np.maximum(first, 5)])
    end = np.stack([np.full_like(first, min(5, keys)), np.minimum(np.maximum(first, 5) + 30, keys)])
    return tuple(np.repeat(side[:, None], groups, axis=1) for side in (begin, end))


MASKS = {"anywhere": anywhere, "neighborhood": neighborhood, "apart": apart}
# dtype, head dim, value dim, heads, KV heads, groups, queries, keys
SHAPES = [
    ("float32", 33, 20, 2, 2, 1, 500, 500),
    ("bfloat16", 40, 64, 4, 2, 2, 300, 330),
    ("float64", 8, 24, 6, 2, 6, 230, 90),
    ("float16", 16, 8, 5, 1, 1, 90, 2600),
    ("bfloat16", 20, 33, 270, 1, 1, 3, 70),  # more query heads of a KV head than a tile has rows
    ("float32", 4, 4, 1, 1, 1, 40, 140_000),  # more than two windows of keys
]


def case(shape, mask, seed=0):
    dtype, dim, value_dim, heads, kv_heads, groups, queries, keys = shape
    rng = np.random.default_rng(seed)
    q, k, v = chunks(queries, keys, heads, kv_heads, dim, value_dim, dtype, seed=seed)
    dout = rng.standard_normal((queries, heads, value_dim)).astype(dtype)
    return q, k, v, dout, *MASKS[mask](rng, int(rng.integers(2, 9)), groups, queries, keys)


def launched(backend, q, k, v, dout, begin, end, softcap=None, given=None, **others):
    """(out, lse, dq, dk, dv), and dbias if there is a bias: by one launch, if the back end takes all lists at once.

    given: (lse, delta) of the backward pass.  others: what else a block has.
    """
    lists = [[np.ascontiguousarray(np.moveaxis(side, 0, -1)) for side in (begin, end)]]
    if not backend.takes_lists:
        lists = zip(begin, end)
    blocks = [BlockInputs(q, k, v, *bounds, SCALE, softcap, **others) for bounds in lists]
    work = WORK[q.dtype.name]
    out, lse = partial(backend, *q.shape[:2], v.shape[2], work)
    arrays = (q, k, v) if others.get("bias") is None else (q, k, v, others["bias"])
    grads = Gradients(*(np.zeros(array.shape, work) for array in arrays))
    with np.errstate(all="ignore"):
        for block in blocks:
            backend.attend(block, out, lse)
        for block in blocks:
            backend.attend_backward(block, BackwardInputs(dout, *given), grads)
    return [out, lse, *grads[: len(arrays)]]


def reference(q, k, v, dout, begin, end, softcap=None, **others):
    """That of NumPy in float64, and (lse, delta) for the backward pass in the kernels' dtype."""
    wide, numpy = [array.astype(np.float64) for array in (q, k, v, dout)], backends.get("numpy")
    out, lse = partial(numpy, *q.shape[:2], v.shape[2], "float64")
    with np.errstate(all="ignore"):
        for bounds in zip(begin, end):
            numpy.attend(BlockInputs(*wide[:3], *bounds, SCALE, softcap, **others), out, lse)
    given = [array.astype(WORK[q.dtype.name]) for array in (lse, np.full_like(lse, 0.1))]
    exact = [array.astype(np.float64) for array in given]
    return launched(numpy, *wide, begin, end, softcap, exact, **others), given


def assert_right(backend, got, ref, dtype, times=1):
    """times: what is allowed more where scores are larger, by a bias."""
    rounded = dtype == "bfloat16" and backend.version.split()[0] in PAIRS
    for array, right in zip(got, ref):
        seen = np.isfinite(right)
        assert (np.isfinite(array) == seen).all()
        limit = times * (ROUNDED if rounded else ROUNDING[dtype])
        assert error(array[seen], right[seen]) <= limit * max(largest(right[seen]), 1e-3)


@pytest.mark.draw(6)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("mask", MASKS)
def test_all_lists_in_one_launch(backend, mask, softcap):
    for seed, shape in enumerate(SHAPES):
        inputs = case(shape, mask, seed)
        ref, given = reference(*inputs, softcap)
        assert_right(backend, launched(backend, *inputs, softcap, given), ref, shape[0])


def test_what_is_not_finite_stays_where_it_is_seen(backend):
    for dtype in ("float32", "bfloat16"):
        q, k, v, dout, *bounds = case((dtype, 24, 16, 2, 1, 1, 200, 200), "neighborhood", 3)
        k[30], v[90], q[120], dout[150] = np.nan, np.inf, np.nan, np.nan
        ref, given = reference(q, k, v, dout, *bounds)
        assert_right(backend, launched(backend, q, k, v, dout, *bounds, None, given), ref, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_threads(dtype):
    rng = np.random.default_rng(0)
    q, k, v, dout, *_ = case((dtype, 64, 64, 2, 1, 1, 2048, 2048), "apart")
    bounds = neighborhood(rng, 7, 1, 2048, 2048, width=64)
    given = np.ones((2, 2048, 2), np.float32)
    results = []
    for threads in (1, 2, 5, 5):
        backend = backends.get(f"cpu:{threads}")
        results.append(bits(*launched(backend, q, k, v, dout, *bounds, None, given)))
        assert backend._scratch.nbytes <= max(
            backend.scratch_bytes(64, 64, dtype, backward, lists=True) for backward in (False, True)
        )
        backend.close()
    assert results == results[:1] * 4
