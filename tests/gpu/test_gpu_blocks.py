"""The CUDA kernels on a GPU: blocks, carry-in, gradients, pages, against the references of their tests on the CPU."""

import ml_dtypes  # noqa: F401  (NumPy learns bfloat16)
import numpy as np
import pytest
from blocks import MASKS, assert_rounded, causal, chunks, dense, of_backward, partial
from dense import bits
from test_kernels_backward import SHAPES as BACKWARD
from test_kernels_backward import assert_right, block
from test_kernels_forward import SHAPES as FORWARD
from test_kernels_pages import CASES, pool

from mpiattn import backends
from mpiattn.arguments.arrays import on_host
from mpiattn.backends.block import BlockInputs, Gradients


def name_of(shape):
    return "-".join(map(str, shape))


def attend(backend, arrays, begin, end, into=None, scale=0.3, softcap=None):
    out, lse = into or partial(backend, *arrays[0].shape[:2], arrays[2].shape[2], "float32")
    block = BlockInputs(*map(backend.contiguous, arrays), begin, end, scale, softcap)
    backend.wait(backend.attend(block, out, lse))
    return out, lse


def host(arrays):
    return [on_host(array) for array in arrays]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", FORWARD, ids=name_of)
def test_forward(backend, shape, mask):
    dtype, head_dim, value_dim, heads, kv_heads, queries, keys = shape
    arrays = chunks(queries, keys, heads, kv_heads, head_dim, value_dim, dtype)
    begin, end = MASKS[mask](queries, keys)
    got = host(attend(backend, arrays, begin, end))
    assert_rounded(got, dense(*arrays, begin, end, 0.3), arrays[2])
    assert bits(*got) == bits(*host(attend(backend, arrays, begin, end)))


@pytest.mark.parametrize(("scale", "softcap"), [(0.3, 4.0), (-0.3, None), (0.0, None)])
def test_scores(backend, scale, softcap):
    arrays = chunks(130, 70, 2, 2, 64, 64, "float16")
    begin, end = causal(130, 70)
    got = host(attend(backend, arrays, begin, end, None, scale, softcap))
    assert_rounded(got, dense(*arrays, begin, end, scale, softcap), arrays[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_carry_in(backend, dtype):
    """Two blocks, one after the other, the second of them split as decoding splits keys."""
    for queries in (70, 3):
        q, k, v = chunks(queries, 400, 4, 1, 64, 64, dtype)
        begin, end = causal(queries, 400)
        into = None
        for first, last in ((0, 37), (37, 400)):
            at = [np.clip(edge, first, last) - first for edge in (begin, end)]
            into = attend(backend, (q, k[first:last], v[first:last]), *at, into)
        assert_rounded(host(into), dense(q, k, v, begin, end, 0.3), v)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", BACKWARD, ids=name_of)
def test_backward(backend, shape, mask):
    dtype, head_dim, value_dim, heads, kv_heads, queries, keys = shape
    arguments = block(queries, keys, heads, kv_heads, head_dim, value_dim, dtype, MASKS[mask])
    given, all_bits = list(map(backend.contiguous, arguments)), set()
    for _ in range(2):
        grads = Gradients(*(backend.empty(arguments[i].shape, "float32") for i in (0, 4, 5)))
        backend.zero(grads[:3])
        backend.wait(backend.attend_backward(*of_backward(given, 0.3), grads))
        grads = host(grads[:3])
        all_bits.add(bits(*grads))
    assert_right(arguments, grads)
    assert len(all_bits) == 1, "another run has other bits"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_pages(backend, case):
    dtype, page_size, keys, queries, heads, kv_heads, head_dim, value_dim, softcap = case
    numpy = backends.get("numpy")
    q = np.random.default_rng(1).standard_normal((queries, heads, head_dim)).astype(dtype)
    pools, pages, _ = pool(keys, page_size, kv_heads, (head_dim, value_dim), dtype)
    for mask in MASKS.values():
        results = []
        for on in (numpy, backend):
            out, lse = on.empty((queries, heads, value_dim), "float32"), on.empty((queries, heads), "float32")
            begin, end = (side[0] for side in mask(queries, keys))
            arrays = map(on.contiguous, (q, *pools))
            on.wait(on.attend_pages(BlockInputs(*arrays, begin, end, 0.3, softcap, pages, page_size), out, lse))
            results.append(host((out, lse)))
        assert_rounded(results[1], results[0], np.nan_to_num(pools[1]))


def test_pages_of_a_long_context(backend):
    """As many splits as the GPU takes; every KV head's keys a hundred times."""
    keys, heads, kv_heads = 40000, 16, 2
    q = np.random.default_rng(1).standard_normal((1, heads, 128)).astype("bfloat16")
    pools, pages, slots = pool(keys, 64, kv_heads, (128, 128), "bfloat16")
    out, lse = partial(backend, 1, heads, 128, "float32")
    begin, end = np.zeros(1, np.int32), np.full(1, keys, np.int32)
    block = BlockInputs(*map(backend.contiguous, (q, *pools)), begin, end, 0.1, pages=pages, page_size=64)
    backend.wait(backend.attend_pages(block, out, lse))
    k, v = (each[:, slots].swapaxes(0, 1) for each in pools)
    assert_rounded(host((out, lse)), dense(q, k, v, begin[None], end[None], 0.1), v)
