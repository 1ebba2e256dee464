"""Cases 1 to 12 and 14 of the list in conftest.py: forward and backward against the dense float64 reference.

`check` runs each on both back ends.
"""

from itertools import product

import numpy as np
import pytest
from dense import draw_all, expected, masks, per_document, wrong
from runs import BACKENDS, OF_KERNELS, agreed, attend, check, check_long, my_chunks, on, once, problem_of, run

from mpiattn import Layout, MeshAttention

LAYOUTS = ("contiguous", "striped", "zigzag")
WAYS = (("greedy", "direct"), ("greedy", "ring"), ("collective", "direct"))  # schedule and route


@pytest.mark.many
@pytest.mark.parametrize("causal", [False, True])
def test_case_1_even(comm, causal):
    check(comm, batch=2, seqlen=64, heads=4, head_dim=16, dtype="float64", causal=causal)


@on(8)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_2_ring_flash_attention(group, layout):
    """S = 3816, and 3824 where that library wants even pieces; five heads forward, one backward."""
    shape = {"seqlen": 3816 if layout == "contiguous" else 3824, "head_dim": 128, "causal": True, "layout": layout}
    check_long(group, every=16, backward=False, heads=5, **shape)
    check_long(group, every=16, heads=1, **shape)


@pytest.mark.draw(4)
@pytest.mark.many
@pytest.mark.parametrize("layout, seqlen, schedule", list(product(LAYOUTS, [31, 5, 1, 0], ["greedy", "collective"])))
def test_case_3_fewer_tokens_than_ranks(comm, layout, seqlen, schedule):
    check(
        comm,
        batch=2,
        seqlen=seqlen,
        heads=2,
        head_dim=4,
        dtype="float64",
        causal=True,
        layout=layout,
        schedule=schedule,
    )


@pytest.mark.many
def test_case_3_uneven_layouts_of_queries_and_keys(comm):
    """Queries and keys may be cut differently, chunks may be empty and of any length."""
    n = comm.size
    q_sizes = tuple(0 if rank == 1 else 3 + 5 * (rank % 3) for rank in range(n))
    k_sizes = tuple(7 if rank == n - 1 else 2 * (rank % 4) for rank in range(n))
    layout = Layout("contiguous", sum(q_sizes), n, q_sizes), k_sizes
    for schedule, route in WAYS:
        check(
            comm,
            batch=2,
            seqlen=sum(q_sizes),
            seqlen_k=sum(k_sizes),
            heads=4,
            kv_heads=2,
            head_dim=8,
            dtype="float64",
            causal=True,
            layout=layout,
            schedule=schedule,
            route=route,
        )


@on(3, 7)
def test_case_4_long_on_prime_ranks(group):
    check_long(group, every=50, seqlen=10_000, heads=1, head_dim=16)


@pytest.mark.draw(4)
@on(2, 4)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 4), (8, 2), (6, 1), (3, 3)])
def test_case_5_grouped_query_heads(group, heads, kv_heads, causal):
    for schedule in ("greedy", "collective"):
        result = check(
            group,
            batch=2,
            seqlen=37,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=8,
            dtype="float64",
            causal=causal,
            schedule=schedule,
        )
        assert result.dk.shape[2] == result.dv.shape[2] == kv_heads


@on(2)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (128, 64), (3, 5)])
def test_case_6_other_value_dim(group, head_dim, value_dim):
    for tile in ("ring", "qring"):
        check(group, seqlen=50, heads=4, kv_heads=2, head_dim=head_dim, value_dim=value_dim, tile=tile)


def documents(group, cuts, heads, causal, **arguments):
    shape = {"seqlen": cuts[-1], "heads": heads, "kv_heads": 1, "head_dim": 16, "causal": causal, **arguments}
    inputs = draw_all(problem_of(shape))
    ref = once(group, lambda: per_document(inputs, cuts, causal=causal, window=shape.get("window", (None, None))))
    check(group, inputs=inputs, ref=ref, call={"cu_seqlens": cuts}, **shape)


@on(8)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("cuts", "heads"), [([0, 128, 1248, 4240], 1), ([0, 7, 14, 16], 2)])
def test_case_7_documents(group, cuts, heads, causal):
    """Packed documents give what each gives alone."""
    documents(group, cuts, heads, causal)


@on(3, 5, 7)
def test_case_7_documents_and_a_tail(group):
    documents(group, [*range(0, 769, 128), 1050], 2, True)


@pytest.mark.draw(1)
@on(2)
@pytest.mark.parametrize("window", [(512, 0), (512, 512)])
def test_case_8_window(group, window):
    check(group, seqlen=4096, heads=1, head_dim=16, window=window)


@pytest.mark.draw(1)
@on(4, 8)
@pytest.mark.parametrize("window", [(50, 0), (50, 40), (None, 30), (45, None)])
def test_case_8_window_over_several_chunks(group, window):
    """Chunks of 20 or 10 tokens."""
    for schedule, route in WAYS:
        for layout in LAYOUTS:
            check(
                group,
                seqlen=80,
                heads=2,
                head_dim=4,
                dtype="float64",
                window=window,
                layout=layout,
                schedule=schedule,
                route=route,
            )


