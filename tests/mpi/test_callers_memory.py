"""Results in the caller's memory: the same bits as in new arrays, and nothing of the size of the data allocated."""

import tracemalloc
from itertools import product

import numpy as np
import pytest
from dense import bits, draw_all
from runs import BACKENDS, agreed, attend, check, my_chunks, on
from test_agreement import same_error
from test_decode import RINGS, Mirror
from test_inputs import KINDS, other

from mpiattn import KVCache, MeshAttention, tree_decode

SHAPE = {"batch": 2, "seqlen": 37, "heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float32", "causal": True}
GRADIENTS = ("dq", "dk", "dv")


def memory_for(results, kind=None):
    """Arrays for such results, with no contents yet."""
    nothing = [np.full(array.shape, np.nan, array.dtype) for array in results]
    return nothing if kind is None else [other(kind, array) for array in nothing]


@pytest.mark.draw(6)
@pytest.mark.parametrize(
    "kind, batch, schedule, backend",
    list(product([kind for kind in KINDS if kind.__name__ != "read_only"], [1, 2], ["greedy", "collective"], BACKENDS)),
)
def test_passes(comm, kind, batch, schedule, backend):
    """In memory of any strides; against the oracle too."""
    shape = {**SHAPE, "batch": batch, "schedule": schedule}
    expected = check(comm, **shape, sinks=True, backends=(backend,))
    with MeshAttention(comm, **shape, backend=backend) as plan:
        chunks = my_chunks(plan, *draw_all(plan.problem, sinks=True))
        into = memory_for(expected[:5], kind)
        for _ in range(2):
            out, lse = plan.forward(*chunks[:3], sinks=chunks.sinks, out=into[0], lse=into[1])
            grads = plan.backward(
                chunks.dout,
                *chunks[:3],
                out,
                lse,
                dlse=chunks.dlse,
                sinks=chunks.sinks,
                **dict(zip(GRADIENTS, into[2:])),
            )
            assert all(got is given for got, given in zip((out, lse, *grads), into))
            same = bits(*into, grads[3]) == bits(*expected)
            agreed(comm, None if same else "other bits than in new arrays")


def test_some_results_in_the_callers_memory(comm):
    with MeshAttention(comm, **SHAPE) as plan:
        chunks = my_chunks(plan, *draw_all(plan.problem))
        expected = attend(plan, chunks)
        into = memory_for(expected[:5])
        out, lse = plan.forward(*chunks[:3], lse=into[1])
        _, dk, dv = plan.backward(chunks.dout, *chunks[:3], out, lse, dlse=chunks.dlse, dk=into[3])
        assert lse is into[1] and dk is into[3] and not np.shares_memory(dv, dk)
        assert bits(out, lse, dk, dv) == bits(*expected[:2], *expected[3:5])


def test_gradients_in_one_array(comm):
    """Interleaved, as a layer that makes q, k and v at once wants them: they share bounds, but no byte."""
    shape = {**SHAPE, "kv_heads": 4}
    with MeshAttention(comm, **shape) as plan:
        chunks = my_chunks(plan, *draw_all(plan.problem))
        expected = attend(plan, chunks)
        packed = np.empty((2, len(plan.positions), 3, 4, 8), np.float32)
        into = dict(zip(GRADIENTS, np.moveaxis(packed, 2, 0)))
        plan.backward(chunks.dout, *chunks[:3], *expected[:2], dlse=chunks.dlse, **into)
        assert bits(*into.values()) == bits(*expected[2:5])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decode", [tree_decode, *RINGS.values()])
