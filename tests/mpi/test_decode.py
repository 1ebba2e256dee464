"""Decoding over a cache that is spread over the ranks, against dense attention of what was appended."""

import contextlib
import gc
import random
import time
import tracemalloc
import weakref

import divisions
import numpy as np
import pytest
from caller import caller
from dense import TOLERANCE, Inputs, bits, largest, naive
from runs import BACKENDS, agreed, narrow, on, once, settle
from test_counted import Counting

from mpiattn import KVCache, Layout, MeshAttention, PeerFailure, query_ring_decode, ring_decode, tree_decode
from mpiattn.arguments.arrays import on_host
from mpiattn.backends.testing.paced import PacedBackend
from mpiattn.decode import call, combine
from mpiattn.schedule.reduction import ALGORITHMS
from mpiattn.verify import reference

RINGS = {"ring": ring_decode, "qring": query_ring_decode}
NINE = [*range(1, 9), pytest.param(9, marks=pytest.mark.many)]


class Mirror:
    """A cache, and beside it all that was appended, whole on every rank."""

    def __init__(self, comm, kv_heads, head_dim, value_dim=None, seed=0, **options):
        self.comm, self.rng = comm, np.random.default_rng(seed)
        self.cache = KVCache(
            comm,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            **{"backend": BACKENDS[0], **narrow(options)},
        )
        self.shapes = (kv_heads, head_dim), (kv_heads, value_dim or head_dim)
        empty = tuple(np.empty((0, *shape), self.cache.dtype) for shape in self.shapes)
        self.whole = [empty] * self.cache.sequences

    def draw(self, *shape):
        return self.rng.standard_normal(shape).astype(self.cache.dtype)

    def append(self, tokens, layout=None, **how):
        """Random tokens, dealt or placed by a kind of layout."""
        sequences = how.get("sequences", range(self.cache.sequences))
        k, v = (self.draw(len(sequences), tokens, *shape) for shape in self.shapes)
        shared = self.cache.shared_kv
        v = k[..., : self.shapes[1][1]] if shared else v
        for sequence, count, *new in zip(sequences, how.get("counts", [tokens] * len(sequences)), k, v):
            self.whole[sequence] = tuple(
                np.concatenate([held, more[:count]]) for held, more in zip(self.whole[sequence], new)
            )
        if layout is not None:
            drawn = divisions.ranges(random.Random(tokens), tokens, self.comm.size)
            layout = drawn if layout == "any" else Layout(layout, tokens, self.comm.size)
            how["layout"] = layout.lengths if layout.kind == "contiguous" else layout
            own = layout.positions(self.comm.rank)
            k, v = k[:, own], v[:, own]
        with caller(self.cache.backend) as (give, take):
            self.cache.append(give(k), *[give(v)] * (not shared), **how)
            take()

    def truncate(self, lengths):
        self.cache.truncate(lengths)
        self.whole = [tuple(array[:length] for array in pair) for pair, length in zip(self.whole, lengths)]

    def expected(self, q, causal=True, sequences=None, **how):
        """out and lse of all sequences, dense, in float64."""
        whole = [self.whole[sequence] for sequence in sequences or range(len(self.whole))]
        parts = []
        for i, (k, v) in enumerate(whole):
            if "mask" in how:  # whose positions are those of the sequence
                how |= {"positions": np.arange(len(k) - q.shape[1], len(k)), "lengths": (len(k), len(k))}
            parts.append(reference.attention(q[i : i + 1], k[None], v[None], causal, **how))
        return tuple(np.concatenate(part) for part in zip(*parts))

    def wrong(self, got, q, **how):
        """What is wrong with a result, or None."""
        for name, array, ref in zip(("out", "lse"), map(on_host, got), self.expected(q, **how)):
            if (np.isneginf(array) != np.isneginf(ref)).any() or not np.array_equal(np.isnan(array), np.isnan(ref)):
                return f"{name} is not finite in the same places"
            finite = np.isfinite(ref)
            off = largest(array[finite].astype(np.float64) - ref[finite])
            allowed = TOLERANCE[self.cache.partial_dtype] * max(largest(ref), 1)
            if name == "out" and self.cache.dtype != self.cache.partial_dtype:
                allowed += 2 * largest(ref) * {"float16": 2.0**-11, "bfloat16": 2.0**-8}[self.cache.dtype]
            if not off <= allowed:
                return f"{name} is off by {off:.3g}, allowed {allowed:.3g}"
        return None

    def check(self, queries=1, heads=None, algorithms=ALGORITHMS, **how):
        """Every algorithm against dense attention; of a tree every rank has the same bits."""
        if self.cache.shared_kv:  # which has no default
            how = {"scale": 0.2} | how
        q = self.draw(len(how.get("sequences", self.whole)), queries, heads or 2 * self.shapes[0][0], self.shapes[0][1])
        for algorithm in algorithms:
            call = {**how, "algorithm": algorithm} if algorithm in ALGORITHMS else how
            with caller(self.cache.backend) as (give, take):
                got = take(*RINGS.get(algorithm, tree_decode)(give(q), self.cache, **call))
            agreed(self.comm, self.wrong(got, q, **how), (algorithm, how))
            alike = algorithm in ("ring", "allreduce") or len(set(self.comm.allgather(bits(*got)))) == 1
            assert alike, (algorithm, how)
        return q


