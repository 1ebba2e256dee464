"""The CUDA kernels' sources on the CPU: attention over keys in pages, against the NumPy back end."""

import ml_dtypes
import numpy as np
import pytest
from blocks import MASKS, assert_rounded, windows
from dense import bits, error, largest

from mpiattn import backends
from mpiattn.backends.block import BlockInputs
from mpiattn.backends.cuda.tile_table import DECODE_ROWS
from mpiattn.backends.testing import emulated

pytestmark = [
    pytest.mark.workshop,
    pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler"),
]


def pool(keys, page_size, kv_heads, dims, dtype, seed=0):
    """Pools of keys and values with a sequence of `keys` keys in pages in any order, NaN elsewhere; and its table."""
    rng = np.random.default_rng(seed)
    used = -(-keys // page_size)
    pages = rng.permutation(used + 3)[:used].astype(np.int32)
    slots = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:keys]
    pools = [np.full((kv_heads, (used + 3) * page_size, dim), np.nan, dtype) for dim in dims]
    for each in pools:
        each[:, slots] = rng.standard_normal((kv_heads, keys, each.shape[2])).astype(dtype)
    return pools, pages, slots


def attend(backend, q, pools, pages, page_size, begin, end, scale=0.3, softcap=None):
    """A partial that did hold something else."""
    out = np.full((*q.shape[:2], pools[1].shape[2]), np.nan, np.float32)
    lse = np.full(q.shape[:2], 3, np.float32)
    backend.attend_pages(BlockInputs(q, *pools, begin, end, scale, softcap, pages, page_size), out, lse)
    return out, lse


# dtype, page size, keys, queries, heads, KV heads, head dim, value dim, softcap
CASES = [
    ("bfloat16", 16, 300, 1, 8, 1, 128, 128, None),
    ("float16", 64, 200, 3, 4, 1, 64, 64, None),
    ("float32", 1, 70, 2, 2, 2, 64, 32, None),
    ("float32", 7, 150, 20, 8, 2, 40, 20, 4.0),
    ("bfloat16", 64, 130, 4, 3, 3, 96, 64, 4.0),
    ("float16", 16, 33, 2, 8, 1, 20, 36, None),
    ("bfloat16", 5, 90, 5, 16, 1, 256, 256, None),
]


