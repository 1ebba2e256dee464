"""Passes over sequences, long, short, padded and packed.

Their floating-point operations bound them or, of padding and documents, the call without, or with those of before.
"""

from collections.abc import Iterator
from itertools import cycle

import numpy as np

from ...model.machine import PRODUCTS
from .operation import TOKENS, Bench, Operation, products

BOTH = ("forward", "backward")
PADDED, LONGEST = 1024, 128  # sequences, of which most are shorter than the longest; its tokens
PACKED, DOCUMENTS = 2**14, 1000  # tokens of a sequence, and the documents in it
CUTS = 64  # ways to cut it: more than a plan keeps, so that each is new when its turn comes again
NARROW = 64  # keys of the window whose time is predicted


def whole_sequences(bench: Bench) -> Iterator[Operation]:
    """Sequences of one length, with a mask or without."""
    tokens = TOKENS * bench.peers.size
    for name, directions, shape in (
        ("a sequence", BOTH, {"seqlen": tokens}),
        ("64 sequences of 128 tokens", BOTH, {"seqlen": 128, "batch": 64}),
        ("64 sequences of 128 tokens, causal", BOTH[:1], {"seqlen": 128, "batch": 64, "causal": True}),
        ("1024 sequences of 16 tokens", BOTH[:1], {"seqlen": 16, "batch": 1024}),
        ("a window of 256 keys", BOTH, {"seqlen": tokens, "causal": True, "window": (255, 0)}),
    ):
        plan = bench.plan(direction="both" if directions == BOTH else "forward", **shape)
        yield from _passes(plan, bench.peers, name, directions)


def _arrays(plan, peers):
    """(q, k, v), and the results of a call with them as arguments for calls to come."""
    p, rng = plan.problem, np.random.default_rng(peers.rank)
    inputs = tuple(rng.standard_normal((3, p.batch, len(plan.positions), p.heads, p.head_dim), np.float32))
    return inputs, dict(zip(("out", "lse"), plan.forward(*inputs)))


def _passes(plan, peers, name, directions):
    inputs, results = _arrays(plan, peers)
    gradients = dict(zip(("dq", "dk", "dv"), map(np.empty_like, inputs)))
    run = {
        "forward": lambda: plan.forward(*inputs, **results),
        "backward": lambda: plan.backward(results["out"], *inputs, *results.values(), **gradients),
    }
    for direction in directions:
        bound, worth = products(plan.problem.flops * PRODUCTS[direction] / peers.size)
        yield Operation(f"{direction}, {name}", "matrix products", run[direction], bound, worth)


def padding(bench: Bench) -> Iterator[Operation]:
    """A batch of sequences that are padded to one length: without padding it is at least as much work."""
    plan = bench.plan(seqlen=LONGEST, batch=PADDED, heads=1)
    inputs, results = _arrays(plan, bench.peers)
    lengths = np.random.default_rng(0).integers(LONGEST // 2, LONGEST, PADDED, endpoint=True)
    yield Operation(
        f"forward, {PADDED} sequences of {LONGEST // 2} to {LONGEST} tokens",
        "without lengths",
        lambda: plan.forward(*inputs, lengths=lengths, **results),
        lambda: plan.forward(*inputs, **results),
    )


def documents(bench: Bench) -> Iterator[Operation]:
    """A sequence that is cut into other documents in each call, beside one whose documents are known."""
    plan = bench.plan(seqlen=PACKED, causal=True)
    again = bench.stack.enter_context(plan.like())  # which keeps what it knows of its documents
    inputs, results = _arrays(plan, bench.peers)
    rng, inner = np.random.default_rng(0), np.arange(1, PACKED)
    cuts = [
        np.concatenate([[0], np.sort(rng.choice(inner, DOCUMENTS - 1, replace=False)), [PACKED]]) for _ in range(CUTS)
    ]
    turns = cycle(cuts)
    yield Operation(
        f"forward, {DOCUMENTS} new documents",
        "the same ones again",
        lambda: plan.forward(*inputs, cu_seqlens=next(turns), **results),
        lambda: again.forward(*inputs, cu_seqlens=cuts[0], **results),
    )


def predictions(bench: Bench) -> Iterator[Operation]:
    """A pass whose time was predicted, by the machine that `mpiattn tune` has measured or that plans assume."""
    plan = bench.plan(seqlen=4 * TOKENS * bench.peers.size, causal=True, window=(NARROW - 1, 0))
    inputs, results = _arrays(plan, bench.peers)
    name = f"forward, a window of {NARROW} keys"
    yield Operation(name, "predicted", lambda: plan.forward(*inputs, **results), plan.predicted_seconds)
