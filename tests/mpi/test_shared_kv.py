"""One array for keys and values: a value is the first numbers of its key, and v is None."""

from itertools import product

import h5py
import numpy as np
import pytest
from dense import bits, draw_all, expected, masks, wrong
from runs import agreed, attend, check, my_chunks, on, problem_of, tiles
from test_agreement import same_error
from test_counted import count, lengths
from test_decode import RINGS, Mirror

import mpiattn
from mpiattn import KVCache, MeshAttention, backends
from mpiattn.schedule import travels
from mpiattn.schedule.reduction import ALGORITHMS

LAYOUTS = "contiguous", "striped", "zigzag"
WAYS = ("greedy", "direct"), ("greedy", "ring"), ("collective", "direct")  # schedule and route
SHARED = {"shared_kv": True, "scale": 0.2}  # which has no default there
KINDS = (1, "float64"), (2, "float32"), (1, "float16"), (2, "bfloat16")  # KV heads and dtype


@pytest.mark.many
@pytest.mark.draw(4)
@pytest.mark.parametrize("layout, how", list(product(LAYOUTS, product(KINDS, WAYS))))
def test_dense(comm, layout, how):
    """Every tile; several query heads share a key, so that dk is a sum over them as well."""
    (kv_heads, dtype), (schedule, route) = how
    shape = {"heads": 4, "kv_heads": kv_heads, "head_dim": 12, "value_dim": 7, "dtype": dtype, **SHARED}
    for batch, tile in zip((1, 2, 1, 2, 1), tiles(comm.size)):
        how = {"tile": tile, "layout": layout, "schedule": schedule, "route": route}
        check(comm, batch=batch, seqlen=41, seqlen_k=50, causal=True, sinks=True, **shape, **how)


