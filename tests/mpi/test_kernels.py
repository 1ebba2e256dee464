"""The whole library on the GPU kernels' sources, run on the CPU as they are called and late; small, since it is slow.

Or on what MPIATTN_BACKENDS names.  There is one head dim, since kernels of each are compiled anew.
"""

import os

import numpy as np
import pytest
from caller import caller, memory_like
from dense import bits, draw_all
from runs import OF_KERNELS, agreed, check, my_chunks, on, problem_of, run, tiles
from test_decode import RINGS, Mirror
from test_numbers import check_padding

from mpiattn import ArgumentError, KVCache, Layout, MeshAttention, tree_decode
from mpiattn.backends.testing import emulated
from mpiattn.schedule.reduction import ALGORITHMS

BACKENDS = tuple(os.environ.get("MPIATTN_BACKENDS", "emulated,deferred-emulated").split(","))
pytestmark = [
    pytest.mark.workshop,
    pytest.mark.skipif(
        "emulated" in BACKENDS and emulated.compiler() is None, reason="the emulation needs a C++ compiler"
    ),
]
SHAPE = {"seqlen": 43, "heads": 4, "kv_heads": 2, "head_dim": 16, "backends": BACKENDS}
ROUTES = (("greedy", "direct"), ("greedy", "ring"), ("collective", "direct"))  # schedule and route


@pytest.mark.draw(1)
@on(4)
@pytest.mark.parametrize(("schedule", "route"), ROUTES)
def test_tiles(group, schedule, route):
    for tile, layout in zip(tiles(4), ("striped", "zigzag", "contiguous")):
        check(group, **SHAPE, causal=True, tile=tile, layout=layout, schedule=schedule, route=route)


@pytest.mark.draw(1)
@on(4)
@pytest.mark.parametrize(("tile", "mesh_layout"), [((2, 1, 2), "zigzag"), ((2, 2, 1), "striped"), ((4, 1, 1), "auto")])
def test_planes(group, tile, mesh_layout):
    """With more planes than KV heads too, where KV heads are repeated; without dlse no argument is copied."""
    how = {"tile": tile, "layout": "contiguous", "mesh_layout": mesh_layout, "dtype": "bfloat16"}
    for dlse in (True, False):
        check(group, **SHAPE, causal=True, dlse=dlse, **how)


