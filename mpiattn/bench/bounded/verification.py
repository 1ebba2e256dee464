"""What `mpiattn run --verify` computes: float64 attention of the visible pairs in plain NumPy bounds it.

Plain NumPy takes a document, or the queries of a window's length, at a time, and computes them by the definition.  The
ranks share these blocks, as they share what they verify.
"""

from collections.abc import Iterator

import numpy as np

from ...comm.agreement import agreement
from ...verify import compare, gradients
from ..baseline import TOLERANCE
from ..kernel import check
from .operation import Bench, Operation

TOKENS, HEAD_DIM = 2**14, 16  # of a causal sequence of one head
WINDOW = 64  # keys that a query sees


def verification(bench: Bench) -> Iterator[Operation]:
    """Short documents, long ones with gradients, and a window."""
    for name, documents, window, backward in (
        ("1000 documents", 1000, None, False),
        ("64 documents, backward too", 64, None, True),
        (f"a window of {WINDOW} keys", 1, WINDOW, False),
    ):
        shape = {"heads": 1, "head_dim": HEAD_DIM, "causal": True, "window": (window - 1, 0) if window else None}
        plan = bench.plan(seqlen=TOKENS, **shape)
        yield _verify(plan, bench.peers, name, documents, window or TOKENS, backward)


def _verify(plan, peers, name, documents, window, backward):
    p, layouts = plan.problem, (plan.q_layout, plan.k_layout)
    arrays = np.random.default_rng(0).standard_normal((4, 1, TOKENS, 1, HEAD_DIM), np.float32)
    whole = dict(zip(("q", "k", "v", "dout"), arrays))
    *inputs, dout = arrays[:, :, plan.positions]
    cuts = np.linspace(0, TOKENS, documents + 1).astype(int)
    cut = {"cu_seqlens": cuts} if documents > 1 else {}
    out, lse = plan.forward(*inputs, **cut)
    grads = plan.backward(dout, *inputs, out, lse, **cut) if backward else ()
    source = compare.Source(p, lambda name, start, stop: whole[name][:, start:stop], cut)

    def verify():
        results = out, lse, *grads
        reports = gradients.verify_results(peers, source, layouts, results)
        gradients.check_passed(peers, reports)

    plain, blocks = _Plain(arrays, window, backward), _blocks(cuts, window)
    plain.run(blocks)
    results = [plan.gather(array, root=None)[0, :, 0] for array in (out, *grads)]
    with agreement(peers):
        check(f"{name} in plain NumPy", results, plain.results, TOLERANCE["float32"])
    return Operation(
        f"verify {name}",
        "the visible pairs in NumPy's float64",
        verify,
        lambda: plain.run(blocks[peers.rank :: peers.size]),
    )


def _blocks(cuts, window):
    """(first key, first query, end of both) of every block: a document, or of one that is longer a part of it."""
    return [
        (max(start, first - window + 1), first, min(first + window, stop))
        for start, stop in zip(cuts.tolist(), cuts[1:].tolist())
        for first in range(start, stop, window)
    ]


class _Plain:
    """Causal attention by its definition in float64, and its gradients.  results: out or, too, dq, dk and dv."""

    def __init__(self, arrays, window, backward):
        self.inputs = [array[0, :, 0].astype(np.float64) for array in arrays]
        self.lse, self.scale = np.zeros(TOKENS), HEAD_DIM**-0.5
        self.results = [np.zeros((TOKENS, HEAD_DIM)) for _ in range(4 if backward else 1)]
        self.window, self.hidden = window, {}

    def _hidden(self, first, start, stop):
        """The pairs that are not visible, a mask for all blocks of one shape."""
        shape = start - first, stop - first
        if shape not in self.hidden:
            apart = np.arange(start, stop)[:, None] - np.arange(first, stop)
            self.hidden[shape] = (apart < 0) | (apart >= self.window)
        return self.hidden[shape]

    def run(self, blocks):
        """Compute these blocks."""
        out, *grads = self.results
        for first, start, stop in blocks:
            rows, keys = slice(start, stop), slice(first, stop)
            q, k, v, dout = (array[part] for array, part in zip(self.inputs, (rows, keys, keys, rows)))
            score = q @ k.T * self.scale
            score[self._hidden(first, start, stop)] = -np.inf
            top = score.max(axis=1)
            weight = np.exp(score - top[:, None])
            total = weight.sum(axis=1)
            weight /= total[:, None]
            out[rows], self.lse[rows] = weight @ v, top + np.log(total)
            if grads:  # of documents, whose keys no other block sees
                dq, dk, dv = grads
                delta = (dout * out[rows]).sum(axis=1)
                dscore = weight * (dout @ v.T - delta[:, None]) * self.scale
                dq[rows], dk[keys], dv[keys] = dscore @ k, dscore.T @ q, weight.T @ dout
