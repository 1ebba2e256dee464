"""mpiattn.torch: values and gradients against float64, shared memory, and errors that all ranks raise."""

import re

import numpy as np
import pytest
from launch import DOCS
from mpi4py import MPI
from runs import agreed, tiles
from test_agreement import same_error

from mpiattn import MeshAttention
from mpiattn.errors import ArgumentError, MpiattnError, VerificationError
from mpiattn.verify import reference

if MPI.COMM_WORLD.size > 8:
    pytest.skip("many ranks would take long to load torch", allow_module_level=True)
torch = pytest.importorskip("torch", reason="torch is not installed (the torch extra has it)")

from mpiattn.torch import attention  # noqa: E402  (needs torch)

torch.set_num_threads(1)

TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2}  # of the largest value
SHAPE = {"batch": 2, "seqlen": 37, "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6, "causal": True}
DOCUMENTS = {
    "cu_seqlens": [0, 5, 5, 21, 37],
    "prefixes": [3, 0, 100, 8],
    "causal_documents": [True, False, True, False],
}
NAMES = ("q", "k", "v", "sinks")


def wide(plan):
    return getattr(torch, plan.problem.partial_dtype)


def draw(plan, seed=0):
    """Whole q, k, v, sinks, dout and dlse as tensors, the same on every rank."""
    p, generator = plan.problem, torch.Generator().manual_seed(seed)
    queries, keys = (p.batch, p.seqlen, p.heads), (p.batch, p.seqlen_k, p.kv_heads)
    shapes = {
        "q": (*queries, p.head_dim),
        "k": (*keys, p.head_dim),
        "v": (*keys, p.value_dim),
        "sinks": (p.heads,),
        "dout": (*queries, p.value_dim),
        "dlse": (p.batch, p.heads, p.seqlen),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(
            wide(plan) if name in ("sinks", "dlse") else getattr(torch, p.dtype)
        )
        for name, shape in shapes.items()
    }


def cut(plan, whole):
    """This rank's chunks of whole tensors; q, k, v and sinks require gradients."""
    at, at_k = plan.positions, plan.positions_k
    chunks = {
        name: tensor[:, at_k] if name in "kv" else tensor[:, at]
        for name, tensor in whole.items()
        if name in ("q", "k", "v", "dout")
    }
    chunks |= {"sinks": whole["sinks"].clone(), "dlse": whole["dlse"][..., at]}
    return {name: tensor.requires_grad_(name in NAMES) for name, tensor in chunks.items()}


def loss_of(out, lse, chunks):
    return (out.to(lse.dtype) * chunks["dout"].to(lse.dtype)).sum() + (lse * chunks["dlse"]).sum()


def off(got, expected):
    got = got.detach().to(torch.float64).numpy()
    return np.abs(got - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 0.1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("documents", [{}, DOCUMENTS])
def test_values_and_gradients(comm, dtype, sinks, documents):
    with MeshAttention(comm, **SHAPE, dtype=dtype, layout="zigzag", tile=tiles(comm.size)[-1 if sinks else 0]) as plan:
        whole = draw(plan)
        chunks, at, at_k = cut(plan, whole), plan.positions, plan.positions_k
        given = {"sinks": chunks["sinks"]} if sinks else {}
        out, lse = attention(plan, chunks["q"], chunks["k"], chunks["v"], **documents, **given)
        loss_of(out, lse, chunks).backward()
    arrays = {name: tensor.detach().to(torch.float64).numpy() for name, tensor in whole.items()}
    q, k, v = (arrays[name] for name in "qkv")
    how = {"causal": True, **documents, "sinks": arrays["sinks"] if sinks else None}
    ref, ref_lse = reference.attention(q, k, v, **how)
    dq, dk, dv, *dsinks = reference.backward(arrays["dout"], q, k, v, **how, dlse=arrays["dlse"])
    compared = {
        "out": (out, ref[:, at]),
        "lse": (lse, ref_lse[..., at]),
        "dq": (chunks["q"].grad, dq[:, at]),
        "dk": (chunks["k"].grad, dk[:, at_k]),
        "dv": (chunks["v"].grad, dv[:, at_k]),
    }
    if sinks:
        compared["dsinks"] = comm.allreduce(chunks["sinks"].grad), dsinks[0]
    else:
        assert chunks["sinks"].grad is None
    complaints = {name: off(*pair) for name, pair in compared.items() if not off(*pair) < TOLERANCE[dtype]}
    agreed(comm, complaints and str(complaints))
    assert {out.dtype, *(chunks[name].grad.dtype for name in "qkv")} == {getattr(torch, dtype)}
    assert lse.dtype == wide(plan)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_keys_that_hold_the_values(comm, dtype):
    """k's gradient is that of a plan with both arrays, where v is cut out of k."""
    grads = []
    for shared in (True, False):
        with MeshAttention(comm, **SHAPE, dtype=dtype, tile=tiles(comm.size)[0], shared_kv=shared, scale=0.3) as plan:
            chunks = cut(plan, draw(plan))
            k = chunks["k"]
            out, lse = attention(plan, chunks["q"], k, *[k[..., :6]] * (not shared), sinks=chunks["sinks"])
            loss_of(out, lse, chunks).backward()
            grads.append([chunks[name].grad.to(torch.float64).numpy() for name in ("q", "k", "sinks")])
    assert all(off(torch.from_numpy(got), ref) < TOLERANCE[dtype] for got, ref in zip(*grads))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_memory_is_shared(comm, dtype):
    """What the plan gets and gives is the tensors' own memory, both ways, in both passes."""
    with MeshAttention(comm, seqlen=40, heads=2, head_dim=4, dtype=dtype) as plan:
        seen = {}

        def recorded(name):
            run = getattr(plan, name)

            def call(*arrays, **options):
                results = run(*arrays, **options)
                seen[name] = arrays, results
                return results

            return call

        plan.forward, plan.backward = recorded("forward"), recorded("backward")
        q, k, v = (
            torch.randn(1, len(plan.positions), 2, 4, dtype=getattr(torch, dtype), requires_grad=True) for _ in range(3)
        )
        dout, dlse = torch.randn_like(q), torch.randn(1, 2, len(plan.positions), dtype=wide(plan))
        out, lse = attention(plan, q, k, v)
        grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))

        def same(tensors, others):
            assert [tensor.data_ptr() for tensor in tensors] == [other.data_ptr() for other in others]
            assert {str(other.dtype) for other in others} <= {f"torch.{dtype}", f"torch.{plan.problem.partial_dtype}"}

        same((q, k, v), seen["forward"][0])
        same((out, lse), seen["forward"][1])
        same((dout, q, k, v, out, lse), seen["backward"][0])
        same(grads, seen["backward"][1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_strides_do_not_matter(comm, dtype):
    """Heads before tokens, as other attention functions have them, and a gradient that is one number everywhere."""
    with MeshAttention(comm, seqlen=30, heads=2, head_dim=4, dtype=dtype, causal=True) as plan:
        chunks = [torch.randn(1, 2, len(plan.positions), 4, dtype=getattr(torch, dtype)) for _ in range(3)]
        results = []
        for view in (lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2).contiguous()):
            leaves = [x.clone().requires_grad_() for x in chunks]
            out, lse = attention(plan, *map(view, leaves))
            out.sum().backward()
            results.append([out, lse, *(leaf.grad for leaf in leaves)])
        assert all(torch.equal(a, b) for a, b in zip(*results))


def test_gradcheck():
    """torch's own check, of a plan that each rank has for itself."""
    with MeshAttention(
        MPI.COMM_SELF, seqlen=7, heads=2, kv_heads=1, head_dim=3, dtype="float64", causal=True, softcap=3.0
    ) as plan:
        chunks = cut(plan, draw(plan))
        assert torch.autograd.gradcheck(
            lambda q, k, v, s: attention(plan, q, k, v, sinks=s, cu_seqlens=[0, 3, 7]), [chunks[name] for name in NAMES]
        )


def test_finite_differences(comm):
    """Of the sum of the ranks' losses, where one element of one rank's chunk, or of all ranks' sinks, is moved."""
    with MeshAttention(
        comm, seqlen=13, heads=2, kv_heads=1, head_dim=3, dtype="float64", causal=True, layout="striped"
    ) as plan:
        whole = draw(plan)

        def losses(whole):
            chunks = cut(plan, whole)
            loss = loss_of(
                *attention(plan, *(chunks[name] for name in "qkv"), sinks=chunks["sinks"], cu_seqlens=[0, 6, 13]),
                chunks,
            )
            return loss, chunks

        loss, chunks = losses(whole)
        loss.backward()
        grads = {name: torch.from_numpy(plan.gather(chunks[name].grad.numpy(), root=None)) for name in "qkv"}
        grads["sinks"] = comm.allreduce(chunks["sinks"].grad)
        for name, element in (
            ("q", (0, 8, 1, 2)),
            ("k", (0, 0, 0, 1)),
            ("v", (0, 12, 0, 0)),
            ("k", (0, 7, 0, 2)),
            ("sinks", (1,)),
        ):
            moved = []
            for step in (1e-5, -1e-5):
                inputs = {**whole, name: whole[name].clone()}
                inputs[name][element] += step
                moved.append(comm.allreduce(losses(inputs)[0].item()))
            assert abs((moved[0] - moved[1]) / 2e-5 - grads[name][element]) < 1e-6


@pytest.mark.parametrize("wrong", ["nothing", "out", "dk"])
def test_verified(comm, monkeypatch, wrong):
    """A result that is wrong on one rank is found in its pass, and not where nobody asks for it."""
    forward, backward, guilty = MeshAttention.forward, MeshAttention.backward, comm.size - 1

    def spoilt(self, results, name):
        if wrong == name and comm.rank == guilty:
            results[name == "dk"][:, -1] += 1
        return results

    monkeypatch.setattr(MeshAttention, "forward", lambda self, *a, **o: spoilt(self, forward(self, *a, **o), "out"))
    monkeypatch.setattr(MeshAttention, "backward", lambda self, *a, **o: spoilt(self, backward(self, *a, **o), "dk"))
    with MeshAttention(comm, **SHAPE, dtype="bfloat16", layout="striped") as plan:
        chunks, last = cut(plan, draw(plan)), plan.q_layout.positions(guilty)[-1]

        def attend(**how):
            return attention(plan, *(chunks[name] for name in "qkv"), sinks=chunks["sinks"], **DOCUMENTS, **how)

        loss_of(*attend(), chunks).backward()
        if wrong == "out":
            text = same_error(comm, lambda: attend(verify=True), VerificationError)
            assert "out off by" in text and f"worst at query {last} of rank {guilty}" in text
            return
        loss = loss_of(*attend(verify=True), chunks)
        if wrong == "nothing":
            return loss.backward()
        text = same_error(comm, loss.backward, VerificationError)
        assert "failed: dk off by" in text and f"worst at key {last} of rank {guilty}" in text


@pytest.mark.whole
@pytest.mark.skipif(not DOCS.is_dir(), reason="takes the docs of a checkout")
def test_verify_of_the_documentation(monkeypatch):
    """Both passes of the first step are compared, and no others."""
    code = re.search(r"<!-- test: verify -->\n```python\n(.*?)```", (DOCS / "training.md").read_text(), re.DOTALL)[1]
    verify, compared = MeshAttention.verify, []

    def counted(*arrays, **options):
        compared.append(verify(*arrays, **options))
        return compared[-1]

    monkeypatch.setattr(MeshAttention, "verify", counted)
    exec(code, {})
    assert [len(verification.arrays) for verification in compared] == [2, 5]


@pytest.fixture
def plan(comm):
    with MeshAttention(comm, seqlen=24, heads=2, head_dim=4, causal=True) as plan:
        yield plan


@pytest.fixture
def chunks(plan):
    return cut(plan, draw(plan))


def test_retained_graph(plan, chunks):
    """The same bits again, and then added up as torch does."""
    leaves = [chunks[name] for name in NAMES]
    loss = loss_of(*attention(plan, *leaves[:3], sinks=leaves[3]), chunks)
    first, again = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(chunks["k"].grad, 2 * first[1])


def test_once_differentiable(plan, chunks):
    """Also where dout is a constant, as that of a sum is: torch would take the gradients for constants."""
    for loss in (lambda out: out.sum(), lambda out: out.square().sum()):
        out, _ = attention(plan, chunks["q"], chunks["k"], chunks["v"])
        (grad,) = torch.autograd.grad(loss(out), chunks["q"], create_graph=True)
        with pytest.raises(ArgumentError, match=r"mpiattn\.torch\.attention cannot be differentiated again"):
            (grad * chunks["q"]).sum().backward()


def test_without_gradients(plan, chunks):
    expected = attention(plan, chunks["q"], chunks["k"], chunks["v"])
    with torch.no_grad():
        got = attention(plan, chunks["q"], chunks["k"], chunks["v"])
    assert all(torch.equal(a, b) and a.requires_grad and not b.requires_grad for a, b in zip(expected, got))
    assert not any(x.requires_grad for x in attention(plan, *(chunks[name].detach() for name in "qkv")))


@pytest.mark.parametrize("wanted", NAMES)
def test_one_gradient(plan, chunks, wanted):
    """Of one input alone, and by one result alone: what is not there counts as 0."""
    q, k, v, sinks = (chunks[name] if name == wanted else chunks[name].detach() for name in NAMES)

    def grad(dout, dlse):
        out, lse = attention(plan, q, k, v, sinks=sinks)
        terms = [(x * dx).sum() for x, dx in ((out, dout), (lse, dlse)) if dx is not None]
        return torch.autograd.grad(sum(terms), chunks[wanted])[0]

    both, of_out, of_lse = (
        grad(*given) for given in ((chunks["dout"], chunks["dlse"]), (chunks["dout"], None), (None, chunks["dlse"]))
    )
    assert torch.allclose(both, of_out + of_lse, atol=1e-5)
    assert wanted != "v" or not of_lse.any()


def test_two_in_one_graph(plan, chunks):
    """Two attentions, one upon the other, as in layers."""
    out, _ = attention(plan, chunks["q"], chunks["k"], chunks["v"])
    again, _ = attention(plan, out, chunks["k"], chunks["v"], cu_seqlens=[0, 9, 24])
    again.square().sum().backward()
    assert all(torch.isfinite(chunks[name].grad).all() for name in "qkv")
    assert chunks["v"].grad.numel() == 0 or chunks["v"].grad.any()


def test_recomputation(plan, chunks):
    """torch.utils.checkpoint calls the forward pass again, in the middle of the backward pass."""

    def layer(q, k, v):
        return attention(plan, q * 2, k, v, cu_seqlens=[0, 9, 24])[0]

    leaves = [chunks[name] for name in "qkv"]
    expected, got = (
        torch.autograd.grad(out, leaves, chunks["dout"])
        for out in (layer(*leaves), torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False))
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, got))


