"""Torch tensors on the CPU as arguments of everything, and results as tensors.  See also test_torch.py."""

import sys

import numpy as np
import pytest
from mpi4py import MPI
from test_agreement import same_error
from test_attention_call import pieces

from mpiattn import KVCache, MeshAttention, attention, query_ring_decode, ring_decode, tree_decode
from mpiattn.problem.tensors import as_array, as_tensor

if MPI.COMM_WORLD.size > 8:
    pytest.skip("many ranks would take long to load torch", allow_module_level=True)
torch = pytest.importorskip("torch", reason="torch is not installed (the torch extra has it)")
import mpiattn.torch  # noqa: E402  (needs torch)

torch.set_num_threads(1)
DTYPES = ("float16", "bfloat16", "float32", "float64")
SHAPE = {"batch": 2, "seqlen": 29, "heads": 4, "kv_heads": 2, "head_dim": 8, "causal": True}


def tensor(*shape, dtype="float32", seed=0):
    """A random tensor, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


def array(given):
    return as_array("given", given)


def same(tensors, arrays):
    """Tensors with the bits of NumPy arrays, and of their dtypes."""
    for got, wanted in zip(tensors, arrays, strict=True):
        assert isinstance(got, torch.Tensor) and isinstance(wanted, np.ndarray)
        assert str(got.dtype) == f"torch.{wanted.dtype.name}"
        assert array(got).tobytes() == wanted.tobytes() and got.shape == wanted.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_passes(comm, dtype):
    with MeshAttention(comm, **SHAPE, dtype=getattr(torch, dtype)) as plan:
        tokens, wide = len(plan.positions), plan.problem.partial_dtype
        q, dout = (tensor(2, tokens, 4, 8, dtype=dtype, seed=i) for i in (0, 1))
        k, v = (tensor(2, tokens, 2, 8, dtype=dtype, seed=i) for i in (2, 3))
        sinks, dlse = tensor(4, dtype=wide), tensor(2, 4, tokens, dtype=wide)
        cuts = torch.tensor([0, 11, 29], dtype=torch.int32)
        out, lse = plan.forward(q, k, v, sinks=sinks, cu_seqlens=cuts)
        grads = plan.backward(dout, q, k, v, out, lse, dlse=dlse, sinks=sinks, cu_seqlens=cuts)
        given = {"sinks": array(sinks), "cu_seqlens": [0, 11, 29]}
        arrays = [array(x) for x in (q, k, v)]
        expected = plan.forward(*arrays, **given)
        same((out, lse), expected)
        same(grads, plan.backward(array(dout), *arrays, *expected, dlse=array(dlse), **given))


@pytest.mark.parametrize("dtype", [*DTYPES, "int64"])
def test_scatter_and_gather(comm, dtype):
    with MeshAttention(comm, **SHAPE, layout="zigzag") as plan:
        whole = (10 * tensor(3, 29)).to(getattr(torch, dtype))
        for root in (None, comm.size - 1):
            chunk = plan.scatter(whole if root in (None, comm.rank) else None, root=root, axis=-1)
            assert torch.equal(chunk, whole[:, plan.positions])
            back = plan.gather(chunk, root=root, axis=-1)
            assert torch.equal(back, whole) if root in (None, comm.rank) else back is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_call(comm, dtype):
    own = slice(*pieces(comm, [3 + rank for rank in range(comm.size)]))
    whole = tensor(2, sum(3 + rank for rank in range(comm.size)), 2, 4, dtype=dtype)
    chunk = whole[:, own]
    same(attention(chunk, chunk, chunk, comm=comm), attention(*[array(chunk)] * 3, comm=comm))


@pytest.mark.parametrize("decode", [tree_decode, ring_decode, query_ring_decode])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding(comm, dtype, decode):
    k, v = (tensor(2, 9, 2, 4, dtype=dtype, seed=i) for i in range(2))
    q, sinks = tensor(2, 3, 4, 4, dtype=dtype), tensor(4, dtype="float64" if dtype == "float64" else "float32")
    with KVCache(
        comm, capacity=64 * comm.size, sequences=2, kv_heads=2, head_dim=4, dtype=getattr(torch, dtype)
    ) as cache:
        cache.append(k, v)
        same(decode(q, cache, sinks=sinks), decode(array(q), cache, sinks=array(sinks)))
        if decode is tree_decode:
            results = decode(q, cache, root=comm.size - 1)
            assert all(isinstance(x, torch.Tensor) if comm.rank == comm.size - 1 else x is None for x in results)


def test_results_in_tensors(comm):
    """A tensor that is given for a result is returned, whatever the inputs are; new results are as the first input."""
    with MeshAttention(comm, **SHAPE, dtype="bfloat16") as plan:
        tokens = len(plan.positions)
        q, k, v = (tensor(2, tokens, heads, 8, dtype="bfloat16", seed=heads) for heads in (4, 2, 2))
        expected = plan.forward(array(q), array(k), array(v))
        grads = plan.backward(expected[0], array(q), array(k), array(v), *expected)
        into = torch.full((2, 4, tokens, 8), float("nan"), dtype=torch.bfloat16).transpose(1, 2)
        for given in ((q, k, v), [array(x) for x in (q, k, v)]):
            out, lse = plan.forward(*given, out=into)
            assert out is into and isinstance(lse, type(given[0]))
            same((out.contiguous(),), expected[:1])
            dq, *_ = plan.backward(out.contiguous(), *given, *expected, dq=into)
            assert dq is into
            same((dq.contiguous(),), grads[:1])
        expanded = torch.empty(2, tokens, 4, 1, dtype=torch.bfloat16).expand(-1, -1, -1, 8)
        assert "out has strides" in same_error(comm, lambda: plan.forward(q, k, v, out=expanded)) or not tokens
        wanted = torch.empty(2, tokens, 4, 8, dtype=torch.bfloat16, requires_grad=True)
        assert "out requires a gradient" in same_error(comm, lambda: plan.forward(q, k, v, out=wanted))
    with KVCache(comm, capacity=64 * comm.size, sequences=2, kv_heads=2, head_dim=4) as cache:
        cache.append(tensor(2, 9, 2, 4), tensor(2, 9, 2, 4))
        q = tensor(2, 3, 4, 4)
        expected, into = tree_decode(array(q), cache), torch.empty(2, 4, 3)
        results = tree_decode(q, cache, lse=into)
        assert results[1] is into
        same(results, expected)


def test_numbers_of_a_cache(comm):
    with KVCache(comm, capacity=64 * comm.size, sequences=3, kv_heads=2, head_dim=4) as cache:
        k = tensor(2, 5, 2, 4)
        cache.append(k, k, sequences=torch.tensor([2, 0], dtype=torch.int32), counts=torch.tensor([5, 3]))
        assert cache.lengths == (3, 0, 5)
        cache.truncate(torch.tensor([1, 2, 0]), sequences=torch.tensor([0, 2, 1]))
        assert cache.lengths == (1, 0, 2)
        out, _ = tree_decode(tensor(1, 1, 2, 4), cache, sequences=torch.tensor([2]))
        assert out.shape == (1, 1, 2, 4)


def test_what_requires_a_gradient(comm):
    """It is refused by name on every rank, since it would be lost, unless torch records none."""
    last = comm.rank == comm.size - 1
    with MeshAttention(comm, **SHAPE) as plan, KVCache(comm, capacity=64, kv_heads=2, head_dim=8) as cache:
        tokens = len(plan.positions)
        q, k = tensor(2, tokens, 4, 8).requires_grad_(last), tensor(2, tokens, 2, 8)
        whole, new = tensor(2, 29).requires_grad_(last), tensor(1, 1, 2, 8).requires_grad_(last)
        calls = {
            "q ": lambda: plan.forward(q, k, k),
            "q": lambda: attention(q, k, k, comm=comm),
            "array": lambda: plan.scatter(whole, root=None),
            "chunk": lambda: plan.gather(whole[:, plan.positions]),
            "k": lambda: cache.append(new, new),
        }
        for name, call in calls.items():
            text = same_error(comm, call)
            assert text.startswith(f"{name.strip()} requires a gradient") and "mpiattn.torch.attention" in text
            with torch.no_grad():
                call()


@pytest.mark.parametrize(
    "documents",
    [
        {"cu_seqlens": torch.tensor([0, 11, 29], dtype=torch.int32)},
        {"cu_seqlens": torch.tensor([[0, 11, 29], [2, 2, 20]]), "padding": True},
        {"cu_seqlens": [torch.tensor([0, 11, 29]), torch.tensor([0, 29])]},
        {"lengths": torch.tensor([29, 7], dtype=torch.int32), "lengths_k": torch.tensor([5, 29], dtype=torch.int16)},
    ],
    ids=str,
)
def test_documents(comm, documents):
    plain = {
        name: [x.tolist() for x in value] if isinstance(value, list) else value.tolist()
        for name, value in documents.items()
        if name != "padding"
    }
    padding = documents.get("padding", False)
    documents = {name: documents[name] for name in plain}
    with MeshAttention(comm, **SHAPE) as plan:
        q, k = tensor(2, len(plan.positions), 4, 8).requires_grad_(), tensor(2, len(plan.positions), 2, 8)
        out, lse = mpiattn.torch.attention(plan, q, k, k, **documents, padding=padding)
        for value in documents.values():  # the backward pass has those of its forward pass
            for part in value if isinstance(value, list) else [value]:
                part.zero_()
        out.sum().backward()
        arrays = [array(x.detach()) for x in (q, k, k)]
        expected = plan.forward(*arrays, **plain, padding=padding)
        same((out.detach(), lse.detach()), expected)
        grads = plan.backward(np.ones_like(expected[0]), *arrays, *expected, **plain, padding=padding)
        same([q.grad], grads[:1])
        for value, part in zip(documents.values(), plain.values()):
            for value_of, whole in zip(
                value if isinstance(value, list) else [value], part if isinstance(value, list) else [part]
            ):
                value_of.copy_(torch.tensor(whole))
        text = same_error(comm, lambda: plan.forward(*arrays, cu_seqlens=torch.tensor([0.0, 29.0])))
        assert "must hold whole numbers" in text
        text = same_error(comm, lambda: plan.forward(*arrays, cu_seqlens=torch.tensor(3)))
        assert "must be a sequence of positions" in text


def test_torch_is_not_loaded(monkeypatch):
    """Who has not loaded it has no tensors."""
    monkeypatch.delitem(sys.modules, "torch")
    ones = np.ones(3)
    assert as_array("q", ones) is ones and "torch" not in sys.modules


def test_memory_is_shared():
    for dtype in DTYPES:
        given = tensor(3, dtype=dtype)
        assert as_tensor(array(given)).data_ptr() == given.data_ptr()


@pytest.mark.parametrize("name", ["cu_seqlens", "lengths", "prefixes", "causal_documents"])
def test_documents_on_another_device(comm, name):
    """They are read before anything is computed."""
    with MeshAttention(comm, **SHAPE) as plan:
        q, k = tensor(2, len(plan.positions), 4, 8), tensor(2, len(plan.positions), 2, 8)
        at = [0, 9, 29] if name == "cu_seqlens" else [1, 1]
        text = same_error(comm, lambda: plan.forward(q, k, k, **{name: torch.tensor(at, device="meta")}))
        assert text.startswith(f"{name} is on device meta; it must be in host memory, as {name}.cpu()")