def test_decoding(comm, decode, backend):
    mirror = Mirror(comm, 2, 8, sequences=2, capacity=100 * comm.size, backend=backend)
    mirror.append(31)
    q, sinks = mirror.draw(2, 3, 4, 8), np.ones(4, np.float32)
    expected = decode(q, mirror.cache, sinks=sinks)
    agreed(comm, mirror.wrong(expected, q, sinks=sinks))
    for kind in KINDS[:3]:
        into = memory_for(expected, kind)
        out, lse = decode(q, mirror.cache, sinks=sinks, out=into[0], lse=into[1])
        assert out is into[0] and lse is into[1] and bits(*into) == bits(*expected)
    if decode is tree_decode:
        into, root = memory_for(expected), comm.size - 1
        returned = decode(q, mirror.cache, sinks=sinks, root=root, out=into[0], lse=into[1])
        assert [got is given for got, given in zip(returned, into)] == [comm.rank == root] * 2
        assert np.isnan(into[0]).all() == (comm.rank != root)
    mirror.cache.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_new_where_no_memory_is_given(comm, backend):
    """However much memory is kept between calls."""
    with MeshAttention(comm, **SHAPE, backend=backend) as plan:
        chunks = my_chunks(plan, *draw_all(plan.problem))
        results = attend(plan, chunks)
        before = bits(*results[:5])
        attend(plan, chunks._replace(q=2 * chunks.q))
        assert bits(*results[:5]) == before
    mirror = Mirror(comm, 2, 8, capacity=100 * comm.size, backend=backend)
    mirror.append(31)
    for decode in (tree_decode, *RINGS.values()):
        results = decode(mirror.draw(1, 1, 4, 8), mirror.cache)
        before = bits(*results)
        decode(mirror.draw(1, 1, 4, 8), mirror.cache)
        assert bits(*results) == before
    mirror.cache.close()


def wrong_memory(good, q):
    """Arrays that a result cannot be written into, by what the message says of them; `good` is one that it can be."""
    locked, wide = good.copy(), np.empty((*good.shape, 2), good.dtype)
    locked.flags.writeable = False
    repeated = np.lib.stride_tricks.as_strided(good.copy(), good.shape, (0, *good.strides[1:]))
    sliding = np.lib.stride_tricks.as_strided(
        np.empty(good.size, good.dtype), good.shape, (*good.strides[:-2], good.itemsize, good.itemsize)
    )
    padded = np.empty(good.shape, [("number", good.dtype), ("padding", np.uint8)])["number"]
    return {
        "has shape": good[:, :-1],
        "it must be": wide,
        "has dtype float64": good.astype(np.float64),
        "has dtype >f4": good.astype(">f4"),
        "is a list": good.tolist(),
        "is a MaskedArray": np.ma.masked_array(good),
        "is read-only": locked,
        "must be multiples": padded,
        "so that its elements may share memory": repeated,
        "must have memory of its own": sliding,
        "shares memory with q": q,
    }


def test_memory_that_cannot_be_written_into(comm):
    """On the last rank alone: the same error on all, and the plan goes on."""
    last = comm.rank == comm.size - 1
    shape = {**SHAPE, "kv_heads": 4, "seqlen": 4 * comm.size}
    with MeshAttention(comm, **shape) as plan:
        chunks = my_chunks(plan, *draw_all(plan.problem))
        results = attend(plan, chunks)
        for said, wrong in wrong_memory(np.empty_like(results.out), chunks.q).items():

            def forward(wrong=wrong, **more):
                return plan.forward(*chunks[:3], **({"out": wrong} if last else {}), **more)

            def backward(name, wrong=wrong, **more):
                return plan.backward(chunks.dout, *chunks[:3], *results[:2], **({name: wrong} if last else {}), **more)

            text = same_error(comm, forward)
            assert text.startswith("out ") and said in text
            for name in GRADIENTS:
                text = same_error(comm, lambda name=name: backward(name))
                assert text.startswith(f"{name} ") and said in text
        both = np.empty_like(results.out)
        assert "dk shares memory with dq" in same_error(
            comm, lambda: plan.backward(chunks.dout, *chunks[:3], *results[:2], dq=both, dk=both[:, ::-1])
        )
        for name, array in (("dout", chunks.dout), ("out", results.out)):
            assert f"dv shares memory with {name};" in same_error(
                comm, lambda array=array: plan.backward(chunks.dout, *chunks[:3], *results[:2], dv=array)
            )
        assert "lse has shape" in same_error(comm, lambda: plan.forward(*chunks[:3], lse=both))
        assert bits(*attend(plan, chunks)) == bits(*results)


