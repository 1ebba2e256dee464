"""Errors of what C programs call: on all ranks alike, and none is left waiting."""

import ctypes
import random

import embedded
import numpy as np
from embedded import ARGUMENT, HANDLE, NONE, OF_MPI, Handle, arrays_of, both, changed, described, options_of

import mpiattn

pytestmark = embedded.needed

WRONG = {  # what one rank passes for q: its error on all ranks
    "NULL": (lambda q: None, "q is NULL"),
    "shape": (lambda q: q[:, :, :1], "q has shape"),
    "dtype": (lambda q: q.astype("d"), "q has dtype float64"),
    "unknown dtype": (lambda q: changed(q, dtype=77), "q has dtype 77; it must be one of 1 (float16)"),
    "axes": (lambda q: changed(q, axes=9), "q has 9 axes; it must have 0 to 8"),
    "negative length": (lambda q: changed(q, shape=(1, -5, 2, 8)), "q has shape (1, -5, 2, 8); lengths must be"),
    "negative stride": (lambda q: changed(q, strides=(1, -5, 2, 8)), "q has strides (1, -5, 2, 8)"),
    "no memory": (lambda q: changed(q, data=None), "and NULL for its data"),
    "overflow": (lambda q: changed(q, shape=(2**40, 2**40, 2, 8)), "more than memory can have"),
}


def test_wrong_arguments_of_a_rank_are_errors_of_all(c, comm):
    handle = c.new("plan_create_text", comm.py2f(), "seqlen=24, heads=2, head_dim=8, timeout=60")
    plan = mpiattn.MeshAttention(comm, seqlen=24, heads=2, head_dim=8, timeout=60)
    q, k, v, _ = arrays_of(plan, comm.rank)
    out, wrong_rank = np.empty_like(q), random.Random(5).randrange(comm.size)
    for change, says in WRONG.values():
        given = change(q) if comm.rank == wrong_rank else q
        status, text = c.fails("forward", handle, given, k, v, out, None, NONE)
        assert status == ARGUMENT and says in text and comm.allgather(text) == [text] * comm.size
    twice = options_of(c, out=out)
    assert "out is an argument of the function" in c.fails("forward", handle, q, k, v, out, None, twice)[1]
    status, text = c.fails("forward", handle, q, k, v, out, None, options_of(c, dropuot=0.5))
    assert status == ARGUMENT and "dropuot is not an argument" in text
    status, text = c.fails("backward", handle, q, q, k, v, q, q, out, out, out, options_of(c, dsinks=out))
    assert "dsinks is given without sinks" in text
    c.ok("forward", handle, q, k, v, out, None, NONE)
    for text, says in [
        ("seqlen=24, heads=2", "head_dim is missing in the options"),
        ("heads=2", "seqlen and head_dim are missing in the options, or grid"),
        ("tile, seqlen=24, heads=2, head_dim=8", "'tile' in it is not name=value"),
        ("seqlen=24, heads=2, head_dim=8, tile", "head_dim is '8, tile'"),
        ("seqlen=24, heads=2, heads=3, head_dim=8", "heads is in it twice"),
        ("seqlen=24, heads=2, head_dim=8, grid=4x6", "dims is missing: grid is given"),
        ("seqlen=24, heads=2, head_dim=8, dims=2x3", "dims is (2, 3), given without grid"),
        ("seqlen=24, heads=2, head_dim=8, sizes=2x3", "sizes is ((2,), (3,)), given without grid"),
        ("seqlen=24, heads=2, head_dim=8, softmax_scale=2", "it is called scale here"),
        ("seqlen=24, haeds=2, head_dim=8", "haeds is not an argument of MeshAttention; did you mean heads?"),
        ("seqlen=24, heads=2, head_dim=8, mask=neighbourhood 3", "neighborhood"),
        ("seqlen=24, heads=2, head_dim=8, causal=2", "causal is 2"),
    ]:
        good = "seqlen=24, heads=2, head_dim=8, timeout=60"
        given = text if comm.rank == wrong_rank else good
        status, says_all = c.fails("plan_create_text", comm.py2f(), given, ctypes.byref(Handle()))
        assert status == ARGUMENT and says in says_all and comm.allgather(says_all) == [says_all] * comm.size
    said = c.fails("cache_create_text", comm.py2f(), "capcity=24, kv_heads=2, head_dim=8", ctypes.byref(Handle()))[1]
    assert said == "capcity is not an argument of KVCache; did you mean capacity?"
    assert "plan is NULL" in c.fails("plan_create_text", comm.py2f(), "seqlen=24, heads=2, head_dim=8", None)[1]
    c.ok("plan_free", ctypes.byref(handle))
    plan.close()


