"""Every back end computes with every field of a block that it says it takes: none is ignored."""

import fake_cudnn
import fake_cupy
import numpy as np
import pytest
from blocks import causal, chunks
from dense import error, largest
from test_cpu_decode import pool

from mpiattn import backends
from mpiattn.arguments.arrays import on_host
from mpiattn.backends.block import BackwardInputs, BlockInputs, Dropout, Gradients
from mpiattn.backends.cuda import devices
from mpiattn.backends.numpy.backend import _packing as packing
from mpiattn.backends.registry import REGISTRY
from mpiattn.backends.testing import emulated

QUERIES, KEYS, HEADS, KV_HEADS, VALUE_DIM, PAGE = 24, 40, 4, 2, 8, 4
NOISE, CHANGE = 2e-2, 5e-2  # of the largest value: bfloat16 differs by less than the one, a field changes more


def other_bias(block):
    """A bias of a block: the same for all queries; or of a block in pages."""
    rng = np.random.default_rng(2)
    if block.pages is not None:
        return rng.standard_normal((QUERIES, HEADS, KEYS), np.float32)
    return rng.standard_normal((1, HEADS, 1, KEYS)).astype(block.q.dtype)


def other_dropout(block):
    """A dropout of a block of the last queries and other keys, of the heads of another sequence than the first."""
    rows, keys, heads = (np.arange(count, dtype=np.int32) for count in (QUERIES, KEYS, HEADS))
    return Dropout(2**30, 2**40 + 1, rows + 16, 3 * keys, heads + HEADS)


# What else a field may be, given what it is, or given the block where that has none.
CHANGES = {
    "q": lambda q: q[::-1].copy(),
    "k": lambda k: k[::-1].copy(),
    "v": lambda v: None,
    "begin": lambda begin: begin + np.int32(5),
    "end": lambda end: np.maximum(end - np.int32(9), 0),
    "scale": lambda scale: 3 * scale,
    "softcap": lambda softcap: 0.5,
    "pages": lambda pages: pages[::-1].copy(),
    "page_size": lambda size: size // 2,
    "bias": other_bias,
    "dropout": other_dropout,
    "dout": lambda dout: dout[::-1].copy(),
    "lse": lambda lse: lse - np.float32(0.5),
    "delta": lambda delta: delta + np.float32(2),
}


@pytest.fixture(params=REGISTRY)
def backend(request):
    with fake_cudnn.install():
        devices._dealt.clear()
        name = {"paced": "paced:1000000"}.get(request.param, request.param)
        if why := backends.find(name).missing():
            pytest.skip(why)
        if backends.find(name).on_gpu and not emulated.compiler():
            pytest.skip("the emulation needs a C++ compiler")
        made = backends.get(name)
        yield made
        made.close()
    fake_cupy._devices[:] = [0]


def chunk():
    """A block and what its backward pass has besides, as NumPy arrays."""
    q, k, v = chunks(QUERIES, KEYS, HEADS, KV_HEADS, 16, VALUE_DIM, "bfloat16")
    rng = np.random.default_rng(1)
    dout = rng.standard_normal((QUERIES, HEADS, VALUE_DIM)).astype(q.dtype)
    lse, delta = rng.standard_normal((2, QUERIES, HEADS)).astype(np.float32)
    return BlockInputs(q, k, v, *causal(QUERIES, KEYS), 0.3), BackwardInputs(dout, 3 + lse, delta)


def paged():
    """A block in pages, of which half are seen: as many as there would be of half the size."""
    (k, v), pages, _ = pool(KEYS, PAGE, KV_HEADS, (16, VALUE_DIM), "bfloat16")
    block, _ = chunk()
    return block._replace(k=k, v=v, begin=block.begin[0], end=block.end[0] // 2, pages=pages, page_size=PAGE)


def put(backend, record):
    """A record's arrays on a back end's device, but those that stay NumPy's in pages."""
    stay = ("begin", "end", "pages") if getattr(record, "pages", None) is not None else ()
    arrays = {
        name: backend.contiguous(value)
        for name, value in record._asdict().items()
        if isinstance(value, np.ndarray) and name not in stay
    }
    if getattr(record, "dropout", None) is not None:
        arrays["dropout"] = put(backend, record.dropout)
    return record._replace(**arrays)


def attend(backend, block, given):
    out, lse = backend.empty((QUERIES, HEADS, VALUE_DIM), "float32"), backend.empty((QUERIES, HEADS), "float32")
    backend.clear(out, lse)
    launch = backend.attend if block.pages is None else backend.attend_pages
    launch(put(backend, block), out, lse)
    backend.drain()
    return [on_host(out), on_host(lse)]


def attend_backward(backend, block, given):
    given = put(backend, given)
    backend.delta(backend.empty(given.delta.shape, "float32"), given.dout, given.dout, None)  # none of them has a dlse
    grads = [np.zeros(array.shape, np.float32) for array in block[:3] if array is not None]
    grads = Gradients(*map(backend.contiguous, grads))
    if block.bias is not None:  # the same for all queries, so its gradient is their sum
        grads = grads._replace(dbias=backend.contiguous(np.zeros(block.bias.shape, np.float32)))
    backend.attend_backward(put(backend, block), given, grads)
    backend.drain()
    return [on_host(grad) for grad in grads if grad is not None]


def test_every_field_is_changed_here():
    assert set(CHANGES) == {*BlockInputs._fields, *BackwardInputs._fields}


def changed(record, name):
    value = getattr(record, name)
    return CHANGES[name](record if value is None else value)


@pytest.mark.parametrize("what", ["forward", "backward", "pages"])
def test_every_field_counts(backend, what):
    """A field that a back end takes changes its result as it changes NumPy's."""
    if "bfloat16" not in backend.dtypes:
        pytest.skip("a dtype that it does not take")
    block, given = (paged(), None) if what == "pages" else chunk()
    run = attend_backward if what == "backward" else attend
    before, numpy = run(backend, block, given), backends.get("numpy")
    for name in (*backend.takes, *(BackwardInputs._fields if what == "backward" else ())):
        if (name in ("pages", "page_size") and what != "pages") or (name == "dropout" and what == "pages"):
            continue
        records = [
            each and (each._replace(**{name: changed(each, name)}) if name in each._fields else each)
            for each in (block, given)
        ]
        now, right = run(backend, *records), run(numpy, *records)
        for got, ref in zip(now, right):
            assert error(got, ref) <= NOISE * largest(ref), name
        assert any(error(got, old) > CHANGE * largest(old) for got, old in zip(now, before)), f"{name} is ignored"


def test_heads_are_packed_only_in_blocks_whose_every_field_is():
    """A field that packing does not know is right from the start, and fast once heads are packed in it too."""
    block, _ = chunk()
    assert packing(block) == HEADS // KV_HEADS and packing(block._replace(page_size=PAGE)) == 1
