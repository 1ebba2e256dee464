"""Masks of several intervals in every call that takes one, and what is refused."""

import numpy as np
import pytest
from runs import on
from test_agreement import same_error

from mpiattn import Layout, MeshAttention, attention, masks
from mpiattn.verify import reference

SHAPE, HEADS, DIM = (6, 10), 2, 4
MASK = masks.neighborhood(SHAPE, (3, 5), cyclic=(False, True)) | masks.global_tokens(1)


def inputs():
    return np.random.default_rng(0).standard_normal((4, 1, 60, HEADS, DIM)).astype(np.float32)


@on(1, 4)
@pytest.mark.parametrize("kind", ["rows", "blocks", "striped"])
def test_a_field_however_it_is_held(group, kind):
    """One call with gradients of a plan; rows, blocks and stripes give the same results."""
    layout = {
        "rows": "contiguous",
        "blocks": Layout.grid(SHAPE, (group.size // 2 or 1, min(group.size, 2))),
        "striped": "striped",
    }[kind]
    q, k, v, dout = inputs()
    expected = reference.attention(q, k, v, mask=MASK)
    gradients = reference.backward(dout, q, k, v, mask=MASK)
    how = {"mesh_layout": "grid"} if kind == "blocks" else {}
    with MeshAttention(group, seqlen=60, heads=HEADS, head_dim=DIM, mask=MASK, layout=layout, **how) as plan:
        at = plan.positions
        assert kind != "blocks" or plan.mesh_layout == "grid"
        chunks = [np.ascontiguousarray(array[:, at]) for array in (q, k, v)]
        out, lse = plan.forward(*chunks)
        results = out, *plan.backward(dout[:, at], *chunks, out, lse)
        plan.verify(*chunks, out, lse)
        assert plan.sent[0] == plan.formula() + plan.formula("backward")
    for result, of in zip(results, (expected[0], *gradients)):
        assert np.abs(result - of[:, at]).max(initial=0) < 1e-5
    called, _ = attention(*chunks, comm=group, mask=MASK, layout=plan.q_layout)  # stripes may be dealt out otherwise
    assert np.abs(called - out).max(initial=0) < 1e-5


@on(1, 3)
def test_gradients_by_torch(group):
    torch = pytest.importorskip("torch")
    from mpiattn.torch import attention as of_torch

    q, k, v, dout = inputs()
    at = Layout("contiguous", 60, group.size).positions(group.rank)
    tensors = [torch.tensor(array[:, at], requires_grad=True) for array in (q, k, v)]
    with MeshAttention(group, seqlen=60, heads=HEADS, head_dim=DIM, mask=MASK, layout="contiguous") as plan:
        out, _ = of_torch(plan, *tensors)
        out.backward(torch.tensor(dout[:, at]))
    for tensor, of in zip(tensors, reference.backward(dout, q, k, v, mask=MASK)):
        assert np.abs(tensor.grad.numpy() - of[:, at]).max(initial=0) < 1e-5


@on(1, 3)
def test_what_is_refused(group):
    def plan(**how):
        return MeshAttention(group, **{"seqlen": 60, "heads": HEADS, "head_dim": DIM, "mask": MASK} | how)

    text = same_error(group, lambda: plan(seqlen=61))
    assert text.startswith("mask is neighborhood 3x5 grid=6x10 cyclic=1") and "seqlen 61" in text, text
    text = same_error(group, lambda: plan(mask=np.ones((60, 60), bool)))
    assert text.startswith("mask is a ndarray; it must be a mask of mpiattn.masks"), text
    blocks = {"layout": Layout.grid(SHAPE, (1, group.size)), "mesh_layout": "grid"}
    text = same_error(group, lambda: plan(**blocks | {"layout": "contiguous"}))
    assert text.startswith("mesh_layout is 'grid'; layout must be of that kind"), text
    if group.size > 1:
        text = same_error(group, lambda: plan(**blocks, tile=(group.size, 1, 1), heads=2 * group.size))
        assert text.startswith(f"mesh_layout is 'grid' and tile {group.size}x1x1"), text
    with plan() as made:
        text = same_error(group, lambda: made.like(seqlen=30))
        assert text.startswith("mask is neighborhood"), text
    if group.size > 1:
        last = group.rank == group.size - 1
        text = same_error(group, lambda: plan(mask=masks.chunked(3 + last)))
        assert text.startswith("mask is Chunked(size=3)") and "must be the same on every rank" in text, text
