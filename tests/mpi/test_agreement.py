"""One rank's wrong argument is every rank's error: the same text, naming argument, value and what it may be."""

import numpy as np
import pytest
from dense import draw, draw_all
from runs import attend, my_chunks, on

from mpiattn import ArgumentError, KVCache, Layout, MeshAttention, attention
from mpiattn.comm.agreement import agree_on, agreement
from mpiattn.comm.peers import Peers
from mpiattn.errors import FileError, KeywordError, MpiattnError

SHAPE = {"seqlen": 24, "heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}


def same_error(comm, call, kind=ArgumentError):
    """The text of the error that `call` raises, after checking that all ranks raise the same."""
    with pytest.raises(MpiattnError) as caught:
        call()
    raised = comm.allgather((type(caught.value).__name__, str(caught.value), caught.value.everywhere))
    assert len(set(raised)) == 1, raised
    assert type(caught.value) is kind and caught.value.everywhere
    return str(caught.value)


WRONG = [
    ("seqlen", -1, ["-1", "at least 0"]),
    ("seqlen", 2.5, ["2.5", "whole number"]),
    ("heads", 0, ["0", "at least 1"]),
    ("heads", True, ["True"]),
    ("kv_heads", 3, ["3", "divide heads", "4"]),
    ("head_dim", None, ["None"]),
    ("value_dim", -2, ["-2"]),
    ("batch", 0, ["0"]),
    ("seqlen_k", "many", ["many"]),
    ("dtype", "bfloat17", ["bfloat17", "float16, float32, float64"]),
    ("causal", 2, ["2", "True or False"]),
    ("scale", float("nan"), ["nan", "finite"]),
    ("scale", "big", ["big"]),
    ("tile", "3x99", ["3x99", "ring, qring or auto"]),
    ("tile", "square", ["square", "auto"]),
    ("tile", (1, 2, 3), ["1x2x3"]),
    ("layout", "diagonal", ["diagonal", "contiguous, striped, zigzag"]),
    ("layout", Layout("striped", 25, 1), ["seqlen=25", "24"]),
    ("layout", "zig-zag", ["zig-zag", "did you mean zigzag?"]),
    ("max_memory", "1X", ["'1X'", "800000000, '512M' or '1.5G'"]),
    ("schedule", "lazy", ["lazy", "greedy, collective, auto"]),
    ("route", "scenic", ["scenic", "direct, ring"]),
    ("backend", "abacus", ["abacus", "numpy"]),
    ("max_message", 0, ["0", "2147483647"]),
    ("max_message", 2**31, [str(2**31)]),
    ("window", (1,), ["(1,)"]),
    ("window", (-2, 0), ["-2"]),
    ("softcap", -1, ["positive"]),
    ("wire_dtype", "float64", ["float64", "bfloat16, float32"]),
    ("wire_dtype", 3, ["3"]),
]


@pytest.mark.parametrize(("name", "value", "parts"), WRONG)
def test_case_26_wrong_on_one_rank(comm, name, value, parts):
    guilty = comm.size - 1
    arguments = {**SHAPE, name: value} if comm.rank == guilty else SHAPE
    text = same_error(comm, lambda: MeshAttention(comm, **arguments))
    assert name in text and all(part in text for part in parts), text
    if comm.size > 1:
        assert f"on rank {guilty} of {comm.size}" in text


def test_unknown_keyword_on_one_rank(comm):
    wrong = {"causel": True} if comm.rank == comm.size - 1 else {}
    text = same_error(comm, lambda: MeshAttention(comm, **SHAPE, **wrong), KeywordError)
    assert text.startswith("causel is not an argument of MeshAttention; did you mean causal?")
    ones = np.ones((1, 3, 2, 8), np.float32)
    text = same_error(comm, lambda: attention(ones, ones, ones, comm=comm, **wrong), KeywordError)
    assert text.startswith("causel is not an argument of attention; did you mean causal?")
    with MeshAttention(comm, **SHAPE) as plan:
        text = same_error(comm, lambda: plan.like(seqlen=8, **wrong), KeywordError)
        assert "causel is not an argument of like" in text


@pytest.mark.many
def test_wrong_on_every_rank(comm):
    text = same_error(comm, lambda: MeshAttention(comm, **{**SHAPE, "heads": 0}))
    assert " on rank" not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seqlen", 25),
        ("heads", 8),
        ("head_dim", 16),
        ("dtype", "float64"),
        ("causal", True),
        ("tile", "ring"),
        ("layout", "striped"),
        ("scale", 0.25),
        ("schedule", "collective"),
        ("route", "ring"),
        ("max_message", 999),
        ("wire_dtype", "float16"),
        ("window", (4, 0)),
        ("softcap", 2.0),
    ],
)
def test_case_26_different_on_one_rank(comm, at_least, name, value):
    at_least(2)
    arguments = {**SHAPE, name: value} if comm.rank == 1 else SHAPE
    text = same_error(comm, lambda: MeshAttention(comm, **arguments))
    assert name in text and "rank 0" in text and "rank 1" in text and "same on every rank" in text
    MeshAttention(comm, **SHAPE).close()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_case_26_wrong_at_a_call(comm, name):
    with MeshAttention(comm, **SHAPE) as plan:
        good = dict(zip("qkv", my_chunks(plan, *draw(plan.problem))))
        expected = plan.forward(**good)
        for guilty in {0, comm.size - 1}:
            for wrong in (good[name][:, :-1], np.concatenate([good[name]] * 2, axis=1), good[name].astype("f8"), None):
                if wrong is not None and wrong.shape == good[name].shape and wrong.dtype == good[name].dtype:
                    continue  # an empty chunk can't be shortened
                given = {**good, name: wrong} if comm.rank == guilty else good
                text = same_error(comm, lambda given=given: plan.forward(**given))
                assert text.startswith(name)
                if comm.size > 1:
                    assert f"rank {guilty}" in text
        again = plan.forward(**good)  # the plan is as good as before
        assert all((a == b).all() for a, b in zip(expected, again))


