"""Masks that pack several sequences into one: each token gets what it would get alone, after those that it sees.

The oracle packs nothing: of every query it takes the tokens that the mask shows, and attends to them as to a sequence.
"""

import random

import numpy as np
import pytest
import warm
from mpi4py import MPI

import mpiattn
from mpiattn import ArgumentError, KVCache, MeshAttention, masks, tree_decode
from mpiattn.masks.interval_mask import Both
from mpiattn.verify import reference
from mpiattn.verify.reference_masks import place_of, shown

HEADS, DIM = 2, 8
PARENTS = [-1, 0, 0, -1, 2, 1, 4, 3]
TABLE = np.random.default_rng(5).standard_normal((HEADS, 9))
DISTANCES = {
    "window": {"window": (4, 0)},
    "window ahead": {"window": (6, 2)},
    "one key": {"window": (0, 0)},
    "alibi": {"alibi_slopes": np.array([0.5, 0.1])},
    "table": {"relative_bias": TABLE},
    "all": {"window": (7, None), "alibi_slopes": np.array([0.5, 0.1]), "relative_bias": TABLE},
}


def arrays(tokens, seed=0):
    return np.random.default_rng(seed).standard_normal((4, 1, tokens, HEADS, DIM))


def paths(mask, seqlen):
    """The tokens that each query sees, its own last."""
    everything = np.arange(seqlen)
    return [np.flatnonzero(row) for row in shown(mask, everything, everything, seqlen, seqlen)]


def alone(q, k, v, path, **arguments):
    """The result of the last token of a path, of a sequence that holds this path only."""
    out, lse = mpiattn.attention(q[:, path], k[:, path], v[:, path], comm=MPI.COMM_SELF, causal=True, **arguments)
    return out[:, -1], lse[:, :, -1]


PACKED = {
    "tree": (masks.tree(PARENTS), 30),
    "tree of all tokens": (masks.tree(PARENTS), len(PARENTS)),
    "chain": (masks.tree([-1, 0, 1, 2]), 9),
    "share": (masks.share_question(9, [5, 0, 7, 1, 4]), 26),
    "share no question": (masks.share_question(0, [5, 3]), 8),
    "share no answer": (masks.share_question(6, []), 6),
}


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("name", PACKED)
def test_plans_give_what_each_path_gives_alone(name, distance):
    mask, seqlen = PACKED[name]
    q, k, v, _ = arrays(seqlen)
    out, lse = mpiattn.attention(q, k, v, comm=MPI.COMM_SELF, mask=mask, **DISTANCES[distance])
    for query, path in enumerate(paths(mask, seqlen)):
        want, want_lse = alone(q, k, v, path, **DISTANCES[distance])
        np.testing.assert_allclose(out[:, query], want, atol=1e-12, err_msg=f"query {query}")
        np.testing.assert_allclose(lse[:, :, query], want_lse, atol=1e-12, err_msg=f"query {query}")


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("causal", [True, False])
def test_decoding_gives_what_each_path_gives_alone(distance, causal):
    mask, context = masks.tree(PARENTS), 22
    tokens = context + len(PARENTS)
    q, k, v, _ = arrays(tokens)
    drafts = slice(context, None)
    with KVCache(MPI.COMM_SELF, capacity=100, kv_heads=HEADS, head_dim=DIM, dtype="float64", page_size=4) as cache:
        cache.append(k, v)
        out, lse = tree_decode(q[:, drafts], cache, mask=mask, causal=causal, **DISTANCES[distance])
    for number, path in enumerate(paths(mask, tokens)[drafts]):
        with KVCache(MPI.COMM_SELF, capacity=100, kv_heads=HEADS, head_dim=DIM, dtype="float64") as cache:
            cache.append(k[:, path], v[:, path])
            want, want_lse = tree_decode(q[:, path[-1:]], cache, **DISTANCES[distance])
        np.testing.assert_allclose(out[:, number], want[:, 0], atol=1e-12)
        np.testing.assert_allclose(lse[:, :, number], want_lse[:, :, 0], atol=1e-12)


BESIDE = {
    "window": (lambda mask: masks.window(4, 0) & mask, lambda: masks.window(4, 0)),
    "chunks": (lambda mask: mask & masks.chunked(8), lambda: masks.chunked(8)),
    "recent and first": (
        lambda mask: (masks.window(3, 0) | masks.global_tokens(2)) & mask,
        lambda: masks.window(3, 0) | masks.global_tokens(2),
    ),
    "either of two": (
        lambda mask: (masks.window(3, 0) & mask) | (masks.chunked(8) & mask),
        lambda: masks.window(3, 0) | masks.chunked(8),
    ),
    "causal": (lambda mask: masks.causal() & mask, masks.causal),
}


