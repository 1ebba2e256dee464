"""Values that no argument has: each is taken, or refused by an ArgumentError; no other error reaches the caller."""

import random
from inspect import signature

import numpy as np
import pytest
from mpi4py import MPI

import mpiattn
from mpiattn import ArgumentError, KVCache, Layout, MeshAttention, masks, tree_decode

TEXTS = [None, "3", "", b"3", "1,2", np.array(["a"])]
NUMBERS = [0, 1, -1, 3.0, 2.5, True, np.int8(3), np.uint8(200), np.bool_(True), float("nan"), 1j, 10**30, 10**400]
LISTS = [[], [1], [1, 2], (1, 2), [[1, 2], [3, 4]], [None], [[]], ["a"], {}, set(), range(3), [(0, 3.0, 0, 3, "full")]]
ARRAYS = [np.array(3), np.array([1, 2]), np.array([]), np.array([1.5]), np.ones((2, 2), bool), np.array([None])]
ODD = [*TEXTS, *NUMBERS, *LISTS, *ARRAYS, object(), abs, masks.causal()]
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 12, 1, 4), np.float32)
MAKERS = {
    "neighborhood": {"shape": (4, 5), "kernel_size": 3},
    "sphere": {"row_lengths": [4, 5], "radius": 1.0},
    "window": {},
    "global_tokens": {"n": 2},
    "chunked": {"size": 3},
    "blocks": {"size": 2, "pairs": [(0, 0)]},
    "ranges": {"entries": [(0, 3, 0, 3, "full")]},
    "share_question": {"question": 2, "answers": [3, 4]},
    "tree": {"parents": [-1, 0]},
    "intervals": {"begin": [[0, 0]], "end": [[1, 2]]},
    "function": {"f": lambda at: ([0 * at], [at + 1]), "seqlen": 6},
    "parse": {"text": "causal", "grid": (3, 4)},
}
OF_CALL = (
    "cu_seqlens",
    "lengths",
    "prefixes",
    "causal_documents",
    "padding",
    "relative_grid",
    "relative_cyclic",
    "dropout",
)
OF_CALL += "seed", "layout", "value_dim", "window", "mask", "causal", "scale", "softcap", "sinks", "alibi_slopes"
OF_DECODE = (
    "sequences",
    "causal",
    "window",
    "softcap",
    "scale",
    "sinks",
    "alibi_slopes",
    "relative_bias",
    "mask",
    "root",
)
LAYOUTS = {
    "sizes": lambda odd: Layout("contiguous", 12, 2, sizes=odd),
    "kind": lambda odd: Layout(odd, 12, 2),
    "shape": lambda odd: Layout.grid(odd, (2,)),
    "cart": lambda odd: Layout.grid((4, 4), odd),
    "sizes of a grid": lambda odd: Layout.grid((4, 4), (2,), sizes=odd),
    "ranges": Layout.of_ranges,
    "ranges of a rank": lambda odd: Layout.of_ranges([odd]),
}


def each(call):
    """Call with every odd value; any error but ArgumentError is raised."""
    for odd in ODD:
        try:
            call(odd)
        except ArgumentError as error:
            assert str(error)


def argument_names(function):
    return [name for name in signature(function).parameters if name not in ("self", "comm")]


@pytest.mark.parametrize("name", MAKERS)
def test_masks(name):
    """Those that are taken can be asked, printed and compared."""
    for argument in signature(getattr(masks, name)).parameters:

        def make(odd, argument=argument):
            mask = getattr(masks, name)(**MAKERS[name] | {argument: odd})
            assert str(mask) and hash(mask) == hash(mask)
            for seqlen, seqlen_k in ((6, 6), (0, 0), (6, 9), (9, 6), (20, 20)):
                try:
                    mask.check(seqlen, seqlen_k)
                except ArgumentError:
                    continue
                mask.intervals(np.arange(seqlen), seqlen, seqlen_k)
                mask.cuts(seqlen, seqlen_k)

        each(make)


@pytest.mark.parametrize("name", argument_names(MeshAttention.__init__))
def test_plans(name):
    shape = {"seqlen": 12, "heads": 1, "head_dim": 4}
    each(lambda odd: MeshAttention(MPI.COMM_SELF, **shape | {name: odd}).close())


@pytest.mark.parametrize("name", argument_names(KVCache.__init__))
def test_caches(name):
    shape = {"capacity": 20, "kv_heads": 1, "head_dim": 4}
    each(lambda odd: KVCache(MPI.COMM_SELF, **shape | {name: odd}).close())


@pytest.mark.parametrize("name", OF_CALL)
def test_calls(name):
    each(lambda odd: mpiattn.attention(q, k, v, comm=MPI.COMM_SELF, **{name: odd}))


@pytest.mark.parametrize("name", OF_DECODE)
def test_decoding(name):
    with KVCache(MPI.COMM_SELF, capacity=20, kv_heads=1, head_dim=4) as cache:
        cache.append(k, v)
        each(lambda odd: tree_decode(q[:, :1], cache, **{name: odd}))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    each(LAYOUTS[name])


WORDS = "neighborhood sphere window causal global chunked blocks ranges tree share-question grid= rows= dilation= edge="
PIECES = [*WORDS.split(), *"cyclic= 3x4 0:1 1,2 -1 full 5 ( ) & |".split()]


@pytest.mark.parametrize("seed", range(4))
def test_texts_of_masks(seed):
    rng = random.Random(seed)
    for _ in range(2000):
        ends = ("".join(rng.choices("0123456789,:x=&|()-. ", k=rng.choice([0, 0, 0, 1, 3]))) for _ in range(6))
        text = " ".join(rng.choice(PIECES) + end for end in list(ends)[: rng.randint(1, 6)])
        try:
            mask = masks.parse(text, rng.choice([None, (3, 4), (12,)]))
            mask.check(12, 12)
        except ArgumentError:
            continue
        mask.intervals(np.arange(12), 12, 12)
