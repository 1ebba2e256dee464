"""A block's bias and dropout in every back end: dense float64 attention with both, and what the bias's gradient is."""

import numpy as np
import pytest
from blocks import chunks
from dense import error, largest
from numpy.lib.stride_tricks import as_strided
from test_block_inputs import backend, put  # noqa: F401  (a fixture)

from mpiattn.arguments.arrays import on_host
from mpiattn.backends.block import BackwardInputs, BlockInputs, Dropout, Gradients
from mpiattn.backends.numpy.dropout import philox

SEQUENCES, HEADS, KV_HEADS = 2, 4, 2  # of one sequence
# (queries, keys, head_dim, value_dim, dtype, softcap): tiles of every size and their edges
CASES = [
    (1, 1, 8, 8, "float32", None),
    (70, 300, 64, 64, "float32", None),
    (150, 67, 32, 24, "float16", 1.5),
    (67, 700, 64, 32, "bfloat16", None),
    (300, 260, 128, 128, "bfloat16", 2.0),
    (41, 53, 16, 16, "float64", None),
]
SHAPES = [(1, 1), (1, HEADS), (SEQUENCES, 1), (SEQUENCES, HEADS)]
# Philox4x32-10 of counters and keys, from the known answers of Random123
KNOWN = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, seed, words", KNOWN)
def test_philox(counter, seed, words):
    assert tuple(map(int, philox(tuple(map(np.uint32, counter)), seed))) == words


def in_float64(array):
    return np.asarray(array).astype(np.float64)


