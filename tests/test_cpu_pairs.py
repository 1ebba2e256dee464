"""What bfloat16 promises on AMX and VDPBF16PS beyond what tests/test_cpu.py holds for every instruction set."""

import numpy as np
import pytest
from blocks import MASKS, NOISE, assert_rounded, chunks, dense, everything, partial
from dense import bits, error, largest
from test_cpu import PAIRS

from mpiattn import backends
from mpiattn.backends.cpu import library

pytestmark = pytest.mark.skipif(not library.PATH.is_file(), reason=f"not compiled: {library.BUILD}")


@pytest.fixture(params=PAIRS)
def kernels(request, monkeypatch):
    monkeypatch.setenv(library.VARIABLE, request.param)
    if why := backends.find("cpu").missing():
        pytest.skip(why)
    made = backends.get("cpu")
    yield made
    made.close()


def attend(kernels, q, k, v, begin, end, scale=0.11):
    out, lse = partial(kernels, *q.shape[:2], v.shape[2], "float32")
    kernels.attend(q, k, v, begin, end, out, lse, scale)
    return out, lse


def rms(array):
    return np.sqrt(np.mean(np.square(array)))


def test_weights_are_rounded_once(kernels):
    """Errors are those of a computation in float64 whose weights alone are rounded; lse has none of that."""
    q, k, v = chunks(100, 500, 1, 1, 64, 64, "bfloat16")
    ref, lse = dense(q, k, v, *everything(100, 500), 0.11)
    score = np.einsum("qhd,khd->qk", q.astype(np.float64), k.astype(np.float64)) * 0.11
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    once = weight.astype(v.dtype).astype(np.float64) @ v[:, 0].astype(np.float64) / weight.sum(axis=1, keepdims=True)
    got = attend(kernels, q, k, v, *everything(100, 500))
    assert rms(got[0] - ref) <= 1.1 * rms(once - ref[:, 0])
    assert error(got[1], lse) <= NOISE * largest(lse)


def test_beyond_the_tiles(kernels):
    """Dims, rows and keys just past a tile, a block and a panel."""
    for queries, keys, dim in ((193, 2049, 32), (33, 257, 65), (31, 31, 31), (1, 33, 1)):
        q, k, v = chunks(queries, keys, 1, 1, dim, dim, "bfloat16")
        for mask in MASKS.values():
            assert_rounded(
                attend(kernels, q, k, v, *mask(queries, keys)), dense(q, k, v, *mask(queries, keys), 0.11), v
            )


def test_any_strides(kernels):
    q, k, v = chunks(70, 90, 4, 2, 40, 24, "bfloat16")
    apart = [np.repeat(array, 2, 1)[:, ::2] for array in (q, k, v)]
    assert bits(*attend(kernels, *apart, *everything(70, 90))) == bits(*attend(kernels, q, k, v, *everything(70, 90)))


def test_threads_change_no_bit(kernels, monkeypatch):
    """Each thread shapes its own tiles."""
    arguments = *chunks(700, 500, 2, 1, 64, 64, "bfloat16"), *MASKS["causal"](700, 500)
    results = set()
    for threads in (1, 2, 5):
        monkeypatch.setattr(kernels, "threads", threads)
        results.add(bits(*attend(kernels, *arguments)))
    assert len(results) == 1