OF_CALLS = ["q", "k", "v", "sinks", "dout", "dlse", "out", "lse"]


@on(4)
@pytest.mark.parametrize("name", OF_CALLS)
def test_case_26_wrong_at_a_call_of_either_kind(group, name):
    """A shape, a dtype, no array: on the last rank alone; every rank says so, and the plan is as good as before."""
    with MeshAttention(group, **SHAPE) as plan:
        chunks = my_chunks(plan, *draw_all(plan.problem, sinks=True))
        expected = attend(plan, chunks)
        good = {**chunks._asdict(), "out": expected.out, "lse": expected.lse}
        backward_only = name in ("dout", "dlse", "out", "lse")
        for wrong in (good[name][:1], good[name].astype("f8"), good[name].tolist()):
            if isinstance(wrong, np.ndarray) and (wrong.shape, wrong.dtype) == (good[name].shape, good[name].dtype):
                wrong = good[name][:, :1]
            given = {**good, name: wrong} if group.rank == 3 else good
            q, k, v, dout, dlse, sinks, out, lse = given.values()
            calls = [lambda a=(dout, q, k, v, out, lse), d=dlse, s=sinks: plan.backward(*a, dlse=d, sinks=s)]
            if not backward_only:
                calls.append(lambda a=(q, k, v), s=sinks: plan.forward(*a, sinks=s))
            for call in calls:
                text = same_error(group, call)
                assert text.startswith(name) and "rank 3 of 4" in text
        again = attend(plan, chunks)
        assert all((a == b).all() for a, b in zip(expected, again))


@on(3)
def test_case_26_different_at_a_call(group):
    """Documents, padding and sinks that differ on one rank, at both calls."""
    with MeshAttention(group, **SHAPE) as plan:
        chunks = my_chunks(plan, *draw_all(plan.problem))
        out, lse = plan.forward(*chunks[:3])
        odd = group.rank == 2
        for named, given in (
            ("documents", {"cu_seqlens": [0, 10 + odd, 24]}),
            ("documents", {"lengths": [9]} if odd else {}),
            ("sinks", {"sinks": np.full(4, 1 + odd, np.float32)}),
            ("sinks", {"sinks": np.ones(4, np.float32)} if odd else {}),
            ("progress is True; it must be a function, or None", {"progress": True} if odd else {}),
        ):
            for call in (
                lambda given=given: plan.forward(*chunks[:3], **given),
                # with an lse that the plan does not know, whose options it would compare first
                lambda given=given: plan.backward(chunks.dout, *chunks[:3], out, lse + 1, **given),
            ):
                text = same_error(group, call)
                assert text.startswith(named) and "rank 2" in text
        assert (plan.forward(*chunks[:3])[0] == out).all()


@pytest.mark.parametrize(
    "given, says",
    [
        ({"padding": True}, "padding is given without cu_seqlens"),
        ({"cu_seqlens": [0, 30, 20]}, "cu_seqlens is"),
        ({"cu_seqlens": [0, 99]}, "positions from 0 to 24"),
        ({"cu_seqlens": [0.5, 3]}, "whole numbers"),
        ({"lengths": [3]}, "it must be a sequence of 2 numbers from 0 to 24, one for each entry of the batch"),
        ({"cu_seqlens": [0, 24], "lengths": [1, 2]}, "lengths and cu_seqlens are both given"),
        ({"cu_seqlens_k": [0, 24]}, "without cu_seqlens"),
        ({"cu_seqlens": [[0, 4]]}, "one for each of 2"),
        ({"cu_seqlens": [0, 9, 24], "cu_seqlens_k": [0, 24]}, "it must have 2"),
    ],
)
def test_wrong_documents(comm, given, says):
    with MeshAttention(comm, **SHAPE, batch=2) as plan:
        chunks = my_chunks(plan, *draw_all(plan.problem))
        out, lse = plan.forward(*chunks[:3], lengths=[24, 0])
        for call in (
            lambda: plan.forward(*chunks[:3], **given),
            lambda: plan.backward(chunks.dout, *chunks[:3], out, lse, **given),
        ):
            with pytest.raises(ArgumentError, match=says):
                call()


