"""Biases and dropout on the compiled kernels of the back end cpu: what only its launches have.

tests/test_bias_blocks.py compares every back end with dense attention.
"""

import functools

import numpy as np
import pytest
from blocks import chunks, partial, windows
from cpu_kernels import EMULATED, SETS, WORK, compiled, kernels_of
from dense import bits
from test_cpu_decode import assert_right as assert_decoded
from test_cpu_decode import batch as ragged
from test_cpu_decode import noise_of
from test_cpu_launches import as_a_batch
from test_cpu_lists import MASKS, SCALE, SHAPES, assert_right, case, launched, neighborhood, reference

from mpiattn import backends
from mpiattn.backends.block import BackwardInputs, BlockInputs, Dropout, Gradients
from mpiattn.backends.numpy.dropout import factors

pytestmark = compiled


@pytest.fixture(params=(*SETS, *EMULATED))
def backend(request, monkeypatch):
    with kernels_of(request.param, monkeypatch) as made:
        yield made


@pytest.fixture(params=SETS)
def of_here(request, monkeypatch):
    """On this processor: an emulated one gets no batch where it lies."""
    with kernels_of(request.param, monkeypatch) as made:
        yield made


def positions(kind, count):
    """One after another from any on, as of a striped layout, or anywhere."""
    if kind == 2:
        return np.sort(np.random.default_rng(count).choice(10 * count, count, False)).astype(np.int32)
    return (13 + np.arange(count, dtype=np.int32) * (1, 2)[kind]).astype(np.int32)


def dropout_of(queries, keys, heads, kind=0, threshold=2**30):
    rows, columns = positions(kind, queries), positions(kind, keys)
    return Dropout(threshold, 2**63 + 5, rows, columns, 3 + np.arange(heads, dtype=np.int32))


