"""Blocks whose values are the first numbers of their keys: v, dv and values are None."""

from itertools import product

import numpy as np
import pytest
from blocks import MASKS, NOISE, dense, dense_gradients, of_backward, partial
from cpu_kernels import EMULATED, SETS, compiled, kernels_of
from dense import epsilon, error, largest
from test_cpu_decode import pool

from mpiattn import ArgumentError, backends
from mpiattn.backends.block import BlockInputs, Gradients
from mpiattn.backends.testing import emulated
from mpiattn.model.machine import DEFAULT
from mpiattn.model.memory import chunk_bytes, gradient_bytes
from mpiattn.model.simulate import simulate
from mpiattn.model.workload import Load, Work
from mpiattn.problem.layout import Layout
from mpiattn.problem.problem import Problem
from mpiattn.schedule.greedy import greedy
from mpiattn.schedule.kinds import shapes
from mpiattn.schedule.tile import Tile
from mpiattn.schedule.travels import token_bytes

CPU = [pytest.param(name, marks=compiled) for name in SETS] + [
    pytest.param(*each.values, marks=[compiled, *each.marks]) for each in EMULATED
]


KERNELS = pytest.param(
    "emulated",
    marks=[
        pytest.mark.workshop,
        pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler"),
    ],
)


@pytest.fixture(params=["numpy", "deferred", *CPU, KERNELS])
def backend(request, monkeypatch):
    if request.param not in ("numpy", "deferred", "emulated"):
        with kernels_of(request.param, monkeypatch) as made:
            yield made
        return
    made = backends.get(request.param)
    yield made
    made.close()


# dtype, head dim, value dim, heads, KV heads, queries, keys
SHAPES = [
    ("float32", 576, 512, 4, 1, 20, 300),
    ("bfloat16", 576, 512, 16, 1, 40, 150),
    ("float16", 40, 33, 6, 2, 70, 130),
    ("float64", 13, 13, 4, 2, 33, 300),
    ("bfloat16", 24, 1, 6, 3, 9, 40),
    ("float32", 64, 48, 2, 2, 300, 260),
]


PAGED = [(shape, (1, 7, 64)[i % 3], mask) for i, (shape, mask) in enumerate(product(SHAPES, MASKS))]


def inputs(shape, mask, scale):
    """q, dout, k, the row intervals, and lse and delta of the rows; keys that no row sees are NaN."""
    dtype, head_dim, value_dim, heads, kv_heads, queries, keys = shape
    rng = np.random.default_rng(0)
    begin, end = mask(queries, keys)
    q, dout, k = (
        rng.standard_normal(size).astype(dtype)
        for size in ((queries, heads, head_dim), (queries, heads, value_dim), (keys, kv_heads, head_dim))
    )
    seen = np.zeros(keys, bool)
    for first, last in zip(begin[0], end[0]):
        seen[first:last] = True
    k[~seen] = np.nan
    work = "float64" if dtype == "float64" else "float32"
    out, lse = dense(q, k, k[..., :value_dim], begin, end, scale)
    return q, dout, k, begin, end, lse.astype(work), (dout.astype(np.float64) * out).sum(axis=2).astype(work)


def noise(dtype, backend):
    """Of sums, relative; kernels may round the weights of half types to them."""
    rounds = {"cpu": ("bfloat16",), "emulated": ("bfloat16", "float16")}.get(backend.name, ())
    rounding = epsilon(dtype) if dtype in rounds else 0
    return rounding + (1e-12 if dtype == "float64" else NOISE)


def check(backend, shape, mask):
    """Compare a block's results and gradients, added to what was there, with float64."""
    dtype, head_dim, value_dim, heads = shape[:4]
    scale = head_dim**-0.5
    q, dout, k, begin, end, lse, delta = inputs(shape, MASKS[mask], scale)
    v = k[..., :value_dim]
    got = partial(backend, len(q), heads, value_dim, lse.dtype)
    backend.wait(backend.attend(BlockInputs(q, k, None, begin, end, scale), *got))
    for array, ref in zip(got, dense(q, k, v, begin, end, scale)):
        assert (np.isneginf(array) == np.isneginf(ref)).all()
        assert error(array, ref) <= noise(dtype, backend) * max(largest(ref), 1)
    (dq, dk, dv), sizes = dense_gradients(q, dout, lse, delta, k, v, begin, end, scale)
    dk[..., :value_dim] += dv
    sizes[1][..., :value_dim] += sizes[2]
    grads = [np.ones(array.shape, lse.dtype) for array in (q, k)]
    backend.wait(
        backend.attend_backward(*of_backward((q, dout, lse, delta, k, None, begin, end), scale), Gradients(*grads))
    )
    for array, ref, size in zip(grads, (dq, dk), sizes):
        assert error(array, ref + 1) <= 3 * noise(dtype, backend) * max(largest(size), 1)


@pytest.mark.draw(6, slow=4)
@pytest.mark.parametrize("shape, mask", list(product(SHAPES, MASKS)))
def test_blocks(backend, shape, mask):
    if shape[0] not in backend.dtypes:
        pytest.skip("a dtype that it does not take")
    check(backend, shape, mask)


