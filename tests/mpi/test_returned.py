"""backward is told less, or something else, than forward was; and programs that come near and are right."""

import numpy as np
import pytest

from mpiattn import ArgumentError, Layout, MeshAttention, masks, merge

PLAN = {"batch": 2, "seqlen": 24, "heads": 4, "kv_heads": 2, "head_dim": 8, "timeout": 60}
OTHERS = np.array([0.5, 0.25, 0.125, 1], np.float32)


@pytest.fixture(params=["auto", "ring"])
def plan(comm, request):
    with MeshAttention(comm, **PLAN, tile=request.param, causal=True) as made:
        yield made


def chunks(plan, seed=0, dtype=np.float32):
    """Random q, k, v and dout."""
    rng = np.random.default_rng([seed, plan.rank])
    p, tokens = plan.problem, len(plan.positions)
    heads = p.heads, p.kv_heads, p.kv_heads, p.heads
    return [rng.standard_normal((p.batch, tokens, count, 8)).astype(dtype) for count in heads]


def tile(plan):
    shape = 2, 4, *map(len, plan.bias_positions)
    return np.random.default_rng(plan.rank).standard_normal(shape).astype(np.float32)


def refused(plan, match, given, **call):
    """backward raises the same on every rank, and the plan goes on."""
    q, k, v, dout, out, lse = given
    with pytest.raises(ArgumentError, match=match) as info:
        plan.backward(dout, q, k, v, out, lse, **call)
    plan.forward(q, k, v)
    assert "check=False" in str(info.value)


OPTIONS = {
    "cu_seqlens": {"cu_seqlens": [0, 10, 24]},
    "cu_seqlens of each": {"cu_seqlens": [[0, 10, 24], [0, 3, 24]]},
    "documents with padding": {"cu_seqlens": [2, 10, 20], "padding": True},
    "lengths": {"lengths": [24, 13]},
    "prefixes": {"prefixes": [5, 9]},
    "causal_documents": {"causal_documents": [True, False]},
    "sinks": {"sinks": OTHERS},
    "alibi_slopes": {"alibi_slopes": OTHERS},
    "relative_bias": {"relative_bias": np.arange(20, dtype=np.float32).reshape(4, 5) / 10},
    "relative_bias of a grid": {"relative_bias": np.ones((1, 3, 3), np.float32), "relative_grid": (4, 6)},
    "relative_bias of a cyclic grid": {
        "relative_bias": np.arange(9, dtype=np.float32).reshape(1, 3, 3),
        "relative_grid": (4, 6),
        "relative_cyclic": (False, True),
    },
    "dropout": {"dropout": 0.5, "seed": 7},
    "bias": {"bias": tile},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_forward_had_is_forgotten(plan, name):
    q, k, v, dout = chunks(plan)
    call = {option: value(plan) if callable(value) else value for option, value in OPTIONS[name].items()}
    out, lse = plan.forward(q, k, v, **call)
    plan.backward(dout, q, k, v, out, lse, **call)
    refused(plan, rf"{name.split()[0]}.* in this backward pass but .* in the forward pass", (q, k, v, dout, out, lse))
    plan.backward(dout, q, k, v, out, lse, check=False)  # as it is asked for


@pytest.mark.parametrize(
    "name, other, values",
    [
        ("cu_seqlens", {"cu_seqlens": [0, 12, 24]}, r"\[0, 12, 24\].*\[0, 10, 24\]"),
        ("lengths", {"lengths": [24, 12]}, r"\[0, 12\].*\[0, 13\]"),
        ("sinks", {"sinks": OTHERS * 2}, "sinks is .1.0, 0.5.*0.5, 0.25"),
        ("alibi_slopes", {"alibi_slopes": OTHERS + np.float32([0, 1, 0, 0])}, r"^alibi_slopes\[1\] is 1.25 .* 0.25 "),
        ("dropout", {"dropout": 0.25, "seed": 7}, "^dropout is 0.25 in this backward pass but 0.5 in"),
        ("dropout", {"dropout": 0.5, "seed": 8}, "^seed is 8 in this backward pass but 7 in"),
        (
            "relative_bias of a cyclic grid",
            {**OPTIONS["relative_bias of a cyclic grid"], "relative_cyclic": (True, True)},
            "^relative_cyclic is",
        ),
    ],
)
def test_backward_has_something_else(plan, name, other, values):
    q, k, v, dout = chunks(plan)
    out, lse = plan.forward(q, k, v, **OPTIONS[name])
    refused(plan, values, (q, k, v, dout, out, lse), **other)


def test_backward_has_more(plan):
    q, k, v, dout = chunks(plan)
    out, lse = plan.forward(q, k, v)
    refused(plan, r"documents .* is \[.* but left out in the forward", (q, k, v, dout, out, lse), cu_seqlens=[0, 9, 24])


def test_one_rank_of_all(comm, plan):
    """What only one rank sees is raised by all, and no rank waits."""
    q, k, v, dout = chunks(plan)
    out, lse = plan.forward(q, k, v)
    last = comm.rank == comm.size - 1
    refused(plan, "lse is", (q, k, v, dout, out, np.full_like(lse, -9) if last else lse))


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag", "ranges"])
@pytest.mark.parametrize("what", ["zeros", "of other keys", "negative"])
def test_an_lse_that_does_not_belong(comm, what, layout):
    if layout == "ranges":
        cuts = np.linspace(0, 24, 2 * comm.size + 1).astype(int).tolist()
        layout = Layout.of_ranges([[(cuts[i], cuts[i + 1]), (cuts[-i - 2], cuts[-i - 1])] for i in range(comm.size)])
    with MeshAttention(comm, **PLAN, layout=layout, mask=masks.parse("global 2 | window 9,9")) as plan:
        q, k, v, dout = chunks(plan)
        k, q = 3 * k, 3 * q
        out, lse = plan.forward(q, k, v)
        wrong = {"zeros": 0 * lse, "of other keys": lse - 5, "negative": -abs(lse)}
        refused(
            plan, r"lse is .* in batch entry 0, head 0, position \d+, whose weights", (q, k, v, dout, out, wrong[what])
        )


def test_out_is_overwritten(plan):
    """The memory of out was used for the next layer, or out was changed in place."""
    (q, k, v, dout), others = chunks(plan), chunks(plan, 1)
    memory = np.empty_like(q)
    out, lse = plan.forward(q, k, v, out=memory)
    plan.forward(*others[:3], out=memory)
    refused(plan, "out has other numbers", (q, k, v, dout, out, lse))
    out, lse = plan.forward(q, k, v)
    np.maximum(out, 0, out=out)
    refused(plan, "out has other numbers", (q, k, v, dout, out, lse))


# Programs that are right, and come near.


def right(plan, calls, order=None):
    """The gradients of several forward passes, whose backward passes come in another order, are those of each alone."""
    each = []
    for (q, k, v, dout), call in calls:
        out, lse = plan.forward(q, k, v, **call)
        each.append((plan.backward(dout, q, k, v, out, lse, **call), (dout, q, k, v, out, lse), call))
    for number in order or range(len(each)):
        wanted, arrays, call = each[number]
        for one, other in zip(wanted, plan.backward(*arrays, **call), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 1, 0, 2, 2)])