@pytest.mark.parametrize("name", BESIDE)
def test_masks_that_go_by_distance_go_by_places(name):
    together, beside = BESIDE[name]
    for mask, seqlen in (PACKED["tree"], PACKED["share"]):
        q, k, v, _ = arrays(seqlen)
        out, _ = mpiattn.attention(q, k, v, comm=MPI.COMM_SELF, mask=together(mask))
        for query, path in enumerate(paths(mask, seqlen)):
            want, _ = alone(q, k, v, path, mask=beside())
            np.testing.assert_allclose(out[:, query], want, atol=1e-12, err_msg=f"query {query}")


def random_packing(rng):
    """(mask, seqlen)."""
    if rng.random() < 0.5:
        parents = [rng.randint(-1, i - 1) for i in range(rng.randint(0, 12))]
        return masks.tree(parents), len(parents) + rng.randint(0, 20)
    answers = [rng.randint(0, 9) for _ in range(rng.randint(0, 5))]
    question = rng.randint(0, 9)
    return masks.share_question(question, answers), question + sum(answers)


@pytest.mark.parametrize("seed", range(60))
def test_intervals_are_those_of_the_definition(seed):
    """With windows, chunks and others beside, by & and |, as the oracle has them pair by pair."""
    rng = random.Random(seed)
    mask, seqlen = random_packing(rng)
    for _ in range(rng.randint(1, 3)):
        other = rng.choice(
            [
                masks.window(rng.randint(0, 9), rng.choice([None, 0, 2])),
                masks.chunked(rng.randint(1, 9)),
                masks.causal(),
            ]
            + [masks.global_tokens(rng.randint(0, 4)), masks.blocks(4, [(0, 0)] * (seqlen > 0)), masks.window(None, 3)]
        )
        pair = [mask, other][:: rng.choice([1, -1])]
        mask = pair[0] & pair[1] if rng.random() < 0.6 else pair[0] | pair[1]
    at = np.arange(seqlen)
    begin, end = mask.intervals(at, seqlen, seqlen)
    count = ((begin[..., None] <= at) & (at < end[..., None])).sum(axis=0)
    wanted = shown(mask, at, at, seqlen, seqlen)
    assert np.array_equal(count, wanted), mask
    first, last = reference.span(mask, at, seqlen, seqlen)
    assert not (wanted & ((at < first[:, None]) | (at >= last[:, None]))).any()


@pytest.mark.parametrize("seed", range(20))
def test_places_are_the_numbers_of_tokens_before(seed):
    mask, seqlen = random_packing(random.Random(seed))
    at = np.arange(seqlen)
    counts = shown(mask, at, at, seqlen, seqlen).sum(axis=1) - 1
    assert np.array_equal(mask.places(seqlen).of(at), counts)
    assert np.array_equal(place_of(mask, seqlen, seqlen)(at), counts)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("name", ["tree", "share"])
def test_gradients_are_those_of_the_oracle(name, distance):
    mask, seqlen = PACKED[name]
    q, k, v, dout = arrays(seqlen)
    call = {name: value for name, value in DISTANCES[distance].items() if name != "window"}
    window = DISTANCES[distance].get("window")
    shape = {"seqlen": seqlen, "heads": HEADS, "head_dim": DIM, "dtype": "float64"}
    for backend in ("numpy", "deferred"):
        with MeshAttention(MPI.COMM_SELF, **shape, backend=backend, mask=mask, window=window, direction="both") as plan:
            out, lse = plan.forward(q, k, v, **call)
            grads = plan.backward(dout, q, k, v, out, lse, **call)
            assert plan.verify(q, k, v, out, lse, dout=dout, grads=grads, samples=None, **call).passed
    want = [np.zeros_like(q) for _ in range(3)]
    for query, path in enumerate(paths(mask, seqlen)):
        with MeshAttention(MPI.COMM_SELF, **shape | {"seqlen": len(path)}, causal=True, window=window) as plan:
            arguments = q[:, path], k[:, path], v[:, path]
            out, lse = plan.forward(*arguments, **call)
            of_last = np.zeros_like(out)
            of_last[:, -1] = dout[:, query]
            for total, part in zip(want, plan.backward(of_last, *arguments, out, lse, **call)):
                total[:, path] += part
    for got, wanted in zip(grads, want):
        np.testing.assert_allclose(got, wanted, atol=1e-12)