@pytest.mark.draw(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_pages(backend, case):
    """As NumPy has it, whatever the slots hold that nobody sees: neither other pages nor the end of the last one."""
    dtype, page_size, keys, queries, heads, kv_heads, head_dim, value_dim, softcap = case
    numpy = backends.get("numpy")
    q = np.random.default_rng(1).standard_normal((queries, heads, head_dim)).astype(dtype)
    for mask in MASKS.values():
        begin, end = (side[0] for side in mask(queries, keys))
        pools, pages, slots = pool(keys, page_size, kv_heads, (head_dim, value_dim), dtype)
        seen = np.zeros(keys, bool)
        for first, last in zip(begin, end):
            seen[first:last] = True
        for each in pools:
            each[:, slots[~seen]] = np.nan
        given = q, pools, pages, page_size, begin, end, 0.3, softcap
        assert_rounded(attend(backend, *given), attend(numpy, *given), np.nan_to_num(pools[1]))


@pytest.mark.parametrize(("dtype", "queries", "heads"), [("bfloat16", 1, 8), ("float32", 3, 4), ("float16", 20, 8)])
def test_a_batch_is_one_launch(backend, monkeypatch, dtype, queries, heads):
    """Sequences of any length, one of none, whose pages lie among each other's; as each of them alone."""
    page_size, lengths = 8, (100, 0, 33, 250)
    rng = np.random.default_rng(0)
    used = [-(-length // page_size) for length in lengths]
    tables = np.split(rng.permutation(sum(used)).astype(np.int32), np.cumsum(used)[:-1])
    pools = [rng.standard_normal((2, sum(used) * page_size, dim)).astype(dtype) for dim in (64, 32)]
    q = rng.standard_normal((len(lengths) * queries, heads, 64)).astype(dtype)
    begin = np.repeat(np.array([0, 0, 5, 30], np.int32), queries)
    end = np.repeat(np.array(lengths, np.int32), queries)
    launched, run = [], backend._run
    monkeypatch.setattr(backend, "_run", lambda kernel, *rest: (launched.append(kernel.name), run(kernel, *rest)))
    got = attend(backend, q, pools, tables, page_size, begin, end)
    assert launched[:1] == ["forward"] and launched[1:] in ([], ["merge_parts"])
    alone = attend(backends.get("numpy"), q, pools, tables, page_size, begin, end)
    assert_rounded(got, alone, pools[1])
    for i, table in enumerate(tables):
        at = slice(i * queries, (i + 1) * queries)
        expected = attend(backends.get("numpy"), q[at], pools, table, page_size, begin[at], end[at])
        assert (expected[0] == alone[0][at]).all() and (expected[1] == alone[1][at]).all()


def test_both_kernels_are_tested():
    """That of few rows, which splits the keys, and that of many."""
    assert len({case[3] * case[4] // case[5] <= DECODE_ROWS for case in CASES}) == 2


def test_no_keys(backend):
    """What nobody sees makes the empty partial, with pages or without."""
    pools, pages, _ = pool(20, 4, 2, (64, 64), "float32")
    q, nothing = np.ones((3, 4, 64), np.float32), np.zeros(3, np.int32)
    for table in (pages, pages[:0]):
        out, lse = attend(backend, q, pools, table, 4, nothing, nothing)
        assert not out.any() and np.isneginf(lse).all()
    out, lse = attend(backend, q[:0], pools, pages, 4, nothing[:0], nothing[:0])
    assert out.shape == (0, 4, 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_not_finite(backend, dtype):
    """A NaN reaches exactly the rows that see it."""
    pools, pages, slots = pool(100, 16, 1, (64, 64), dtype)
    pools[1][0, slots[20], 5] = np.nan
    begin, end = (side[0] for side in windows(9, 100))
    q = np.random.default_rng(1).standard_normal((9, 2, 64)).astype(dtype)
    out, _ = attend(backend, q, pools, pages, 16, begin, end)
    hit = np.zeros(out.shape, bool)
    hit[(begin <= 20) & (end > 20), :, 5] = True
    assert hit.any() and (np.isnan(out) == hit).all()


def test_the_order_of_pages_changes_no_bit(backend):
    """Nor does another size of the pages or of the pool, nor what is in slots that nobody sees."""
    q, all_bits = np.ones((1, 8, 64), ml_dtypes.bfloat16), set()
    values = np.random.default_rng(0).standard_normal((2, 1, 256, 64)).astype(q.dtype)
    for page_size, seed in ((16, 0), (16, 1), (64, 0), (1, 0)):
        pools, pages, slots = pool(256, page_size, 1, (64, 64), q.dtype, seed)
        for each, of in zip(pools, values):
            each[:, slots] = of
            each[:, slots[250:]] = 0 if seed else np.nan
        begin, end = np.zeros(1, np.int32), np.full(1, 250, np.int32)
        all_bits.add(bits(*attend(backend, q, pools, pages, page_size, begin, end)))
    assert len(all_bits) == 1


def test_sums_of_partials(backend):
    """A partial becomes weights and weighted sums, which add up over ranks, and a partial again."""
    rng, numpy = np.random.default_rng(0), backends.get("numpy")
    out, lse = rng.standard_normal((30, 3, 40)).astype(np.float32), 3 * rng.standard_normal((30, 3)).astype(np.float32)
    lse[:4] = -np.inf
    top = np.maximum(lse, 1).astype(np.float32)
    top[:2] = -np.inf
    results = []
    for on in (numpy, backend):
        partial = out.copy(), lse.copy()
        on.unnormalize(*partial, top)
        sums = [each.copy() for each in partial]
        on.normalize(*partial, top)
        results.append((*sums, *partial))
    for ref, got in zip(*results):
        assert error(got, ref) <= 2e-6 * largest(ref)
    assert np.isneginf(results[1][3][:4]).all() and not results[1][2][:4].any()
