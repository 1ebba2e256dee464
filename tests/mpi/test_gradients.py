"""Forward and backward with every mask, against float64: random problems, each on every layout's and route's turn.

MPIATTN_CASES=n and MPIATTN_SEED=s choose how many and which.
"""

import os
import random

import numpy as np
import pytest
from runs import agreed, tiles

from mpiattn import ArgumentError, MeshAttention, reference

SEED = int(os.environ.get("MPIATTN_SEED", "1"))
CASES = int(os.environ.get("MPIATTN_CASES", "25"))
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
SMALL = 0.1            # gradients that cancel to nothing are compared with this instead of their size


def cuts(rng, tokens, documents):
    end = tokens if rng.random() < 0.7 else rng.randint(0, tokens)
    return sorted([0, end, *(rng.randint(0, end) for _ in range(documents - 1))])


def draw_documents(rng, batch, seqlen, seqlen_k):
    """Arguments of a call, and what the reference calls them."""
    kind, keys_too = rng.choice(["none", "none", "packed", "of each", "padding"]), seqlen != seqlen_k
    if kind == "packed":
        count = rng.randint(1, 3)
        given = {"cu_seqlens": cuts(rng, seqlen, count)}
        if keys_too or rng.random() < 0.3:
            given["cu_seqlens_k"] = cuts(rng, seqlen_k, count)
        return given, given
    if kind == "of each":
        given = {"cu_seqlens": [cuts(rng, seqlen, 2) for _ in range(batch)]}
        if keys_too:
            given["cu_seqlens_k"] = [cuts(rng, seqlen_k, 2) for _ in range(batch)]
        return given, given
    if kind == "padding":
        given = {"lengths": [rng.randint(0, seqlen) for _ in range(batch)]}
        if keys_too:
            given["lengths_k"] = [rng.randint(0, seqlen_k) for _ in range(batch)]
        names = {"lengths": "cu_seqlens", "lengths_k": "cu_seqlens_k"}
        return given, {names[name]: [[0, n] for n in values] for name, values in given.items()}
    return {}, {}


def draw_case(rng, ranks):
    kv_heads, seqlen, dim = rng.choice([1, 2]), rng.choice([1, 5, 17, 31, 40, 64]), rng.choice([4, 8])
    return {"batch": rng.choice([1, 1, 2, 3]), "seqlen": seqlen, "seqlen_k": rng.choice([seqlen, seqlen, 7, 50]),
            "heads": kv_heads * rng.choice([1, 2]), "kv_heads": kv_heads, "head_dim": dim,
            "value_dim": rng.choice([dim, 6]), "causal": rng.random() < 0.5, "softcap": rng.choice([None, None, 2.0]),
            "window": rng.choice([None, None, (3, 0), (5, 4), (None, 2), (20, None), (0, 0)]),
            "dtype": rng.choice(["float64", "float32"]), "tile": rng.choice(tiles(ranks)),
            "layout": rng.choice(["contiguous", "striped", "zigzag"]), "schedule": rng.choice(["greedy", "collective"]),
            "route": rng.choice(["direct", "ring"]), "backend": rng.choice(["numpy", "deferred"])}


def off(got, expected):
    return np.abs(got - expected).max(initial=0) / max(np.abs(expected).max(initial=0), SMALL)


def complaint(comm, case, given, as_reference, seed):
    """What is wrong with out, lse, dq, dk and dv of a case on this rank, as text; None if nothing is."""
    p, rng = case, np.random.default_rng(seed)
    queries, keys = (p["batch"], p["seqlen"], p["heads"]), (p["batch"], p["seqlen_k"], p["kv_heads"])
    shapes = [(*queries, p["head_dim"]), (*keys, p["head_dim"]), (*keys, p["value_dim"]), (*queries, p["value_dim"]),
              (p["batch"], p["heads"], p["seqlen"])]
    q, k, v, dout, dlse = (rng.standard_normal(shape).astype(p["dtype"]) for shape in shapes)
    dlse = dlse if seed % 2 else None
    how = {"window": p["window"] or (None, None), "softcap": p["softcap"], **as_reference}
    expected = [*reference.attention(q, k, v, p["causal"], **how),
                *reference.backward(dout, q, k, v, p["causal"], dlse=dlse, **how)]
    with MeshAttention(comm, **p) as plan:
        at, at_k = plan.positions, plan.positions_k
        mine = q[:, at], k[:, at_k], v[:, at_k]
        out, lse = plan.forward(*mine, **given)
        slope = None if dlse is None else dlse[..., at]
        for _ in range(2):                                  # buffers that a call leaves behind must not matter
            grads = plan.backward(dout[:, at], *mine, out, lse, dlse=slope, **given)
    places = [(slice(None), at), (slice(None), slice(None), at), (slice(None), at), (slice(None), at_k),
              (slice(None), at_k)]
    for name, got, ref, place in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), expected, places):
        ref = ref[place]
        if (np.isneginf(got) != np.isneginf(ref)).any():
            return f"{name} is -inf elsewhere"
        seen = np.isfinite(ref)
        if not off(got[seen], ref[seen]) < TOLERANCE[p["dtype"]]:
            return f"{name} is off by {off(got[seen], ref[seen]):.1e}"
    return None


