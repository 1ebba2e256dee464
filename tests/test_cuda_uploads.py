"""What calls of the back end `cuda` copy from the host to the GPU, counted on a made-up CuPy."""

import fake_cupy
import numpy as np
import pytest
from mpi4py import MPI

from mpiattn import KVCache, MeshAttention, tree_decode
from mpiattn.arguments.arrays import on_host
from mpiattn.backends.cuda import uploads as ring
from mpiattn.backends.cuda.backend import CudaBackend
from mpiattn.backends.testing import emulated

pytestmark = pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler")


@pytest.fixture
def uploads(gpu, monkeypatch):
    """Shapes of NumPy arrays that are copied to the GPU, by CuPy or by way of the ring of uploads."""
    shapes, asarray, upload = [], fake_cupy.asarray, CudaBackend._upload

    def counted(a, *rest, **named):
        if isinstance(a, np.ndarray):
            shapes.append(a.shape)
        return asarray(a, *rest, **named)

    def sent(backend, array):
        shapes.append(array.shape)
        return upload(backend, array)

    monkeypatch.setattr(fake_cupy, "asarray", counted)
    monkeypatch.setattr(CudaBackend, "_upload", sent)
    return shapes


def test_row_intervals_are_kept_on_the_device(uploads):
    """Calls with the same masks and documents send none: forward and backward, blocks and tiles."""
    ones = fake_cupy.asarray(np.ones((1, 9, 1, 16), np.float32))
    for schedule in ("greedy", "collective"):
        with MeshAttention(
            MPI.COMM_SELF, seqlen=9, heads=1, head_dim=16, causal=True, schedule=schedule, backend="cuda"
        ) as plan:
            for cuts, new in ((None, 2), (None, 0), ([0, 4, 9], 2), ([0, 4, 9], 0), ([0, 5, 9], 2)):
                uploads.clear()
                out, lse = plan.forward(ones, ones, ones, cu_seqlens=cuts)
                plan.backward(ones, ones, ones, ones, out, lse, cu_seqlens=cuts)
                assert len(uploads) == new, (schedule, cuts, uploads)
    shared = {"causal": True, "layout": "zigzag", "schedule": "collective", "backend": "cuda"}
    with MeshAttention(MPI.COMM_SELF, seqlen=9, heads=1, head_dim=16, **shared) as plan:
        plan.forward(ones, ones, ones)
        uploads.clear()
        plan.forward(ones, ones, ones)
        assert not uploads


@pytest.mark.parametrize("sequences", [1, 3])
def test_block_tables_are_kept_on_the_device(uploads, sequences):
    """Decoding sends what the queries see, block tables only after pages have changed, and a list of work once."""
    of_tokens = fake_cupy.asarray(np.ones((sequences, 5, 1, 16), np.float32))
    token, q = of_tokens[:, :1], fake_cupy.asarray(np.ones((sequences, 1, 2, 16), np.float32))
    with KVCache(
        MPI.COMM_SELF, capacity=64, sequences=sequences, page_size=4, kv_heads=1, head_dim=16, backend="cuda"
    ) as cache:
        cache.append(of_tokens, of_tokens)
        for length in range(6, 11):
            cache.append(token, token)
            uploads.clear()
            out, _ = tree_decode(q, cache)
            assert on_host(out) == pytest.approx(1)
            intervals, tables = (2 * sequences,), (sequences + sequences * -(-length // 4),)
            work = (4 * sequences + sequences + 1,)  # an item for each, and the numbers of their partials
            assert uploads == [work] * (length == 6) + [intervals] + [tables] * (length in (6, 9)), length


def test_the_ring_is_not_overtaken(gpu, monkeypatch):
    """Calls of any number before the first copy's turn comes: each launch still reads its own numbers."""
    monkeypatch.setattr(ring, "LENGTH", 1024)
    rng = np.random.default_rng(0)
    sent, kept = [], []
    for number in range(200):
        array = np.full(rng.integers(1, 129), number, np.int32)
        with gpu._on(gpu.stream):
            copy = gpu.cupy.empty(array.shape, np.int32)
            gpu.cupy.take(gpu._uploads(array), gpu.cupy.asarray(np.arange(len(array))), axis=0, out=copy)
        sent.append(array)
        kept.append(copy)
    assert all((on_host(copy) == array).all() for copy, array in zip(kept, sent))
    assert gpu._uploads(np.zeros(1024 // 8 + 1, np.int32)) is None


def test_more_queries_than_the_ring_takes(gpu, monkeypatch):
    monkeypatch.setattr(ring, "LENGTH", 8)
    ones = fake_cupy.asarray(np.ones((3, 5, 1, 16), np.float32))
    with KVCache(MPI.COMM_SELF, capacity=64, sequences=3, kv_heads=1, head_dim=16, backend="cuda") as cache:
        cache.append(ones, ones)
        assert on_host(tree_decode(ones[:, :1], cache)[0]) == pytest.approx(1)
