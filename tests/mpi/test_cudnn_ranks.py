"""The back end `cuda+cudnn` on ranks, with a made-up GPU and a made-up cuDNN."""

import biased
import fake_cudnn
import ml_dtypes
import numpy as np
import pytest
from dense import draw_all, masks
from runs import my_chunks

from mpiattn import ArgumentError, MeshAttention
from mpiattn.arguments.arrays import on_host
from mpiattn.backends.testing import emulated
from mpiattn.problem.problem import Problem
from mpiattn.verify import reference

pytestmark = [
    pytest.mark.workshop,
    pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler"),
]
SEQLEN, HEADS, KV_HEADS, DIM = 48, 4, 2, 16
OFF = {"float16": 4e-3, "bfloat16": 3e-2}  # of the largest value


@pytest.fixture(scope="module", autouse=True)
def library():
    with fake_cudnn.install():
        yield


def plan_of(comm, **options):
    options = {"causal": True, "dtype": "bfloat16", "batch": 2, "transport": "staged"} | options
    shape = {"seqlen": SEQLEN, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    return MeshAttention(comm, **shape, backend="cuda+cudnn", **options)


def drawn(plan, dtype):
    """The whole q, k, v and dout, in float64 as they are rounded to a dtype, and this rank's parts."""
    rng = np.random.default_rng(0)
    shapes = [(2, SEQLEN, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    arrays = [rng.standard_normal(shape).astype(kind) for shape in shapes]
    return [array.astype(np.float64) for array in arrays], [array[:, plan.positions] for array in arrays]


@pytest.mark.draw(6)
@pytest.mark.parametrize("dtype", OFF)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("schedule", ["greedy", "collective"])
def test_whole(comm, dtype, layout, causal, schedule):
    """One launch for all blocks has the tokens of several chunks: of striped chunks, a row sees some keys more each."""
    with plan_of(comm, layout=layout, dtype=dtype, causal=causal, schedule=schedule) as plan:
        whole, (q, k, v, dout) = drawn(plan, dtype)
        out, lse = plan.forward(q, k, v)
        grads = plan.backward(dout, q, k, v, out, lse)
        ref_out, ref_lse = reference.attention(*whole[:3], causal=causal)
        refs = reference.backward(whole[3], *whole[:3], causal=causal)
        blocks = plan._backend.blocks
        at = plan.positions
        for got, ref in zip((out, *grads), (ref_out, *refs)):
            assert np.abs(on_host(got).astype(np.float64) - ref[:, at]).max() <= OFF[dtype] * np.abs(ref).max()
        assert np.abs(on_host(lse) - ref_lse[..., at]).max() <= 1e-5
        strides = (layout, causal, schedule) == ("striped", True, "collective") and comm.size > 1
        if comm.size <= 4:  # with more, some blocks are too small
            assert bool(blocks["kernels"]) == strides and bool(blocks["cudnn"]) != strides, blocks


def test_a_dlse(comm):
    """Is for the kernels; on some ranks alone it is refused on all."""
    with plan_of(comm) as plan:
        _, (q, k, v, dout) = drawn(plan, "bfloat16")
        out, lse = plan.forward(q, k, v)
        plan._backend.blocks.update(cudnn=0, kernels=0)
        plan.backward(dout, q, k, v, out, lse, dlse=np.ones(lse.shape, np.float32))
        blocks = plan._backend.blocks
        assert blocks["kernels"] and not blocks["cudnn"]
        if comm.size > 1:
            with pytest.raises(ArgumentError, match=r"^whether dlse is given is False on rank 0 but True on rank 1"):
                plan.backward(dout, q, k, v, out, lse, dlse=np.ones(lse.shape, np.float32) if comm.rank else None)
        plan.backward(dout, q, k, v, out, lse)
        assert blocks["cudnn"] or comm.size > 4


@pytest.mark.draw(1)
@pytest.mark.parametrize("kinds", ["bias", "key_bias alibi", "relative dropout"])
def test_biases(comm, kinds):
    """Every kind on a GPU's stream: tiles, what travels with keys, work arrays, and what comes back to the host."""
    problem = Problem(SEQLEN, HEADS, DIM, 2, KV_HEADS, dtype="bfloat16", causal=True)
    given, inputs = biased.draw(problem, 1, kinds), draw_all(problem)
    *right, gradients, _ = biased.expected(problem, inputs, given, **masks(problem))
    with plan_of(comm, key_bias=given.key_bias is not None) as plan:
        q, k, v, dout, dlse, _ = my_chunks(plan, *inputs)
        own = {name: value for name, value in given._asdict().items() if value is not None}
        if given.bias is not None:
            own["bias"] = plan.scatter_bias(given.bias, root=None)
        if given.key_bias is not None:
            own["key_bias"] = np.ascontiguousarray(given.key_bias[..., plan.positions_k])
        out, lse = plan.forward(q, k, v, **own)
        shared = None if given.bias is None else [
            name for name, length in zip(("batch", "heads"), given.bias.shape) if length == 1
        ]  # fmt: skip
        grads = plan.backward(dout, q, k, v, out, lse, dlse=dlse, bias_shared=shared, **own)
        refs = [right[0], *right[2:5]]
        for got, ref in zip((out, *grads[:3]), refs):
            off = np.abs(on_host(got).astype(np.float64) - ref[:, plan.positions]).max()
            assert off <= OFF["bfloat16"] * np.abs(ref).max() / (1 - given.dropout)
        for name, got in zip(given.given, grads[3:], strict=True):
            ref = gradients[name]
            if name == "bias":
                got, shape = plan.gather_bias(got, bias_shared=shared), ref.shape
                assert comm.rank or got.shape == shape
                if comm.rank:
                    continue
            elif name == "key_bias":
                ref = ref[..., plan.positions_k]
            assert np.abs(on_host(got) - ref).max() <= 0.1 * np.abs(ref).max(), name
