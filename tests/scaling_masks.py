"""What tiles, layouts and schedules take for one mask or set of documents, on the ranks of a launch of scaling.py.

`auto` is run first.  Of the others those are left out whose bytes or blocks alone take longer than it took.  The rest
run in turn; those that the first run shows to be far behind run once.  Every plan's rows are compared with float64
attention, a few a rank, and its bytes with a count over pairs.
"""

import sys
import time
from itertools import product

import numpy as np
import scaling_case
from searches import flat_choices

from mpiattn import MeshAttention, backends
from mpiattn.errors import ArgumentError
from mpiattn.model.machine import load
from mpiattn.model.space import layouts
from mpiattn.problem.problem import Problem
from mpiattn.schedule.tile import tiles

FAR = 1.5  # times the fastest first run: no further run
ROWS = 4  # of a rank, that are compared with float64
TOLERANCE = 1e-4  # of the largest element


def document_sets(tokens):
    """Three sets of documents, from few long to many short: their cuts, for so many tokens.

    They are those of 64 ranks of 8192 tokens, with lengths that are lognormal, lognormal, and even from 512 to 4096,
    all made shorter in proportion.
    """
    whole, rng, sets = 64 * 8192, np.random.default_rng(0), []
    for draw in (lambda: rng.lognormal(9.5, 1.6), lambda: rng.lognormal(8.5, 1.2), lambda: rng.integers(512, 4097)):
        cuts = [0]
        while cuts[-1] < whole:
            cuts.append(min(whole, cuts[-1] + max(1, int(draw()))))
        sets.append([int(cut) for cut in np.unique(np.array(cuts) * tokens // whole)])
    return sets


class Inputs:
    """q, k and v of a whole problem, the same on every rank, and which keys a query sees."""

    def __init__(self, case):
        rng, tokens = np.random.default_rng(0), case["tokens"]
        self.q, self.k, self.v = rng.standard_normal((3, tokens, case["dim"]), np.float32)
        self.case, self.cuts = case, np.array(case.get("cu_seqlens") or [0, tokens])
        self.keys = np.arange(tokens)

    def sees(self, queries):
        """Which keys some queries see: bool (queries, keys).  The rule of docs/masks.md, pair by pair."""
        case, of = self.case, np.searchsorted(self.cuts, queries, "right")[:, None]
        start, query, key = self.cuts[of - 1], np.asarray(queries)[:, None], self.keys[None]
        seen = (key >= start) & (key < self.cuts[of])
        if case.get("causal"):
            seen &= (key <= query) | (key - start < case.get("prefix", 0))
        left, right = case.get("window", (None, None))
        if left is not None:
            seen &= key >= query - left
        return seen if right is None else seen & (key <= query + right)

    def rows(self, queries):
        """float64 attention of some queries."""
        seen = self.sees(queries)
        scores = np.where(seen, self.q[queries].astype(float) @ self.k.T / self.q.shape[1] ** 0.5, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return weights @ self.v / weights.sum(axis=1, keepdims=True)

    def bytes_of(self, plan, positions):
        """Bytes that have to move for a rank: it receives keys, values and queries, and returns partials.

        positions: of every chunk.  Of a chunk that is all tokens from the first to the last that is needed.
        """
        dim, of_rank = self.q.shape[1], {chunk: self.sees(positions[chunk]) for chunk in plan.tile.row(plan.chunk)}
        tokens = {True: 0, False: 0}
        for column, others in ((True, plan.tile.column(plan.chunk)), (False, plan.tile.row(plan.chunk))):
            for chunk in others:
                if chunk == plan.chunk:
                    continue
                if column:
                    seen = np.any([sees.any(axis=0) for sees in of_rank.values()], axis=0)[positions[chunk]]
                else:
                    columns = np.concatenate([positions[other] for other in plan.tile.column(plan.chunk)])
                    seen = of_rank[chunk][:, columns].any(axis=1)
                at = np.flatnonzero(seen)
                tokens[column] += int(at[-1] - at[0] + 1) if len(at) else 0
        return 4 * (tokens[True] * 2 * dim + tokens[False] * (2 * dim + 1))


class Subject:
    """A plan and its inputs; asked: (tile, layout, schedule)."""

    def __init__(self, job, case, inputs, asked):
        tile, layout, schedule = asked
        self.job, self.inputs, self.seconds = job, inputs, []
        shape = {name: case[name] for name in ("causal", "window", "prefix") if name in case}
        if "window" in shape:
            shape["window"] = tuple(shape["window"])
        self.call = {"cu_seqlens": case["cu_seqlens"]} if case.get("cu_seqlens") else {}
        self.plan = plan = MeshAttention(
            job.comm, seqlen=case["tokens"], heads=1, head_dim=case["dim"], backend=case["backend"],
            machine=case["machine"], tile=tile, layout=layout, schedule=schedule,
            expected_cu_seqlens=case.get("cu_seqlens"), **shape,
        )  # fmt: skip
        self.chosen = str(plan.tile), plan.q_layout.kind, plan.schedule.name
        self.arrays = [array[plan.positions][None, :, None] for array in (inputs.q, inputs.k, inputs.v)]

    def check(self):
        """Run once and compare; also connects the ranks, and keeps what the call has decided."""
        before = self.plan.sent[0]
        out, _ = self.plan.forward(*self.arrays, **self.call)
        self.sent = self.plan.sent[0] - before
        positions = np.asarray(self.plan.positions)
        some = np.unique(np.linspace(0, len(positions) - 1, ROWS).astype(int))
        want = self.inputs.rows(positions[some])
        right = np.abs(out[0, some, 0] - want).max() <= TOLERANCE * np.abs(want).max()
        of_chunk = dict(self.job.peers.allgather((self.plan.chunk, positions)))
        needed = self.inputs.bytes_of(self.plan, of_chunk)
        by_rank = self.job.peers.allgather((bool(right), self.sent, needed))
        if not all(right for right, *_ in by_rank):
            raise ArgumentError(f"{self.chosen} is wrong")
        self.sent, self.needed = (sum(of[i] for of in by_rank) for i in (1, 2))
        self.most = max(of[1] for of in by_rank)

    def run(self):
        """Run once and keep the slowest rank's time."""
        self.job.peers.barrier()
        start = time.perf_counter()
        self.plan.forward(*self.arrays, **self.call, check=False)
        self.plan.drain()
        self.seconds.append(max(self.job.peers.allgather(time.perf_counter() - start)))

    def result(self):
        """What is kept of it."""
        return {
            **dict(zip(("tile", "layout", "schedule"), self.chosen)), "predicted": self.plan.predicted_seconds,
            "seconds": self.seconds, "sent": self.sent, "most": self.most, "needed": self.needed,
        }  # fmt: skip


def possible(case, ranks, seconds):
    """(tile, layout, schedule) of all choices that could take less than some seconds.

    The mean of the ranks' bytes over their rate, and the blocks of the busiest, are not more than the time.  With
    documents, which leave less of both, they are all tiles and layouts, each with the schedule that a plan takes.
    """
    if case.get("cu_seqlens"):
        return list(product(map(str, tiles(ranks)), case["layouts"], ["auto"]))
    shape = {name: case[name] for name in ("causal", "prefix") if name in case}
    problem = Problem(
        seqlen=case["tokens"], heads=1, head_dim=case["dim"], window=tuple(case.get("window", (None, None))), **shape
    )
    machine = load(case["machine"])
    pairs = [layouts(kind, problem, ranks)[0] for kind in case["layouts"]]
    return [
        (str(c.tile), c.layouts[0].kind, c.schedule)
        for c in flat_choices(problem, ranks, layout_pairs=pairs, machine=machine)
        if max(c.sent_bytes / case["rate"], c.balance * problem.flops / ranks / machine.flops["float32"]) < seconds
    ]


def measure(job, case):
    """Every plan of a case: {"results": a list, that of `auto` first}."""
    job.peers.idle = backends.get(case["backend"]).idle  # ranks wait between passes as inside them
    inputs = Inputs(case)
    layout = "auto" if len(case["layouts"]) > 1 else case["layouts"][0]
    subjects = {}

    def add(asked):
        subject = Subject(job, case, inputs, asked)
        if subject.chosen in subjects:
            subject.plan.close()
            return
        subjects[subject.chosen] = subject
        subject.check()
        subject.run()

    add(("auto", layout, "auto"))
    (first,) = subjects.values()
    for asked in job.peers.broadcast(None if job.comm.rank else possible(case, job.peers.size, first.seconds[0])):
        add(asked)
    least = min(subject.seconds[0] for subject in subjects.values())
    near = [s for s in subjects.values() if s is first or s.seconds[0] <= FAR * least]
    for _ in range(case["runs"]):
        for subject in near:
            subject.run()
    results = [subject.result() for subject in subjects.values()]
    for subject in subjects.values():
        subject.plan.close()
    return {"results": results}


if __name__ == "__main__":
    sys.exit(scaling_case.run(__doc__, measure))
