"""The CUDA kernels' bias and dropout where they depend on tiles, addresses, strides, pages and streams."""

import fake_cupy
import numpy as np
import pytest
from dense import bits
from numpy.lib.stride_tricks import as_strided
from test_bias_blocks import HEADS, SEQUENCES, backward, close, dense, forward, made

from mpiattn import backends
from mpiattn.arguments.arrays import on_host
from mpiattn.backends.block import BlockInputs, Gradients
from mpiattn.backends.cuda.extras import PAIR, Extras, Owners, Rows
from mpiattn.backends.testing import emulated

pytestmark = [
    pytest.mark.workshop,
    pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler"),
]

SHARED = (1, 1), (1, HEADS), (SEQUENCES, 1)


@pytest.fixture
def options(backend, monkeypatch):
    """The constants of each kernel that has been launched, by its name."""
    launched, run = {}, backend._run
    monkeypatch.setattr(
        backend,
        "_run",
        lambda kernel, grid, *rest: (launched.update({kernel.name: dict(kernel.defines)}), run(kernel, grid, *rest)),
    )
    return launched


@pytest.mark.parametrize("packed", [1, 2, 4])
@pytest.mark.parametrize("sequences", [1, 3])
def test_every_number_has_one_writer(sequences, packed):
    """Every group of heads is some owner's, once; no two owners add to the same numbers, nor two rows of a group."""
    heads = 4 * sequences
    for shape in ((own, of, 9) for own in {1, sequences} for of in (1, 4)):
        of_sequence = 4 if shape[1] > 1 or shape[0] > 1 else heads
        owners = Owners.of(Rows("float", 1, shape, (0, 0, 0)), heads, packed)
        groups, writers = [], {}
        for owner in range(owners.number):
            for turn in range(owners.sharers):
                group = owner * owners.step + turn * owners.apart
                groups.append(group)
                numbers = [
                    (head // of_sequence % shape[0], head % of_sequence % shape[1])
                    for head in range(group * owners.packed, (group + 1) * owners.packed)
                ]
                assert len(set(numbers)) == len(numbers)
                assert all(writers.setdefault(number, owner) == owner for number in numbers)
        assert sorted(groups) == [*range(heads // owners.packed)]


def zeros(array):
    return np.zeros(array.shape, np.float32)


def check(backend, dtype, block, given, dbias=None):
    """Forward and backward of a block as dense attention has them; dbias: where to, else memory like the bias's."""
    right = dense(block)
    close(dtype, forward(backend, block), right)
    given = given._replace(lse=right[1].astype(np.float32))
    *right, of_pairs = dense(block, given)
    shared = tuple(axis for axis in range(3) if block.bias.shape[axis] == 1)
    got = backward(backend, block, given, zeros(block.bias) if dbias is None else dbias)
    close(dtype, got, [*right, of_pairs.sum(axis=shared, keepdims=True)])


def as_it_is(backend, monkeypatch):
    """Let a bias and its gradient keep their strides where tests put arrays on a device."""
    contiguous = backend.contiguous
    monkeypatch.setattr(
        backend, "contiguous", lambda array, *options: array if array.ndim == 4 else contiguous(array, *options)
    )


@pytest.mark.draw(3)
@pytest.mark.parametrize("tokens", ["each", "all"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_tile(backend, dtype, dim, tokens):
    """Of the table's tiles, with the gradient in either kernel."""
    block, given = made((40, 90, dim, dim, dtype, None), (SEQUENCES, HEADS), seed=dim)
    if tokens == "all":
        block = block._replace(bias=block.bias[:, :, :1].copy())
    check(backend, dtype, block, given)


@pytest.mark.draw(2)
@pytest.mark.parametrize("groups", [1, 4])
def test_groups_of_heads_have_their_own_intervals(backend, groups):
    """As many as there are KV heads, or one; sums over heads and sequences have to meet in any case."""
    block, given = made((40, 90, 32, 32, "float16", 2.0), (1, 1))
    begin, end = (np.resize(side, (groups, side.shape[1])) for side in (block.begin, block.end))
    begin[:, 3] = end[:, 3]
    block = block._replace(begin=begin, end=end)
    check(backend, "float16", block, given)


@pytest.mark.draw(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("keys, before, gap, width", [(90, 2, 4, 2), (90, 1, 4, 1), (90, 2, 5, 1), (89, 2, 5, 1)])
def test_addresses(backend, monkeypatch, options, dtype, keys, before, gap, width):
    """Pairs where all rows can be read so, also if keys are seen from an odd one on.

    What lies around the rows is neither used nor changed.
    """
    as_it_is(backend, monkeypatch)
    block, given = made((40, keys, 64, 64, "bfloat16", None), (SEQUENCES, HEADS))
    begin = np.maximum(block.begin, 3)
    block = block._replace(begin=begin, end=np.maximum(block.end, begin))
    numbers = block.bias.size // keys * (keys + gap)
    memory = np.full(numbers + 8, np.nan, dtype), np.full(numbers + 8, np.nan, np.float32)
    bias, dbias = (
        each[(start := -each.ctypes.data // each.itemsize % PAIR + before) : start + numbers].reshape(
            *block.bias.shape[:3], keys + gap
        )[..., :keys]
        for each in memory
    )
    bias[:], dbias[:] = block.bias, 0
    check(backend, "bfloat16", block._replace(bias=bias), given, dbias)
    assert options["forward"]["BIAS"] == options["gradient_kv"]["BIAS"] == options["gradient_q"]["DBIAS"] == width
    assert sum(np.isnan(memory[1])) == numbers + 8 - bias.size


@pytest.mark.draw(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_strides(backend, monkeypatch, dtype):
    """A bias by distance is a view of one row, and rows of its gradient may overlap in memory that they do not use."""
    as_it_is(backend, monkeypatch)
    block, given = made((40, 90, 32, 32, dtype, None), (1, HEADS))
    queries, keys = len(block.q), len(block.k)
    table = np.random.default_rng(3).standard_normal((1, HEADS, queries + keys - 1), np.float32)
    strides = (*table.strides[:2], -4, 4)
    bias = as_strided(table[:, :, queries - 1 :], (1, HEADS, queries, keys), strides)
    wide = np.zeros((1, HEADS, queries, queries + keys), np.float32)
    dbias = as_strided(wide[:, :, :, queries - 1 :], bias.shape, (*wide.strides[:2], wide.strides[2] - 4, 4))
    check(backend, dtype, block._replace(bias=bias), given, dbias)


@pytest.mark.parametrize("tokens", [40, 1])
def test_sums_have_the_same_bits(tokens):
    """Where all share a bias: in every run, whichever warp is first."""
    block, given = made((40, 90, 64, 64, "bfloat16", None), (1, 1))
    block = block._replace(bias=block.bias[:, :, :tokens].copy())
    results = set()
    for descending in (False, True, True):
        backend = backends.get("emulated")
        backend.descending = descending
        results.add(bits(*backward(backend, block, given, zeros(block.bias))))
    assert len(results) == 1


@pytest.mark.draw(2)
@pytest.mark.parametrize("shape", [*SHARED, (SEQUENCES, HEADS)])
def test_one_launch_of_each_kernel(backend, monkeypatch, shape):
    """Whoever shares the bias; a bias of all queries takes one more to add sums up."""
    launched, run = [], backend._run
    monkeypatch.setattr(backend, "_run", lambda kernel, *rest: (launched.append(kernel.name), run(kernel, *rest)))
    block, given = made((20, 30, 32, 32, "float32", None), shape)
    for bias, more in ((block.bias, []), (block.bias[:, :, :1].copy(), ["add_key_sums"])):
        launched.clear()
        backward(backend, block._replace(bias=bias), given, zeros(bias))
        assert launched == ["delta", "gradient_q", "hulls", "gradient_kv", *more]


@pytest.mark.draw(1)
def test_splits_of_the_queries(backend, monkeypatch):
    """Several thread blocks share the keys; each has sums of its own."""
    grids, run = {}, backend._run
    monkeypatch.setattr(
        backend, "_run", lambda kernel, grid, *rest: (grids.update({kernel.name: grid}), run(kernel, grid, *rest))
    )
    block, given = made((520, 9, 32, 32, "float32", None), (1, HEADS))
    block = block._replace(bias=block.bias[:, :, :1].copy())
    check(backend, "float32", block, given)
    assert grids["gradient_kv"][2] > 1


def in_pages(backend, dtype, queries, heads, softcap, most):
    """Sequences of any length, one of none, several queries each: as NumPy has them."""
    kv_heads, page_size, lengths = min(heads, 2), 8, (100, 0, 33, 250)
    rng = np.random.default_rng(0)
    used = [-(-length // page_size) for length in lengths]
    tables = np.split(rng.permutation(sum(used)).astype(np.int32), np.cumsum(used)[:-1])
    k, v = (rng.standard_normal((kv_heads, sum(used) * page_size, dim)).astype(dtype) for dim in (64, 32))
    q = rng.standard_normal((len(lengths) * queries, heads, 64)).astype(dtype)
    begin, end = (np.repeat(np.array(ends, np.int32), queries) for ends in ((0, 0, 5, 30), lengths))
    bias = rng.standard_normal((len(q), heads, most), np.float32)
    for row, length in zip(bias, np.repeat(lengths, queries)):
        row[:, length:] = np.nan  # which nobody sees
    bias[1, :, ::2], bias[-1, heads // 4] = -np.inf, -np.inf
    results = []
    for on in (backends.get("numpy"), backend):
        out, lse = np.full((*q.shape[:2], 32), np.nan, np.float32), np.full(q.shape[:2], 3, np.float32)
        on.attend_pages(BlockInputs(q, k, v, begin, end, 0.3, softcap, tables, page_size, bias), out, lse)
        results.append((out, lse))
    close(dtype, results[1], results[0])
    assert np.isneginf(results[1][1][-1, heads // 4])


@pytest.mark.draw(3)
@pytest.mark.parametrize("most", [250, 251])
@pytest.mark.parametrize(("dtype", "queries", "softcap"), [("bfloat16", 2, None), ("float32", 20, 3.0)])
def test_pages(backend, dtype, queries, softcap, most):
    """Of few rows, and of many."""
    in_pages(backend, dtype, queries, 8, softcap, most)


def test_sequences_of_one_head_in_pages(backend):
    """They have more sequences than heads."""
    in_pages(backend, "bfloat16", 2, 1, None, 250)


def test_launches_are_ordered(gpu):
    """Two blocks add to columns of one gradient, which begins as zeros; both are done when the last event is."""
    block, given = made((20, 60, 32, 32, "bfloat16", None), (1, HEADS))
    *_, of_pairs = dense(block, given)
    bias, dbias = gpu.contiguous(block.bias), gpu.empty(block.bias.shape, "float32")
    assert isinstance(bias, fake_cupy.ndarray)
    arrays = {name: gpu.contiguous(getattr(block, name)) for name in ("q", "k", "v")}
    given = type(given)(*map(gpu.contiguous, given))
    grads = [gpu.empty(getattr(block, name).shape, "float32") for name in ("q", "k", "v")]
    gpu.zero([*grads, dbias])
    for first, last in ((0, 22), (22, 60)):
        keys = slice(first, last)
        begin, end = (gpu.contiguous(np.clip(side, first, last) - first) for side in (block.begin, block.end))
        part = block._replace(
            q=arrays["q"], k=arrays["k"][keys], v=arrays["v"][keys], begin=begin, end=end, bias=bias[..., keys]
        )
        into = Gradients(grads[0], grads[1][keys], grads[2][keys], dbias[..., keys])
        event = gpu.attend_backward(part, given, into)
    gpu.wait(event)
    close("bfloat16", [on_host(dbias)], [of_pairs.sum(axis=0, keepdims=True)])


@pytest.mark.draw(1)
def test_kernels_of_other_blocks_know_nothing_of_it(backend, options):
    block, given = made((20, 30, 32, 32, "float32", None))
    assert Extras.of(block, None) is None
    forward(backend, block)
    backward(backend, block, given, None)
    assert not {"BIAS", "DBIAS", "KEY_SUMS", "DROPOUT"} & {name for of in options.values() for name in of}
