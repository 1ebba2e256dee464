"""mpiattn in functions that torch.compile has made: the same bits as without it; nothing of the library is traced."""

import pytest
from dense import bits
from mpi4py import MPI
from test_agreement import same_error

import mpiattn
from mpiattn import MeshAttention
from mpiattn.arguments.untraced import REASON

if MPI.COMM_WORLD.size > 8:
    pytest.skip("many ranks would take long to load torch", allow_module_level=True)
torch = pytest.importorskip("torch", reason="torch is not installed (the torch extra has it)")

from mpiattn.torch import attention  # noqa: E402  (needs torch)

torch.set_num_threads(1)

SHAPE = {"seqlen": 29, "heads": 2, "head_dim": 8}
DOCUMENTS = (None, [0, 11, 29], [0, 2, 20, 29])  # of the steps of a training


@pytest.fixture(autouse=True)
def compiled_frames():
    """The code that Dynamo compiles: that of these tests, and none of the library."""
    seen = []
    handle = torch._dynamo.convert_frame.register_bytecode_hook(lambda code, _: seen.append(code))
    yield seen
    handle.remove()
    torch._dynamo.reset()
    assert {code.co_filename for code in seen} <= {__file__}


@pytest.fixture
def plan(comm):
    with MeshAttention(comm, **SHAPE, causal=True) as made:
        yield made


def drawn(plan, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((3, 1, 29, 2, 8), generator=generator)[:, :, plan.positions].requires_grad_(grad)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_two_layers(comm, plan, compiled_frames, backend):
    """Layers of two kinds in one function, of a plan each, and documents that change from step to step."""

    def layers(qkv, plans, cuts):
        q, k, v = (qkv * 0.5).unbind()
        q, lse = attention(plans[0], q, k, v, cu_seqlens=cuts)
        q = q.sin() + lse.mean()
        q, lse = attention(plans[1], q, k * 2, v, cu_seqlens=cuts)
        return q.cos() * lse.mean()

    compiled = torch.compile(layers, backend=backend)
    with MeshAttention(comm, **SHAPE) as other:
        for step, cuts in enumerate(DOCUMENTS):
            results = []
            for run in (layers, compiled):
                qkv = drawn(plan, step)
                made = run(qkv, (plan, other), cuts)
                made.square().sum().backward()
                results.append(bits(made.detach().numpy(), qkv.grad.numpy()))
            assert results[0] == results[1], f"step {step}"
    assert compiled_frames


def test_backward_inside(plan):
    """A compiled function that holds loss.backward(), and so the backward pass of attention."""

    def step(qkv, leaf):
        (attention(plan, *qkv)[0] * leaf).square().sum().backward()

    grads = []
    for run in (step, torch.compile(step, backend="eager")):
        leaf = torch.ones(8, requires_grad=True)
        qkv = drawn(plan)
        run(qkv, leaf)
        grads.append(bits(qkv.grad.numpy(), leaf.grad.numpy()))
    assert grads[0] == grads[1]


def test_biases_and_dropout(comm):
    """Also of gradients, and of a seed that is another at every step."""

    def step(plan, qkv, bias, slopes, seed):
        out, lse = attention(plan, *qkv, bias=bias * 2, alibi_slopes=slopes, dropout=0.3, seed=seed)
        return out.sin().sum() + lse.sum()

    compiled = torch.compile(step, backend="eager")
    with MeshAttention(comm, **SHAPE, causal=True, backend="numpy") as plan:
        rows, columns = map(torch.from_numpy, plan.bias_positions)
        of_steps = []
        for seed in range(2):
            grads = []
            for run in (step, compiled):
                bias = (columns / 9 - rows[:, None].sin())[None, None].float().requires_grad_()
                leaves = [drawn(plan), bias, torch.tensor([0.5, 0.25], requires_grad=True)]
                grads.append(bits(*(x.numpy() for x in torch.autograd.grad(run(plan, *leaves, seed), leaves))))
            assert grads[0] == grads[1]
            of_steps.append(grads[0])
        assert of_steps[0] != of_steps[1]


def test_tensors_as_documents(plan):
    """Their values and, from the second number of documents on, their number compile nothing again."""
    compiled = torch.compile(lambda qkv, cuts: attention(plan, *qkv, cu_seqlens=cuts)[0] * 2, backend="eager")
    for number, cuts in enumerate([*DOCUMENTS[1:], [0, 5, 9, 29], [0, 1, 2, 3, 4, 29]]):
        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            out = compiled(drawn(plan), torch.tensor(cuts))
        assert torch.equal(out, attention(plan, *drawn(plan), cu_seqlens=cuts)[0] * 2)


def test_calls_without_gradients(comm, plan):
    """The other calls, which take tensors too."""

    def every(qkv, cuts):
        q, k, v = qkv.unbind()
        out, lse = plan.forward(q * 1, k, v, cu_seqlens=cuts)
        grads = plan.backward(out * 2, q, k, v, out, lse, cu_seqlens=cuts)
        plan.verify(q, k, v, out, lse, cu_seqlens=cuts)
        more = mpiattn.attention(q + 0, k, v, comm=comm, causal=True)
        merged, _ = mpiattn.merge(out, lse, *more)
        with plan.like(seqlen=29) as other, mpiattn.KVCache(comm, capacity=8, kv_heads=2, head_dim=8) as cache:
            again = other.scatter(plan.gather(out), root=0)
            cache.append(*torch.ones(2, 1, 3, 2, 8))
            decoded = [decode(torch.ones(1, 1, 2, 8), cache)[0] for decode in DECODING]
        return [array + 1 for array in (out, *grads, merged, again, *decoded)]

    for cuts in DOCUMENTS[:2]:
        expected, got = (run(drawn(plan, grad=False), cuts) for run in (every, torch.compile(every, backend="eager")))
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


DECODING = mpiattn.tree_decode, mpiattn.ring_decode, mpiattn.query_ring_decode


def test_a_whole_graph_is_refused(plan):
    q, k, v = drawn(plan)
    for call in (attention, lambda plan, *qkv: plan.forward(*qkv)):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=REASON):
            torch.compile(lambda q, call=call: call(plan, q, k, v)[0] * 2, backend="eager", fullgraph=True)(q)