def test_several_forward_passes_before_backward(plan, order, same):
    """Also of the same numbers: lse does not depend on dropout, nor on the values."""
    options = {"cu_seqlens": [0, 10, 24]}, {"dropout": 0.5, "seed": 1}, {"dropout": 0.5, "seed": 2}
    right(plan, [(chunks(plan, 0 if same else i), call) for i, call in enumerate(options)], order)


def test_many_calls_with_the_same_numbers(plan):
    """More than are remembered of one lse, and more than are remembered in all."""
    call = [(chunks(plan), {"dropout": 0.5, "seed": seed}) for seed in range(12)]
    right(plan, call, range(11, -1, -1))
    q, k, v, dout = chunks(plan)
    out, lse = plan.forward(q, k, v, cu_seqlens=[0, 10, 24])
    for i in range(300):
        plan.forward(q + i, k, v)
    plan.backward(dout, q, k, v, out, lse, cu_seqlens=[0, 10, 24])
    assert len(plan._returned._calls) <= 256


def test_other_values_of_the_same_keys(plan):
    q, k, v, dout = chunks(plan)
    right(plan, [((q, k, value, dout), {}) for value in (v, v + 1, -v)], (1, 0, 2))


def test_copies_and_views(plan):
    q, k, v, dout = chunks(plan)
    call = {"lengths": [24, 13]}
    out, lse = plan.forward(q, k, v, **call)
    wanted = plan.backward(dout, q, k, v, out, lse, **call)
    fortran, wide = np.asfortranarray(lse), np.repeat(lse, 2, axis=2)[:, :, ::2]
    for copy in (lse.copy(), fortran, wide, lse[:], np.frombuffer(lse.tobytes(), lse.dtype).reshape(lse.shape)):
        for one, other in zip(wanted, plan.backward(dout, q, k, v, out.copy(), copy, **call), strict=True):
            np.testing.assert_array_equal(one, other)
        refused(plan, "documents", (q, k, v, dout, out, copy))


def test_memory_that_is_used_again(plan):
    """The last call counts; and what was saved before and copied back is known by its numbers."""
    q, k, v, dout = chunks(plan)
    memory = np.empty((2, 4, q.shape[1]), np.float32)
    out, lse = plan.forward(q, k, v, cu_seqlens=[0, 10, 24], lse=memory)
    saved = lse.copy()
    second, lse = plan.forward(q, k, v, lengths=[20, 20], lse=memory)
    plan.backward(dout, q, k, v, second, lse, lengths=[20, 20])
    memory[...] = saved
    plan.backward(dout, q, k, v, out, memory, cu_seqlens=[0, 10, 24])
    refused(plan, "documents", (q, k, v, dout, out, memory), lengths=[20, 20])


