"""The back end `cuda` and torch tensors: torch's streams, which CuPy does not know, and results of torch's own."""

import fake_cupy
import fake_torch
import numpy as np
import pytest
from mpi4py import MPI

from mpiattn import KVCache, MeshAttention, attention, query_ring_decode, ring_decode, tree_decode
from mpiattn.backends.testing import emulated
from mpiattn.errors import ArgumentError, VerificationError
from mpiattn.verify import reference

pytestmark = pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler")
SHAPE = {"seqlen": 7, "heads": 2, "head_dim": 16}
TRIES = 5  # the order in which streams go on is drawn at random


@pytest.fixture
def torch(gpu):
    with fake_torch.install():
        yield fake_torch


def drawn(count=3, seed=0):
    return np.random.default_rng(seed).standard_normal((count, 1, 7, 2, 16), np.float32)


def seen(torch, results, inputs):
    """What the caller's stream sees of tensors, next after a call; then he uses his inputs for something else."""
    copies = [result.clone() for result in results]
    for given in inputs:
        given.fill_(np.nan)
    torch._stream().synchronize()
    return [copy.array.values for copy in copies]


@pytest.fixture(params=["side stream", "null stream"])
def stream(request, torch):
    """Torch's current stream, as often as wanted."""

    def every():
        for _ in range(TRIES):
            made = fake_cupy.Stream(non_blocking=True) if request.param == "side stream" else fake_cupy.Stream.null
            with torch.cuda.stream(made):
                yield made

    return every


@pytest.fixture
def plan(torch):
    with MeshAttention(MPI.COMM_SELF, **SHAPE, causal=True, backend="cuda") as made:
        yield made


def test_forward(torch, plan, stream):
    arrays = drawn()
    expected, expected_lse = reference.attention(*arrays, causal=True)
    for _ in stream():
        given = [torch.tensor(array) for array in arrays]
        out, lse = plan.forward(*given)
        assert isinstance(out, torch.Tensor) and isinstance(lse, torch.Tensor)
        got, got_lse = seen(torch, (out, lse), given)
        assert np.allclose(got, expected, atol=1e-5) and np.allclose(got_lse, expected_lse, atol=1e-5)


def test_results_in_torchs_memory(torch, plan, stream):
    """Whatever the inputs are: the memory is ready for the call when torch's stream is, and torch's after it."""
    arrays = drawn()
    expected, _ = reference.attention(*arrays, causal=True)
    on_gpu = [fake_cupy.asarray(array) for array in arrays]
    for inputs in (arrays, on_gpu):
        for _ in stream():
            out = torch.tensor(np.zeros_like(arrays[0]))
            out.fill_(7)  # late: it must not come after the result
            given, lse = plan.forward(*inputs, out=out)
            assert given is out and isinstance(lse, fake_cupy.ndarray), "of q's library, unless it is the caller's"
            assert np.allclose(seen(torch, [out], ())[0], expected, atol=1e-5)


def test_arrays_of_both(torch, plan, stream):
    """CuPy's current stream has its arrays, torch's current stream torch's."""
    arrays = drawn()
    expected, _ = reference.attention(*arrays, causal=True)
    for _ in stream():
        with fake_cupy.Stream(non_blocking=True) as cupys:
            k, out = fake_cupy.asarray(arrays[1]), fake_cupy.asarray(np.zeros_like(arrays[0]))
            q, v = torch.tensor(arrays[0]), torch.tensor(arrays[2])
            plan.forward(q, k, v, out=out)
            copy = fake_cupy.empty(out.shape, np.float32)
            source, target = out.values, copy.values
            fake_cupy._later(lambda source=source, target=target: np.copyto(target, source))
            k.fill(np.nan)
            cupys.synchronize()
            assert np.allclose(copy.values, expected, atol=1e-5)


def test_backward(torch, plan, stream):
    q, k, v, dout = drawn(4)
    sinks = np.array([0.5, -1], np.float32)
    results = plan.forward(*map(fake_cupy.asarray, (q, k, v)), sinks=fake_cupy.asarray(sinks))
    out, lse = (array.get() for array in results)
    expected = [
        array.get() for array in plan.backward(*(map(fake_cupy.asarray, (dout, q, k, v, out, lse))), sinks=sinks)
    ]
    for _ in stream():
        given = [torch.tensor(array) for array in (dout, q, k, v, out, lse)]
        late_sinks = torch.tensor(np.zeros(2, np.float32))
        late_sinks = torch.tensor(sinks)
        grads = plan.backward(*given, sinks=late_sinks)
        assert all(isinstance(grad, torch.Tensor) for grad in grads) and len(grads) == 4
        for got, wanted in zip(seen(torch, grads, given), expected, strict=True):
            assert np.allclose(got, wanted, atol=1e-5)


def test_verify(torch, plan, stream):
    """Tensors and CuPy's arrays, which come late to this call too."""
    q, k, v, dout = drawn(4)
    sinks = np.array([0.5, -1], np.float32)
    for _ in stream():
        for on_gpu in (torch.tensor, fake_cupy.asarray):
            given = [on_gpu(array) for array in (q, k, v)]
            out, lse = plan.forward(*given, sinks=on_gpu(sinks))
            late = on_gpu(dout)
            grads = plan.backward(late, *given, out, lse, sinks=on_gpu(sinks))
            options = {"sinks": on_gpu(sinks), "dout": late, "samples": 2}
            verification = plan.verify(*given, out, lse, grads=grads, **options)
            assert len(verification.arrays) == 6 and verification.passed
    wrong = [array if name != 1 else fake_cupy.asarray(2 * k) for name, array in enumerate(grads)]
    with pytest.raises(VerificationError, match="failed: dk off by"):
        plan.verify(*given, out, lse, grads=wrong, **options)