def test_handles(c, comm):
    """What names nothing is an error of its rank, and freed numbers stay so."""
    plan = c.new("plan_create_text", comm.py2f(), "seqlen=24, heads=2, head_dim=8, timeout=60")
    options, copy = c.new("options_create", "causal=1"), Handle(plan.number)
    value = ctypes.byref(ctypes.c_int64())
    assert c.fails("plan_integer", plan, "tokenss", value)[0] == ARGUMENT
    assert c.fails("plan_integer", plan, None, value)[0] == ARGUMENT
    assert c.fails("plan_integer", plan, "tokens", None) == (
        ARGUMENT,
        "value is NULL, or its number is negative; it must be memory for int64 numbers",
    )
    assert "size is 2" in c.fails("plan_text", plan, "layout", ctypes.create_string_buffer(2), ctypes.c_size_t(2))[1]
    assert "count is 99" in c.fails("plan_positions", plan, 0, ctypes.c_int64(99), (ctypes.c_int64 * 99)())[1]
    c.ok("plan_free", ctypes.byref(plan))
    for wrong, says in [
        (NONE, "that of no plan"),
        (copy, "that of a plan that was freed"),
        (options, "that of another kind: options"),
        (Handle(-3), "no handle that mpiattn has given"),
    ]:
        status, text = c.fails("forward", wrong, None, None, None, None, None, NONE)
        assert status == HANDLE and says in text
    assert c.fails("plan_free", ctypes.byref(copy))[0] == HANDLE
    assert c.fails("plan_free", None)[0] == ARGUMENT and c.fails("options_set_text", options, "a b", "x")[0] == ARGUMENT
    c.ok("options_free", ctypes.byref(options))
    assert c.fails("options_set_real", options, "scale", 1.0)[0] == HANDLE
    for handle in (comm.py2f() + 12345678, -1):
        status, text = c.fails("plan_create_text", handle, "seqlen=24, heads=2, head_dim=8", ctypes.byref(Handle()))
        assert status in (ARGUMENT, OF_MPI) and "comm is" in text
    assert c.version().decode() == mpiattn.__version__


def test_wrong_memory_for_what_is_moved_or_a_gradient(c, comm):
    """Also what only the result tells, a shape, is an error of all ranks."""
    handle, plan = both(c, comm, "seqlen=23, heads=2, head_dim=4, timeout=60", seqlen=23, heads=2, head_dim=4)
    whole, n, odd = np.arange(23 * 3.0).reshape(23, 3), len(plan.positions), comm.rank == comm.size - 1
    chunk = np.empty((n, 3 + odd))
    status, text = c.fails("scatter", handle, whole, chunk, 0, 0, 0)
    assert status == ARGUMENT and "chunk has shape and dtype ((" in text and comm.allgather(text) == [text] * comm.size
    assert "whole is NULL" in c.fails("scatter", handle, None, chunk, 0, 0, 0)[1]
    status, text = c.fails("gather", handle, chunk[:, :3], whole[1:] if comm.rank == 0 else None, 0, 0, 0)
    assert status == ARGUMENT and "whole has shape and dtype ((22, 3)" in text
    strided = described(chunk)._obj
    strided.strides[:2] = 0, 1
    assert "elements may share memory" in c.fails("scatter", handle, whole, ctypes.byref(strided), 0, 0, 0)[1]
    q, k, v, dout = arrays_of(plan, comm.rank)
    (out, lse), sinks = plan.forward(q, k, v), np.zeros(2, "f")
    memory = [np.empty_like(of) for of in (q, k, v)]
    for dsinks, more, says in [
        (np.zeros(3, "f"), {}, "dsinks has shape and dtype"),
        (sinks, {}, "dsinks shares memory with sinks"),
        (np.zeros(2, "f"), {"alibi_slopes": np.ones(2, "f"), "dalibi_slopes": sinks}, "shares memory with sinks"),
        (
            np.zeros(2, "f"),
            {"alibi_slopes": np.ones(2, "f"), "dalibi_slopes": np.ones(2, "f"), "bias_gradients": "false"},
            "dalibi_slopes is given, and bias_gradients, False, is without alibi_slopes",
        ),
    ]:
        call = options_of(c, sinks=sinks, dsinks=dsinks, **more)
        status, text = c.fails("backward", handle, dout, q, k, v, out, lse, *memory, call)
        assert status == ARGUMENT and says in text
    c.ok("plan_free", ctypes.byref(handle))
    plan.close()


