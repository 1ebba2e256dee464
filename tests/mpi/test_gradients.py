"""Gradients by definition: finite differences of the library's own forward pass, one input element at a time."""

import pytest
from dense import draw_all
from runs import attend, my_chunks, on, problem_of

from mpiattn import MeshAttention

STEP = 1e-5


@on(3)
@pytest.mark.parametrize("masks", [{}, {"causal": True, "softcap": 3.0}, {"window": (4, 1)}], ids=str)
@pytest.mark.parametrize("tile", ["ring", "qring"])
def test_case_27_finite_differences(group, tile, masks):
    """Of sum(dout * out) + sum(dlse * lse) by every input; 1e-6."""
    shape = {"seqlen": 12, "heads": 2, "kv_heads": 1, "head_dim": 3, "dtype": "float64", **masks}
    inputs = draw_all(problem_of(shape), sinks=True)
    call = {"cu_seqlens": [0, 5, 12]}
    with MeshAttention(group, **shape, tile=tile) as plan:

        def loss(moved):
            chunks = my_chunks(plan, *moved)
            out, lse = plan.forward(*chunks[:3], sinks=chunks.sinks, **call)
            return group.allreduce(float((out * chunks.dout).sum() + (lse * chunks.dlse).sum()))

        result = attend(plan, my_chunks(plan, *inputs), call)
        whole = {name: plan.gather(getattr(result, "d" + name), root=None) for name in "qkv"}
        whole["sinks"] = result.dsinks
        for name, element in (
            ("q", (0, 4, 1, 2)),
            ("q", (0, 9, 0, 0)),
            ("q", (0, 11, 0, 1)),
            ("k", (0, 0, 0, 1)),
            ("k", (0, 7, 0, 2)),
            ("v", (0, 3, 0, 0)),
            ("v", (0, 10, 0, 2)),
            ("sinks", (1,)),
        ):
            moved = []
            for step in (STEP, -STEP):
                array = getattr(inputs, name).copy()
                array[element] += step
                moved.append(loss(inputs._replace(**{name: array})))
            slope = (moved[0] - moved[1]) / (2 * STEP)
            assert abs(slope - whole[name][element]) < 1e-6, (name, element)
