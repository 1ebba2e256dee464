"""Whoever calls the library on a GPU: his streams, his arrays of any library, and what he gets back."""

import numpy as np
import pytest

from mpiattn.arguments.arrays import on_host
from mpiattn.verify import reference

SHAPE = {"seqlen": 300, "heads": 4, "kv_heads": 2, "head_dim": 64}


@pytest.fixture
def plan():
    from mpi4py import MPI

    from mpiattn import MeshAttention

    with MeshAttention(MPI.COMM_SELF, **SHAPE, dtype="bfloat16", causal=True, backend="cuda") as made:
        yield made


def drawn():
    rng = np.random.default_rng(0)
    shapes = [(1, 300, heads, 64) for heads in (4, 2, 2)]
    return [rng.standard_normal(shape).astype("bfloat16") for shape in shapes]


def assert_right(out, arrays):
    expected, _ = reference.attention(*arrays, causal=True)
    assert np.abs(on_host(out).astype(np.float64) - expected).max() < 0.02 * np.abs(expected).max()


def test_the_callers_stream(plan):
    """Inputs that are still being made on it are waited for, and it goes on only after the results."""
    import cupy

    arrays, rows = drawn(), cupy.asarray(np.arange(300))
    held = [cupy.asarray(array) for array in arrays]
    busy = cupy.empty((2**25,), np.float32)

    def late_copy(array):
        copy = cupy.empty(array.shape, array.dtype)
        copy.fill(0)
        for number in range(20):  # milliseconds
            busy.fill(number)
        cupy.take(array[0].view("uint16"), rows, axis=0, out=copy[0].view("uint16"))
        return copy

    made = cupy.cuda.get_current_stream().record()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.wait_event(made)
        given = [late_copy(array) for array in held]
        out, _ = plan.forward(*given)
        for array in given:  # after the call they are the caller's again
            array.fill(0)
        out = on_host(late_copy(out))
    assert_right(out, arrays)


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch", reason="torch is not installed (the torch extra has it)")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


def tensors(torch, arrays):
    return [torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda() for array in arrays]


def as_array(tensor):
    """A bfloat16 tensor on the GPU as NumPy's, read on torch's current stream."""
    import torch

    return tensor.view(torch.int16).cpu().numpy().view("bfloat16")


def test_a_torch_tensor_is_not_copied_and_tensors_come_back(torch, plan):
    arrays = drawn()
    given = tensors(torch, arrays)
    for name, tensor in zip("qkv", given):
        assert plan._backend.array(name, tensor).data.ptr == tensor.data_ptr(), "it was copied"
    out, lse = plan.forward(*given)
    assert isinstance(out, torch.Tensor) and isinstance(lse, torch.Tensor) and out.device == given[0].device
    assert_right(as_array(out), arrays)
    grads = plan.backward(out, *given, out, lse)
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 3 and all(grad.is_cuda for grad in grads)


def test_torchs_side_stream(torch, plan):
    """As `test_the_callers_stream`, of a stream that CuPy does not know, into new memory and into torch's."""
    arrays = drawn()
    held = tensors(torch, arrays)
    busy = torch.empty(2**25, device="cuda")
    torch.cuda.synchronize()
    for into in (None, torch.empty_like(held[0])):
        with torch.cuda.stream(torch.cuda.Stream()):
            for number in range(20):  # milliseconds
                busy.fill_(number)
            given = [tensor.clone() for tensor in held]
            out, _ = plan.forward(*given, out=into)
            for tensor in given:  # after the call they are the caller's again
                tensor.zero_()
            assert_right(as_array(out.clone()), arrays)


def test_one_pool_of_memory(torch, plan):
    """CuPy allocates from torch's pool, as docs/training.md has it."""
    import cupy

    def allocate(nbytes, device):
        return torch.cuda.caching_allocator_alloc(nbytes, device, cupy.cuda.get_current_stream(device).ptr)

    def free(address, device):
        torch.cuda.caching_allocator_delete(address)

    arrays, before = drawn(), torch.cuda.memory_allocated()
    with cupy.cuda.using_allocator(cupy.cuda.PythonFunctionAllocator(allocate, free).malloc):
        given = [cupy.asarray(array) for array in arrays]
        assert torch.cuda.memory_allocated() > before
        for _ in range(3):
            assert_right(plan.forward(*given)[0], arrays)


def test_numpy_in(plan):
    arrays = drawn()
    assert_right(plan.forward(*arrays)[0], arrays)
