"""A token of each of many sequences: reading their keys once bounds decoding, storing the tokens bounds appending."""

from collections.abc import Iterator
from itertools import count

import numpy as np

from ...comm.agreement import agreement
from ...decode.tree import tree_decode
from ...verify import reference
from ..baseline import TOLERANCE
from ..clock import reading
from ..kernel import check
from .operation import HEAD_DIM, HEADS, Bench, Operation, agreeing

TURN = 2048  # tokens that are appended before all of them are removed again


def decoding(bench: Bench) -> Iterator[Operation]:
    """Few and many keys; with a key a rank, what a call costs however few they are."""
    for sequences, keys, dtype in (
        (64, 1024, "float32"),
        (256, 512, "float32"),
        (64, 1024, "bfloat16"),
        (64, 16, "float32"),
    ):
        run, nbytes = _decode(bench, sequences, keys, dtype)
        kind = "" if dtype == "float32" else f", {dtype}"
        name = f"decode, {sequences} sequences x {keys} keys{kind}"
        yield Operation(name, "reading them", run, reading(nbytes // bench.peers.size))
    least, _ = _decode(bench, 1, bench.peers.size, "float32")
    yield Operation("decode, a key a rank", "agreeing", least, agreeing(bench.peers), in_mpi=True)


def _decode(bench, sequences, keys, dtype):
    """A function that decodes a token of every sequence, whose first is right; bytes of their keys and values."""
    cache, (k, v) = bench.cache(sequences, keys, dtype)
    q = np.random.default_rng(1).standard_normal((sequences, 1, HEADS, HEAD_DIM), np.float32).astype(dtype)
    out, _ = tree_decode(q, cache)
    with agreement(bench.peers):
        expected, _ = reference.attention(q[:1], k[:1], v[:1])
        check(f"decoding {sequences} sequences of {keys} keys", [out[:1]], [expected], TOLERANCE[dtype])
    return lambda: tree_decode(q, cache), k.nbytes + v.nbytes


def appending(bench: Bench) -> Iterator[Operation]:
    """A token to each of few and of many sequences."""
    for sequences in (1, 16, 64):
        yield _append(bench, sequences)


def _append(bench, sequences):
    cache, tokens = bench.cache(sequences, 1024, spare=TURN)
    token, lengths, numbers = tokens[:, :, :1], cache.lengths, count(1)
    store, agree = np.empty_like(token), agreeing(bench.peers)

    def append():
        cache.append(*token)
        if next(numbers) % TURN == 0:
            cache.truncate(lengths)

    def copy():
        store[...] = token
        agree()

    to = "a sequence" if sequences == 1 else f"{sequences} sequences"
    return Operation(f"append a token to {to}", "copying it, agreeing", append, copy, in_mpi=True)