def test_planes(torch, stream):
    """A mesh that has another layout than its caller: the call begins and ends several times."""
    arrays = drawn()
    expected, _ = reference.attention(*arrays, causal=True)
    shape = {**SHAPE, "layout": "contiguous", "mesh_layout": "striped", "causal": True}
    with MeshAttention(MPI.COMM_SELF, **shape, tile=(1, 1), backend="cuda") as plan:
        for _ in stream():
            given = [torch.tensor(array) for array in arrays]
            out, _ = plan.forward(*given)
            assert np.allclose(seen(torch, [out], given)[0], expected, atol=1e-5)


@pytest.mark.parametrize("decode", [tree_decode, ring_decode, query_ring_decode])
def test_decoding(torch, stream, decode):
    q, k, v = drawn()
    expected, _ = reference.attention(q, k, v, causal=True)
    for _ in stream():
        with KVCache(MPI.COMM_SELF, capacity=9, kv_heads=2, head_dim=16, backend="cuda") as cache:
            given = [torch.tensor(array) for array in (k, v)]
            cache.append(*given)
            for array in given:
                array.fill_(np.nan)
            queries, sinks = torch.tensor(q), torch.tensor(np.full(2, -np.inf, np.float32))
            out, lse = decode(queries, cache, sinks=sinks)
            assert isinstance(lse, torch.Tensor)
            assert np.allclose(seen(torch, [out], [queries])[0], expected, atol=1e-5)
            before = len(torch._stream().queue)
            with fake_cupy.Stream(non_blocking=True):
                keys, _ = cache.local(0)
                assert len(torch._stream().queue) == before, "it has taken no tensor"
                assert (keys.get() == k[0]).all()


def test_one_call(torch, stream):
    arrays = drawn()
    expected, _ = reference.attention(*arrays, causal=True)
    for _ in stream():
        given = [torch.tensor(array) for array in arrays]
        out, _ = attention(*given, comm=MPI.COMM_SELF, causal=True)
        assert np.allclose(seen(torch, [out], given)[0], expected, atol=1e-5)


def test_whole_arrays(torch, plan, stream):
    """A scattered tensor is dealt out in tensors on the GPU; gathered ones become one in host memory."""
    whole = drawn()[0]
    for _ in stream():
        given = torch.tensor(whole)
        chunk = plan.scatter(given)
        assert chunk.is_cuda and (seen(torch, [chunk], [given])[0] == whole).all()
        chunk = torch.tensor(whole)
        gathered = plan.gather(chunk)
        assert isinstance(gathered, torch.Tensor) and (gathered.numpy() == whole).all()


def test_what_a_call_before_has_taken_does_not_matter(torch, plan):
    """A call of CuPy arrays is ordered by CuPy's stream alone, also after one of tensors, failed or not."""
    arrays = drawn()
    expected, _ = reference.attention(*arrays, causal=True)
    for bad in (False, True, True):
        given = [torch.tensor(array) for array in arrays]
        if bad:
            with pytest.raises(ArgumentError, match="k has shape"):
                plan.forward(given[0], torch.tensor(arrays[1][:, :5]), given[2])
        else:
            plan.forward(*given)
        torch_stream = fake_cupy.Stream(non_blocking=True)
        with torch.cuda.stream(torch_stream), fake_cupy.Stream(non_blocking=True) as cupys:
            before = len(torch_stream.queue)
            out, _ = plan.forward(*map(fake_cupy.asarray, arrays))
            assert isinstance(out, fake_cupy.ndarray) and len(torch_stream.queue) == before
            seen_by_cupy = fake_cupy.empty(out.shape, np.float32)
            target, source = seen_by_cupy.values, out.values
            fake_cupy._later(lambda target=target, source=source: np.copyto(target, source))
            cupys.synchronize()
            assert np.allclose(target, expected, atol=1e-5)


def test_tensors_leave_cupys_stream_alone(torch, plan):
    """CuPy's null stream is torch's, too: what is there must not wait for a call on a side stream."""
    with torch.cuda.stream(fake_cupy.Stream(non_blocking=True)):
        given = [torch.tensor(array) for array in drawn()]
        before = len(fake_cupy.Stream.null.queue)
        plan.forward(*given)
        assert len(fake_cupy.Stream.null.queue) == before


def test_gradients_are_not_lost(torch, plan):
    tensors = [torch.tensor(array) for array in drawn()]
    tensors[1].requires_grad = True
    with pytest.raises(ArgumentError, match=r"k requires a gradient, .*use mpiattn\.torch\.attention"):
        plan.forward(*tensors)


class Namespace:
    """Another library's, with arrays that know it."""

    class Array:
        def __init__(self, array):
            self.array, self.__cuda_array_interface__ = array, array.__cuda_array_interface__

        def __array_namespace__(self):
            return Namespace

    from_dlpack = Array


def test_another_library(torch, plan):
    """Its arrays come back where it takes arrays from others; else CuPy's do."""
    arrays = drawn()
    expected, _ = reference.attention(*arrays, causal=True)
    q, k, v = (Namespace.Array(fake_cupy.asarray(array)) for array in arrays)
    out, lse = plan.forward(q, k, v)
    assert isinstance(out, Namespace.Array) and isinstance(lse, Namespace.Array)
    assert np.allclose(out.array.get(), expected, atol=1e-5)
    assert isinstance(plan.forward(q.array, k, v)[0], fake_cupy.ndarray), "q's library decides"