@on(2)
def test_a_wire_dtype_on_the_ring_route_is_refused(group):
    text = same_error(group, lambda: MeshAttention(group, **SHAPE, route="ring", wire_dtype="bfloat16"))
    assert "wire_dtype is 'bfloat16'" in text and "float32" in text and " on rank" not in text


def test_unchecked_call_raises_alone():
    from mpi4py import MPI

    with MeshAttention(MPI.COMM_SELF, **SHAPE) as plan, pytest.raises(ArgumentError, match=r"^q has shape"):
        plan.forward(*[np.zeros((1, 3, 4, 8), "f4")] * 3, check=False)


@pytest.mark.parametrize("check", ["no", None, 1])
def test_a_check_that_is_no_bool(comm, check):
    arrays = np.zeros((1, 0, 4, 8), "f4"), *[np.zeros((1, 0, 2, 8), "f4")] * 2
    with MeshAttention(comm, **{**SHAPE, "seqlen": 0}) as plan:
        text = same_error(comm, lambda: plan.forward(*arrays, check=check if comm.rank == 0 else True))
        assert text.startswith(f"check is {check!r}; it must be True or False")
        for right in (np.True_, np.False_):
            out, _ = plan.forward(*arrays, check=right if comm.rank == 0 else bool(right))
            assert out.shape == (1, 0, 4, 8)


def test_any_exception_of_one_rank(comm):
    """Errors that are not mpiattn's, and files, arrive as mpiattn's."""

    def fail(error):
        with agreement(Peers(comm)):
            if comm.rank == comm.size - 1:
                raise error

    assert "KeyError: 'x'" in same_error(comm, lambda: fail(KeyError("x")), MpiattnError)
    assert "no such thing" in same_error(comm, lambda: fail(FileNotFoundError("no such thing")), FileError)
    assert "out of it" in same_error(comm, lambda: fail(MemoryError("out of it")), MpiattnError)


def test_first_of_different_errors(comm):
    def fail():
        with agreement(Peers(comm)):
            raise ArgumentError(f"wrong as rank {comm.rank} is")

    text = same_error(comm, fail)
    assert text.startswith("wrong as rank 0 is")
    assert comm.size == 1 or text.endswith(f"(on rank 0 of {comm.size}; the others have errors too)")


def test_agree_on_names_the_argument(comm, at_least):
    at_least(2)
    agree_on(Peers(comm), {"x": 1, "y": None})
    text = same_error(comm, lambda: agree_on(Peers(comm), {"x": 1, "y": comm.rank if comm.rank == 1 else None}))
    assert text.startswith("y is left out on rank 0 but 1 on rank 1")


def test_equal_numbers_of_different_types_agree(comm, at_least):
    at_least(2)
    agree_on(Peers(comm), {"x": [2, np.int64(2), 2.0, np.float32(2)][comm.rank % 4], "y": [True, 1][comm.rank % 2]})
    for value in (2.5, float("inf"), True):
        text = same_error(comm, lambda value=value: agree_on(Peers(comm), {"x": np.int64(2) if comm.rank else value}))
        assert text.startswith(f"x is {value!r} on rank 0 but ")


def test_arguments_of_calls_before(comm, at_least):
    """A call that all ranks have made, then a call in which a rank differs, and the first again, by equal values."""
    at_least(2)
    token = np.ones((2, 1, 1, 4), np.float32)
    with KVCache(comm, capacity=40, sequences=2, kv_heads=1, head_dim=4) as cache:
        for _ in range(2):
            cache.append(token, token, counts=[1, 1])
            given = [1, 1 - (comm.rank == comm.size - 1)]
            text = same_error(comm, lambda given=given: cache.append(token, token, counts=given))
            assert text.startswith("counts is [1, 1] on rank 0 but [1, 0] on rank")
            cache.append(token, token, counts=np.array([1.0, 1]).astype(int) if comm.rank else (1, np.int32(1)))
        assert cache.lengths == (4, 4)


def test_zeros_of_both_signs_after_a_difference(comm, at_least):
    """Of the failed call ranks remember different arguments; some equal the next call's but print otherwise."""
    at_least(2)
    peers, hashes = Peers(comm), {}

    def call(value):
        with agreement(peers, call="a call", hashes=hashes) as same:
            same["sinks"] = [value]

    same_error(comm, lambda: call(float(comm.rank)))
    call(-0.0)
    call(0.0)
