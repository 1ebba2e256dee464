"""Forward attention against the dense float64 reference, whatever the number of ranks."""

import numpy as np
import pytest
from runs import check

from mpiattn import Layout

BACKENDS = ("numpy", "deferred")


@pytest.mark.many
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_even(comm, causal, backend):
    check(comm, batch=2, seqlen=64, heads=4, head_dim=16, dtype="float64", causal=causal, backend=backend)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("schedule", ["greedy", "collective"])
def test_layouts_and_dtypes(comm, layout, dtype, schedule):
    check(comm, batch=2, seqlen=97, heads=2, head_dim=8, dtype=dtype, layout=layout, schedule=schedule, causal=True)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_ring_flash_attention_case(comm, layout):
    """S = 3816 (and 3824 for zigzag, which that library cuts evenly), H 5, D 128, causal, 8 ranks."""
    if comm.size != 8:
        pytest.skip("a case of 8 ranks")
    check(comm, seqlen=3816 if layout == "contiguous" else 3824, heads=5, head_dim=128, causal=True, layout=layout,
          every=7)


@pytest.mark.many
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("seqlen", [31, 5, 1, 0])
def test_fewer_tokens_than_ranks(comm, seqlen, layout, backend):
    for schedule in ("greedy", "collective"):
        check(comm, batch=2, seqlen=seqlen, heads=2, head_dim=4, dtype="float64", causal=True, layout=layout,
              backend=backend, schedule=schedule)


def test_long_on_prime_ranks(comm):
    if comm.size not in (3, 7):
        pytest.skip("a case of 3 and 7 ranks")
    check(comm, seqlen=10_000, heads=1, head_dim=16, every=3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 4), (8, 2), (6, 1), (3, 3)])
def test_grouped_query_heads(comm, heads, kv_heads, causal):
    for schedule in ("greedy", "collective"):
        check(comm, batch=2, seqlen=37, heads=heads, kv_heads=kv_heads, head_dim=8, dtype="float64", causal=causal,
              schedule=schedule)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (128, 64), (3, 5)])
def test_other_value_dim(comm, head_dim, value_dim):
    for tile in ("ring", "qring"):
        check(comm, seqlen=50, heads=4, kv_heads=2, head_dim=head_dim, value_dim=value_dim, tile=tile)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen", "seqlen_k"), [(113, 203), (203, 113), (1, 147), (147, 1), (255, 256), (40, 0)])
def test_other_number_of_keys(comm, seqlen, seqlen_k, causal):
    """Causal is bottom-right: with more queries than keys, the first ones see nothing."""
    for layout in ("contiguous", "striped", "zigzag"):
        for schedule in ("greedy", "collective"):
            check(comm, batch=2, seqlen=seqlen, seqlen_k=seqlen_k, heads=2, head_dim=4, dtype="float64",
                  causal=causal, layout=layout, schedule=schedule)


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_that_see_nothing(comm, backend):
    for route in ("direct", "ring"):
        out, lse = check(comm, seqlen=40, seqlen_k=11, heads=2, head_dim=4, causal=True, layout="contiguous",
                         tile="qring", route=route, schedule="greedy", backend=backend)
        blind = np.isneginf(lse)
        total = comm.allreduce(int(blind.sum()))
        assert total == 2 * 29
        assert not out[blind.transpose(0, 2, 1)].any() and not np.isnan(out).any()


@pytest.mark.parametrize("scale", [0.5, 0.0, -1.0, None])
def test_scale(comm, scale):
    check(comm, seqlen=33, heads=2, head_dim=4, scale=scale, dtype="float64", causal=True)


@pytest.mark.many
def test_uneven_layouts_of_queries_and_keys(comm):
    """Queries and keys may be cut differently, chunks may be empty and of any length."""
    n = comm.size
    q_sizes = tuple(0 if rank == 1 else 3 + 5 * (rank % 3) for rank in range(n))
    k_sizes = tuple(7 if rank == n - 1 else 2 * (rank % 4) for rank in range(n))
    layout = tuple(Layout("contiguous", sum(sizes), n, sizes) for sizes in (q_sizes, k_sizes))
    for schedule in ("greedy", "collective"):
        for route in ("direct", "ring"):
            check(comm, batch=2, seqlen=sum(q_sizes), seqlen_k=sum(k_sizes), heads=4, kv_heads=2, head_dim=8,
                  dtype="float64", causal=True, layout=layout, schedule=schedule, route=route)


def test_progress_counts_every_block(comm):
    from mpiattn import MeshAttention
    for schedule in ("greedy", "collective"):
        with MeshAttention(comm, seqlen=16, heads=1, head_dim=2, schedule=schedule) as plan:
            done = []
            chunk = np.ones((1, len(plan.positions), 1, 2), np.float32)
            plan.forward(chunk, chunk, chunk, progress=done.append)
            assert sum(done) == comm.size