@on(4, 8)
@pytest.mark.parametrize("batch", [1, 3])
def test_case_17_tree_decode(group, batch):
    """Also where ranks hold no keys: 31 tokens, then 3."""
    for backend in BACKENDS:
        mirror = Mirror(group, 8, 64, sequences=batch, capacity=200, page_size=16, backend=backend)
        for tokens in (3, 28):
            mirror.append(tokens, "contiguous")
            assert tokens > 3 or 0 in group.allgather(mirror.cache.local_lengths[0]) or group.size < 4
            mirror.check(heads=8, algorithms=(*ALGORITHMS, *RINGS))
        mirror.cache.close()


@on(4)
def test_case_18_step_by_step(group):
    """A prefill whose keys stay where they are, then token by token: each step is the last row of a causal prefill."""
    heads, kv_heads, dim, prompt, total = 4, 2, 16, 21, 40
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, total, n, dim), np.float32) for n in (heads, kv_heads, kv_heads))
    out, lse = once(group, lambda: reference.attention(q, k, v, causal=True))
    for backend in BACKENDS:
        with (
            MeshAttention(
                group,
                batch=2,
                seqlen=prompt,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=dim,
                causal=True,
                backend=backend,
            ) as plan,
            KVCache(
                group, capacity=2 * total, sequences=2, kv_heads=kv_heads, head_dim=dim, page_size=4, backend=backend
            ) as cache,
        ):
            at = plan.positions
            got = on_host(plan.forward(q[:, at], k[:, at], v[:, at])[0])
            assert np.allclose(got, out[:, at], atol=1e-5)
            cache.append(k[:, at], v[:, at], layout=plan.k_layout)
            for token in range(prompt, total):
                now = slice(token, token + 1)
                cache.append(k[:, now], v[:, now])
                got, got_lse = map(on_host, tree_decode(q[:, now], cache))
                assert np.allclose(got, out[:, now], atol=1e-5) and np.allclose(got_lse, lse[..., now], atol=1e-5)
            held = group.allgather(cache.local_lengths[0])
            assert max(held) - min(held) <= 1, "tokens are dealt to the ranks with the fewest"


@on(*NINE)
def test_case_28_the_same_bits_on_every_rank(group):
    """Unequal lengths, grouped heads, several queries; and what a root alone gets."""
    mirror = Mirror(group, 2, 8, 5, sequences=3, capacity=300, page_size=3, dtype="float64")
    mirror.append(19, counts=[19, 0, 4])
    mirror.append(30, "zigzag", counts=[30, 2, 0])
    q = mirror.check(3, algorithms=(*ALGORITHMS, *RINGS))
    for algorithm in ALGORITHMS:
        root = group.size // 2
        got = tree_decode(q, mirror.cache, algorithm=algorithm, root=root)
        assert (got == (None, None)) if group.rank != root else (mirror.wrong(got, q) is None)
    mirror.cache.close()


@pytest.mark.draw(1)
@on(4)
@pytest.mark.parametrize("dtype, page_size", [("float32", 1), ("bfloat16", 64), ("float64", 16), ("float16", 16)])
def test_masks_dtypes_and_pages(group, dtype, page_size):
    """Several queries, causal among them; pages of sequences that grow, shrink and share the pool."""
    dtype = narrow({"dtype": dtype})["dtype"]
    sinks = np.linspace(-1, 2, 4).astype("float64" if dtype == "float64" else "float32")
    masks = (
        {},
        {"causal": False},
        {"window": (5, 0)},
        {"window": (2, 1), "causal": False},
        {"window": (0, None)},
        {"softcap": 1.5, "scale": 0.7},
        {"sinks": sinks},
        {"sequences": [2, 0]},
    )
    for backend in BACKENDS:
        mirror = Mirror(
            group,
            2,
            8,
            12,
            sequences=3,
            capacity=400,
            page_size=page_size,
            dtype=dtype,
            backend=backend,
            max_message=100,
        )
        for step in range(4):
            mirror.append(17, counts=[17, 1 + step, 9])
            mirror.append(2, "striped", sequences=[2])
            mirror.truncate([max(0, length - 4 * (i == step % 3)) for i, length in enumerate(mirror.cache.lengths)])
        for how in masks:
            mirror.check(4, algorithms=("allreduce", "butterfly", "levels", *RINGS) if how else ("auto",), **how)
        mirror.cache.free([1])
        mirror.whole[1] = tuple(array[:0] for array in mirror.whole[1])
        mirror.check(2, algorithms=("butterfly", "allreduce", "qring"))
        mirror.cache.close()


