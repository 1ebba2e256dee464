"""Only tokens that are seen travel: buffers of that size, which grow for calls that see more, and results in place."""

import numpy as np
import pytest
from mpi4py import MPI
from runs import agreed

from mpiattn import MeshAttention
from mpiattn.schedule.tile import tiles

NAMES = ("out", "lse", "dq", "dk", "dv")


def results(plan, arrays, **documents):
    """Whole results of both passes, on every rank."""
    q, dout = (plan.scatter(array, root=None) for array in (arrays[0], arrays[3]))
    k, v = (plan.scatter(array, root=None, keys=True) for array in arrays[1:3])
    out, lse = plan.forward(q, k, v, **documents)
    grads = plan.backward(dout, q, k, v, out, lse, **documents)
    wholes = [plan.gather(out, root=None), plan.gather(lse, root=None, axis=2)]
    return wholes + [plan.gather(grad, root=None, keys=name != "dq") for name, grad in zip(NAMES[2:], grads)]


def drawn(tokens, tokens_k, dtype):
    rng = np.random.default_rng(tokens)
    shapes = [(1, tokens, 4, 8), (1, tokens_k, 2, 8), (1, tokens_k, 2, 8), (1, tokens, 4, 8)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.draw(3)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("schedule, route", [("greedy", "direct"), ("greedy", "ring"), ("collective", "direct")])
def test_documents_that_see_more_than_the_plan(comm, layout, schedule, route):
    """Calls with and without them in turn, on buffers that grow, against one rank with whole arrays."""
    tokens = 11 * comm.size + 3
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float64", "causal": True, "window": (4, 40)}
    cuts = np.array([0, tokens // 3, tokens])
    calls = [
        {},
        {"cu_seqlens": cuts, "causal_documents": [False, True]},
        {"cu_seqlens": cuts},
        {"cu_seqlens": cuts, "prefixes": [tokens, 2]},
        {},
    ]
    arrays = drawn(tokens, tokens, "float64")
    with MeshAttention(MPI.COMM_SELF, seqlen=tokens, **shape) as alone:
        expected = [results(alone, arrays, **call) for call in calls]
    for tile in tiles(comm.size):
        chosen = {"tile": tile, "layout": layout, "schedule": schedule, "route": route}
        with MeshAttention(comm, seqlen=tokens, **shape, **chosen) as plan:
            sizes = []
            for call, wanted in zip(calls, expected):
                for name, got, right in zip(NAMES, results(plan, arrays, **call), wanted):
                    same = np.array_equal(np.isinf(got), np.isinf(right))
                    off = np.nanmax(np.abs(np.where(np.isinf(got), 0, got - np.where(np.isinf(right), 0, right))))
                    about = f"{name} of {call}, tile {tile}"
                    agreed(comm, None if same and off < 1e-12 else f"{about}: off by {off}")
                sizes.append(plan.nbytes)
            assert sizes[0] <= sizes[-1], "buffers that have grown stay"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_window_needs_no_memory_for_what_it_does_not_see(comm, dtype):
    """A rank's own chunks and results, and the window: no more than a tenth beside them for float32."""
    if comm.size == 1:
        pytest.skip("one rank receives nothing")
    tokens, window = 1024, 15
    shape = {"heads": 2, "head_dim": 16, "dtype": dtype, "causal": True, "window": (window, 0)}
    with MeshAttention(
        comm, seqlen=tokens * comm.size, **shape, tile="ring", layout="contiguous", schedule="greedy"
    ) as plan:
        arrays = np.ones((3, 1, tokens, 2, 16), plan.problem.dtype)
        out, _ = plan.forward(*arrays)
        buffers = plan._passes.executors["forward"].buffers.nbytes
        halo = 2 * window * arrays[0, :, :1].nbytes
        own = arrays.nbytes + out.nbytes
        in_place = 0 if dtype == "float32" else out.size * 4
        most = in_place + own / 10 + 3 * halo
        agreed(comm, None if buffers <= most else f"{buffers} bytes of buffers, {own} own, {halo} of the window")
        agreed(comm, None if plan.sent[0] == halo * (comm.rank + 1 < comm.size) else f"{plan.sent[0]} bytes sent")


def test_results_are_accumulated_where_the_caller_wants_them(comm):
    """Contiguous, strided and no memory for results in turn: the same bits, and the memory is let go."""
    tokens = 7 * comm.size + 1
    q, k, v, dout = drawn(tokens, tokens, "float32")
    with MeshAttention(comm, seqlen=tokens, heads=4, kv_heads=2, head_dim=8, causal=True) as plan:
        q, k, v, dout = (plan.scatter(array, root=None) for array in (q, k, v, dout))
        out, lse = plan.forward(q, k, v)
        grads = plan.backward(dout, q, k, v, out, lse)

        def memory(like, strided):
            twice = np.full((*like.shape[:-1], 2 * like.shape[-1]), 7, like.dtype)
            return twice[..., ::2] if strided else np.full_like(like, 7)

        for strided in (False, True, False):
            own = memory(out, strided)
            again, _ = plan.forward(q, k, v, out=own)
            assert again is own and np.array_equal(again, out)
            parts = [memory(grad, strided) for grad in grads]
            plan.backward(dout, q, k, v, out, lse, **dict(zip(("dq", "dk", "dv"), parts)))
            assert all(np.array_equal(part, grad) for part, grad in zip(parts, grads))