@pytest.mark.draw(1)
@on(4)
@pytest.mark.parametrize("window", [(20, 9), (20, 0)])
def test_case_9_window_documents_heads_and_uneven_chunks(group, window):
    documents(group, [0, 33, 34, 90, 131], 4, True, window=window, dtype="float64")
    uneven = Layout("contiguous", 131, 4, (40, 0, 81, 10))
    for schedule, route in WAYS:
        for call in ({"cu_seqlens": [[0, 33, 90], [5, 100, 131]], "padding": True}, {"lengths": [131, 17]}):
            check(
                group,
                batch=2,
                seqlen=131,
                heads=4,
                kv_heads=2,
                head_dim=8,
                dtype="float64",
                window=window,
                layout=uneven,
                schedule=schedule,
                route=route,
                call=call,
                sinks=True,
            )


@pytest.mark.draw(2)
@on(4)
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 50.0},
        {"softcap": 2.0},
        {"softcap": 50.0, "scale": 0.5},
        {"scale": 0.5},
        {"scale": 0.0},
        {"scale": -1.0},
    ],
    ids=str,
)
def test_case_10_softcap_and_scale(group, options):
    for dtype in ("float64", "float32"):
        check(group, seqlen=65, heads=2, head_dim=16, dtype=dtype, causal=True, **options)


@on(2)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {"softcap": 1e36}),
        ("float32", {"softcap": 8e37, "scale": 1.0}),
        ("float32", {"softcap": 2e-38}),
        ("float32", {"scale": 2e-38}),
        ("float32", {"scale": 0}),
        ("float64", {"softcap": 1e306}),
        ("float64", {"softcap": 1e-300, "scale": -1.0}),
        ("bfloat16", {"softcap": 1e36}),
    ],
)
def test_case_10_as_large_and_small_as_they_may_be(group, dtype, options):
    """A cap that no score comes near is none, and one that is below all leaves their signs."""
    if dtype == "float64" and OF_KERNELS & set(BACKENDS):
        pytest.skip("kernels do not take float64, and float32 has no such numbers")
    check(group, seqlen=33, heads=2, head_dim=16, dtype=dtype, causal=True, **options)


@pytest.mark.draw(6)
@on(2)
@pytest.mark.parametrize(
    "tokens, causal, schedule, layout",
    list(
        product(
            [(113, 203), (203, 113), (1, 147), (147, 1), (1023, 1024), (40, 0)],
            [False, True],
            ["greedy", "collective"],
            LAYOUTS,
        )
    ),
)
def test_case_11_other_number_of_keys(group, tokens, causal, schedule, layout):
    """Causal is bottom-right: with more queries than keys, the first ones see nothing."""
    check(
        group,
        seqlen=tokens[0],
        seqlen_k=tokens[1],
        heads=2,
        head_dim=4,
        dtype="float64",
        causal=causal,
        layout=layout,
        schedule=schedule,
    )


@on(4)
def test_case_12_queries_that_see_nothing(group):
    """The first 29 queries, and padding; their gradients are 0, and so are those of keys that nobody sees."""
    for schedule, route in WAYS:
        for call in (None, {"lengths": [35], "lengths_k": [6]}):
            result = check(
                group,
                seqlen=40,
                seqlen_k=11,
                heads=2,
                head_dim=4,
                causal=True,
                layout="contiguous",
                tile="qring",
                route=route,
                schedule=schedule,
                call=call,
            )
            blind = np.isneginf(result.lse)
            assert group.allreduce(int(blind.sum())) == 2 * (29 if call is None else 34)
            assert not any(array[blind.transpose(0, 2, 1)].any() for array in (result.out, result.dq))
            assert not any(np.isnan(array).any() for array in result[:5])
            if call and group.rank == 3:  # holds the last two keys, which are padding
                assert not result.dk.any() and not result.dv.any()