@on(2, 4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_absorbed_mla(group, dtype):
    """The shape that it is for, on the back ends that compute on CPUs."""
    shape = {"seqlen": 70, "heads": 6, "kv_heads": 1, "head_dim": 576, "value_dim": 512, "dtype": dtype}
    arguments = {**shape, **SHARED, "causal": True}
    check(group, backends=("numpy", "deferred"), **arguments)
    if not backends.find("cpu").missing():
        check(group, backends=("cpu",), terms=True, **arguments)


@on(4)
@pytest.mark.parametrize("wire_dtype", [None, "bfloat16"])
def test_masks_and_documents(group, wire_dtype):
    shape = {"batch": 2, "seqlen": 45, "heads": 2, "kv_heads": 1, "head_dim": 10, "value_dim": 4, **SHARED}
    for mask in ({"window": (5, 2)}, {"causal": True, "prefix": 3, "softcap": 2.0}):
        check(group, wire_dtype=wire_dtype, terms=True, **mask, **shape)
    check(group, call={"cu_seqlens": [0, 7, 7, 30, 45]}, causal=True, wire_dtype=wire_dtype, terms=True, **shape)


def test_bytes_are_the_formula(comm):
    """Counted at MPI in both passes; 47 % less in a column than with an array v."""
    shape = {"seqlen": 8 * comm.size, "heads": 2, "kv_heads": 1, "head_dim": 9, "value_dim": 8, "layout": "striped"}
    for tile, schedule in product(tiles(comm.size), ("greedy", "collective")):
        with MeshAttention(comm, **shape, **SHARED, tile=tile, schedule=schedule) as plan:
            cut = (lengths(plan.q_layout), lengths(plan.k_layout)), plan.tile, comm.rank
            q, k, v, dout, *_ = my_chunks(plan, *draw_all(plan.problem))
            out, lse = plan.forward(q, k)
            nbytes = {
                "forward": count(plan, lambda plan=plan, a=(q, k): plan.forward(*a))[0],
                "backward": count(plan, lambda plan=plan, a=(dout, q, k, v, out, lse): plan.backward(*a))[0],
            }
            a, b = plan.tile.a, plan.tile.b
            by_hand = {
                "forward": 8 * 4 * ((a - 1) * 2 * (9 + 8 + 1) + (b - 1) * 9),
                "backward": 8 * 4 * ((a - 1) * 2 * (9 + 8 + 1 + 1 + 9) + (b - 1) * 2 * 9),
            }
            formula = {direction: travels.sent(plan.problem, *cut, direction=direction).total for direction in by_hand}
            figures = nbytes, formula, by_hand
            agreed(comm, None if nbytes == formula == by_hand else f"{schedule} {tile}: {figures}")
    apart, together = (
        travels.token_bytes(problem_of({**shape, "head_dim": 576, "value_dim": 512, "shared_kv": shared}))["KV"]
        for shared in (False, True)
    )
    assert 1 - together / apart == pytest.approx(0.47, abs=0.001)


def test_memory(comm):
    """What a plan says that it needs is less by v and what v would need, in both passes."""
    shape = {"seqlen": 512 * comm.size, "heads": 1, "head_dim": 16, "layout": "contiguous", "tile": (1, comm.size)}
    with MeshAttention(comm, **shape) as apart, MeshAttention(comm, **shape, **SHARED) as together:
        less = apart.nbytes - together.nbytes
        assert less >= 512 * 16 * 4 * (1 + (comm.size > 1))
        for plan in (apart, together):
            q, k, v, dout, *_ = my_chunks(plan, *draw_all(plan.problem))
            plan.backward(dout, q, k, v, *plan.forward(q, k, v))
        assert apart.nbytes - together.nbytes >= less + 512 * 16 * 4 * (1 + (comm.size > 1))


def test_memory_of_the_caller(comm):
    arguments = {"seqlen": 40, "heads": 2, "kv_heads": 1, "head_dim": 8, "value_dim": 6, **SHARED}
    inputs = draw_all(problem_of(arguments))
    with MeshAttention(comm, **arguments) as plan:
        chunks = my_chunks(plan, *inputs)
        given = attend(plan, chunks)
        dq, dk = np.empty_like(chunks.q), np.empty_like(chunks.k)
        got = plan.backward(chunks.dout, chunks.q, chunks.k, None, *given[:2], dlse=chunks.dlse, dq=dq, dk=dk)
        assert got[0] is dq and got[1] is dk and got[2] is None
        assert bits(*got) == bits(*given[2:5])


def test_attention_in_one_call(comm):
    arguments = {"seqlen": 40, "heads": 2, "kv_heads": 1, "head_dim": 8, "value_dim": 6, **SHARED}
    problem = problem_of({**arguments, "causal": True})
    inputs = draw_all(problem)
    ref = expected(inputs, False, **masks(problem))
    at = np.array_split(np.arange(40), comm.size)[comm.rank]
    for _ in range(2):  # the second time it takes the plan that it has made
        result = mpiattn.attention(
            inputs.q[:, at], inputs.k[:, at], None, comm=comm, causal=True, value_dim=6, scale=0.2
        )
        agreed(comm, wrong(problem, type(ref)(*result), ref, inputs, at, at))
    assert "value_dim must say" in same_error(comm, lambda: mpiattn.attention(inputs.q, inputs.k, None, comm=comm))


def test_absorbed_is_not_absorbed(comm):
    """MLA with keys and values made of compressed ones, and absorbed: the same, with the scale of the first."""
    heads, nope, rope, compressed = 4, 8, 4, 16
    rng = np.random.default_rng(comm.rank)
    c, k_rope = rng.standard_normal((1, 5, 1, compressed)), rng.standard_normal((1, 5, 1, rope))
    q_nope, q_rope = rng.standard_normal((1, 5, heads, nope)), rng.standard_normal((1, 5, heads, rope))
    to_keys, to_values = np.random.default_rng(0).standard_normal((2, heads, 8, compressed))
    k = np.concatenate([np.einsum("bjxl,hnl->bjhn", c, to_keys), np.repeat(k_rope, heads, 2)], -1)
    v = np.einsum("bjxl,hdl->bjhd", c, to_values)
    plain, _ = mpiattn.attention(np.concatenate([q_nope, q_rope], -1), k, v, comm=comm, causal=True)
    q = np.concatenate([np.einsum("bihn,hnl->bihl", q_nope, to_keys), q_rope], -1)
    of_keys = np.concatenate([c, k_rope], -1)
    how = {"value_dim": compressed, "comm": comm, "causal": True}
    out, _ = mpiattn.attention(q, of_keys, None, scale=(nope + rope) ** -0.5, **how)
    np.testing.assert_allclose(np.einsum("bihl,hdl->bihd", out, to_values), plain, atol=1e-12)
    said = same_error(comm, lambda: mpiattn.attention(q, of_keys, None, **how))
    assert said.startswith("scale is left out; where keys hold the values") and "head_dim, here 20," in said


def test_scale_has_no_default(comm):
    shape = {"head_dim": 8, "value_dim": 6, "shared_kv": True}
    said = same_error(comm, lambda: MeshAttention(comm, seqlen=12, heads=2, **shape))
    assert said.startswith("scale is left out; where keys hold the values")
    with KVCache(comm, capacity=8, kv_heads=2, **shape) as cache:
        cache.append(np.ones((1, 2, 2, 8), np.float32))
        q = np.ones((1, 1, 2, 8), np.float32)
        for decode in (mpiattn.tree_decode, mpiattn.ring_decode):
            said = same_error(comm, lambda decode=decode: decode(q, cache))
            assert said.startswith("scale is left out; where keys hold the values")
        mpiattn.tree_decode(q, cache, scale=0.2)


def test_errors(comm):
    shape = {"seqlen": 12, "heads": 2, "head_dim": 8, "value_dim": 6}
    with MeshAttention(comm, **shape, **SHARED) as plan, MeshAttention(comm, **shape) as other:
        inputs = draw_all(other.problem)
        q, k, v, dout, *_ = my_chunks(plan, *inputs)
        out, lse = plan.forward(q, k)
        for name, call in (
            ("v", lambda: plan.forward(q, k, v)),
            ("v", lambda: plan.backward(dout, q, k, v, out, lse)),
            ("dv", lambda: plan.backward(dout, q, k, None, out, lse, dv=v)),
        ):
            said = same_error(comm, call)
            assert f"{name} is of shape" in said and "with shared_kv it is the first columns of" in said
        assert "v is None; it must be an array" in same_error(comm, lambda: other.forward(q, k))
        assert bits(*plan.forward(q, k)) == bits(out, lse)  # both plans still work
    wide = {**shape, "value_dim": 9, **SHARED}
    assert "value_dim is 9; with shared_kv" in same_error(comm, lambda: MeshAttention(comm, **wide))
    assert "shared_kv is 1" in same_error(comm, lambda: MeshAttention(comm, **shape, shared_kv=1))
    if comm.size > 1:
        assert "shared_kv" in same_error(
            comm, lambda: MeshAttention(comm, **shape, scale=0.2, shared_kv=comm.rank == 0)
        )


@pytest.mark.draw(8)
@on(1, 3, 4)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["numpy", "deferred", "cpu"])
def test_decoding(group, backend, dtype):
    """A prefill that stays where it is, tokens of their own, several queries, a cut, and the rings."""
    if why := backends.find(backend).missing():
        pytest.skip(why)
    how = {"kv_heads": 2, "head_dim": 12, "value_dim": 7, "shared_kv": True, "sequences": 2, "page_size": 4}
    mirror = Mirror(group, capacity=200, backend=backend, dtype=dtype, **how)
    with mirror.cache:
        for tokens, layout in ((21, "zigzag"), (2, None), (1, None)):
            mirror.append(tokens, layout)
            mirror.check(queries=2, algorithms=(*ALGORITHMS, *RINGS))
        mirror.truncate([20, 3])
        mirror.append(3, counts=[3, 1])
        mirror.check(window=(4, 0), softcap=3.0, algorithms=ALGORITHMS[:1])


