"""Decoding and partials on the compiled kernels of the back end cpu, on all instruction sets of this processor."""

import numpy as np
import pytest
from blocks import MASKS, NOISE, dense, windows
from cpu_kernels import EMULATED, WORK, compiled, kernels_of
from dense import bits, error, largest

from mpiattn import backends
from mpiattn.backends.block import BlockInputs

pytestmark = compiled


@pytest.fixture(params=("plain", "avx2", "avx512", "amx", *EMULATED))
def backend(request, monkeypatch):
    with kernels_of(request.param, monkeypatch) as made:
        yield made


def pool(keys, page_size, kv_heads, dims, dtype, seed=0):
    """Pools of keys and values with a sequence of `keys` keys in pages in any order, NaN elsewhere; pages and slots."""
    rng = np.random.default_rng(seed)
    used = -(-keys // page_size)
    pages = rng.permutation(used + 3)[:used].astype(np.int32)
    slots = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:keys]
    pools = [np.full((kv_heads, (used + 3) * page_size, dim), np.nan, dtype) for dim in dims]
    for each in pools:
        each[:, slots] = rng.standard_normal((kv_heads, keys, each.shape[2])).astype(dtype)
    return pools, pages, slots


def attend(backend, q, pools, pages, page_size, begin, end, scale=0.2, softcap=None, **options):
    """A partial that did hold something else."""
    out = np.full((*q.shape[:2], pools[1].shape[2]), np.nan, WORK[q.dtype.name])
    lse = np.full(q.shape[:2], 3, out.dtype)
    block = BlockInputs(q, *pools, begin, end, scale, softcap, pages, page_size)
    backend.attend_pages(block, out, lse, **options)
    return out, lse


def noise_of(backend, dtype):
    """How many times the noise of float32: AMX rounds weights to the 16 bits of two bfloat16 numbers."""
    return 5 if backend.version.startswith("amx") and dtype == "bfloat16" else 1


def assert_right(got, ref, times=1):
    """Half types are exact in the float32 in which kernels compute."""
    noise = times * (1e-13 if got[0].dtype == np.float64 else NOISE)
    assert (np.isneginf(got[1]) == np.isneginf(ref[1])).all()
    assert error(got[0], ref[0]) <= noise * max(largest(ref[0]), 1e-300)
    assert error(got[1], ref[1]) <= noise * max(largest(ref[1]), 1)


def queries(count, heads, dim, dtype):
    return np.random.default_rng(1).standard_normal((count, heads, dim)).astype(dtype)


def of_one(backend, case, mask, seed=0):
    """A sequence on the back end and on NumPy's, and the right partial; slots that nobody sees hold NaN."""
    dtype, page_size, keys, count, heads, kv_heads, head_dim, value_dim, softcap = case
    begin, end = (np.clip(side[0], 0, keys) for side in mask(count, keys))
    pools, pages, slots = pool(keys, page_size, kv_heads, (head_dim, value_dim), dtype, seed)
    q = queries(count, heads, head_dim, dtype)
    ref = dense(q, *(each[:, slots].swapaxes(0, 1) for each in pools), begin[None], end[None], 0.2, softcap)
    seen = np.zeros(keys, bool)
    for first, last in zip(begin, end):
        seen[first:last] = True
    for each in pools:
        each[:, slots[~seen]] = np.nan
    given = q, pools, pages, page_size, begin, end, 0.2, softcap
    return attend(backend, *given), attend(backends.get("numpy"), *given), ref


# dtype, page size, keys, queries, heads, KV heads, head dim, value dim, softcap
CASES = [
    ("bfloat16", 16, 300, 1, 8, 1, 128, 128, None),
    ("float16", 64, 200, 3, 4, 1, 64, 64, None),
    ("float32", 1, 70, 2, 2, 2, 64, 32, None),
    ("float32", 7, 150, 20, 8, 2, 40, 20, 4.0),
    ("bfloat16", 64, 130, 4, 3, 3, 96, 65, 4.0),
    ("float16", 16, 33, 2, 8, 1, 20, 36, None),
    ("bfloat16", 5, 90, 5, 16, 1, 256, 257, None),
    ("float64", 16, 200, 3, 5, 1, 33, 17, None),
    ("float64", 3, 129, 1, 2, 2, 1, 3, 4.0),
    ("float32", 16, 65, 1, 7, 1, 1, 1, None),
    ("float16", 4, 64, 1, 12, 2, 8, 7, None),
    ("float32", 32, 1, 1, 4, 2, 48, 24, None),
    ("bfloat16", 16, 2100, 2, 2, 1, 16, 16, None),
]


