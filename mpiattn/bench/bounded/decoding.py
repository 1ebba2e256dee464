"""A token of each of many sequences: reading their keys once bounds decoding, storing the tokens bounds appending."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

import numpy as np

from ...comm.agreement import agreement
from ...decode.cache import KVCache
from ...decode.tree import tree_decode
from ...verify import reference
from ..baseline import TOLERANCE
from ..clock import reading
from ..kernel import check
from .operation import HEAD_DIM, HEADS, KV_HEADS, Operation, agreeing

TURN = 2048  # tokens that are appended before all of them are removed again


@contextmanager
def decoding(peers, backend) -> Iterator[list[Operation]]:
    """Few and many keys; with a key a rank, what a call costs however few they are."""
    with ExitStack() as stack:
        rows = []
        for sequences, keys, dtype in (
            (64, 1024, "float32"),
            (256, 512, "float32"),
            (64, 1024, "bfloat16"),
            (64, 16, "float32"),
        ):
            run, nbytes = _decode(stack, peers, backend, sequences, keys, dtype)
            kind = "" if dtype == "float32" else f", {dtype}"
            name = f"decode, {sequences} sequences x {keys} keys{kind}"
            rows.append(Operation(name, "reading them", run, reading(nbytes // peers.size)))
        least, _ = _decode(stack, peers, backend, 1, peers.size, "float32")
        yield [*rows, Operation("decode, a key a rank", "agreeing", least, agreeing(peers), in_mpi=True)]


def _decode(stack, peers, backend, sequences, keys, dtype):
    """A function that decodes a token of every sequence, whose first is right; bytes of their keys and values."""
    cache, (k, v) = _cache(stack, peers, backend, sequences, keys, dtype)
    q = np.random.default_rng(1).standard_normal((sequences, 1, HEADS, HEAD_DIM), np.float32).astype(dtype)
    out, _ = tree_decode(q, cache)
    with agreement(peers):
        expected, _ = reference.attention(q[:1], k[:1], v[:1])
        check(f"decoding {sequences} sequences of {keys} keys", [out[:1]], [expected], TOLERANCE[dtype])
    return lambda: tree_decode(q, cache), k.nbytes + v.nbytes


def _cache(stack, peers, backend, sequences, keys, dtype="float32", spare=0):
    """A cache of sequences of so many keys, with room for `spare` more of each, and what is in it."""
    cache = stack.enter_context(
        KVCache(
            peers.comm,
            capacity=sequences * (keys + spare),
            sequences=sequences,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=dtype,
            backend=backend,
            timeout=peers.timeout,
        )
    )
    tokens = np.random.default_rng(0).standard_normal((2, sequences, keys, KV_HEADS, HEAD_DIM), np.float32)
    tokens = tokens.astype(cache.dtype)
    cache.append(*tokens)
    return cache, tokens


@contextmanager
def appending(peers, backend) -> Iterator[list[Operation]]:
    """A token to each of few and of many sequences."""
    with ExitStack() as stack:
        yield [_append(stack, peers, backend, sequences) for sequences in (1, 16, 64)]


def _append(stack, peers, backend, sequences):
    cache, tokens = _cache(stack, peers, backend, sequences, 1024, spare=TURN)
    token, lengths, numbers = tokens[:, :, :1], cache.lengths, count(1)
    store, agree = np.empty_like(token), agreeing(peers)

    def append():
        cache.append(*token)
        if next(numbers) % TURN == 0:
            cache.truncate(lengths)

    def copy():
        store[...] = token
        agree()

    to = "a sequence" if sequences == 1 else f"{sequences} sequences"
    return Operation(f"append a token to {to}", "copying it, agreeing", append, copy, in_mpi=True)