def test_memory_that_decoding_cannot_write_into(comm):
    last = comm.rank == comm.size - 1
    mirror = Mirror(comm, 4, 8, sequences=2, capacity=100 * comm.size)
    mirror.append(31)
    q = mirror.draw(2, 3, 4, 8)
    expected = tree_decode(q, mirror.cache)
    for decode in (tree_decode, *RINGS.values()):
        for said, wrong in wrong_memory(np.empty_like(q), q).items():
            text = same_error(
                comm, lambda wrong=wrong, decode=decode: decode(q, mirror.cache, **({"out": wrong} if last else {}))
            )
            assert text.startswith("out ") and said in text
    memory, small = np.empty(q.size, q.dtype), expected[1]
    assert "lse shares memory with out" in same_error(
        comm,
        lambda: tree_decode(
            q, mirror.cache, out=memory.reshape(q.shape), lse=memory[: small.size].reshape(small.shape)
        ),
    )
    assert bits(*tree_decode(q, mirror.cache)) == bits(*expected)
    mirror.cache.close()


# Memory that is taken

# Bytes that a warm call may take for a moment: NumPy's own buffers of 8192 elements, requests, small objects.
MOMENTARY = 2**17


def taken(call):
    """Bytes that a call takes at most at a time, once it has been made before."""
    call()
    tracemalloc.start()
    call()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - before


@pytest.mark.draw(3)
@on(1, 3)
@pytest.mark.parametrize(
    "options",
    [
        {"batch": 2},
        {"schedule": "collective", "layout": "striped", "dtype": "float16", "window": (100, 0)},
        {"wire_dtype": "bfloat16", "tile": "ring", "softcap": 5.0},
        {"schedule": "greedy", "strided": True},
    ],
    ids=str,
)
def test_a_warm_pass_allocates_nothing(group, options):
    options = dict(options)
    strided = options.pop("strided", False)
    shape = {"seqlen": 280 * group.size, "heads": 4, "kv_heads": 2, "head_dim": 256, "causal": True, **options}
    with MeshAttention(group, backend="numpy", **shape) as plan:
        chunks = my_chunks(plan, *draw_all(plan.problem))
        if strided:
            chunks = chunks._replace(
                **{
                    name: np.repeat(getattr(chunks, name), 2, axis=-1)[..., ::2]
                    for name in ("q", "k", "v", "dout", "dlse")
                }
            )
        results = attend(plan, chunks)[:5]
        out, lse, *grads = results
        peaks = {
            "forward": taken(lambda: plan.forward(*chunks[:3], out=out, lse=lse)),
            "backward": taken(
                lambda: plan.backward(
                    chunks.dout, *chunks[:3], out, lse, dlse=chunks.dlse, **dict(zip(GRADIENTS, grads))
                )
            ),
        }
    assert out.nbytes > 4 * MOMENTARY
    agreed(group, None if max(peaks.values()) < MOMENTARY else peaks)


@pytest.mark.draw(4)
@on(1, 2, 4)
@pytest.mark.parametrize("schedule", ["greedy", "collective"])
@pytest.mark.parametrize("batch", [1, 2])
def test_passes_share_their_memory(group, batch, schedule):
    """From the making of the plan to the second backward: no more at a time than `nbytes`."""
    shape = {"batch": batch, "seqlen": 280 * group.size, "heads": 4, "kv_heads": 2, "head_dim": 256, "causal": True}
    rng = np.random.default_rng(0)
    tracemalloc.start()
    try:
        with MeshAttention(group, backend="numpy", **shape, schedule=schedule, layout="striped") as plan:
            before, _ = tracemalloc.get_traced_memory()
            q, k, v = rng.standard_normal((3, batch, 280, 4, 256), np.float32)
            k, v = k[:, :, :2].copy(), v[:, :, :2].copy()
            out, lse = plan.forward(q, k, v)
            for _ in range(2):
                grads = plan.backward(out.copy(), q, k, v, out, lse)
                del grads
            _, peak = tracemalloc.get_traced_memory()
            buffers = [executor.buffers.nbytes for executor in plan._passes.executors.values()]
            pool = plan._passes.pool.nbytes
            needed = plan.nbytes
    finally:
        tracemalloc.stop()
    agreed(group, None if peak - before < needed + 2**20 else f"{peak - before} bytes, {needed} said")
    agreed(group, None if max(buffers) <= pool < max(buffers) + 2**14 else f"{pool} bytes for {buffers}")


