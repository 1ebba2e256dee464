"""What C programs call, called on ranks of Python, so that results can be compared with those of Python's interface."""

import ctypes
import random
import sys
import threading

import embedded
import numpy as np
import pytest
from embedded import Handle, described

import mpiattn
from mpiattn import Layout, masks
from mpiattn.embed import calls, plans

pytestmark = embedded.needed
NONE = Handle(0)
ARGUMENT, HANDLE, CALL, PEER, OF_MPI, FILE, VERIFY = range(1, 8)


@pytest.fixture(scope="module")
def c(comm):
    """The library, built by one rank."""
    path = comm.bcast(str(embedded.installed().library) if comm.rank == 0 else None)
    return embedded.Library(path)


def arrays_of(plan, seed, dtype="float32"):
    """(q, k, v, dout) of this rank, drawn."""
    p, rng = plan.problem, np.random.default_rng(seed)
    tokens, tokens_k = len(plan.positions), len(plan.positions_k)
    shapes = (tokens, p.heads, p.head_dim), (tokens_k, p.kv_heads, p.head_dim), (tokens_k, p.kv_heads, p.value_dim)
    return [rng.standard_normal((p.batch, *shape)).astype(dtype) for shape in (*shapes, (tokens, p.heads, p.value_dim))]


def both(c, comm, text, **options):
    """A plan of C and the same plan of Python."""
    return c.new("plan_create_text", comm.py2f(), text), mpiattn.MeshAttention(comm, timeout=60, **options)


@pytest.mark.parametrize(
    "text, options, dtype",
    [
        ("seqlen=37, heads=4, kv_heads=2, head_dim=8, causal=1", {"kv_heads": 2, "causal": True}, "float32"),
        ("seqlen=37, heads=4, head_dim=8, batch=2, window=5,", {"batch": 2, "window": (5, None)}, "float32"),
        ("seqlen=37, heads=4, head_dim=8, dtype=bfloat16, layout=zigzag", {"layout": "zigzag"}, "bfloat16"),
        ("seqlen=37, heads=4, head_dim=8, dtype=float64, value_dim=6, scale=0.5", {"value_dim": 6, "scale": 0.5}, None),
        ("seqlen=37, heads=4, head_dim=8, shared_kv=true, value_dim=6", {"shared_kv": True, "value_dim": 6}, "float32"),
    ],
)
def test_the_numbers_of_python(c, comm, text, options, dtype):
    """Forward, backward and verify; every result is written where the program has memory for it."""
    dtype = dtype or "float64"
    if dtype != "float32":
        options = options | {"dtype": dtype}
    handle, plan = both(c, comm, f"{text}, timeout=60", seqlen=37, heads=4, head_dim=8, **options)
    q, k, v, dout = arrays_of(plan, comm.rank, plan.problem.dtype)
    v = None if plan.problem.shared_kv else v
    out, lse = plan.forward(q, k, v)
    grads = plan.backward(dout, q, k, v, out, lse)
    got = [np.empty_like(out), np.empty_like(lse)]
    c.ok("forward", handle, q, k, v, *got, NONE)
    given = [*got, *[None if grad is None else np.empty_like(grad) for grad in grads]]
    c.ok("backward", handle, dout, q, k, v, *given, NONE)
    for here, there in zip(given, [out, lse, *grads], strict=True):
        assert (here is None) == (there is None) and (here is None or np.array_equal(here, there))
    worst = ctypes.c_double(-1)
    c.ok("verify", handle, q, k, v, *got, NONE, ctypes.byref(worst))
    assert 0 <= worst.value < 1
    got[0] += 1 if comm.rank == 0 else 0
    assert c.fails("verify", handle, q, k, v, *got, NONE, None)[0] == VERIFY
    c.ok("plan_free", ctypes.byref(handle))
    assert handle.number == 0
    plan.close()


def test_a_grid_on_a_cartesian_communicator(c, comm):
    cart = comm.Create_cart(comm_dims(comm), periods=(False, True), reorder=True)
    mask = "neighborhood 3x5 cyclic=1"
    options = {"seqlen": 7 * 9, "heads": 2, "head_dim": 8, "layout": Layout.grid((7, 9), cart)}
    handle = c.new("plan_create_text", cart.py2f(), f"grid=7x9, heads=2, head_dim=8, mask={mask}, timeout=60")
    plan = mpiattn.MeshAttention(cart, mask=masks.parse(mask, (7, 9)), timeout=60, **options)
    dims = "x".join(map(str, cart.dims))
    other = c.new("plan_create_text", comm.py2f(), f"grid=7x9, dims={dims}, heads=2, head_dim=8, timeout=60")
    assert text_of(c, handle, "layout") == text_of(c, other, "layout") == "grid"
    tokens = c.integer("plan_integer", handle, "tokens")
    assert np.array_equal(c.integers("plan_positions", tokens, handle, 0), plan.positions)
    rows = [7 - (comm.size - 1), *[1] * (comm.size - 1)]
    text = f"grid=7x9, dims={comm.size}x1, sizes={','.join(map(str, rows))}xeven, heads=2, head_dim=8, timeout=60"
    uneven = c.new("plan_create_text", comm.py2f(), text)
    assert c.integer("plan_integer", uneven, "tokens") == rows[comm.rank] * 9
    q, k, v, _ = arrays_of(plan, comm.rank)
    out, _ = plan.forward(q, k, v)
    got = np.empty_like(out)
    c.ok("forward", handle, q, k, v, got, None, NONE)
    assert np.array_equal(got, out)
    for each in (handle, other, uneven):
        c.ok("plan_free", ctypes.byref(each))
    plan.close()
    cart.Free()