@on(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_case_14_half_types_are_kept(group, dtype):
    result = check(group, batch=2, seqlen=97, heads=4, kv_heads=2, head_dim=32, dtype=dtype, causal=True, sinks=True)
    assert {array.dtype.name for array in (result.out, result.dq, result.dk, result.dv)} == {dtype}
    assert {array.dtype.name for array in (result.lse, result.dsinks)} == {"float32"}


# Besides the list


@pytest.mark.draw(6)
@pytest.mark.parametrize(
    "dtype, layout, way", list(product(["float16", "bfloat16", "float32", "float64"], LAYOUTS, WAYS))
)
def test_layouts_and_dtypes(comm, dtype, layout, way):
    schedule, route = way
    check(
        comm,
        batch=2,
        seqlen=97,
        heads=2,
        head_dim=8,
        dtype=dtype,
        layout=layout,
        schedule=schedule,
        route=route,
        causal=True,
    )


@on(4)
@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("schedule", ["greedy", "collective"])
def test_sinks(group, schedule, dlse):
    """Also of queries that see no key: their lse is the sink.  dsinks is the same on every rank, to the bit."""
    for call in (None, {"lengths": [0, 23]}, {"cu_seqlens": [[3, 10, 38], [0, 38]], "padding": True}):
        result = check(
            group,
            batch=2,
            seqlen=38,
            heads=4,
            kv_heads=2,
            head_dim=8,
            dtype="float64",
            causal=True,
            call=call,
            sinks=True,
            dlse=dlse,
            schedule=schedule,
            tile="2x2",
        )
        assert len(set(group.allgather(result.dsinks.tobytes()))) == 1


@on(2)
def test_sinks_at_the_ends(group):
    """A sink of -inf is none, one far above all scores takes everything."""
    shape = {"seqlen": 20, "heads": 2, "head_dim": 4, "dtype": "float64"}
    inputs, dtype = draw_all(problem_of(shape)), problem_of(shape).partial_dtype
    without, *_ = run(group, inputs, **shape)
    none, *_ = run(group, inputs._replace(sinks=np.full(2, -np.inf, dtype)), **shape)
    assert all(np.array_equal(a, b) for a, b in zip(none[:5], without[:5])) and not none.dsinks.any()
    far, *_ = run(group, inputs._replace(sinks=np.full(2, 1e3, dtype)), **shape)
    assert not far.out.any() and (far.lse == 1e3).all()


@on(6)
@pytest.mark.parametrize("wire", ["float16", "bfloat16", "float32"])
def test_wire_dtype(group, wire):
    """Off by no more than one rounding of each partial; lse does not notice."""
    for dtype in ("float16", "float32", "float64"):
        for tile, schedule in (("2x3", "greedy"), ("6x1", "collective")):
            shape = {
                "seqlen": 61,
                "heads": 4,
                "kv_heads": 2,
                "head_dim": 16,
                "dtype": dtype,
                "causal": True,
                "tile": tile,
                "schedule": schedule,
                "layout": "zigzag",
            }
            narrow, plain = check(group, wire_dtype=wire, **shape), check(group, **shape)
            assert np.array_equal(narrow.lse, plain.lse)
            rounds = wire != problem_of(shape).partial_dtype
            agreed(group, None if group.allreduce(rounds == (not np.array_equal(narrow.dq, plain.dq))) else wire)


def test_progress_counts_every_block(comm):
    for schedule in ("greedy", "collective"):
        with MeshAttention(comm, seqlen=16, heads=1, head_dim=2, schedule=schedule, tile="ring") as plan:
            done, (q, k, v) = [], my_chunks(plan, *np.ones((3, 1, 16, 1, 2), np.float32))
            out, lse = plan.forward(q, k, v, progress=done.append)
            plan.backward(out, q, k, v, out, lse, progress=done.append)
            assert sum(done) == 2 * comm.size


def test_progress_moves_within_a_block(comm):
    """Parts of a block are reported while it is computed, and their sum is exact; no bit changes.

    NumPy's blocks report after every tile; compiled kernels do so by the clock.
    """
    with MeshAttention(comm, seqlen=600 * comm.size, heads=6, head_dim=4, causal=True, backend="numpy") as plan:
        inputs = my_chunks(plan, *np.ones((3, 1, 600 * comm.size, 6, 4), np.float32))
        plain, done = plan.forward(*inputs), []
        out, lse = plan.forward(*inputs, progress=done.append)
        assert np.array_equal(out, plain[0]) and np.array_equal(lse, plain[1])
        assert max(done) <= 0.5 and min(done) > 0 and sum(done) == plan.tile.a * plan.tile.b
        plan.backward(out, *inputs, out, lse, progress=done.append)
        assert max(done) <= 0.5 and sum(done) == 2 * plan.tile.a * plan.tile.b


def test_one_plan_for_many_calls(comm):
    """What a call had, documents, padding, sinks, does not stay for the next one."""
    shape = {"batch": 2, "seqlen": 40, "heads": 2, "head_dim": 4, "dtype": "float64"}
    inputs, problem = draw_all(problem_of(shape), sinks=True), problem_of(shape)
    padded = {"cu_seqlens": [[0, 40], [3, 5]], "padding": True}
    calls = [{}, {"cu_seqlens": [0, 11, 40]}, {"lengths": [40, 0]}, padded, {}]
    with MeshAttention(comm, **shape, backend="deferred") as plan:
        chunks = my_chunks(plan, *inputs)
        for i, call in enumerate(calls):
            given = chunks if i % 2 else chunks._replace(sinks=None)
            whole = inputs if i % 2 else inputs._replace(sinks=None)
            ref = expected(whole, **masks(problem, call))
            agreed(comm, wrong(problem, attend(plan, given, call), ref, whole, plan.positions, plan.positions_k, call))
