"""Every whole number that a caller gives, from very small to very large: what it means, or an ArgumentError.

A number is refused with its name, its value and what it may be, or has the effect of the largest that has one: a window
wider than the sequence shows all of it.  None overflows in silence.
"""

import subprocess
import sys

import numpy as np
import pytest
from mpi4py import MPI

import mpiattn
from mpiattn import ArgumentError, KVCache, Layout, MeshAttention, masks, tree_decode
from mpiattn.problem.problem import Problem
from mpiattn.verify.reference_masks import shown

TOKENS = 12
EDGES = [
    2**31 - 1,
    2**31,
    2**40,
    2**53 + 1,
    2**62,
    2**63 - TOKENS,
    2**63 - 2,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    10**30,
]
ODD = [0, -1, -(2**63), -(10**30), True, 3.0, "3", None, np.int8(3), np.uint64(3), np.bool_(True)]
q, k, v = np.random.default_rng(0).standard_normal((3, 1, TOKENS, 1, 4), np.float32)
SHAPE = {"seqlen": TOKENS, "heads": 1, "head_dim": 4}


def plan(**arguments):
    with MeshAttention(MPI.COMM_SELF, **SHAPE | arguments):
        pass


def call(**arguments):
    mpiattn.attention(q, k, v, comm=MPI.COMM_SELF, **arguments)


def cache(**arguments):
    with KVCache(MPI.COMM_SELF, **{"capacity": 20, "kv_heads": 1, "head_dim": 4} | arguments) as made:
        made.append(k, v)


def with_plan(method):
    def run(n):
        with MeshAttention(MPI.COMM_SELF, **SHAPE) as made:
            method(made, n)

    return run


def with_cache(method):
    def run(n):
        with KVCache(MPI.COMM_SELF, capacity=40, kv_heads=1, head_dim=4) as made:
            made.append(k, v)
            method(made, n)

    return run


def verified(made, **arguments):
    made.verify(q, k, v, *made.forward(q, k, v), **arguments)


def named(call, *names):
    """{name: a function of one number}, of the arguments of a call that takes them by name."""
    return {f"{call.__name__}({name}=)": lambda n, name=name: call(**{name: n}) for name in names}