WRONG = {
    "device": (lambda x: x.to("meta"), "is on device meta; it must be on the CPU"),
    "array": (lambda x: x.detach().numpy(), "is a ndarray; it must be a torch tensor"),
    "none": (lambda x: None, "is a NoneType"),
    "dtype": (lambda x: x.double(), "has dtype float64; it must be float32"),
    "bfloat16": (lambda x: x.bfloat16(), "has dtype bfloat16; it must be float32"),
    "float8": (lambda x: x.detach().to(torch.float8_e4m3fn), "it must be a dense one that NumPy can share"),
    "sparse": (lambda x: x.detach().to_sparse(), "is a Tensor of torch.float32 and torch.sparse_coo; it must be"),
    "shape": (lambda x: x[..., :-1], "has shape"),
}


@pytest.mark.parametrize(
    ("name", "wrong"), [(name, wrong) for name in NAMES for wrong in WRONG if (name, wrong) != ("sinks", "none")]
)
def test_wrong_on_one_rank(comm, plan, chunks, name, wrong):
    change, says = WRONG[wrong]
    guilty = comm.size - 1
    given = {key: chunks[key] for key in NAMES}
    if comm.rank == guilty:
        given[name] = change(given[name])
    text = same_error(comm, lambda: attention(plan, **given))
    assert text.startswith(f"{name} ") and says in text
    assert comm.size == 1 or f"on rank {guilty} of" in text