def test_errors_of_a_rank_before_a_call(c, comm):
    """Whatever is wrong on a rank, the others do not wait for it, nor take its next call for this one."""
    handle = c.new("plan_create_text", comm.py2f(), "seqlen=24, heads=2, head_dim=8, timeout=60")
    cache = c.new("cache_create_text", comm.py2f(), "capacity=64, kv_heads=2, head_dim=8, timeout=60")
    n, wrong = c.integer("plan_integer", handle, "tokens"), comm.rank == comm.size - 1
    q = np.zeros((1, n, 2, 8), "f")
    queries, new = np.zeros((1, 1, 2, 8), "f"), Handle(77)

    def all_fail(says, name, *arguments):
        status, text = c.fails(name, *arguments)
        assert status == ARGUMENT and says in text and comm.allgather(text) == [text] * comm.size, text

    def there(value, usual):
        return value if wrong else usual

    for shape, strides in [((0, 2**62, 2**62, 8), None), ((1, n, 2, 8), (2**62, 16, 8, 1))]:
        bad = changed(q, shape=shape, **({"strides": strides} if strides else {}))
        all_fail("q has ", "forward", handle, there(bad, q), q, q, np.empty_like(q), None, NONE)
    all_fail("options has the handle 99", "forward", handle, q, q, q, np.empty_like(q), None, there(Handle(99), NONE))
    all_fail(
        "options has the handle 99",
        "plan_create",
        comm.py2f(),
        there(Handle(99), options_of(c, seqlen=24, heads=2, head_dim=8, timeout=60)),
        ctypes.byref(new),
    )
    assert new.number == 0
    text = "seqlen=24, heads=2, head_dim=8, timeout=60"
    for bad, says in [("comm=3", "comm is an argument of the function"), ("grid=4x6, dims=1,,2", "dims is")]:
        given = there(f"{text}, {bad}", text)
        all_fail(says, "plan_create_text", comm.py2f(), given, ctypes.byref(new))
    given = there("seqlen=99999999999999999999, heads=2, head_dim=8", text)
    all_fail("must have 64 bits at most", "plan_create_text", comm.py2f(), given, ctypes.byref(new))
    all_fail("k is an argument", "cache_append", cache, queries, queries, there(options_of(c, k=1), NONE))
    length = ctypes.byref(ctypes.c_int64(0))
    all_fail("lengths is an", "cache_truncate", cache, ctypes.c_int64(1), length, there(options_of(c, lengths=1), NONE))
    c.ok("cache_append", cache, queries, queries, NONE)
    for name in ("q", "cache"):
        all_fail(f"{name} is an", "tree_decode", cache, queries, None, None, there(options_of(c, **{name: 1}), NONE))
    out = np.empty_like(q)
    c.ok("forward", handle, q, q, q, out, None, NONE)
    c.ok("cache_free", ctypes.byref(cache))
    c.ok("plan_free", ctypes.byref(handle))
