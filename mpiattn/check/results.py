"""Computes small attention problems on these ranks, forward and backward, and compares them with float64."""

from itertools import product
from typing import NamedTuple

import numpy as np

from ..model.cost import SCHEDULES
from ..plan.mesh_attention import MeshAttention
from ..schedule.route import ROUTES
from ..schedule.tile import Tile, tiles
from ..verify.compare import Source
from ..verify.gradients import verify_both

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


class Case(NamedTuple):
    """How one problem is computed."""

    tile: Tile
    causal: bool
    schedule: str
    route: str

    def __str__(self):
        return f"tile {self.tile}, {'causal' if self.causal else 'full'}, {self.schedule}, {self.route} route"


def cases(ranks):
    """Every tile of that many ranks, full and causal, with every schedule and route."""
    return [Case(*how) for how in product(tiles(ranks), (False, True), SCHEDULES, ROUTES)]


def gather(peers, timeout, progress=lambda done: None):
    """Run every case: [{"case", "passed", "text"}], the same on every rank; collective."""
    return [_run(peers, case, timeout, progress) for case in cases(peers.size)]


def _run(peers, case, timeout, progress):
    seqlen = 6 * peers.size + 5  # chunks of different lengths
    rng = np.random.default_rng(seqlen)
    q, dout = rng.standard_normal((2, 1, seqlen, HEADS, HEAD_DIM), np.float32)
    k, v = rng.standard_normal((2, 1, seqlen, KV_HEADS, HEAD_DIM), np.float32)
    inputs = {"q": q, "k": k, "v": v, "dout": dout}

    def read(name, start, stop):
        return inputs[name][:, start:stop]

    with MeshAttention(
        peers.comm,
        seqlen=seqlen,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        causal=case.causal,
        tile=case.tile,
        schedule=case.schedule,
        route=case.route,
        layout="zigzag" if case.causal else "contiguous",
        timeout=timeout,
    ) as plan:
        *chunks, dout_chunk = (np.ascontiguousarray(array[:, plan.positions]) for array in inputs.values())
        out, lse = plan.forward(*chunks)
        gradients = plan.backward(dout_chunk, *chunks, out, lse)
        layouts = plan.q_layout, plan.k_layout
        reports = verify_both(peers, Source(plan.problem, read), layouts, out, lse, gradients)
    progress(1)
    failed = [str(report) for report in reports if not report.passed]
    return {"case": str(case), "passed": not failed, "text": "; ".join(failed)}