def test_gradient_wanted_on_one_rank(comm, plan, chunks, at_least):
    at_least(2)
    given = [chunks[name] if comm.rank else chunks[name].detach() for name in "qkv"]
    assert "requires_grad" in same_error(comm, lambda: attention(plan, *given))


def test_changed_before_backward(comm, plan, chunks):
    """torch finds out in the middle of the backward pass, on the rank that did it."""
    q = chunks["q"] * 1
    out, _ = attention(plan, q, chunks["k"], chunks["v"])
    if comm.rank == comm.size - 1:
        with torch.no_grad():
            q += 1
    assert "modified by an inplace operation" in same_error(comm, out.sum().backward, MpiattnError)


def test_closed_before_backward(comm):
    with MeshAttention(comm, seqlen=24, heads=2, head_dim=4) as plan:
        chunks = cut(plan, draw(plan))
        out, _ = attention(plan, chunks["q"], chunks["k"], chunks["v"])
    with pytest.raises(MpiattnError, match="the plan is closed"):
        out.sum().backward()


def test_unchecked(plan, chunks):
    given = [chunks[name] for name in "qkv"]
    expected, got = (attention(plan, *given, check=check)[0] for check in (True, False))
    dout = chunks["dout"]
    assert torch.equal(expected, got)
    assert torch.equal(*(torch.autograd.grad(out, chunks["q"], dout)[0] for out in (expected, got)))
