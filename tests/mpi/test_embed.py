"""What C programs call, called on ranks of Python, so that results can be compared with those of Python's interface."""

import ctypes
import sys
import threading

import embedded
import numpy as np
import pytest
from embedded import ARGUMENT, CALL, FILE, NONE, PEER, VERIFY, Handle, arrays_of, both, options_of, text_of

import mpiattn
from mpiattn import Layout, masks
from mpiattn.embed import calls, plans

pytestmark = embedded.needed


@pytest.mark.parametrize(
    "text, options, dtype",
    [
        ("seqlen=37, heads=4, kv_heads=2, head_dim=8, causal=1", {"kv_heads": 2, "causal": True}, "float32"),
        ("seqlen=37, heads=4, head_dim=8, batch=2, window=5,", {"batch": 2, "window": (5, None)}, "float32"),
        ("seqlen=37, heads=4, head_dim=8, dtype=bfloat16, layout=zigzag", {"layout": "zigzag"}, "bfloat16"),
        ("seqlen=37, heads=4, head_dim=8, dtype=float64, value_dim=6, scale=0.5", {"value_dim": 6, "scale": 0.5}, None),
        (
            "seqlen=37, heads=4, head_dim=8, shared_kv=true, value_dim=6, scale=.5",
            {"shared_kv": True, "value_dim": 6, "scale": 0.5},
            "float32",
        ),
        ("seqlen=37, heads=4, head_dim=8, tile=bands, causal=1", {"tile": "bands", "causal": True}, "float32"),
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
    rows = [4 if rank == comm.size // 2 else 1 for rank in range(comm.size)]
    tile = "2x2x1" if comm.size == 4 else "auto"  # on which chunks 1 and 2 are those of ranks 2 and 1
    sizes = f"{','.join(map(str, rows))}xeven"
    text = f"grid={sum(rows)}x9, dims={comm.size}x1, sizes={sizes}, heads=2, head_dim=8, tile={tile}, timeout=60"
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
    return (1, comm.size) if comm.size % 2 or comm.size == 2 else (comm.size // 2, 2)


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


@pytest.mark.parametrize("batch, heads", [(2, 3), (3, 2)])
def test_numbers_of_a_plan(c, comm, batch, heads):
    """Those that were given, and of this rank's tile: every rank is a plane, of some heads or of a sequence."""
    given = {"seqlen": 7, "seqlen_k": 9, "head_dim": 4, "value_dim": 5, "kv_heads": 1}
    given |= {"batch": batch * comm.size, "heads": heads} if heads % 2 else {"batch": batch, "heads": heads * comm.size}
    text = ", ".join(f"{name}={value}" for name, value in given.items())
    handle, plan = both(c, comm, f"{text}, tile={comm.size}x1x1", **given, tile=(comm.size, 1, 1))
    q, k, v, _ = arrays_of(plan, comm.rank)
    out, lse = plan.forward(q, k, v)
    c.ok("forward", handle, q, k, v, np.empty_like(out), np.empty_like(lse), NONE)
    names = "tokens", "tokens_k", "chunk", "sent_bytes", "sent_messages", "nbytes"
    names += "bias_first_sequence", "bias_sequences", "bias_first_head", "bias_heads", *given
    of_c = {name: c.integer("plan_integer", handle, name) for name in names}
    assert {name: of_c[name] for name in given} == given
    assert (of_c["tokens"], of_c["tokens_k"]) == (len(plan.positions), len(plan.positions_k))
    assert (of_c["chunk"], of_c["nbytes"]) == (plan.chunk, plan.nbytes)
    assert (of_c["sent_bytes"], of_c["sent_messages"]) == plan.sent
    for of_tile, names, length in (
        (plan.bias_sequences, ("bias_first_sequence", "bias_sequences"), given["batch"]),
        (plan.bias_heads, ("bias_first_head", "bias_heads"), given["heads"]),
    ):
        first, count = (of_c[name] for name in names)
        assert [*range(first, first + count)] == [*range(length)[of_tile]]
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


def test_pieces_have_no_tile_of_a_bias(c, comm):
    handle = c.new("plan_create_text", comm.py2f(), "seqlen=23, heads=2, head_dim=4, tile=bands, timeout=60")
    assert text_of(c, handle, "tile") == "bands"
    status, text = c.fails("scatter_bias", handle, np.zeros((1, 1, 23, 23)), np.zeros((1, 1, 1, 1)), 0)
    assert status == ARGUMENT and "the tile of this plan is 'bands'" in text
    assert comm.allgather(text) == [text] * comm.size
    status, text = c.fails("plan_integer", handle, "bias_rows", ctypes.byref(ctypes.c_int64()))
    assert status == ARGUMENT and text.startswith("bias_positions is asked for, but the tile of this plan is 'bands'")
    c.ok("plan_free", ctypes.byref(handle))


def test_another_mask_with_the_same_positions(c, comm):
    """As `like` of Python, with the layout of the first plan among the options of the second."""
    how = {"seqlen": 30, "heads": 2, "head_dim": 4}
    text = "seqlen=30, heads=2, head_dim=4, causal=1, layout=zigzag, timeout=60"
    handle, plan = both(c, comm, text, **how, causal=True, layout="zigzag")
    options = options_of(c, **how, causal=1, window="5,0", timeout=60)
    c.ok("options_set_layout", options, "layout", handle, 0)
    sliding = c.new("plan_create", comm.py2f(), options)
    q, k, v, _ = arrays_of(plan, comm.rank)
    got = np.empty_like(q), np.empty((1, 2, len(plan.positions)), np.float32)
    c.ok("forward", sliding, q, k, v, *got, NONE)
    with plan.like(window=(5, 0)) as other:
        assert np.array_equal(c.integers("plan_positions", len(plan.positions), sliding, 0), other.positions)
        for result, wanted in zip(got, other.forward(q, k, v)):
            assert np.abs(result - wanted).max(initial=0) < 1e-5
    for each in (sliding, handle):
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


def test_an_exception_inside(c, comm, monkeypatch):
    """Also what nobody expects is a status, and the process goes on.  Of a rank that failed first, others hear."""
    plan = c.new("plan_create_text", comm.py2f(), "seqlen=8, heads=1, head_dim=4, timeout=60")
    q = np.ones((1, c.integer("plan_integer", plan, "tokens"), 1, 4), "f")
    monkeypatch.setattr(plans.PLANS[plan.number]._passes, "run", 3)
    status, text = c.fails("forward", plan, q, q, q, np.empty_like(q), None, NONE)
    assert status in (PEER, 10) and "TypeError" in text and "'int' object is not callable" in text
    statuses = comm.allgather(status)
    raised = {rank for rank, of_rank in enumerate(statuses) if of_rank == 10}
    count, ranks = c.failed_ranks()
    assert raised and set(ranks) <= raised and count == len(ranks) and (count > 0) == (status == PEER)
    assert c.failed_ranks(0) == (count, [])
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
