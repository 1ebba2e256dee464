"""`attention`: one call, the ranks tell each other how long their pieces are."""

import numpy as np
import pytest
from dense import Inputs, Result, bits, draw, draw_all, expected, masks, wrong
from runs import agreed

from mpiattn import ArgumentError, MeshAttention, attention
from mpiattn.problem.problem import Problem

BACKENDS = ("numpy", "deferred")


def pieces(comm, lengths):
    """Where this rank's consecutive piece starts and stops."""
    start = sum(lengths[: comm.rank])
    return start, start + lengths[comm.rank]


@pytest.mark.many
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_uneven_pieces(comm, causal, dtype, backend):
    q_lengths = [(7 * rank + 3) % 11 for rank in range(comm.size)]
    k_lengths = [(5 * rank + 4) % 9 for rank in range(comm.size)]
    problem = Problem(
        batch=2,
        seqlen=sum(q_lengths),
        seqlen_k=sum(k_lengths),
        heads=4,
        kv_heads=2,
        head_dim=8,
        value_dim=6,
        dtype=dtype,
        causal=causal,
        scale=0.3,
    )
    q, k, v = draw(problem)
    inputs = Inputs(q, k, v)
    ref = expected(inputs, backward=False, **masks(problem))
    own, own_k = slice(*pieces(comm, q_lengths)), slice(*pieces(comm, k_lengths))
    for options in ({}, {"schedule": "greedy", "route": "ring"}, {"schedule": "collective"}):
        out, lse = attention(
            q[:, own], k[:, own_k], v[:, own_k], comm=comm, causal=causal, scale=0.3, backend=backend, **options
        )
        agreed(comm, wrong(problem, Result(out, lse), ref, inputs, own, own_k), options)


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
def test_other_layouts(comm, layout):
    problem = Problem(seqlen=31, heads=2, head_dim=4, dtype="float64", causal=True)
    q, k, v = draw(problem)
    with MeshAttention(comm, seqlen=31, heads=2, head_dim=4, dtype="float64", causal=True, layout=layout) as plan:
        at = plan.positions
        planned = plan.forward(q[:, at], k[:, at], v[:, at])
    out, lse = attention(q[:, at], k[:, at], v[:, at], comm=comm, causal=True, layout=layout)
    assert bits(out, lse) == bits(*planned)
    inputs = Inputs(q, k, v)
    agreed(comm, wrong(problem, Result(out, lse), expected(inputs, backward=False, **masks(problem)), inputs, at, at))


@pytest.mark.parametrize(
    "call",
    [
        {"cu_seqlens": [0, 4, 13]},
        {"cu_seqlens": [0, 4, 4], "cu_seqlens_k": [2, 9, 10]},
        {"lengths": [9, 12]},
        {"lengths": [9, 12], "lengths_k": [0, 5]},
        {},
    ],
    ids=str,
)
def test_documents_and_sinks(comm, call):
    """As of a plan's forward pass; positions are those of the whole sequence."""
    q_lengths, k_lengths = (
        [13 // comm.size + (rank < 13 % comm.size) for rank in ranks]
        for ranks in (range(comm.size), range(comm.size)[::-1])
    )
    problem = Problem(batch=2, seqlen=13, seqlen_k=13, heads=4, kv_heads=2, head_dim=8, causal=True)
    inputs = draw_all(problem, sinks=True)
    own, own_k = slice(*pieces(comm, q_lengths)), slice(*pieces(comm, k_lengths))
    ref = expected(inputs, backward=False, **masks(problem, call))
    result = attention(
        inputs.q[:, own], inputs.k[:, own_k], inputs.v[:, own_k], comm=comm, causal=True, sinks=inputs.sinks, **call
    )
    agreed(comm, wrong(problem, Result(*result), ref, inputs, own, own_k, call), call)


def test_wrong_arguments(comm):
    """The same error on every rank, wherever it is wrong."""
    good = np.ones((1, 3, 2, 4), np.float32)
    last = comm.rank == comm.size - 1
    cases = [
        ({"q": good[0]}, "q is of shape"),
        ({"k": None}, "k is a NoneType"),
        ({"v": good.tolist()}, "v is a list"),
        ({"k": good[..., :2]}, "k has shape"),
        ({"v": good[:, :2]}, "v has shape"),
        ({"k": good[:, :, :0]}, "kv_heads"),
    ]
    if comm.size > 1:  # the others have told what the problem is
        cases += [({"q": good.astype(np.float64)}, "dtype is"), ({"q": good[..., :3]}, "head_dim is")]
    for wrong_one, text in cases:
        given = {**dict.fromkeys("qkv", good), **(wrong_one if last else {})}
        with pytest.raises(ArgumentError, match=text) as caught:
            attention(**given, comm=comm)
        assert len(set(comm.allgather(str(caught.value)))) == 1
    with pytest.raises(ArgumentError, match="cu_seqlens is"):
        attention(good, good, good, comm=comm, cu_seqlens=[0, 1, 99])
    attention(good, good, good, comm=comm)