# Arguments that have no effect once they are larger than the sequence: masks by the number.
UNLIMITED = {
    "window": lambda n: masks.window(n, n),
    "left": lambda n: masks.window(n),
    "right": lambda n: masks.window(None, n),
    "global": masks.global_tokens,
    "chunked": masks.chunked,
    "blocks": lambda n: masks.blocks(n, [(0, 0)]),
    "kernel": lambda n: masks.neighborhood((TOKENS,), n, edge="clipped"),
    "kernel of 2": lambda n: masks.neighborhood((3, 4), n, edge="clipped", causal=(True, False)),
    "dilation": lambda n: masks.neighborhood((TOKENS,), 5, dilation=n, edge="clipped"),
    "both": lambda n: masks.neighborhood((3, 4), n, dilation=n, causal=True),
    "text": lambda n: masks.parse(f"window {n},{n} & chunked {n} | global {n}"),
}
SIZES = "seqlen", "heads", "head_dim", "batch", "kv_heads", "seqlen_k", "value_dim", "prefix", "causal_block"
OPTIONS = "max_message", "max_memory", "timeout", "scale", "softcap", "causal", "key_bias"
OF_CACHE = "capacity", "kv_heads", "head_dim", "value_dim", "sequences", "page_size", "max_message", "timeout"
CALLS = {
    **named(plan, *SIZES, *OPTIONS),
    **named(cache, *OF_CACHE),
    "plan(window=)": lambda n: plan(window=(n, n)),
    "plan(tile=)": lambda n: plan(tile=(n, 1)),
    "plan(tile=HxAxB)": lambda n: plan(tile=(1, n, 1)),
    "plan(layout=)": lambda n: plan(layout=(n,)),
    "plan(expected_cu_seqlens=)": lambda n: plan(expected_cu_seqlens=[0, n]),
    "cu_seqlens": lambda n: call(cu_seqlens=[0, n]),
    "cu_seqlens between": lambda n: call(cu_seqlens=[0, n, TOKENS]),
    "lengths": lambda n: call(lengths=[n]),
    "prefixes": lambda n: call(causal=True, prefixes=[n]),
    "causal_documents": lambda n: call(causal_documents=[n]),
    "seed": lambda n: call(dropout=0.5, seed=n),
    "relative_grid": lambda n: call(relative_bias=np.zeros((1, 3), np.float32), relative_grid=(n,)),
    "call(value_dim=)": lambda n: call(value_dim=n),
    "truncate": with_cache(lambda made, n: made.truncate(n)),
    "truncate each": with_cache(lambda made, n: made.truncate([n])),
    "append(counts=)": with_cache(lambda made, n: made.append(k, v, counts=[n])),
    "append(sequences=)": with_cache(lambda made, n: made.append(k, v, sequences=[n])),
    "append(layout=)": with_cache(lambda made, n: made.append(k, v, layout=(n,))),
    "decode(sequences=)": with_cache(lambda made, n: tree_decode(q[:, :1], made, sequences=[n])),
    "decode(root=)": with_cache(lambda made, n: tree_decode(q[:, :1], made, root=n)),
    "decode(window=)": with_cache(lambda made, n: tree_decode(q[:, :1], made, window=(n, n))),
    "decode(mask=)": with_cache(lambda made, n: tree_decode(q[:, :1], made, mask=masks.window(n, n))),
    "gather(root=)": with_plan(lambda made, n: made.gather(q, root=n)),
    "gather(axis=)": with_plan(lambda made, n: made.gather(q, axis=n)),
    "scatter(axis=)": with_plan(lambda made, n: made.scatter(q, axis=n)),
    "verify(samples=)": with_plan(lambda made, n: verified(made, samples=n)),
    "verify(sample_seed=)": with_plan(lambda made, n: verified(made, sample_seed=n)),
    "Layout(seqlen)": lambda n: Layout("zigzag", n, 2).lengths,
    "Layout(chunks)": lambda n: Layout("contiguous", 5, n).length(0),
    "Layout(sizes)": lambda n: Layout("contiguous", TOKENS, 2, sizes=(n, 0)).lengths,
    "Layout.grid(shape)": lambda n: Layout.grid((n, 2), (1, 2)),
    "Layout.grid(cart)": lambda n: Layout.grid((4, 4), (n, 2**25)),
    "Layout.grid(sizes)": lambda n: Layout.grid((4, 4), (2, 1), sizes=((n, 1), None)),
    "Layout.of_ranges": lambda n: Layout.of_ranges([[(0, n)]]).lengths,
    "share_question(question)": lambda n: call(mask=masks.share_question(n, [2])),
    "share_question(answers)": lambda n: call(mask=masks.share_question(2, [n])),
    "ranges of queries": lambda n: call(mask=masks.ranges([(0, n, 0, TOKENS, "full")])),
    "ranges of keys": lambda n: call(mask=masks.ranges([(0, TOKENS, 0, n, "causal")])),
    "tree": lambda n: call(mask=masks.tree([-1, n])),
    "neighborhood(shape)": lambda n: call(mask=masks.neighborhood((n,), 3)),
    "neighborhood(kernel_size)": lambda n: call(mask=masks.neighborhood((TOKENS,), n)),
    "blocks(pairs)": lambda n: call(mask=masks.blocks(4, [(n, 0)])),
    "sphere(row_lengths)": lambda n: call(mask=masks.sphere([n, 4], 1.0)),
    "sphere(radius)": lambda n: call(mask=masks.sphere([6, 6], n)),
    "intervals": lambda n: call(mask=masks.intervals([[0] * TOKENS], [[n] * TOKENS])),
    "function(seqlen)": lambda n: masks.function(lambda at: ([0 * at], [at + 1]), n if n != 2**31 - 1 else 2**31),
    "text of neighborhood": lambda n: masks.parse(f"neighborhood {n} grid={n}"),
    "text of share-question": lambda n: masks.parse(f"share-question {n},{n}").check(TOKENS, TOKENS),
    "text of tree": lambda n: masks.parse(f"tree -1,{n}"),
    "text of ranges": lambda n: masks.parse(f"ranges 0:{n}:0:{n}:causal").check(TOKENS, TOKENS),
    "text of sphere": lambda n: masks.parse(f"sphere 1 rows={n},{n}").check(TOKENS, TOKENS),
    **{f"masks: {name}": lambda n, made=made: call(mask=made(n)) for name, made in UNLIMITED.items()},
}


