"""Passes over sequences, long, short, padded and packed.

Their floating-point operations bound them or, of padding and documents, the call without, or with those of before.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle

import numpy as np

from ...model.machine import PRODUCTS
from ...plan.mesh_attention import MeshAttention
from .operation import HEAD_DIM, HEADS, TOKENS, Operation, products

BOTH = ("forward", "backward")
PADDED, LONGEST = 1024, 128  # sequences, of which most are shorter than the longest; its tokens
PACKED, DOCUMENTS = 2**14, 1000  # tokens of a sequence, and the documents in it
CUTS = 64  # ways to cut it: more than a plan keeps, so that each is new when its turn comes again
NARROW = 64  # keys of the window whose time is predicted


@contextmanager
def whole_sequences(peers, backend) -> Iterator[list[Operation]]:
    """Sequences of one length, with a mask or without."""
    with ExitStack() as stack:
        rows = []
        for name, directions, shape in (
            ("a sequence", BOTH, {"seqlen": TOKENS * peers.size}),
            ("64 sequences of 128 tokens", BOTH, {"seqlen": 128, "batch": 64}),
            ("64 sequences of 128 tokens, causal", BOTH[:1], {"seqlen": 128, "batch": 64, "causal": True}),
            ("1024 sequences of 16 tokens", BOTH[:1], {"seqlen": 16, "batch": 1024}),
            ("a window of 256 keys", BOTH, {"seqlen": TOKENS * peers.size, "causal": True, "window": (255, 0)}),
        ):
            plan = _plan(stack, peers, backend, direction="both" if directions == BOTH else "forward", **shape)
            rows += _passes(plan, peers, name, directions)
        yield rows


def _plan(stack, peers, backend, **shape):
    return stack.enter_context(
        MeshAttention(
            peers.comm, timeout=peers.timeout, **{"heads": HEADS, "head_dim": HEAD_DIM, "backend": backend, **shape}
        )
    )


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


@contextmanager
def padding(peers, backend) -> Iterator[list[Operation]]:
    """A batch of sequences that are padded to one length: without padding it is at least as much work."""
    with ExitStack() as stack:
        plan = _plan(stack, peers, backend, seqlen=LONGEST, batch=PADDED, heads=1)
        inputs, results = _arrays(plan, peers)
        lengths = np.random.default_rng(0).integers(LONGEST // 2, LONGEST, PADDED, endpoint=True)
        yield [
            Operation(
                f"forward, {PADDED} sequences of {LONGEST // 2} to {LONGEST} tokens",
                "without lengths",
                lambda: plan.forward(*inputs, lengths=lengths, **results),
                lambda: plan.forward(*inputs, **results),
            )
        ]


@contextmanager
def documents(peers, backend) -> Iterator[list[Operation]]:
    """A sequence that is cut into other documents in each call, beside one whose documents are known."""
    with ExitStack() as stack:
        plan = _plan(stack, peers, backend, seqlen=PACKED, causal=True)
        again = stack.enter_context(plan.like())  # which keeps what it knows of its documents
        inputs, results = _arrays(plan, peers)
        rng, inner = np.random.default_rng(0), np.arange(1, PACKED)
        cuts = [
            np.concatenate([[0], np.sort(rng.choice(inner, DOCUMENTS - 1, replace=False)), [PACKED]])
            for _ in range(CUTS)
        ]
        turns = cycle(cuts)
        yield [
            Operation(
                f"forward, {DOCUMENTS} new documents",
                "the same ones again",
                lambda: plan.forward(*inputs, cu_seqlens=next(turns), **results),
                lambda: again.forward(*inputs, cu_seqlens=cuts[0], **results),
            )
        ]


@contextmanager
def predictions(peers, backend) -> Iterator[list[Operation]]:
    """A pass whose time was predicted, by the machine that `mpiattn tune` has measured or that plans assume."""
    with ExitStack() as stack:
        plan = _plan(stack, peers, backend, seqlen=4 * TOKENS * peers.size, causal=True, window=(NARROW - 1, 0))
        inputs, results = _arrays(plan, peers)
        yield [
            Operation(
                f"forward, a window of {NARROW} keys",
                "predicted",
                lambda: plan.forward(*inputs, **results),
                plan.predicted_seconds,
            )
        ]