@KERNELS.marks[0]
@KERNELS.marks[1]
@pytest.mark.parametrize("architecture", [80, 89])
def test_tiles_of_other_architectures(architecture):
    backend = backends.get("emulated")
    backend.architecture = architecture
    check(backend, SHAPES[1], "windows")


@pytest.mark.draw(15, slow=3)
@pytest.mark.parametrize("shape, page_size, mask", PAGED)
def test_pages(backend, shape, page_size, mask):
    """Slots that nobody sees hold NaN."""
    if shape[0] not in backend.dtypes:
        pytest.skip("a dtype that it does not take")
    dtype, head_dim, value_dim, heads, kv_heads, queries, keys = shape
    queries, scale = min(queries, 20), head_dim**-0.5
    begin, end = (np.clip(side[0], 0, keys) for side in MASKS[mask](queries, keys))
    (held,), pages, slots = pool(keys, page_size, kv_heads, (head_dim,), dtype)
    q = np.random.default_rng(1).standard_normal((queries, heads, head_dim)).astype(dtype)
    k = held[:, slots].swapaxes(0, 1)
    ref = dense(q, k, k[..., :value_dim], begin[None], end[None], scale)
    seen = np.zeros(keys, bool)
    for first, last in zip(begin, end):
        seen[first:last] = True
    held[:, slots[~seen]] = np.nan
    work = "float64" if dtype == "float64" else "float32"
    out, lse = np.full((queries, heads, value_dim), np.nan, work), np.full((queries, heads), 3, work)
    block = BlockInputs(q, held, None, begin, end, scale, pages=pages, page_size=page_size)
    backend.wait(backend.attend_pages(block, out, lse))
    for array, right in zip((out, lse), ref):
        assert (np.isneginf(array) == np.isneginf(right)).all()
        assert error(array, right) <= noise(dtype, backend) * max(largest(right), 1)


def test_keys_are_added_in_pieces(backend):
    """A partial of some keys, to which others are added: rows that see none of these keep what they have."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((20, 4, 40), np.float32), rng.standard_normal((90, 1, 40), np.float32)
    begin, end = MASKS["windows"](20, 90)
    out, lse = partial(backend, 20, 4, 33, "float32")
    for first, last in ((0, 30), (30, 31), (31, 90)):
        bounds = [np.clip(side - first, 0, last - first) for side in (begin, end)]
        event = backend.attend(BlockInputs(q, k[first:last], None, *bounds, 0.3), out, lse)
    backend.wait(event)
    for array, ref in zip((out, lse), dense(q, k, k[..., :33], begin, end, 0.3)):
        assert error(array, ref) <= 3 * NOISE * max(largest(ref), 1)


def test_what_the_kernels_do_not_take():
    kernels = backends.get("emulated")
    kernels.scratch_bytes(576, 512, "bfloat16", shared_kv=True)
    with pytest.raises(ArgumentError, match="head_dim is 577; of keys that hold the values"):
        kernels.scratch_bytes(577, 512, "bfloat16", shared_kv=True)


def test_problem():
    shape = {"seqlen": 10, "heads": 4, "kv_heads": 1, "head_dim": 576, "value_dim": 512}
    assert "x 576 (512 of values, in the keys)," in str(Problem(**shape, shared_kv=True))
    assert not Problem(**shape).shared_kv
    for given, said in (
        ({"shared_kv": 1}, "shared_kv is 1"),
        ({"shared_kv": True, "value_dim": 577}, "at most head_dim"),
    ):
        with pytest.raises(ArgumentError, match=said):
            Problem(**{**shape, **given})


def test_what_travels_and_is_held():
    """By hand: k is there once, v and dv nowhere."""
    shape = {"seqlen": 10, "heads": 4, "kv_heads": 1, "head_dim": 576, "value_dim": 512, "dtype": "bfloat16"}
    together, apart = (Problem(**shape, shared_kv=shared) for shared in (True, False))
    assert token_bytes(together)["KV"] == 576 * 2 and token_bytes(apart)["KV"] == 1088 * 2
    assert token_bytes(together, "backward")["dKV"] == 576 * 4
    assert {**token_bytes(apart, "backward"), "KV": 576 * 2, "dKV": 576 * 4} == token_bytes(together, "backward")
    held = shapes(together, "backward")
    assert held["KV"] == [((1, 576), "bfloat16")]
    assert held["dKV"] == held["+dKV"] == [((1, 576), "float32")]
    for nbytes in (chunk_bytes, gradient_bytes):
        assert nbytes(apart, 5, 3) - nbytes(together, 5, 3) == 3 * 512 * 2


def test_prediction():
    """A hop of a column takes the time of the bytes that it has, and of one message."""
    tile, seconds = Tile(1, 1, 4), {}
    for shared in (True, False):
        problem = Problem(seqlen=4096, heads=1, head_dim=576, value_dim=512, dtype="bfloat16", shared_kv=shared)
        load = Load(Work(problem.whole_mask, *[Layout("contiguous", 4096, 4)] * 2), tile)
        moves = simulate(greedy(tile, (1, 1, 1, 1)), problem, load, DEFAULT).moves
        seconds[shared] = [float((move.arrived - move.begun).max()) for move in moves]
    assert len(seconds[True]) == 3 and all(less < more for less, more in zip(seconds[True], seconds[False]))