@pytest.mark.draw(1)
@on(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_that_hold_the_values(group, dtype):
    """The dims of absorbed MLA, in both passes and in decoding."""
    shape = {"heads": 4, "kv_heads": 1, "head_dim": 576, "value_dim": 512, "shared_kv": True}
    check(
        group, seqlen=43, dtype=dtype, causal=True, layout="zigzag", scale=0.05, backends=BACKENDS, terms=True, **shape
    )
    del shape["heads"]
    for backend in BACKENDS:
        mirror = Mirror(group, capacity=100, dtype=dtype, backend=backend, page_size=8, **shape)
        with mirror.cache:
            mirror.append(60)
            mirror.check(queries=2, heads=4)


CALLS = {
    "documents": {"cu_seqlens": [0, 7, 30, 43]},
    "documents of each": {"cu_seqlens": [[0, 7, 43], [5, 5, 40]], "padding": True},
    "padding": {"lengths": [43, 9]},
}


@on(3)
@pytest.mark.parametrize("name", CALLS)
def test_documents_windows_and_sinks(group, name):
    """With groups of heads that see different keys, chunks of unequal length, and rows that see nothing."""
    uneven = Layout("contiguous", 43, 3, (20, 0, 23))
    check(group, **SHAPE, batch=2, window=(11, 2), layout=uneven, schedule="greedy", call=CALLS[name], sinks=True)


@on(2)
def test_padding(group):
    for value in (np.nan, np.inf):
        shape = {name: size for name, size in SHAPE.items() if name != "backends"}
        check_padding(group, value, BACKENDS, **shape, batch=2, causal=True)


@on(4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_and_what_travels(group, dtype):
    shape = {**SHAPE, "dtype": dtype, "causal": True, "tile": "2x2"}
    check(group, **shape, schedule="greedy")
    check(group, **shape, schedule="collective", wire_dtype="bfloat16")


@on(2)
def test_softcap_scale_and_other_keys(group):
    check(group, **{**SHAPE, "seqlen": 21}, seqlen_k=37, causal=True, softcap=2.0, scale=0.5)
    check(group, **{**SHAPE, "seqlen": 37}, seqlen_k=5, causal=True, tile="qring")
    for options in ({"softcap": 1e36}, {"softcap": 2e-38}, {"scale": 2e-38}, {"scale": 0}):
        check(group, **{**SHAPE, "seqlen": 21}, causal=True, **options)


@on(4)
def test_repeats_change_no_bit(group):
    inputs = draw_all(problem_of(SHAPE))
    arguments = {name: value for name, value in SHAPE.items() if name != "backends"}
    results = {
        tuple(array.tobytes() for array in run(group, inputs, backend=BACKENDS[-1], **arguments)[0][:5])
        for _ in range(3)
    }
    agreed(group, None if len(results) == 1 else "repeats differ")


@pytest.mark.draw(1)
@on(2)
@pytest.mark.parametrize("batch", [1, 2])
def test_the_callers_memory(group, batch):
    """Twice, so that what is kept between calls is used again; the bits of new arrays."""
    shape = {**{name: size for name, size in SHAPE.items() if name != "backends"}, "batch": batch, "causal": True}
    inputs = draw_all(problem_of(shape), sinks=True)
    for backend in BACKENDS:
        expected = run(group, inputs, backend=backend, **shape)[0]
        with MeshAttention(group, **shape, backend=backend) as plan:
            for _ in range(2):
                with caller(backend) as (give, take):
                    into = [memory_like(backend, array) for array in expected[:5]]
                    q, k, v, dout, dlse, sinks = map(give, my_chunks(plan, *inputs))
                    out, lse = plan.forward(q, k, v, sinks=sinks, out=into[0], lse=into[1])
                    grads = plan.backward(
                        dout, q, k, v, out, lse, dlse=dlse, sinks=sinks, dq=into[2], dk=into[3], dv=into[4]
                    )
                    given = all(got is array for got, array in zip((out, lse, *grads), into))
                    same = bits(*take(*into)) == bits(*expected[:5])
                agreed(group, None if given and same else (backend, given, same))
        mirror = Mirror(group, 2, 16, sequences=batch, capacity=200, backend=backend)
        mirror.append(31)
        q = mirror.draw(batch, 3, 4, 16)
        for algorithm in ALGORITHMS:
            with caller(backend) as (give, take):
                expected = take(*tree_decode(give(q), mirror.cache, algorithm=algorithm))
                into = [memory_like(backend, array) for array in expected]
                tree_decode(give(q), mirror.cache, algorithm=algorithm, out=into[0], lse=into[1])
                same = bits(*take(*into)) == bits(*expected)
            agreed(group, None if same else (backend, algorithm))
        mirror.cache.close()


@on(4)
@pytest.mark.parametrize(("dtype", "page_size"), [("float32", 16), ("bfloat16", 64)])
def test_decode(group, dtype, page_size):
    """Every algorithm and both rings; sequences of which ranks hold nothing, several queries, masks."""
    sinks = np.linspace(-1, 2, 4, dtype=np.float32)
    for backend in BACKENDS:
        mirror = Mirror(group, 2, 16, sequences=2, capacity=400, page_size=page_size, dtype=dtype, backend=backend)
        mirror.append(3, "contiguous")
        mirror.append(70, "striped", counts=[70, 0])
        mirror.append(20, counts=[1, 20])
        mirror.check(1, algorithms=(*ALGORITHMS, *RINGS))
        mirror.check(3, algorithms=("butterfly",), window=(5, 0), sinks=sinks)
        for _ in range(5):  # one row: most ranks have none of their own
            mirror.check(1, algorithms=("qring",), sequences=[1])
        for ring in RINGS.values():
            assert ring(mirror.draw(0, 1, 4, 16), mirror.cache, sequences=[])[0].shape == (0, 1, 4, 16)
        mirror.cache.close()


@on(4)
def test_a_token_a_rank(group):
    """One head and one batch entry: no argument is copied, so only the caller's stream is waited for."""
    shape = {**SHAPE, "seqlen": 4, "heads": 1, "kv_heads": 1}
    for tile, (schedule, route) in zip(("4x1", "2x2", "qring"), ROUTES):
        for sinks in (False, True):  # the host reads sinks, and all that was given before is there then
            check(group, **shape, causal=True, sinks=sinks, tile=tile, schedule=schedule, route=route)
    for backend in BACKENDS:
        for arrays in inputs_and_results(group, shape, backend):
            agreed(group, None if all(map(np.array_equal, *arrays)) else f"not what was given, {backend}")
        mirror = Mirror(group, 1, 16, capacity=20, page_size=1, backend=backend)
        mirror.append(4, "contiguous")
        mirror.check(1, 1, algorithms=(*ALGORITHMS, *RINGS))
        mirror.append(3)
        mirror.check(2, 1, algorithms=(*ALGORITHMS, *RINGS), sinks=np.ones(1, np.float32))
        with caller(backend) as (_, take):
            own = [array[mirror.cache.positions(0)] for array in mirror.whole[0]]
            agreed(group, None if all(map(np.array_equal, take(*mirror.cache.local(0)), own)) else "local is wrong")
        mirror.cache.close()


def inputs_and_results(group, shape, backend):
    """Pairs of what was given and what came back: scattered and gathered, by hand and by one call."""
    whole = draw_all(problem_of(shape)).q
    arguments = {name: value for name, value in shape.items() if name != "backends"}
    with MeshAttention(group, **arguments, backend=backend) as plan, caller(backend) as (give, take):
        chunk = plan.scatter(give(whole) if group.rank == 0 else None)
        gathered = plan.gather(chunk, root=None)
        yield (whole[:, plan.positions],), take(chunk)
        yield (whole,), (gathered,)
        yield (whole,), (plan.gather(give(whole[:, plan.positions]), root=None),)
        yield (whole,), take(plan.give(whole))


@on(2)
@pytest.mark.skipif(not OF_KERNELS & set(BACKENDS), reason="these back ends read any")
def test_a_cache_that_kernels_cannot_read(group):
    """All ranks are told when it is made: later a rank without keys would not find out."""
    for wrong, message in (({"dtype": "float64"}, "dtype is float64"), ({"head_dim": 300}, "head_dim is 300")):
        with pytest.raises(ArgumentError, match=message):
            KVCache(group, **{"capacity": 4, "kv_heads": 1, "head_dim": 16, "backend": BACKENDS[0], **wrong})


@on(2)
def test_a_cache_as_a_file(group, tmp_path_factory):
    path = group.bcast(str(tmp_path_factory.mktemp("cache") / "cache.h5") if group.rank == 0 else None)
    mirror = Mirror(group, 2, 16, sequences=2, capacity=60, backend=BACKENDS[-1])
    mirror.append(20, counts=[20, 3])
    mirror.cache.save(path)
    mirror.cache.close()
    mirror.cache = KVCache.load(group, path, backend=BACKENDS[-1])
    mirror.check(1, algorithms=("butterfly",))
    mirror.cache.close()


@on(2)
@pytest.mark.skipif("MPIATTN_TRANSPORT" not in os.environ, reason="MPIATTN_TRANSPORT does not say which there must be")
def test_transport(group):
    """What "auto" takes, which is what the other tests here have run on."""
    with MeshAttention(group, seqlen=8, heads=1, head_dim=16, backend=BACKENDS[0]) as plan:
        assert plan._backend.transport == os.environ["MPIATTN_TRANSPORT"]