@on(2)
def test_decoding_of_absorbed_mla(group):
    """Half of the memory that keys and values apart would take, and of what the ring sends."""
    nbytes, sent = {}, {}
    for shared in (True, False):
        how = {"kv_heads": 1, "head_dim": 576, "value_dim": 512, "shared_kv": shared}
        mirror = Mirror(group, capacity=256, dtype="bfloat16", backend="numpy", **how)
        with mirror.cache as cache:
            mirror.append(150)
            nbytes[shared] = sum(pool.nbytes for pool in cache.storage.pools)
            mirror.check(heads=16, algorithms=ALGORITHMS)
            before = cache.sent[0]
            mirror.check(heads=16, algorithms=["ring"])
            sent[shared] = cache.sent[0] - before
    assert nbytes[True] / nbytes[False] == sent[True] / sent[False] == 576 / (576 + 512)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_files(comm, tmp_path_factory, dtype):
    """A file of keys alone, loaded again with sequences in several stretches of slots."""
    path = comm.bcast(str(tmp_path_factory.mktemp("cache") / "x.h5") if comm.rank == 0 else None)
    how = {"kv_heads": 2, "head_dim": 6, "value_dim": 4, "shared_kv": True, "sequences": 3, "page_size": 2}
    mirror = Mirror(comm, capacity=100, dtype=dtype, **how)
    with mirror.cache as cache:
        for counts in ([7, 0, 3], [6, 0, 7], [0, 0, 5]):
            mirror.append(7, counts=counts)
        assert cache.local(0)[1] is None
        cache.save(path)
    with h5py.File(path) as file:
        assert "v" not in file and file.attrs["value_dim"] == 4
        assert file["k"].shape == (1, 28, 2, 6)
    with KVCache.load(comm, path, page_size=1, capacity=90) as mirror.cache:
        loaded = mirror.cache
        assert (loaded.shared_kv, loaded.value_dim, loaded.lengths) == (True, 4, (13, 0, 15))
        assert "6 (4 of values, in the keys)" in repr(loaded)
        mirror.check()
        mirror.append(1)
        mirror.check()
    assert "the file fixes it" in same_error(comm, lambda: KVCache.load(comm, path, shared_kv=True))
    comm.Barrier()


def test_errors_of_a_cache(comm):
    how = {"capacity": 20, "kv_heads": 1, "head_dim": 6, "value_dim": 4}
    k = np.ones((1, 3, 1, 6), np.float32)
    with KVCache(comm, **how, shared_kv=True) as cache, KVCache(comm, **how) as other:
        assert "v is of shape (1, 3, 1, 4)" in same_error(comm, lambda: cache.append(k, k[..., :4]))
        assert "v is None; it must be an array" in same_error(comm, lambda: other.append(k))
        assert cache.lengths == other.lengths == (0,)
    wide = {**how, "value_dim": 7}
    assert "value_dim is 7; with shared_kv" in same_error(comm, lambda: KVCache(comm, **wide, shared_kv=True))