@pytest.mark.draw(slow=4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_pages(backend, case):
    """As float64 and NumPy have it, whatever the slots hold that nobody sees."""
    for mask in MASKS.values():
        got, numpy, ref = of_one(backend, case, mask)
        assert_right(got, ref, times=noise_of(backend, case[0]))
        assert_right(got, numpy, times=2 * noise_of(backend, case[0]))


@pytest.mark.parametrize("dtype", WORK)
def test_random_shapes(backend, dtype):
    for seed in range(12):
        rng = np.random.default_rng([seed, len(dtype)])
        kv_heads = int(rng.integers(1, 4))
        keys = int(rng.choice([1, 2, 63, 64, 65, 150, 1025]))
        page_size, count, heads = int(rng.integers(1, 40)), int(rng.integers(1, 6)), kv_heads * int(rng.integers(1, 20))
        dims, softcap = map(int, rng.integers(1, 140, 2)), 3.0 if rng.random() < 0.3 else None
        case = dtype, page_size, keys, count, heads, kv_heads, *dims, softcap
        got, _, ref = of_one(backend, case, rng.choice(list(MASKS.values())), seed)
        assert_right(got, ref, times=noise_of(backend, dtype))


def batch(dtype, count, heads, lengths=(100, 0, 1, 250, 1500)):
    """Sequences of any length, one of none, whose pages lie among each other's: arguments of `attend`."""
    rng = np.random.default_rng(0)
    used = [-(-length // 8) for length in lengths]
    tables = np.split(rng.permutation(sum(used)).astype(np.int32), np.cumsum(used)[:-1])
    pools = [rng.standard_normal((2, sum(used) * 8, dim)).astype(dtype) for dim in (64, 32)]
    q = rng.standard_normal((len(lengths) * count, heads, 64)).astype(dtype)
    begin = np.repeat(np.array([0, 0, 0, 30, 7], np.int32), count)
    return q, pools, tables, 8, begin, np.repeat(np.array(lengths, np.int32), count)


@pytest.mark.parametrize(
    ("dtype", "count", "heads"), [("bfloat16", 1, 8), ("float32", 3, 4), ("float16", 40, 8), ("float64", 2, 2)]
)
def test_a_batch_has_the_bits_of_each_sequence_alone(backend, dtype, count, heads):
    q, pools, tables, page_size, begin, end = arguments = batch(dtype, count, heads)
    got = attend(backend, *arguments)
    assert_right(got, attend(backends.get("numpy"), *arguments), times=noise_of(backend, dtype))
    for i, table in enumerate(tables):
        at = slice(i * count, (i + 1) * count)
        alone = attend(backend, q[at], pools, table, page_size, begin[at], end[at])
        assert bits(*alone) == bits(got[0][at], got[1][at])


def test_threads_change_no_bit(backend, monkeypatch):
    """One long sequence, whose parts are merged, and many."""
    pools, pages, _ = pool(30000, 16, 2, (64, 64), "float32")
    long = queries(2, 8, 64, "float32"), pools, pages, 16, np.array([0, 5], np.int32), np.full(2, 30000, np.int32)
    for arguments in (long, batch("float32", 2, 16)):
        results = set()
        for threads in (1, 2, 5):
            monkeypatch.setattr(backend, "threads", threads)
            results.add(bits(*attend(backend, *arguments)))
        assert len(results) == 1


def test_the_order_of_pages_changes_no_bit(backend):
    """Nor does another size of the pages or of the pool, nor what is in slots that nobody sees."""
    q, all_bits = queries(1, 8, 64, "bfloat16"), set()
    sees = np.zeros(1, np.int32), np.full(1, 250, np.int32)
    values = np.random.default_rng(0).standard_normal((2, 1, 256, 64)).astype(q.dtype)
    for page_size, seed in ((16, 0), (16, 1), (64, 0), (1, 0)):
        pools, pages, slots = pool(256, page_size, 1, (64, 64), q.dtype, seed)
        for each, of in zip(pools, values):
            each[:, slots] = of
            each[:, slots[250:]] = 0 if seed else np.nan
        all_bits.add(bits(*attend(backend, q, pools, pages, page_size, *sees)))
    assert len(all_bits) == 1


def test_no_keys(backend):
    """What nobody sees makes the empty partial, with pages or without."""
    pools, pages, _ = pool(20, 4, 2, (64, 64), "float32")
    q, nothing = np.ones((3, 4, 64), np.float32), np.zeros(3, np.int32)
    for table in (pages, pages[:0]):
        out, lse = attend(backend, q, pools, table, 4, nothing, nothing)
        assert not out.any() and np.isneginf(lse).all()
    assert attend(backend, q[:0], pools, pages, 4, nothing[:0], nothing[:0])[0].shape == (0, 4, 64)


@pytest.mark.draw(slow=6)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", WORK)
def test_not_finite(backend, dtype, where, value):
    """What isn't finite reaches exactly the rows that see it: a masked value is not multiplied by zero."""
    for mask in (windows, MASKS["causal"], MASKS["full"]):
        for dims in ((64, 64), (21, 3), (40, 37)):
            pools, pages, slots = pool(100, 16, 1, dims, dtype)
            q = queries(9, 2, dims[0], dtype)
            if where == "q":
                q[4, 1, 2] = value
            else:
                pools[where == "v"][0, slots[97], [1, dims[where == "v"] - 1]] = value
            begin, end = (side[0] for side in mask(9, 100))
            ref = dense(q, *(each[:, slots].swapaxes(0, 1) for each in pools), begin[None], end[None], 0.2)
            for got, right in zip(attend(backend, q, pools, pages, 16, begin, end), ref):
                assert (np.isnan(got) == np.isnan(right)).all()
                assert (got[np.isinf(right)] == right[np.isinf(right)]).all()
                assert error(got, right) <= noise_of(backend, dtype) * NOISE * max(largest(right), 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_infinite_value_of_little_weight(backend, dtype):
    """It is infinite, since its weight is not 0, although it may be as small as numbers with all their digits are."""
    pools, pages, slots = pool(64, 16, 1, (64, 64), dtype)
    q = np.zeros((1, 8, 64), dtype)
    q[..., 0] = 1
    pools[0][0, slots] = 0
    pools[1][0, slots[1], 3] = np.inf
    for score in (1, 40, 60, 75, 80, 85):
        pools[0][0, slots[5], 0] = score
        out, _ = attend(backend, q, pools, pages, 16, np.zeros(1, np.int32), np.full(1, 64, np.int32), scale=1)
        assert (out[..., 3] == np.inf).all() and np.isfinite(np.delete(out, 3, axis=-1)).all()


def test_large_scores(backend):
    """The largest score may come late, and in another part of the keys."""
    pools, pages, slots = pool(3000, 16, 1, (64, 64), "float32")
    q = queries(1, 4, 64, "float32")
    pools[0][:, slots] *= np.linspace(1, 300, 3000, dtype=np.float32)[:, None]
    ref = dense(q, *(each[:, slots].swapaxes(0, 1) for each in pools), *np.array([[[0]], [[3000]]]), 0.2)
    out, lse = attend(backend, q, pools, pages, 16, np.zeros(1, np.int32), np.full(1, 3000, np.int32))
    eps = np.finfo(np.float32).eps * largest(ref[1])
    assert error(lse, ref[1]) <= 4 * eps and error(out, ref[0]) <= 4 * eps * largest(ref[0])


def test_any_strides(backend):
    """Bits are those of contiguous arrays, and what lies between is not touched."""
    q, pools, *rest = batch("float16", 2, 4)
    expected = bits(*attend(backend, q, pools, *rest))
    for axis in range(3):
        second = (*(slice(None),) * axis, slice(None, None, 2))
        apart = [np.repeat(array, 2, axis)[second] for array in (q, *pools)]
        whole = np.zeros(np.array([10, 4, 32]) * (1 + (np.arange(3) == axis)), np.float32)
        lse = np.zeros((10, 4), np.float32)
        block = BlockInputs(*apart, *rest[2:], 0.2, pages=rest[0], page_size=rest[1])
        backend.attend_pages(block, whole[second], lse)
        assert bits(whole[second], lse) == expected
        assert not whole[(*(slice(None),) * axis, slice(1, None, 2))].any()


@pytest.mark.draw(1)
def test_it_asks_meanwhile(backend):
    """With shares that grow; it changes no bit, and what it raises ends the launch."""
    if "aarch64" in backend.version:
        pytest.skip("an emulated processor's launches do not ask")
    pools, pages, _ = pool(40000, 64, 4, (64, 64), "float64")
    arguments = queries(1, 32, 64, "float64"), pools, pages, 64, np.zeros(1, np.int32), np.full(1, 40000, np.int32)
    shares = []
    assert bits(*attend(backend, *arguments, meanwhile=shares.append)) == bits(*attend(backend, *arguments))
    assert len(shares) > 2 and shares == sorted(shares) and shares[0] == 0 and shares[-1] <= 1

    def fail(share):
        if share:
            raise KeyboardInterrupt("enough")

    with pytest.raises(KeyboardInterrupt, match="enough"):
        attend(backend, *arguments, meanwhile=fail)


# Partials


def partials(dtype, tokens=30, heads=3, dim=21):
    """Two, of which some rows are empty or not finite."""
    rng = np.random.default_rng(0)
    made = []
    for empty in (slice(0, 6), slice(3, 9)):
        out, lse = rng.standard_normal((tokens, heads, dim)).astype(dtype), (30 * rng.standard_normal((tokens, heads)))
        lse[empty], out[empty] = -np.inf, 0
        made.append((out, lse.astype(dtype)))
    made[0][0][12, -1, -1], made[0][1][12, -1] = np.nan, np.nan
    made[1][0][13, 0, 0] = np.inf
    return made


def like_numpy(backend, launch, *arrays):
    """The result of `launch(back end, copies of arrays)`, compared with NumPy's."""
    results = [launch(on, *(array.copy() for array in arrays)) for on in (backends.get("numpy"), backend)]
    noise = 1e-14 if arrays[0].dtype == np.float64 else 1e-6
    for right, got in zip(*results):
        assert (np.isnan(got) == np.isnan(right)).all() and (got[np.isinf(right)] == right[np.isinf(right)]).all()
        assert error(got, right) <= noise * max(largest(right), 1)


@pytest.mark.draw(slow=4)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(30, 3, 21), (3000, 2, 64), (15, 1, 1), (20, 7, 130)])
def test_partials(backend, dtype, shape):
    """Merge and sinks as NumPy's, on one thread and several."""

    def merge(on, out, lse, out_b, lse_b):
        on.merge(out, lse, out_b, lse_b)
        return out, lse

    def sink(on, out, lse, sinks):
        on.sink(out, lse, sinks)
        return out, lse

    first, second = partials(dtype, *shape)
    like_numpy(backend, merge, *first, *second)
    like_numpy(backend, merge, *second, *first)
    sinks = np.where(np.arange(shape[1]) == 1, -np.inf, 3).astype(dtype)
    like_numpy(backend, sink, *first, sinks)


def test_a_partial_may_come_in_another_dtype(backend):
    def merge(on, out, lse, out_b, lse_b):
        on.merge(out, lse, out_b.astype("bfloat16"), lse_b)
        return out, lse

    first, second = partials("float32")
    like_numpy(backend, merge, *first, *second)


@pytest.mark.draw(slow=5)
@pytest.mark.parametrize("dtype", WORK)
@pytest.mark.parametrize("dim", [1, 3, 21, 64, 130])
def test_delta(backend, dtype, dim):
    """A row whose out is 0 has none, even if its dout is not a number."""
    rng = np.random.default_rng(0)
    dout, out = rng.standard_normal((2, 40, 3, dim)).astype(dtype)
    out[:5] = 0
    dout[3, 1, 0], dout[10, 2, dim - 1] = np.nan, np.inf
    dlse = rng.standard_normal((40, 3)).astype(WORK[dtype])
    for given in (None, dlse):
        results = [np.empty_like(dlse) for _ in range(2)]
        for on, delta in zip((backends.get("numpy"), backend), results):
            on.delta(delta, dout, out, given)
        right, got = results
        assert (np.isnan(got) == np.isnan(right)).all()
        assert error(got, right) <= (1e-13 if dtype == "float64" else 1e-5)
        assert np.isfinite(got[3]).all() and not np.isfinite(got[10, 2])