def test_the_same_documents_said_otherwise(plan):
    """Nothing differs in what queries see."""
    q, k, v, dout = chunks(plan)
    for call, other in [
        ({"cu_seqlens": [0, 10, 24]}, {"cu_seqlens": np.array([[0, 10, 24]] * 2), "cu_seqlens_k": (0, 10, 24)}),
        ({"cu_seqlens": [0, 24]}, {}),
        ({"lengths": [24, 24]}, {}),
        ({"lengths": [20, 20]}, {"cu_seqlens": [0, 20], "padding": True}),
        ({}, {"prefixes": [0, 1], "causal_documents": [True, True]}),
        ({"dropout": 0.0, "seed": 3}, {}),
        (
            OPTIONS["relative_bias of a cyclic grid"],
            {
                **OPTIONS["relative_bias of a cyclic grid"],
                "relative_grid": np.array([4, 6]),
                "relative_cyclic": np.array([False, True]),
            },
        ),
        ({"dropout": 0.5, "seed": np.int64(3)}, {"dropout": np.float64(0.5), "seed": 3}),
        (
            OPTIONS["relative_bias of a grid"],
            {**OPTIONS["relative_bias of a grid"], "relative_cyclic": [False, False], "relative_grid": [4, 6]},
        ),
    ]:
        out, lse = plan.forward(q, k, v, **call)
        plan.backward(dout, q, k, v, out, lse, **other)