def test_transforms_are_refused(comm, plan):
    """On every rank, also if they are tried on one."""
    qkv, F = drawn(plan, grad=False), torch.func
    q, k, v = qkv

    def of_torch(q):
        return attention(plan, q, k, v)[0]

    def of_plan(q):
        return plan.forward(q, k, v)[0]

    def refused(call):
        return "inside a transform of torch.func (grad, vjp, jvp, vmap" in same_error(comm, call)

    for call in (of_torch, of_plan):
        assert refused(lambda call=call: F.grad(lambda q: call(q).sum())(q))
        assert refused(lambda call=call: F.vmap(call)(qkv))
        assert refused(lambda call=call: F.jvp(call, (q,), (k,)))
        assert refused(lambda call=call: F.vmap(call)(qkv) if comm.rank == 0 else call(q))
    assert refused(lambda: F.vmap(lambda factor: factor * of_torch(q))(torch.ones(2)))


def test_batches_of_gradients_are_refused(comm, plan):
    q, k, v = drawn(plan)
    out, _ = attention(plan, q, k, v)
    text = same_error(comm, lambda: torch.autograd.grad(out, q, torch.ones(2, *out.shape), is_grads_batched=True))
    assert "dout is a batch of gradients, as is_grads_batched=True" in text


def test_records_are_refused(comm, plan):
    q, k, v = drawn(plan, grad=False)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(k, v)
        for call in (attention, MeshAttention.forward):
            assert "k has a tangent" in same_error(comm, lambda call=call: call(plan, q, dual, v))
    for call in (attention, MeshAttention.forward):
        text = same_error(comm, lambda call=call: torch.jit.trace(lambda q: call(plan, q, k, v)[0], q))
        assert "q is used inside torch.jit.trace" in text
    assert torch.isfinite(attention(plan, q, k, v)[0]).all(), "the plan goes on"