def test_gradients_of_slopes_and_tables_go_by_places():
    """By differences."""
    mask, seqlen = PACKED["share"]
    q, k, v, dout = arrays(seqlen)
    slopes, step = np.array([0.3, 0.2]), 1e-6
    shape = {"seqlen": seqlen, "heads": HEADS, "head_dim": DIM, "dtype": "float64"}
    with MeshAttention(MPI.COMM_SELF, **shape, mask=mask, direction="both") as plan:

        def loss(slopes, table):
            return (plan.forward(q, k, v, alibi_slopes=slopes, relative_bias=table)[0] * dout).sum()

        biases = {"alibi_slopes": slopes, "relative_bias": TABLE}
        out, lse = plan.forward(q, k, v, **biases)
        *_, dslopes, dtable = plan.backward(dout, q, k, v, out, lse, bias_gradients=True, **biases)
        for name, gradient in (("alibi_slopes", dslopes), ("relative_bias", dtable)):
            for at in np.ndindex(gradient.shape):
                sides = []
                for sign in (1, -1):
                    moved = biases | {name: biases[name].copy()}
                    moved[name][at] += sign * step
                    sides.append(loss(*moved.values()))
                assert abs((sides[0] - sides[1]) / (2 * step) - gradient[at]) < 1e-6, (name, at)


@pytest.mark.parametrize("distance", [{"window": (3, 0)}, {"alibi_slopes": np.array([0.5, 0.5])}], ids=list)
def test_two_masks_with_other_places_are_refused(distance):
    q, k, v, _ = arrays(8)
    other = masks.tree([-1, -1]) & masks.share_question(2, [3, 3])
    same = masks.tree([-1, -1]) & masks.tree([-1, -1])
    with KVCache(MPI.COMM_SELF, capacity=9, kv_heads=HEADS, head_dim=DIM, dtype="float64") as cache:
        cache.append(k, v)
        for call in (
            lambda **how: mpiattn.attention(q, k, v, comm=MPI.COMM_SELF, **how),
            lambda **how: tree_decode(q, cache, **how),
        ):
            call(mask=other)  # nothing goes by distance
            call(mask=same, **distance)
            with pytest.raises(ArgumentError, match="give tokens other places"):
                call(mask=other, **distance)
    with pytest.raises(ArgumentError, match="give tokens other places"):
        (other & masks.chunked(4)).check(8, 8)


def test_a_grid_beside_places_is_refused():
    table = {"relative_bias": np.zeros((1, 3, 3)), "relative_grid": (2, 4)}
    with pytest.raises(ArgumentError, match="relative_grid is given with mask share-question 2,3,3, whose tokens"):
        mpiattn.attention(*arrays(8)[:3], comm=MPI.COMM_SELF, mask=masks.share_question(2, [3, 3]), **table)


def test_documents_of_other_diagonals_beside_a_window_are_refused():
    shape = {"seqlen": 6, "seqlen_k": 8, "heads": HEADS, "head_dim": DIM, "dtype": "float64"}
    q, k, v = arrays(6)[0], *arrays(8)[1:3]
    with MeshAttention(MPI.COMM_SELF, **shape, mask=masks.tree([-1, -1]), window=(3, 0)) as plan:
        plan.forward(q, k, v, cu_seqlens=[0, 6], cu_seqlens_k=[0, 8])
        with pytest.raises(ArgumentError, match="window, beside mask tree -1,-1, is given with documents"):
            plan.forward(q, k, v, cu_seqlens=[0, 3, 6], cu_seqlens_k=[0, 3, 8])


def test_masks_without_places_stay_as_they_are():
    """No mask is taken apart for nothing."""
    mask = masks.window(4, 0) & masks.chunked(8)
    assert mask.places(20) is None and mask._parts(20) == (mask.a, mask.b)
    packed = masks.causal() & masks.tree([-1, 0])
    assert isinstance(packed, Both) and packed._parts(20) == (packed.a, packed.b)


@pytest.mark.parametrize("mask", ["tree -1,0,0,-1", "share-question 10,20,10"])
def test_the_command_verifies_by_places(tmp_path, mask):
    source, out = str(tmp_path / "in.h5"), str(tmp_path / "out.h5")
    made = warm.command(1, ["generate", source, "--seqlen", "40", "--heads", "2", "--head-dim", "8", "--dout"])
    assert not made.returncode, made.stderr
    options = ["--mask", mask, "--window", "4,0", "--alibi", "--backward", "--verify"]
    done = warm.command(3, ["run", source, out, *options])
    assert not done.returncode and "passed" in done.stdout, done.stdout + done.stderr