# Bytes of a pass that are taken at a time, in tensors of the size of this rank's q: three gradients, or out, and what
# the schedule needs together in any step.  Slots of chunks that all blocks have read take the partials that come.
@pytest.mark.draw(2)
@on(2)
@pytest.mark.parametrize(
    "tile, options, forward, backward",
    [
        ("1x2", {"schedule": "greedy"}, 2, 3 + 4),  # k, v; with their gradients
        ("2x1", {"schedule": "greedy"}, 2, 3 + 3),  # q, out; q, dout, dq
        ("1x2", {"schedule": "greedy", "dtype": "bfloat16"}, 4, 3 + 6 + 8),  # own accumulators are no results
        ("1x2", {"schedule": "collective"}, 5, 3 + 9),  # both chunks in one arena, own accumulators too
        ("1x2", {"schedule": "collective", "layout": "zigzag", "causal": True}, 8, 3 + 9),  # and keys sorted
    ],
    ids=str,
)
def test_the_first_call_takes_no_more_than_a_step_needs(group, tile, options, forward, backward):
    """More than these many tensors, and something is held twice: an array of a call, or memory that could be shared."""
    shape = {"seqlen": 128 * group.size, "heads": 64, "head_dim": 64, "tile": tile, **options}
    tracemalloc.start()
    try:
        with MeshAttention(group, backend="numpy", **shape) as plan:
            chunks = my_chunks(plan, *draw_all(plan.problem))
            out, lse = plan.forward(*chunks[:3])
            pool = plan._passes.pool.nbytes
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0] - plan._backend._work.nbytes()
            plan.backward(chunks.dout, *chunks[:3], out, lse)
            peak = tracemalloc.get_traced_memory()[1] - plan._backend._work.nbytes()
    finally:
        tracemalloc.stop()
    counted = pool / chunks.q.nbytes, (peak - before + pool) / chunks.q.nbytes
    few = counted[0] < forward + 0.5 and counted[1] < backward + 0.5
    agreed(group, None if few else f"{counted} tensors in place of {forward} and {backward}")


@on(1, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_warm_decoding_allocates_nothing(group, dtype):
    with KVCache(
        group, capacity=100 * group.size, sequences=2, kv_heads=4, head_dim=256, dtype=dtype, backend="numpy"
    ) as cache:
        rng = np.random.default_rng(0)

        def draw(*shape):
            return rng.standard_normal(shape).astype(cache.dtype)

        cache.append(draw(2, 50, 4, 256), draw(2, 50, 4, 256))
        q = draw(2, 24, 16, 256)
        for algorithm in ("butterfly", "allreduce"):
            out, lse = tree_decode(q, cache, algorithm=algorithm)
            options = {"algorithm": algorithm, "out": out, "lse": lse}
            peak = taken(lambda options=options: tree_decode(q, cache, **options))
            assert out.nbytes > 2.9 * MOMENTARY
            agreed(group, None if peak < MOMENTARY else f"{algorithm}: {peak}")


def test_memory_that_is_kept_is_counted(comm):
    with MeshAttention(comm, **{**SHAPE, "batch": 1}) as plan:
        q, k, v = my_chunks(plan, *draw_all(plan.problem))[:3]
        before = plan.nbytes
        plan.forward(q, k, v)
        assert plan.nbytes == before
        for _ in range(2):
            plan.forward(np.repeat(q, 2, axis=-1)[..., ::2], k, v)
            assert plan.nbytes == before + q.nbytes
    mirror = Mirror(comm, 2, 8, capacity=100 * comm.size)
    mirror.append(31)
    before = mirror.cache.nbytes
    for _ in range(2):
        tree_decode(mirror.draw(1, 1, 4, 8), mirror.cache, algorithm="butterfly")
        assert mirror.cache.nbytes == before + 2 * 4 * (8 + 1) * 4
    mirror.cache.close()