@on(2)
def test_large_scores_and_nan(group):
    """No overflow; what a NaN reaches is the queries that see it, of any algorithm."""
    mirror = Mirror(group, 1, 4, capacity=64, page_size=4)
    mirror.append(20)
    k, v = 1e4 * np.ones((1, 1, 1, 4), np.float32), np.full((1, 1, 1, 4), np.nan, np.float32)
    for key, value in ((k, v), (-k, k), (k, k)):
        mirror.cache.append(key, value)
        mirror.whole[0] = tuple(np.concatenate([held, new[0]]) for held, new in zip(mirror.whole[0], (key, value)))
    for how in ({}, {"window": (1, 0)}, {"window": (2, 0)}):
        mirror.check(5, algorithms=(*ALGORITHMS, *RINGS), **how)
    mirror.cache.close()


@on(4)
def test_sent_bytes_do_not_depend_on_the_context(group):
    """Counted where they are handed to MPI; memory is the cache, two partials, and tiles of a fixed size."""
    heads, dim, peaks = 4, 8, []
    q = np.ones((1, 1, heads, dim), np.float32)
    for tokens in (4096, 65_536, 1_000_000):
        layout = Layout("contiguous", tokens, group.size)
        chunk = np.ones((2, 1, layout.length(group.rank), 2, dim), np.float32)
        with KVCache(group, capacity=tokens, kv_heads=2, head_dim=dim) as cache:
            cache.append(*chunk, layout=layout)
            del chunk
            least = layout.length(group.rank) * 2 * 2 * dim * 4
            assert cache.pages - cache.free_pages == -(-layout.length(group.rank) // cache.page_size)
            assert least <= cache.nbytes <= least + 2 * 2 * cache.page_size * 2 * dim * 4
            for algorithm in ALGORITHMS:
                counting = cache.combiner.comm = Reducing(cache.combiner.comm)
                before = cache.sent
                tracemalloc.start()
                out, _ = tree_decode(q, cache, algorithm=algorithm)
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
                cache.combiner.comm = counting.comm
                partial = heads * (dim + 1) * 4
                formula = combine.moved_bytes(algorithm, partial, heads * 4, cache.nodes, group.rank)
                assert counting.bytes == formula == cache.sent[0] - before[0]
                assert formula == {"butterfly": 2 * partial, "allreduce": partial + heads * 4}.get(algorithm, formula)
                assert np.allclose(out, 1)
    assert max(peaks) < 2**20 and max(peaks) < min(peaks) + 2**19, "no copy of keys, at 16 MB a rank"


class Reducing(Counting):
    """Counts reductions too, each array once."""

    def __init__(self, comm):
        super().__init__(comm)
        self.size = comm.size

    def Iallreduce(self, given, taken, operation):
        self._add(given.nbytes)
        return self.comm.Iallreduce(given, taken, operation)


@on(3)
def test_ranks_wait_as_their_back_end_does(group, monkeypatch):
    """A paced rank that waits for a late one gives the core away."""
    looks = []
    monkeypatch.setattr(PacedBackend, "idle", lambda backend: looks.append(time.sleep(1e-3)))
    with KVCache(group, capacity=10, kv_heads=1, head_dim=2, backend="paced:1:1") as cache:
        cache.append(*np.ones((2, 1, 1, 1, 2), np.float32))
        looks.clear()
        if group.rank == 0:
            time.sleep(0.05)
        tree_decode(np.ones((1, 1, 1, 2), np.float32), cache, check=False)
    assert group.rank == 0 or looks


@on(2)
def test_what_mpi_may_still_write_outlives_an_interrupted_call(group, monkeypatch):
    made, q = [], np.ones((1, 1, 1, 2), np.float32)

    class Watched(combine.Partial):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(weakref.ref(self.packed.base))  # the memory, which the cache keeps

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(call, "Partial", Watched)
    with KVCache(group, capacity=10, kv_heads=1, head_dim=2) as cache:
        cache.append(*np.ones((2, 1, 1, 1, 2), np.float32))
        settle(group)  # the other rank has made the cache, too
        if group.rank == 0:
            cache._peers.idle = interrupt
            with pytest.raises(KeyboardInterrupt):
                tree_decode(q, cache, algorithm="butterfly", check=False)
            gc.collect()
            assert all(memory() is not None for memory in made), "the other rank has not even sent yet"
            group.send(None, 1)
        else:
            group.recv()
            with contextlib.suppress(PeerFailure):  # it may look for news before it has what was sent
                tree_decode(q, cache, algorithm="butterfly", check=False)
        group.barrier()


@on(2)
def test_half_types_are_as_near_as_a_naive_run(group):
    for dtype in ("float16", "bfloat16"):
        mirror = Mirror(group, 2, 32, capacity=300, dtype=dtype)
        mirror.append(256, "striped")
        q = mirror.draw(1, 1, 4, 32)
        ref, _ = mirror.expected(q)
        low = naive(Inputs(q, *(array[None] for array in mirror.whole[0])), dtype, causal=True, window=(None, None))
        out, _ = tree_decode(q, mirror.cache)
        assert out.dtype.name == dtype
        assert largest(out.astype(np.float64) - ref) <= 2 * largest(low.out.astype(np.float64) - ref)
        mirror.cache.close()