def test_random_masks_and_gradients(comm):
    for index in range(CASES):
        rng = random.Random(f"{SEED} {index} {comm.size}")
        case = draw_case(rng, comm.size)
        given, as_reference = draw_documents(rng, case["batch"], case["seqlen"], case["seqlen_k"])
        agreed(comm, complaint(comm, case, given, as_reference, index), f"case {index} of seed {SEED}: {case} {given}")


def test_finite_differences(comm):
    """Gradients by definition, one input element at a time."""
    shape = {"seqlen": 12, "heads": 2, "kv_heads": 1, "head_dim": 3, "dtype": "float64", "causal": True, "softcap": 3.0}
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 1, 12, 2, 3))
    k, v = rng.standard_normal((2, 1, 12, 1, 3))
    with MeshAttention(comm, **shape, tile=tiles(comm.size)[-1]) as plan:
        def loss(inputs):
            out, _ = plan.forward(*(np.ascontiguousarray(array[:, plan.positions]) for array in inputs))
            return comm.allreduce(float((out * dout[:, plan.positions]).sum()))
        mine = [np.ascontiguousarray(array[:, plan.positions]) for array in (q, k, v)]
        out, lse = plan.forward(*mine)
        grads = plan.backward(np.ascontiguousarray(dout[:, plan.positions]), *mine, out, lse)
        whole = [plan.gather(grad, root=None) for grad in grads]
        for i, element in ((0, (0, 5, 1, 2)), (1, (0, 0, 0, 1)), (2, (0, 11, 0, 0)), (1, (0, 7, 0, 2))):
            moved = []
            for step in (1e-5, -1e-5):
                inputs = [q.copy(), k.copy(), v.copy()]
                inputs[i][element] += step
                moved.append(loss(inputs))
            assert abs((moved[0] - moved[1]) / 2e-5 - whole[i][element]) < 1e-6


def test_gradients_keep_the_dtype(comm):
    with MeshAttention(comm, seqlen=20, heads=2, head_dim=4, dtype="float16", causal=True) as plan:
        q, k, v = np.random.default_rng(comm.rank).standard_normal((3, 1, len(plan.positions), 2, 4)).astype("float16")
        out, lse = plan.forward(q, k, v)
        assert {grad.dtype.name for grad in plan.backward(out, q, k, v, out, lse)} == {"float16"}


@pytest.mark.parametrize("given, says", [
    ({"cu_seqlens": [0, 30, 20]}, "cu_seqlens is"), ({"cu_seqlens": [0, 99]}, "positions from 0 to 40"),
    ({"cu_seqlens": [0.5, 3]}, "whole numbers"), ({"lengths": [3]}, "2 numbers from 0 to 40"),
    ({"cu_seqlens": [0, 40], "lengths": [1, 2]}, "lengths is given with cu_seqlens"),
    ({"cu_seqlens_k": [0, 40]}, "without cu_seqlens"), ({"cu_seqlens": [[0, 4]]}, "one for each of 2"),
    ({"cu_seqlens": [0, 9, 40], "cu_seqlens_k": [0, 40]}, "it must have 2"),
])
def test_wrong_documents(comm, given, says):
    with MeshAttention(comm, batch=2, seqlen=40, heads=1, head_dim=4) as plan:
        chunk = np.zeros((2, len(plan.positions), 1, 4), np.float32)
        with pytest.raises(ArgumentError, match=says):
            plan.forward(chunk, chunk, chunk, **given)
        plan.forward(chunk, chunk, chunk, lengths=[40, 0])


def test_documents_must_be_the_same_everywhere(comm):
    if comm.size == 1:
        pytest.skip("takes two ranks to disagree")
    with MeshAttention(comm, seqlen=40, heads=1, head_dim=4) as plan:
        chunk = np.zeros((1, len(plan.positions), 1, 4), np.float32)
        for given in ({"cu_seqlens": [0, 20 + comm.rank, 40]}, {"lengths": [9]} if comm.rank else {}):
            with pytest.raises(ArgumentError, match="documents"):
                plan.forward(chunk, chunk, chunk, **given)


def test_wrong_masks(comm):
    for wrong, says in (({"window": (1,)}, "window is"), ({"window": (-1, 0)}, "window is"),
                        ({"softcap": 0}, "softcap is")):
        with pytest.raises(ArgumentError, match=says):
            MeshAttention(comm, seqlen=4, heads=1, head_dim=4, **wrong)