def test_merged_results(comm):
    """Gradients of a part of the keys, by the lse of all."""
    with MeshAttention(comm, **PLAN) as plan:
        q, k, v, dout = chunks(plan)
        parts = [(k, v), chunks(plan, 1)[1:3]]
        results = [plan.forward(q, *part, alibi_slopes=OTHERS) for part in parts]
        out, lse = merge(*results[0], *results[1])
        for part in parts:
            plan.backward(dout, q, *part, out, lse, alibi_slopes=OTHERS)
        results = [plan.forward(q, *part) for part in parts]
        out, lse = merge(*results[0], *results[1])
        for part in parts:
            plan.backward(dout, q, *part, out, lse)
        results[0][1][...] = lse  # merged in place
        plan.backward(dout, q, *parts[0], out, results[0][1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("size", [1, 30])
def test_dtypes_and_large_scores(comm, dtype, size):
    """An lse of another plan is held against scores that were rounded otherwise."""
    import ml_dtypes  # noqa: F401  NumPy then knows bfloat16

    options = {**PLAN, "dtype": dtype, "causal": True, "softcap": 50.0 if size > 1 else None}
    with MeshAttention(comm, **options) as plan, MeshAttention(comm, **options, tile="ring", backend="numpy") as other:
        if not np.array_equal(plan.positions, other.positions):
            pytest.skip("the plans have other layouts")
        q, k, v, dout = chunks(plan, dtype=np.dtype(dtype))
        q, k = q * np.array(size, q.dtype), k * np.array(size, k.dtype)
        out, lse = other.forward(q, k, v)
        plan.backward(dout, q, k, v, out, lse)
        out, lse = plan.forward(q, k, v)
        plan.backward(dout, q, k, v, out.astype("float16").astype(dtype), lse)


def test_plans_like_it(plan):
    with plan.like(seqlen=24) as other:
        q, k, v, dout = chunks(plan)
        out, lse = plan.forward(q, k, v, lengths=[20, 3])
        other.backward(dout, q, k, v, out, lse, lengths=[20, 3])


def test_rows_without_keys_or_gradients(plan):
    """Rows that see nothing; rows whose lse is the caller's own, and that have no gradient."""
    q, k, v, dout = chunks(plan)
    right(plan, [((q, k, v, dout), {"lengths": [0, 0]}), ((q, k, v, dout), {"lengths": [0, 1]})], (1, 0, 1))
    out, lse = plan.forward(q, k, v)
    hidden = plan.positions >= 12
    dout[:, hidden] = 0
    wanted = plan.backward(dout, q, k, v, out, lse)
    lse, out = lse.copy(), out.copy()
    lse[:, :, hidden], out[:, hidden] = 0, 0
    for one, other in zip(wanted, plan.backward(dout, q, k, v, out, lse), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_rows_that_see_nothing_are_filled(plan):
    """A program that writes something of its own into the rows of padding, in place."""
    q, k, v, dout = chunks(plan)
    call = {"lengths": [13, 13]}
    out, lse = plan.forward(q, k, v, **call)
    wanted = plan.backward(dout, q, k, v, out, lse, **call)
    out[:, plan.positions >= 13] = 7
    for one, other in zip(wanted, plan.backward(dout, q, k, v, out, lse, **call), strict=True):
        np.testing.assert_array_equal(one, other)


def test_fewer_tokens_than_ranks(comm):
    with MeshAttention(comm, **{**PLAN, "seqlen": 1}, layout=(1, *[0] * (comm.size - 1))) as plan:
        right(plan, [(chunks(plan), call) for call in ({}, {"sinks": OTHERS}, {"dropout": 0.5, "seed": 1})], (2, 0, 1))


def test_ranks_with_copies(comm, plan):
    """Only some ranks pass an lse that the plan knows."""
    q, k, v, dout = chunks(plan)
    call = {"cu_seqlens": [0, 10, 24]}
    out, lse = plan.forward(q, k, v, **call)
    plan.backward(dout, q, k, v, out, lse if comm.rank % 2 else lse + np.float32(1e-3), **call)


def test_calls_that_are_not_checked(plan):
    """A plan whose forward passes were not all checked does not know who else returned the same numbers."""
    q, k, v, dout = chunks(plan)
    first, second = {"dropout": 0.5, "seed": 1}, {"dropout": 0.5, "seed": 2}
    plan.forward(q, k, v, **first)
    out, lse = plan.forward(q, k, v, **second, check=False)
    plan.backward(dout, q, k, v, out, lse, **second)
    plan.forward(q, k, v, **first)
    plan.backward(dout, q, k, v, out, lse, **second)


def test_values_that_are_not_finite(plan):
    q, k, v, dout = chunks(plan)
    for array, value in ((q, np.nan), (k, np.inf), (v, np.nan), (dout, np.nan)):
        given = [x.copy() if x is array else x for x in (q, k, v, dout)]
        next(x for x, before in zip(given, (q, k, v, dout)) if before is array)[:, :1] = value
        out, lse = plan.forward(*given[:3])
        plan.backward(given[3], *given[:3], out, lse)
        plan.backward(given[3], *given[:3], out, lse + np.float32(1e-3))


@pytest.mark.parametrize("sink", [np.nan, np.inf, -np.inf])
def test_sinks_that_are_not_finite(plan, sink):
    """NaN is the same as NaN."""
    right(plan, [(chunks(plan), {"sinks": np.array([sink, 0, 1, 2], np.float32)})], (0,))


@pytest.mark.filterwarnings("error")
def test_infinite_results_that_were_rounded(plan):
    q, k, v, dout = chunks(plan)
    v[:, :, :, 0] = np.inf
    out, lse = plan.forward(q, k, v)
    plan.backward(dout, q, k, v, out.astype("float16").astype("float32"), lse)


def test_an_lse_that_was_kept_in_16_bits(plan):
    import ml_dtypes

    q, k, v, dout = chunks(plan)
    for size in (10, 11, 12, 13):
        out, lse = plan.forward(size * q, size * k, v)
        plan.backward(dout, size * q, size * k, v, out, lse.astype(ml_dtypes.bfloat16).astype(lse.dtype))


def test_batch_entries_in_another_order(comm):
    """Of an lse so long that its bits are added up: the same ones have the same sum in any order."""
    with MeshAttention(comm, **{**PLAN, "seqlen": 5000 * comm.size}, causal=True, window=(9, 0)) as plan:
        q, k, v, dout = chunks(plan)
        out, lse = plan.forward(q, k, v)
        dout, q, k, v, out, lse = (array[::-1] for array in (dout, q, k, v, out, lse))
        plan.backward(dout, q, k, v, out, lse)


def test_a_part_of_merged_results_that_sees_nothing(plan):
    """The lse of both parts is then that of the other one, which had other options."""
    q, k, v, dout = chunks(plan)
    nothing = {"lengths": [0, 0]}
    out, lse = merge(*plan.forward(q, k, v, sinks=OTHERS), *plan.forward(q, v, k, **nothing))
    for part, call in (((k, v), {"sinks": OTHERS}), ((v, k), nothing)):
        plan.backward(dout, q, *part, out, lse, **call)


def test_little_is_kept(comm):
    """No array of the caller or of a result stays alive."""
    with MeshAttention(comm, **PLAN) as plan:
        q, k, v, _ = chunks(plan)
        plan.forward(q, k, v, relative_bias=np.ones((4, 999), np.float32))
        ((call,),) = plan._returned._calls.values()
        assert call.out.base is None and call.out.size <= 3 * 8
        assert "another array (4, 999)" in repr(call.options["relative_bias"].given)
        slopes = np.ones((1000, 4), np.float32)[3]
        plan.forward(q, k, v, alibi_slopes=slopes)
        *_, (call,) = plan._returned._calls.values()
        assert call.options["alibi_slopes"].given.base is None
