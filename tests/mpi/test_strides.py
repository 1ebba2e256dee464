"""Every array that a caller hands in or gets results in, in any memory: the same bits, and nothing outside is touched.

On every back end, between guard bytes.
"""

import random
from itertools import product

import biased
import draws
import numpy as np
import pytest
from dense import bits, draw_all
from memories import KINDS, Memory, repeated
from random_cases import COMPILED
from runs import agreed, my_chunks, problem_of
from test_biases import of_rank
from test_decode import RINGS

from mpiattn import KVCache, MeshAttention, attention, merge, tree_decode
from mpiattn.backends.testing import emulated
from mpiattn.schedule.regroup import every_tile

PLAN = {"batch": 2, "seqlen": 41, "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 5, "causal": True}
BACKENDS = tuple(dict.fromkeys(("numpy", "deferred", COMPILED)))
READ = "q", "k", "v", "dout", "dlse", "sinks", "bias", "key_bias", "alibi_slopes", "relative_bias"
WRITTEN = "out", "lse", "dq", "dk", "dv", "dbias"


class Arrays:
    """The arrays of a call by name, each in memory of its own.  kinds: names of `KINDS` by those of arrays."""

    def __init__(self, kinds):
        self._kinds, self._memories, self._before = kinds, {}, {}

    def given(self, name, array):
        """The array in this kind of memory; None stays None."""
        if array is None:
            return None
        self._memories[name] = Memory.of(KINDS[self._kinds[name]], array)
        self._before[name] = array
        return self._memories[name].array

    def room(self, name, like):
        """Memory for a result like another."""
        self._memories[name] = Memory(KINDS[self._kinds[name]], like.shape, like.dtype)
        return self._memories[name].array

    @property
    def complaint(self):
        """What a call did to memory that it must leave alone, or None."""
        for name, memory in self._memories.items():
            if not memory.intact:
                return f"bytes outside of {name} were written"
            if name in self._before and bits(memory.array) != bits(self._before[name]):
                return f"{name} was changed"
        return None


def biases_of(plan, drawn):
    """This rank's arrays of whole biases, by name."""
    return {name: array for name, array in of_rank(plan, drawn).items() if isinstance(array, np.ndarray)}


def shared(bias):
    """The axes along which a bias is the same for all."""
    return [name for name, length in zip(("batch", "heads"), bias.shape) if length == 1]


def passes(plan, chunks, own, arrays=None, like=None):
    """The results of forward and backward by name.

    own: this rank's biases.  arrays: `Arrays` of the call; None: new ones.  like: results by name.
    """

    def given(name, array):
        return array if arrays is None else arrays.given(name, array)

    def room(*names):
        return {} if arrays is None else {name: arrays.room(name, like[name]) for name in names}

    inputs = [given(name, getattr(chunks, name)) for name in "qkv"]
    options = {name: given(name, array) for name, array in own.items()} | {"sinks": given("sinks", chunks.sinks)}
    out, lse = plan.forward(*inputs, **options, **room("out", "lse"))
    names = ["dq", "dk", "dv", "dsinks", *(f"d{name}" for name in own)]
    gradients = plan.backward(
        given("dout", chunks.dout),
        *inputs,
        out,
        lse,
        dlse=given("dlse", chunks.dlse),
        **options,
        **room("dq", "dk", "dv", *["dbias"] * ("bias" in own)),
        **{"bias_shared": shared(own["bias"])} if "bias" in own else {},
    )
    return {"out": out, "lse": lse} | dict(zip(names, gradients, strict=True))


def compare(comm, right, got, about):
    """Assert that results by name are the same bits on every rank."""
    differing = [name for name in right if bits(got[name]) != bits(right[name])]
    agreed(comm, f"other bits: {', '.join(differing)}" if differing else None, about)


def check_passes(comm, backend, dtype, kinds, schedule, each):
    """Every one of some choices of memory, each a kind by the name of the array, against new contiguous arrays."""
    rng = random.Random(f"{draws.seed()} {backend} {dtype} {kinds} {schedule}")
    tile = rng.choice(every_tile(comm.size, PLAN["heads"], PLAN["kv_heads"], PLAN["batch"]))
    shape = {**PLAN, "dtype": dtype, "backend": backend, "schedule": schedule, "tile": tile}
    problem = problem_of(shape)
    drawn = biased.draw(problem, rng.randrange(100), kinds) if kinds else biased.Drawn()
    with MeshAttention(comm, **shape, key_bias=drawn.key_bias is not None) as plan:
        chunks, own = my_chunks(plan, *draw_all(problem, sinks=True)), biases_of(plan, drawn)
        right = passes(plan, chunks, own)
        for of_names in each:
            arrays = Arrays(of_names)
            got = passes(plan, chunks, own, arrays, right)
            agreed(comm, arrays.complaint, of_names)
            compare(comm, right, got, of_names)


@pytest.mark.draw(4)
@pytest.mark.many
@pytest.mark.parametrize("schedule", ["greedy", "collective"])
@pytest.mark.parametrize("kinds", ["", "bias", "bias key_bias alibi relative"])
@pytest.mark.parametrize("backend, dtype", list(product(BACKENDS, ["float32", "bfloat16"])))
def test_passes(comm, backend, dtype, kinds, schedule):
    """Each kind of memory for all arrays at once, then another one for each."""
    rng = random.Random(draws.seed())
    each = [dict.fromkeys(READ + WRITTEN, kind) for kind in KINDS]
    each += [{name: rng.choice(list(KINDS)) for name in READ + WRITTEN} for _ in range(4)]
    check_passes(comm, backend, dtype, kinds, schedule, each)


@pytest.mark.workshop
@pytest.mark.draw(1)
@pytest.mark.skipif(not emulated.compiler(), reason="the emulation needs a C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels(comm, dtype):
    each = [dict.fromkeys(READ + WRITTEN, kind) for kind in ("transposed", "backward in gaps")]
    check_passes(comm, "emulated", dtype, "bias", "greedy", each)


@pytest.mark.draw(4)
@pytest.mark.many
@pytest.mark.parametrize("backend, axis, kinds", list(product(BACKENDS, range(4), ["", "bias"])))
def test_repeated_inputs(comm, backend, axis, kinds):
    """Read-only arrays of which an axis has a stride of 0, as the gradient of a sum is."""
    shape = {**PLAN, "backend": backend, "tile": (1, comm.size)}
    problem = problem_of(shape)
    with MeshAttention(comm, **shape) as plan:
        own = biases_of(plan, biased.draw(problem, 3, kinds)) if kinds else {}
        chunks = my_chunks(plan, *draw_all(problem, sinks=True))
        if not len(plan.positions):
            axis = 0
        views = [repeated(array, min(axis, array.ndim - 1)) for array in chunks]
        own_views = {name: repeated(array, axis) for name, array in own.items()}
        right = passes(plan, type(chunks)(*map(np.copy, views)), {name: a.copy() for name, a in own_views.items()})
        compare(comm, right, passes(plan, type(chunks)(*views), own_views), axis)


@pytest.mark.draw(6)
@pytest.mark.many
@pytest.mark.parametrize("backend, dtype, kind", list(product(BACKENDS, ["float32", "bfloat16"], KINDS)))
def test_decoding(comm, backend, dtype, kind):
    """What is appended, one token or many, dealt or placed; queries, sinks, biases, and memory for results."""
    rng = np.random.default_rng(0)
    shape = {"sequences": 2, "capacity": 200 * comm.size, "page_size": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 5}

    def draw(*shape):
        return rng.standard_normal(shape).astype(plain.dtype)

    with (
        KVCache(comm, **shape, dtype=dtype, backend=backend) as plain,
        KVCache(comm, **shape, dtype=dtype, backend=backend) as cache,
    ):
        for tokens, how in ((23, {}), (1, {}), (6, {"layout": [6] * comm.size}), (1, {}), (300, {}), (1, {})):
            tokens = min(tokens, 40 * comm.size)
            k, v = draw(2, tokens, 2, 8), draw(2, tokens, 2, 5)
            arrays = Arrays(dict.fromkeys(("k", "v"), kind))
            plain.append(k, v, **how)
            cache.append(arrays.given("k", k), arrays.given("v", v), **how)
            agreed(comm, arrays.complaint)
        held = [cache.local(sequence) for sequence in range(2)], [plain.local(sequence) for sequence in range(2)]
        agreed(comm, None if bits(*sum(held[0], ())) == bits(*sum(held[1], ())) else "the cache holds other bits")
        options = {"sinks": draw(4), "alibi_slopes": draw(4), "relative_bias": draw(4, 9)}
        options = {name: array.astype(plain.partial_dtype) for name, array in options.items()}
        for queries, decode in product((1, 3), (tree_decode, *RINGS.values())):
            q = draw(2, queries, 4, 8)
            right = decode(q, plain, **options)
            arrays = Arrays(dict.fromkeys(("q", "out", "lse", *options), kind))
            given = {name: arrays.given(name, array) for name, array in options.items()}
            into = {name: arrays.room(name, array) for name, array in zip(("out", "lse"), right)}
            got = decode(arrays.given("q", q), cache, **given, **into)
            agreed(comm, arrays.complaint or (None if bits(*got) == bits(*right) else "other bits"), decode.__name__)


@pytest.mark.many
@pytest.mark.parametrize("kind", KINDS)
def test_the_other_calls(comm, kind):
    """`attention`, `merge`, `verify`, and whole arrays to and from ranks."""
    names = *READ, *WRITTEN, "lse_b", "out_b", "whole", "tile"
    shape = {**PLAN, "tile": (1, comm.size)}
    problem = problem_of(shape)
    drawn = biased.draw(problem, 3, "bias")
    with MeshAttention(comm, **shape) as plan:
        chunks, own = my_chunks(plan, *draw_all(problem, sinks=True)), biases_of(plan, drawn)
        result = passes(plan, chunks, own)
        arrays = Arrays(dict.fromkeys(names, kind))
        given = {name: arrays.given(name, getattr(chunks, name)) for name in ("q", "k", "v", "dout", "dlse", "sinks")}
        for name in ("out", "lse"):
            given[name] = arrays.given(name, result[name])
        given["bias"] = arrays.given("bias", own["bias"])
        grads = [result[name] for name in ("dq", "dk", "dv", "dsinks", "dbias")]
        grads = [Memory.of(KINDS[kind], array).array for array in grads]
        assert plan.verify(**given, grads=grads, bias_shared=shared(own["bias"]), samples=None).passed
        agreed(comm, arrays.complaint, "verify")
        for root in (None, comm.size - 1):
            has = root in (None, comm.rank)
            tile = plan.scatter_bias(arrays.given("whole", drawn.bias) if has else None, root=root)
            agreed(comm, None if bits(tile) == bits(own["bias"]) else "scatter_bias")
            whole = plan.gather_bias(arrays.given("tile", tile), root=comm.size - 1, bias_shared=shared(tile))
            agreed(comm, None if whole is None or bits(whole) == bits(drawn.bias) else "gather_bias")
        agreed(comm, arrays.complaint, "biases")
        halves = [result["out"], result["lse"], 2 * result["out"], 1 + result["lse"]]
        right = merge(*halves)
        got = merge(*map(arrays.given, ("out", "lse", "out_b", "lse_b"), halves))
        agreed(comm, arrays.complaint or (None if bits(*got) == bits(*right) else "other bits"), "merge")
    right = attention(*chunks[:3], comm=comm, causal=True)
    got = attention(*(arrays.given(name, getattr(chunks, name)) for name in "qkv"), comm=comm, causal=True)
    agreed(comm, arrays.complaint or (None if bits(*got) == bits(*right) else "other bits"), "attention")
