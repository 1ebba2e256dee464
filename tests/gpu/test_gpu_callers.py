"""Whoever calls the library on a GPU: his streams, his arrays of any library, and what he gets back."""

import numpy as np
import pytest

from mpiattn.engine.folding import on_host
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


def test_a_torch_tensor_is_not_copied_and_cupy_comes_back(plan):
    import cupy

    torch = pytest.importorskip("torch", reason="torch is not installed (the torch extra has it)")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    arrays = drawn()
    given = [torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda() for array in arrays]
    for name, tensor in zip("qkv", given):
        assert plan._backend.array(name, tensor).data.ptr == tensor.data_ptr(), "it was copied"
    out, lse = plan.forward(*given)
    assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    assert_right(out, arrays)


def test_numpy_in(plan):
    arrays = drawn()
    assert_right(plan.forward(*arrays)[0], arrays)