@pytest.mark.parametrize("name", CALLS)
def test_every_whole_number_is_taken_or_refused(name):
    """No other error: any but ArgumentError would be a number that overflows."""
    for n in EDGES + ODD:
        try:
            CALLS[name](n)
        except ArgumentError as error:
            assert "Error:" not in str(error) or "limit" in str(error), (n, error)


@pytest.mark.parametrize("name", UNLIMITED)
def test_numbers_beyond_the_sequence_see_no_more(name):
    at = np.arange(TOKENS)
    for n in EDGES:
        mask, last = UNLIMITED[name](n), UNLIMITED[name](3 * TOKENS)
        for seqlen, seqlen_k in ((TOKENS, TOKENS), (5, TOKENS), (TOKENS, 5)):
            if name in ("kernel", "kernel of 2", "dilation", "both") and seqlen != seqlen_k:
                continue
            queries, keys = at[:seqlen], at[:seqlen_k]
            wanted = shown(last, queries, keys, seqlen, seqlen_k)
            assert np.array_equal(shown(mask, queries, keys, seqlen, seqlen_k), wanted), (n, seqlen)
            begin, end = mask.intervals(queries, seqlen, seqlen_k)
            seen = (begin[..., None] <= keys) & (keys < end[..., None])
            assert np.array_equal(seen.any(axis=0), wanted), (n, seqlen)
            cuts = mask.cuts(seqlen, seqlen_k), last.cuts(seqlen, seqlen_k)
            assert all(side is None for side in cuts) or np.array_equal(*cuts), (n, seqlen)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32, np.uint64])
def test_unsigned_numbers_do_not_wrap_around(dtype):
    most = np.iinfo(dtype).max
    begin, end = np.zeros((1, TOKENS), dtype), np.full((1, TOKENS), most, dtype)
    assert masks.intervals(begin, end).keys == min(most, 2**63 - 1)
    with pytest.raises(ArgumentError, match="last end"):
        call(mask=masks.intervals(begin, end))
    with pytest.raises(ArgumentError, match="cu_seqlens is"):
        call(cu_seqlens=np.array([0, most], dtype))


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"seqlen": 2**63}, f"seqlen is {2**63}; it must be a whole number from 0 to 2^63 - 1"),
        ({"seqlen": 2**32}, f"seqlen is {2**32}, seqlen_k is {2**32}; the square of the larger must be below 2^63"),
        ({"seqlen_k": 2**32}, f"seqlen is 12, seqlen_k is {2**32}; the square of the larger must be below 2^63"),
        ({"heads": 2**60}, f"batch is 1, seqlen is 12, heads is {2**60}, head_dim is 4; their product must be below"),
        ({"value_dim": 2**60}, f"heads is 1, value_dim is {2**60}; their product must be below 2^56"),
    ],
)
def test_errors_say_the_range(arguments, text):
    with pytest.raises(ArgumentError) as raised:
        Problem(**SHAPE | arguments)
    assert text in str(raised.value)


def test_long_sequences_in_windows_are_taken():
    """As many tokens as a genome has: below the limits, and counted at once."""
    tokens = 3_000_000_000
    problem = Problem(**SHAPE | {"seqlen": tokens}, causal=True, window=(4095, 0))
    assert problem.pairs == 4096 * tokens - 4096 * 4095 // 2


@pytest.mark.parametrize(
    "command",
    [
        "plan --ranks 100000000000 --seqlen 64 --heads 1 --head-dim 4",
        "plan --ranks 4 --ranks-per-node 10000000000000000000000 --seqlen 64 --heads 1 --head-dim 4",
        "plan --ranks 4 --seqlen 10000000000000000000000 --heads 1 --head-dim 4",
        "generate FILE --seqlen 64 --heads 1 --seed 10000000000000000000000000",
        "generate FILE --seqlen 64 --heads 1 --problems 10000000000000000000000",
    ],
)
def test_commands_refuse_too_large_numbers(command, tmp_path):
    words = [str(tmp_path / "x.h5") if word == "FILE" else word for word in command.split()]
    done = subprocess.run([sys.executable, "-m", "mpiattn", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done
    assert "it must be" in done.stderr and "Traceback" not in done.stderr and "Error" not in done.stderr