def bias_of(heads, sequences, queries, keys, shape, dtype="float32"):
    """shape: which of the sequences, their heads and their queries have a bias of their own."""
    lengths = (length if own else 1 for own, length in zip(shape, (sequences, heads // sequences, queries)))
    return np.random.default_rng(5).standard_normal((*lengths, keys)).astype(dtype)


OWN = [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1), (0, 1, 0), (0, 0, 0)]


@functools.cache
def several_intervals(mask, number):
    """Arguments of `launched` of one of the SHAPES and what else it takes, and what is right; once for all sets."""
    shape = SHAPES[number]
    dtype, _, _, heads, kv_heads, groups, queries, keys = shape
    *inputs, begin, end = case(shape, mask, number)
    sequences, softcap = groups if groups == kv_heads else 1, 3.0 if number % 2 else None
    own = OWN[(number + list(MASKS).index(mask)) % len(OWN)]
    bias = bias_of(heads, sequences, queries, keys, own, dtype if number % 2 else WORK[dtype])
    others = {"bias": bias, "dropout": dropout_of(queries, keys, heads, number % 3)}
    ref, given = reference(*inputs, begin, end, softcap, **others)
    return (*inputs, begin, end, softcap, given), others, ref


@pytest.mark.draw(8)
@pytest.mark.parametrize("mask", MASKS)
def test_rows_that_see_several_intervals(backend, mask):
    """All lists in one launch, with biases of every shape and dtype."""
    for number, (dtype, *_) in enumerate(SHAPES[:4]):
        arguments, others, ref = several_intervals(mask, number)
        assert_right(backend, launched(backend, *arguments, **others), ref, dtype, times=2)


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pairs_that_are_not_seen(backend, dtype, lists):
    """Their bias may be anything, their gradient stays what it is, and nothing behind a row's last key is touched."""
    queries, keys = 150, 333
    q, k, v = chunks(queries, keys, 2, 1, 24, 16, dtype)
    dout = np.ones((queries, 2, 16), q.dtype)
    if lists:
        rng = np.random.default_rng(2)
        sides = [np.ascontiguousarray(np.moveaxis(side, 0, -1)) for side in neighborhood(rng, 3, 1, queries, keys, 20)]
        begin, end = (side[0].T for side in sides)
    else:
        sides = begin, end = windows(queries, keys)
    columns = np.arange(keys)
    seen = ((begin[..., None] <= columns) & (columns < end[..., None])).any(axis=0)
    results = []
    for unseen in (0.5, np.nan):
        bias = np.where(seen, bias_of(2, 1, queries, keys, (0, 0, 1)), np.float32(unseen)).astype(np.float32)
        wide = np.full((1, 1, queries, keys + 9), -0.0, np.float32)  # which to add 0 to would change
        wide[..., 4 : keys + 4] = 7
        out, lse = partial(backend, queries, 2, 16, "float32")
        block = BlockInputs(q, k, v, *sides, SCALE, bias=bias)
        backend.attend(block, out, lse)
        grads = Gradients(*(np.zeros(array.shape, np.float32) for array in (q, k, v)), wide[..., 4 : keys + 4])
        backend.attend_backward(block, BackwardInputs(dout, np.where(np.isinf(lse), 0, lse), np.ones_like(lse)), grads)
        results.append(bits(out, lse, *grads[:3], wide))
        behind = wide[..., [*range(4), *range(keys + 4, keys + 9)]]
        assert not behind.any() and np.signbit(behind).all()
        changed = wide[0, 0, :, 4 : keys + 4] != 7
        assert not changed[~seen].any() and changed.any()
    assert results[0] == results[1]


def both_ways(backend, block, dout):
    """Results of a forward launch, and of a backward one that has its lse."""
    work, rows = WORK[block.q.dtype.name], (len(block.q), -1)
    out = np.zeros((*block.q.shape[:-1], block.v.shape[-1]), work)
    lse = np.full((len(out), out[0, ..., 0].size), -np.inf, work)
    backend.attend(block, out, lse)
    grads = Gradients(
        *(np.ones_like(array, work) for array in block[:3]), None if block.bias is None else np.ones_like(block.bias)
    )
    backend.attend_backward(
        block, BackwardInputs(dout, np.where(np.isinf(lse), 0, lse), 0 * out[..., 0].reshape(rows)), grads
    )
    arrays = (out, *grads[:3])
    return [lse, *(array.reshape(len(array), -1) for array in arrays), *grads[3:]]


@pytest.mark.parametrize("dtype", WORK)
def test_a_batch_where_it_lies(of_here, monkeypatch, dtype):
    """Bits are those of a batch folded into the heads."""
    monkeypatch.setattr(of_here, "threads", 2)
    for batch, tokens, heads, kv_heads, own in ((3, 9, 2, 1, OWN[1]), (2, 150, 4, 2, OWN[3]), (4, 33, 3, 3, OWN[2])):
        q, k, v = chunks(tokens, tokens + 5, batch * heads, batch * kv_heads, 40, 24, dtype)
        bias = bias_of(batch * heads, batch, tokens, tokens + 5, own, WORK[dtype])
        others = {"bias": bias, "dropout": dropout_of(tokens, tokens + 5, batch * heads)}
        bounds = windows(tokens, tokens + 5, batch)
        results = []
        for apart in (False, True):
            arrays = [as_a_batch(array, batch, apart) for array in (q, k, v, np.resize(v, (*q.shape[:2], 24)))]
            block = BlockInputs(*arrays[:3], *bounds, SCALE, **others)
            results.append(bits(*both_ways(of_here, block, arrays[3])))
        assert results[0] == results[1]


@pytest.mark.draw(6)
@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_change_no_bit(dtype, own):
    """Of gradients that heads, sequences or queries share either: small heads, large ones, and several intervals."""
    for queries, keys, sequences, heads, lists in ((60, 50, 8, 4, 0), (500, 700, 2, 4, 0), (900, 900, 3, 2, 5)):
        q, k, v = chunks(queries, keys, sequences * heads, sequences * heads // 2, 64, 64, dtype)
        if lists:
            sides = neighborhood(np.random.default_rng(0), lists, 1, queries, keys, 30)
            bounds = [np.ascontiguousarray(np.moveaxis(side, 0, -1)) for side in sides]
        else:
            bounds = windows(queries, keys)
        bias = bias_of(sequences * heads, sequences, queries, keys, own)
        dropout = dropout_of(queries, keys, sequences * heads)
        block = BlockInputs(q, k, v, *bounds, SCALE, bias=bias, dropout=dropout)
        results = set()
        for threads in (1, 2, 3, 5, 5):
            made = backends.get(f"cpu:{threads}")
            results.add(bits(*both_ways(made, block, q)))
            made.close()
        assert len(results) == 1


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("dtype", WORK)
def test_which_weights_are_dropped(backend, dtype, kind):
    """Of equal weights and values that are unit vectors, results are what is kept: what NumPy keeps, pair by pair."""
    queries, keys, heads = 70, 90, 2
    q, k = np.zeros((queries, heads, 8), dtype), np.zeros((keys, 1, 8), dtype)
    every = np.zeros((1, queries), np.int32), np.full((1, queries), keys, np.int32)
    some = np.stack([every[0], every[0] + 40], axis=-1), np.stack([every[0] + 30, every[1]], axis=-1)
    dropout = dropout_of(queries, keys, heads, kind, 2**31)
    right = np.stack([factors(dropout, h, slice(None), slice(None), np.dtype(np.float64)) for h in range(heads)], 1)
    for bounds in (every, some):
        block = BlockInputs(q, k, np.eye(keys, dtype=dtype)[:, None], *bounds, SCALE, dropout=dropout)
        out, lse = partial(backend, queries, heads, keys, WORK[dtype])
        backend.attend(block, out, lse)
        kept = right.copy()
        if bounds is some:
            kept[:, :, 30:40] = 0
        assert np.array_equal(out > 0, kept > 0)
        assert np.allclose(out, kept / (keys if bounds is every else keys - 10), rtol=5e-3)
        block = block._replace(v=np.zeros((keys, 1, queries), dtype))
        for h in range(heads):  # dv of dout that is a unit vector of each row, of one head at a time
            dout = np.zeros((queries, heads, queries), dtype)
            dout[:, h] = np.eye(queries, dtype=dtype)
            grads = Gradients(*(np.zeros(array.shape, WORK[dtype]) for array in block[:3]))
            backend.attend_backward(block, BackwardInputs(dout, lse, np.zeros_like(lse)), grads)
            assert np.array_equal(grads.dv[:, 0].T > 0, kept[:, h] > 0)


@pytest.mark.parametrize("dtype, count, heads", [("bfloat16", 1, 8), ("float32", 3, 4), ("float64", 2, 2)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_decoding(backend, monkeypatch, dtype, count, heads, softcap):
    """A ragged batch: a bias of keys that a query does not see, or that its sequence lacks, is not read into it."""
    q, pools, tables, page_size, begin, end = ragged(dtype, count, heads)
    columns = np.arange(1503)
    seen = (begin[:, None] <= columns) & (columns < end[:, None])
    bias = np.random.default_rng(4).standard_normal((len(q), heads, len(columns))).astype(WORK[dtype])
    bias[:, :, ::7] = -np.inf
    bias = np.where(seen[:, None], bias, np.nan).astype(WORK[dtype])
    block = BlockInputs(q, *pools, begin, end, SCALE, softcap, tables, page_size, bias)

    def attend(backend):
        out, lse = partial(backend, *q.shape[:2], 32, WORK[dtype])
        backend.attend_pages(block, out, lse)
        return out, lse

    results = []
    for threads in (1, 3):
        monkeypatch.setattr(backend, "threads", threads)
        results.append(attend(backend))
    assert bits(*results[0]) == bits(*results[1])
    rounded = 1e4 if dtype == "bfloat16" and backend.version.startswith("avx512bf16") else 1  # weights, to bfloat16
    assert_decoded(results[0], attend(backends.get("numpy")), 2 * noise_of(backend, dtype) * rounded)