def comm_dims(comm):
    return (1, comm.size) if comm.size in (2, 3) else (comm.size // 2 or 1, min(comm.size, 2))


def text_of(c, plan, name, size=500):
    text = ctypes.create_string_buffer(size)
    c.ok("plan_text", plan, name, text, ctypes.c_size_t(size))
    return text.value.decode()


def options_of(c, **values):
    """Options of C: arrays, lists, numbers and texts, each by its own function."""
    options = c.new("options_create", "")
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            c.ok("options_set_array", options, name, value)
        elif isinstance(value, list):
            numbers = np.array(value, np.int64)
            memory = ctypes.c_void_p(numbers.ctypes.data)
            c.ok("options_set_integers", options, name, ctypes.c_int64(len(value)), memory)
        elif isinstance(value, float):
            c.ok("options_set_real", options, name, value)
        elif isinstance(value, int):
            c.ok("options_set_integer", options, name, ctypes.c_int64(value))
        else:
            c.ok("options_set_text", options, name, value)
    return options


def test_options_of_calls(c, comm):
    """Documents, sinks, biases and dropout, with memory for all gradients, and memory with strides."""
    options = {"seqlen": 30, "heads": 4, "head_dim": 8, "key_bias": True}
    making = options_of(c, **options, timeout=60.0)
    handle, plan = c.new("plan_create", comm.py2f(), making), mpiattn.MeshAttention(comm, timeout=60, **options)
    q, k, v, dout = arrays_of(plan, comm.rank)
    rng, same = np.random.default_rng(comm.rank), np.random.default_rng(1)
    rows, columns = map(len, plan.bias_positions)
    tile = rng.standard_normal((1, plan.bias_heads.stop or 4, rows, columns)).astype("f")
    tile = tile[:, : len(range(4)[plan.bias_heads])]
    key_bias = rng.standard_normal((4, len(plan.positions_k))).astype("f")
    sinks, slopes, table = (same.standard_normal(n).astype("f") for n in (4, 4, (1, 5)))
    biases = {"bias": tile, "key_bias": key_bias, "alibi_slopes": slopes, "relative_bias": table, "sinks": sinks}
    drop = {"cu_seqlens": [0, 11, 30], "dropout": 0.25, "seed": 7}
    out, lse = plan.forward(q, k, v, **biases, **drop)
    dq, dk, dv, dsinks, *of_biases = plan.backward(dout, q, k, v, out, lse, **biases, **drop)
    wide = np.zeros((*out.shape[:3], 11), "f")  # whose first 8 elements are out
    got = [wide[..., :8], np.empty_like(lse)]
    call = options_of(c, **biases, **drop)
    c.ok("forward", handle, q, k, v, *got, call)
    assert np.array_equal(got[0], out) and np.array_equal(got[1], lse) and not wide[..., 8:].any()
    names = ["dsinks", "dbias", "dkey_bias", "dalibi_slopes", "drelative_bias"]
    grads = {name: np.empty_like(of) for name, of in zip(names, [dsinks, *of_biases], strict=True)}
    for name, memory in grads.items():
        c.ok("options_set_array", call, name, memory)
    memory = [np.empty_like(of) for of in (dq, dk, dv)]
    got[0][...] = 0
    c.ok("forward", handle, q, k, v, *got, call)  # memory for gradients is none of its concern
    assert np.array_equal(got[0], out)
    c.ok("backward", handle, dout, q, k, v, out, lse, *memory, call)
    for here, there in zip([*memory, *grads.values()], [dq, dk, dv, dsinks, *of_biases], strict=True):
        assert np.array_equal(here, there)
    c.ok("options_unset", call, "dbias")
    c.ok("options_unset", call, "dsinks")
    grads["dkey_bias"][:] = 0
    c.ok("backward", handle, dout, q, k, v, out, lse, *memory, call)
    assert np.array_equal(grads["dkey_bias"], of_biases[1])
    for options in (making, call):
        c.ok("options_free", ctypes.byref(options))
    c.ok("plan_free", ctypes.byref(handle))
    plan.close()


def test_distribution(c, comm):
    """Scatter and gather of tokens and biases, positions, numbers and texts of a plan, and plans of other lengths."""
    handle, plan = both(c, comm, "seqlen=23, heads=2, head_dim=4, timeout=60", seqlen=23, heads=2, head_dim=4)
    whole, root = np.arange(23 * 3, dtype=np.int32).reshape(23, 3), comm.size - 1
    chunk = np.empty((len(plan.positions), 3), np.int32)
    c.ok("scatter", handle, whole if comm.rank == root else None, chunk, root, 0, 0)
    assert np.array_equal(chunk, whole[plan.positions])
    back = np.zeros_like(whole)
    c.ok("gather", handle, chunk, back if comm.rank == root else None, root, 0, 0)
    assert np.array_equal(back, whole * (comm.rank == root))
    c.ok("gather", handle, chunk, back, -1, 0, 1)
    assert np.array_equal(back, whole)
    rows, columns = (
        c.integers("plan_bias_positions", c.integer("plan_integer", handle, name), handle, i)
        for i, name in enumerate(["bias_rows", "bias_columns"])
    )
    bias = np.random.default_rng(0).standard_normal((1, 1, 23, 23))
    tile = np.empty((1, 1, len(rows), len(columns)))
    c.ok("scatter_bias", handle, bias if comm.rank == 0 else None, tile, 0)
    assert np.array_equal(tile, bias[:, :, rows[:, None], columns])
    again, shared = np.empty_like(bias), options_of(c, bias_shared="batch,heads")
    c.ok("gather_bias", handle, tile, again if comm.rank == 0 else None, 0, shared)
    assert comm.rank or np.array_equal(again, bias)
    assert c.integer("plan_integer", handle, "nbytes") == plan.nbytes
    assert text_of(c, handle, "tile") == str(plan.tile) and text_of(c, handle, "description") == repr(plan)
    longer = c.new("plan_like", handle, ctypes.c_int64(40), ctypes.c_int64(41))
    assert [c.integer("plan_integer", longer, name) for name in ("seqlen", "seqlen_k")] == [40, 41]
    taken = options_of(c, seqlen=40, seqlen_k=41, heads=2, head_dim=4, timeout=60)
    c.ok("options_set_layout", taken, "layout", longer, 0)
    assert "layout" in c.fails("plan_create", comm.py2f(), taken, ctypes.byref(Handle()))[1]  # of 40 keys, not of 41
    for each in (handle, longer):
        c.ok("plan_free", ctypes.byref(each))
    plan.close()


def test_decoding(c, comm, tmp_path_factory):
    handle, plan = both(c, comm, "seqlen=20, heads=2, head_dim=4, timeout=60", seqlen=20, heads=2, head_dim=4)
    cache = c.new("cache_create_text", comm.py2f(), "capacity=64, kv_heads=2, head_dim=4, page_size=4, timeout=60")
    own = mpiattn.KVCache(comm, capacity=64, kv_heads=2, head_dim=4, page_size=4, timeout=60)
    _, k, v, _ = arrays_of(plan, comm.rank)
    new = np.random.default_rng(0).standard_normal((3, 1, 2, 2, 4)).astype("f")
    placed = c.new("options_create", None)
    c.ok("options_set_layout", placed, "layout", handle, 1)
    c.ok("cache_append", cache, k, v, placed)
    c.ok("cache_append", cache, new[0], new[1], NONE)
    own.append(k, v, layout=plan.k_layout)
    own.append(new[0], new[1])
    out, lse = mpiattn.tree_decode(new[2], own, window=(9, None))
    got = np.empty_like(out), np.empty_like(lse)
    c.ok("tree_decode", cache, new[2], *got, options_of(c, window="9,"))
    assert np.array_equal(got[0], out) and np.array_equal(got[1], lse)
    c.ok("tree_decode", cache, new[2], None, None, options_of(c, algorithm="butterfly", root=comm.size - 1))
    assert c.integers("cache_lengths", 1, cache, 0).tolist() == [22] == list(own.lengths)
    (held,) = c.integers("cache_lengths", 1, cache, 1)
    assert np.array_equal(c.integers("cache_positions", held, cache, ctypes.c_int64(0)), own.positions(0))
    c.ok("cache_truncate", cache, ctypes.c_int64(1), ctypes.byref(ctypes.c_int64(13)), options_of(c, sequences="0,"))
    assert c.integer("cache_integer", cache, "free_pages")
    assert (c.integer("cache_integer", cache, "sent_messages") > 0) == (comm.size > 1)
    path = comm.bcast(str(tmp_path_factory.mktemp("caches") / "c.h5") if comm.rank == 0 else None)
    c.ok("cache_save", cache, path)
    loaded = c.new("cache_load", comm.py2f(), path, options_of(c, timeout=60))
    assert c.integers("cache_lengths", 1, loaded, 0).tolist() == [13]
    given = None if comm.rank == comm.size - 1 else path
    status, text = c.fails("cache_load", comm.py2f(), given, NONE, ctypes.byref(Handle()))
    assert status == ARGUMENT and "path is NULL" in text and comm.allgather(text) == [text] * comm.size
    status, text = c.fails("cache_load", comm.py2f(), f"{path}.none", NONE, ctypes.byref(Handle()))
    assert status == FILE and "c.h5.none" in text
    for each in (cache, loaded):
        c.ok("cache_free", ctypes.byref(each))
    c.ok("plan_free", ctypes.byref(handle))
    plan.close(), own.close()


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


def changed(q, **fields):
    """A description of q with other fields."""
    of = described(q)._obj
    for name, value in fields.items():
        setattr(of, name, (ctypes.c_int64 * 8)(*value) if isinstance(value, tuple) else value)
    return ctypes.byref(of)


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
        ("seqlen=24, heads=2, head_dim=8, mask=neighbourhood 3", "neighborhood"),
        ("seqlen=24, heads=2, head_dim=8, causal=2", "causal is 2"),
    ]:
        good = "seqlen=24, heads=2, head_dim=8, timeout=60"
        given = text if comm.rank == wrong_rank else good
        status, says_all = c.fails("plan_create_text", comm.py2f(), given, ctypes.byref(Handle()))
        assert status == ARGUMENT and says in says_all and comm.allgather(says_all) == [says_all] * comm.size
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
    assert "count is 3" in c.fails("plan_positions", plan, 0, ctypes.c_int64(3), (ctypes.c_int64 * 3)())[1]
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