def words(of):
    """The word of every head, row and key of a dropout."""
    heads, rows, keys = (array.astype(np.uint32) for array in (of.heads, of.rows, of.keys))
    four = philox((keys // 4, rows[:, None], heads[:, None, None], np.uint32(0)), of.seed)
    return np.choose(keys % 4, np.broadcast_arrays(*four))


def intervals(rng, queries, keys, groups):
    """Intervals of each row: some empty, some of all keys."""
    begin, end = np.sort(rng.integers(0, keys + 1, (2, groups, queries)), axis=0).astype(np.int32)
    begin[:, ::5], end[:, ::5] = 0, keys
    return begin, end


def dense(block, given=None):
    """(out, lse) of a block alone or, with `given`, (dq, dk, dv, dbias of every pair), in float64."""
    q, k, v = (in_float64(array) for array in (block.q, block.k, block.v))
    queries, heads, keys = len(q), q.shape[1], len(k)
    k, v = (np.repeat(array, heads // (KV_HEADS * SEQUENCES), axis=1) for array in (k, v))
    columns, per_group = np.arange(keys), heads // len(block.begin)
    begin, end = (np.repeat(side, per_group, axis=0)[:, :, None] for side in (block.begin, block.end))
    seen = (begin <= columns) & (columns < end)
    capped = score = block.scale * np.einsum("qhd,khd->hqk", q, k)
    if block.softcap:
        capped = np.tanh(score / block.softcap)
        score = block.softcap * capped
    if block.bias is not None:
        whole = np.broadcast_to(in_float64(block.bias), (SEQUENCES, heads // SEQUENCES, queries, keys))
        score = score + whole.reshape(heads, queries, keys)
    score = np.where(seen, score, -np.inf)
    kept = np.ones(score.shape)
    if block.dropout is not None:
        kept = (words(block.dropout) >= block.dropout.threshold) / block.dropout.kept
    with np.errstate(all="ignore"):
        if given is None:
            top = score.max(axis=2, keepdims=True, initial=-np.inf)
            weight = np.exp(score - np.where(np.isinf(top), 0, top))
            total = weight.sum(axis=2)
            out = np.einsum("hqk,khd->qhd", np.where(weight == 0, 0, weight / total[:, :, None]) * kept, v)
            return out, (top[:, :, 0] + np.log(total)).T
        dout, lse, delta = (in_float64(array) for array in given)
        weight = np.where(seen, np.exp(score - np.where(np.isinf(lse.T), 0, lse.T)[:, :, None]), 0)
        dscore = weight * (np.einsum("qhd,khd->hqk", dout, v) * kept - delta.T[:, :, None])
        raw = dscore * (1 - capped**2) if block.softcap else dscore
    of_kv = lambda array: array.reshape(keys, KV_HEADS * SEQUENCES, -1, array.shape[2]).sum(axis=2)  # noqa: E731
    return (
        block.scale * np.einsum("hqk,khd->qhd", raw, k),
        of_kv(block.scale * np.einsum("hqk,qhd->khd", raw, q)),
        of_kv(np.einsum("hqk,qhd->khd", weight * kept, dout)),
        dscore.reshape(SEQUENCES, -1, queries, keys),
    )


def made(case, shape=None, bias_dtype=None, drop=False, seed=0):
    """A block of a case, with a bias of (sequences, heads) = shape; and what its backward pass has besides."""
    queries, keys, head_dim, value_dim, dtype, softcap = case
    heads, rng = SEQUENCES * HEADS, np.random.default_rng(seed)
    q, k, v = chunks(queries, keys, heads, SEQUENCES * KV_HEADS, head_dim, value_dim, dtype)
    begin, end = intervals(rng, queries, keys, SEQUENCES)
    partial = np.float64 if dtype == "float64" else np.float32
    bias = dropout = None
    if shape:
        bias = rng.standard_normal((*shape, queries, keys)).astype(bias_dtype or partial)
    if drop:
        rows, columns, numbers = (np.sort(rng.choice(10**5, n, False)).astype(np.int32) for n in (queries, keys, heads))
        dropout = Dropout(2**31, 2**63 + 17, rows, columns, numbers)
    block = BlockInputs(q, k, v, begin, end, 1 / np.sqrt(head_dim), softcap, bias=bias, dropout=dropout)
    dout = rng.standard_normal((queries, heads, value_dim)).astype(q.dtype)
    lse = dense(block)[1].astype(partial)
    return block, BackwardInputs(dout, lse, rng.standard_normal(lse.shape).astype(partial))


def forward(backend, block):  # noqa: F811
    partial = "float64" if block.q.dtype == np.float64 else "float32"
    out = backend.empty((*block.q.shape[:2], block.v.shape[2]), partial)
    lse = backend.empty(block.q.shape[:2], partial)
    backend.clear(out, lse)
    backend.attend(put(backend, block), out, lse)
    backend.drain()
    return on_host(out), on_host(lse)


def backward(backend, block, given, dbias):  # noqa: F811
    partial = np.float64 if block.q.dtype == np.float64 else np.float32
    given = put(backend, given)
    backend.delta(backend.empty(given.delta.shape, partial), given.dout, given.dout, None)
    grads = Gradients(*[backend.contiguous(np.zeros(array.shape, partial)) for array in block[:3]], dbias)
    backend.attend_backward(put(backend, block), given, grads)
    backend.drain()
    return [on_host(grad) for grad in grads]


def tolerance(dtype):
    return {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}[dtype]


def close(dtype, got, right):
    for array, ref in zip(got, right, strict=True):
        assert error(array, ref) <= tolerance(dtype) * max(largest(ref), 1)


@pytest.mark.draw(5)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_a_bias_and_its_gradient(backend, case, shape):  # noqa: F811
    """Of every shape, in the dtype of the inputs or in that of partials; sums where it is shared."""
    dtype = case[4]
    if dtype not in backend.dtypes or "bias" not in backend.takes:
        pytest.skip("what it does not take")
    for bias_dtype in {dtype, "float64" if dtype == "float64" else "float32"}:
        block, given = made(case, shape, np.dtype(bias_dtype))
        close(dtype, forward(backend, block), dense(block))
        shared = tuple(axis for axis in (0, 1) if shape[axis] == 1)
        *right, of_pairs = dense(block, given)
        dbias = backend.contiguous(np.zeros(block.bias.shape, np.float64 if dtype == "float64" else np.float32))
        got = backward(backend, block, given, dbias)
        close(dtype, got, [*right, of_pairs.sum(axis=shared, keepdims=True)])
        close(dtype, backward(backend, block, given, None)[:3], right)


@pytest.mark.draw(8)
@pytest.mark.parametrize(
    "shape, of_gradient", [*(((1, 1), more) for more in SHAPES[1:]), (SHAPES[1], SHAPES[2]), (SHAPES[3], (1, 1))]
)
def test_a_gradient_of_another_shape(backend, shape, of_gradient):  # noqa: F811
    """As of a bias that is one for all heads, whose gradient is added up by head later."""
    if "bias" not in backend.takes:
        pytest.skip("what it does not take")
    block, given = made((9, 20, 8, 8, "float32", None), shape)
    *right, of_pairs = dense(block, given)
    shared = tuple(axis for axis in (0, 1) if of_gradient[axis] == 1)
    dbias = backend.contiguous(np.zeros((*of_gradient, 9, 20), np.float32))
    close("float32", backward(backend, block, given, dbias), [*right, of_pairs.sum(axis=shared, keepdims=True)])


@pytest.mark.draw(5)
@pytest.mark.parametrize("case", CASES[1:4])
def test_one_bias_for_all_queries(backend, case):  # noqa: F811
    if case[4] not in backend.dtypes or "bias" not in backend.takes:
        pytest.skip("what it does not take")
    block, given = made(case, (1, HEADS))
    block = block._replace(bias=block.bias[:, :, :1].copy())
    close(case[4], forward(backend, block), dense(block))
    *right, of_pairs = dense(block, given)
    got = backward(backend, block, given, backend.contiguous(np.zeros(block.bias.shape, np.float32)))
    close(case[4], got, [*right, of_pairs.sum(axis=(0, 2), keepdims=True)])


@pytest.mark.draw(5)
@pytest.mark.parametrize("case", CASES[1:5])
def test_dropout(backend, case):  # noqa: F811
    """With a bias: the gradients are those of the weights that are kept."""
    if case[4] not in backend.dtypes or "dropout" not in backend.takes:
        pytest.skip("what it does not take")
    block, given = made(case, (1, HEADS), drop=True)
    close(case[4], forward(backend, block), dense(block))
    *right, of_pairs = dense(block, given)
    got = backward(backend, block, given, backend.contiguous(np.zeros(block.bias.shape, np.float32)))
    close(case[4], got, [*right, of_pairs.sum(axis=0, keepdims=True)])


@pytest.mark.draw(5)
def test_infinite_and_undefined_biases(backend):  # noqa: F811
    """-inf takes a pair's weight, a row of nothing else has no keys, and NaN stays in its row."""
    if "bias" not in backend.takes:
        pytest.skip("what it does not take")
    case = (70, 300, 64, 64, "float32" if "float32" in backend.dtypes else "bfloat16", None)
    block, given = made(case, (SEQUENCES, HEADS))
    bias = block.bias.copy()
    bias[:, :, :, ::3] = bias[0, 1, 7] = -np.inf
    block = block._replace(bias=bias)
    right = dense(block)
    got = forward(backend, block)
    assert (got[1][7, 1], *got[0][7, 1]) == (-np.inf, *np.zeros(64))
    close(case[4], got, right)
    given = given._replace(lse=right[1].astype(np.float32))
    grads = backward(backend, block, given, backend.contiguous(np.zeros(bias.shape, np.float32)))
    close(case[4], grads, dense(block, given))
    bias[0, 2, 10, 5], seen = np.nan, block.begin[0, 10] <= 5 < block.end[0, 10]
    out, lse = forward(backend, block)
    assert seen and np.isnan(out[10, 2]).all() and np.isnan(lse[10, 2])
    out[10, 2], lse[10, 2] = got[0][10, 2], got[1][10, 2]
    assert np.array_equal(out, got[0]) and np.array_equal(lse, got[1])


def test_any_strides():
    """A bias by distance is a view of one row, and its gradient may be one too."""
    from mpiattn import backends

    for name in ("numpy", "cpu"):
        if backends.find(name).missing():
            continue
        block, given = made(CASES[1], (1, HEADS))
        queries, keys = len(block.q), len(block.k)
        table = np.random.default_rng(3).standard_normal((1, HEADS, queries + keys - 1), np.float32)
        size = table.itemsize
        strides = (*table.strides[:2], -size, size)
        bias = as_strided(table[:, :, queries - 1 :], (1, HEADS, queries, keys), strides)
        assert bias[0, 1, 3, 5] == table[0, 1, queries - 1 - 3 + 5]
        block, made_backend = block._replace(bias=bias), backends.get(name)
        close("float32", forward(made_backend, block), dense(block))
        wide = np.zeros((1, HEADS, queries, queries + keys), np.float32)  # rows by distance from the query
        strides = (*wide.strides[:2], wide.strides[2] - size, size)
        dbias = as_strided(wide[:, :, :, queries - 1 :], bias.shape, strides)
        *right, of_pairs = dense(block, given)
        close("float32", backward(made_backend, block, given, dbias), [*right, of_pairs.sum(axis=0, keepdims=True)])
        made_backend.close()