def test_output_and_threads(c, comm, monkeypatch):
    """Python's text goes to the program's function.  Calls inside a call are refused, of this thread and of others."""
    parts, inside = [], []

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p)
    def output(text, is_error, context):
        parts.append((text.decode(), is_error, context))
        inside.append(c.fails("start"))
        thread = threading.Thread(target=lambda: inside.append(c.fails("start")))
        thread.start()
        thread.join()

    def speak():
        print("a line", end="")
        print("a warning", end="", file=sys.stderr)

    before = sys.stdout, sys.stderr
    c.ok("start")
    monkeypatch.setattr(calls, "nothing", speak)
    c.ok("set_output", output, ctypes.c_void_p(5))
    try:
        c.ok("start")
    finally:
        c.ok("set_output", None, None)
    assert (sys.stdout, sys.stderr) == before and parts == [("a line", 0, 5), ("a warning", 1, 5)]
    assert len(inside) == 4 and {status for status, _ in inside} == {CALL}
    assert all("call from one thread at a time" in text for _, text in inside)


def test_an_exception_inside(c, comm):
    """Also what nobody expects is a status, and the process goes on.  Of a rank that failed first, others hear."""
    plan = c.new("plan_create_text", comm.py2f(), "seqlen=8, heads=1, head_dim=4, timeout=60")
    q = np.ones((1, c.integer("plan_integer", plan, "tokens"), 1, 4), "f")
    status, text = c.fails("forward", plan, q, q, q, np.empty_like(q), None, options_of(c, progress=3))
    assert status in (PEER, 10) and "TypeError: 'int' object is not callable" in text
    assert 10 in comm.allgather(status)
    c.plan_free(ctypes.byref(plan))
    again = c.new("plan_create_text", comm.py2f(), "seqlen=8, heads=1, head_dim=4, timeout=60")
    c.ok("plan_free", ctypes.byref(again))


def test_the_memory_is_the_programs(c, comm, monkeypatch):
    """What Python computes with lies where the program's arrays lie, also with strides."""
    handle = c.new("plan_create_text", comm.py2f(), "seqlen=24, heads=2, head_dim=8, timeout=60")
    plan, passed = plans.PLANS[handle.number], []
    monkeypatch.setattr(plan, "forward", lambda **arrays: passed.append(arrays))
    shape = 1, c.integer("plan_integer", handle, "tokens"), 2, 8
    given = {name: np.zeros(shape, "f") for name in ("q", "k", "v")} | {"out": np.zeros((*shape[:3], 11), "f")[..., :8]}
    for _ in range(2):
        c.ok("forward", handle, *given.values(), None, NONE)
        for name, array in passed.pop().items():
            assert array.ctypes.data == given[name].ctypes.data and array.strides == given[name].strides
    monkeypatch.undo()
    c.ok("plan_free", ctypes.byref(handle))


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
