"""Measures the cases of one size: plans are made, every result is checked, and then passes are run in turn.

Run 1 of every case, run 2 of every case, ...: what drifts on a machine hits all of them alike.
"""

import time
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from .. import backends
from ..console.progress import Progress
from ..engine.folding import on_host
from ..errors import VerificationError
from ..model.machine import PRODUCTS
from ..plan.mesh_attention import MeshAttention
from ..schedule import travels
from ..verify import compare, gradients
from .summary import EMULATED
from .tensors import NAMES, Tensors

CHECK_WORK = 2e9           # operations of float64 attention for a check of rows, over all ranks; edges come on top
PIECES = 16                # of tensors that are kept while cases are checked, 4 MiB each


class Taken(NamedTuple):
    """What one pass of one case has taken on this rank: a number a run.

    seconds, waiting: of the pass, and in it waiting for transfers.  sent: bytes.
    """

    seconds: list
    waiting: list
    sent: list


class Subject:
    """A plan with this rank's inputs, and what its passes have taken so far: `taken`, by pass.

    reports: of its check.
    """

    def __init__(self, case, plan, inputs, passes):
        self.case, self.plan, self.passes, self.reports = case, plan, passes, {}
        *self.inputs, self.dout = map(plan.give, inputs)
        self.forward = ()                              # out, lse that gradients are computed from
        self.taken = {name: Taken([], [], []) for name in passes}

    def check(self, peers, read):
        """Compare results with float64 attention, all rows or a sample; collective.

        Raises VerificationError, the same on every rank.
        """
        plan, limit = self.plan, CHECK_WORK / peers.size
        self.forward = plan.forward(*self.inputs)
        out, lse = map(on_host, self.forward)
        self.reports["forward"] = compare.verify(peers, plan.problem, plan.q_layout, out, lse, read, limit=limit)
        if "backward" in self.passes:
            grads = list(map(on_host, plan.backward(self.dout, *self.inputs, *self.forward)))
            self.reports["backward"] = gradients.verify_gradients(
                peers, plan.problem, plan.q_layout, plan.k_layout, out, lse, grads, read, limit=limit)
        failed = [str(report) for report in self.reports.values() if not report.passed]
        if failed:
            error = VerificationError(f"{self.case} is wrong, nothing is measured: {'; '.join(failed)}")
            error.everywhere = True                    # the reports are the same on every rank
            raise error

    def run(self, peers, keep):
        """Every pass once, each begun by all ranks together; collective.  keep: note what it took."""
        for name in self.passes:
            plan = self.plan
            peers.barrier()
            waited, sent, start = plan.wait_seconds, plan.sent[0], time.perf_counter()
            if name == "forward":
                plan.forward(*self.inputs, check=False)
            else:
                plan.backward(self.dout, *self.inputs, *self.forward, check=False)
            plan.drain()
            seconds = time.perf_counter() - start
            if keep:
                for found, kept in zip((seconds, plan.wait_seconds - waited, plan.sent[0] - sent), self.taken[name]):
                    kept.append(found)

    def told(self, one):
        """What this rank has to say of every pass, for the others; one: `OneRank`, whose speed an ideal has."""
        return {name: {**taken._asdict(), "formula": self.formula(name), "nbytes": self.plan.nbytes,
                       "ideal": self.flops(name) / one.speed(name)} for name, taken in self.taken.items()}

    def facts(self):
        """What was chosen and checked, the same on every rank."""
        plan, schedule = self.plan, self.plan.schedule
        return {"tile": "x".join(map(str, plan.tile)), "schedule": schedule.name, "route": plan.route,
                "layout": plan.q_layout.kind, "ahead": schedule.ahead, "balance": plan.balance,
                "predicted_seconds": plan.predicted_seconds,
                "checked": {name: {**report._asdict(), "told": str(report)} for name, report in self.reports.items()}}

    def formula(self, name):
        """Bytes that this rank should send in a pass."""
        plan, activity = self.plan, self.plan.activity
        lengths = [layout.lengths for layout in (activity.q_layout, activity.k_layout)]
        return travels.sent(plan.problem, *lengths, *plan.tile, plan.chunk, plan.route, name, activity,
                            plan.schedule.name == "collective").total

    def flops(self, name):
        """Floating-point operations of this rank's blocks in a pass, attended pairs only."""
        return PRODUCTS[name] * self.plan.problem.flops_per_pair * self.plan.activity.work(self.plan.chunk)


class OneRank:
    """The speed of one rank on one block, a chunk of queries by a chunk of keys without a mask, and no transfers.

    It is measured on all ranks at once, which share what they share when they work together; where compute is
    emulated it is known.
    """

    def __init__(self, problem, ranks, backend, passes):
        p, self.passes = problem, passes
        self.known, self.seconds = backend.emulated_flops, {name: [] for name in passes}
        if self.known:
            return
        tokens = -(-p.seqlen // ranks)
        self.plan = MeshAttention(MPI.COMM_SELF, seqlen=tokens, heads=p.heads, head_dim=p.head_dim, batch=p.batch,
                                  kv_heads=p.kv_heads, dtype=p.dtype, backend=backend.name)
        tensors = Tensors(self.plan.problem)
        q, k, v, self.dout = (self.plan.give(tensors.read(name, 0, tokens)) for name in NAMES)
        self.inputs = q, k, v
        self.forward = self.plan.forward(*self.inputs)

    def run(self, peers, keep):
        """Every pass once, on all ranks at once; collective."""
        for name in () if self.known else self.passes:
            peers.barrier()
            start = time.perf_counter()
            if name == "forward":
                self.plan.forward(*self.inputs)
            else:
                self.plan.backward(self.dout, *self.inputs, *self.forward)
            self.plan.drain()
            if keep:
                self.seconds[name].append(time.perf_counter() - start)

    def speed(self, name):
        """Floating-point operations a second in a pass."""
        return self.known or PRODUCTS[name] * self.plan.problem.flops / float(np.median(self.seconds[name]))

    def close(self):
        """Give up the plan."""
        if not self.known:
            self.plan.close()


class Measured(NamedTuple):
    """One size on all ranks.

    problem, machine, backend: of its plans.  compute: "real", or EMULATED where its time is not.  which: for each case
    which plan it is.  plans: of each its "facts" and, by pass, a list by rank of what `Subject.told` says.
    timelines: by pass of the first case, (predicted, measured), by rank of the mesh.
    """

    problem: object
    machine: object
    backend: str
    compute: str
    which: list
    plans: list
    timelines: dict


def _chosen(case, plan):
    """What tells one plan from another: cases with the same are measured once."""
    schedule = plan.schedule
    return (plan.tile, schedule.name, plan.route, plan.q_layout, plan.k_layout, schedule.ahead,
            case.overlap or schedule.name == "collective")


def _subjects(job, cases, how, passes):
    """Every different plan that the cases ask for, as a list, and for each case which one it is; collective."""
    subjects, inputs, which = {}, {}, []
    for case in cases:
        plan = MeshAttention(job.comm, seqlen=case.seqlen, tile=case.tile, schedule=case.schedule, route=case.route,
                             overlap=case.overlap, **how)
        chosen = _chosen(case, plan)
        if chosen in subjects:
            plan.close()
        else:
            job.peers.timeout = max(job.peers.timeout, plan.timeout)       # between passes as in one
            tensors, place = Tensors(plan.problem), (plan.q_layout, plan.k_layout)
            if place not in inputs:
                inputs[place] = [tensors.tokens(name, plan.positions_k if name in "kv" else plan.positions)
                                 if name != "dout" or "backward" in passes else None for name in NAMES]
            subjects[chosen] = Subject(case, plan, inputs[place], passes)
        which.append(list(subjects).index(chosen))
    return list(subjects.values()), which


def measure(job, cases, how, passes, runs, warmup):
    """What there is to say of every case of one size, `Measured`; collective.

    how: keywords of `mpiattn.MeshAttention` that the cases share.  passes: names of directions, in order.
    """
    peers = job.peers
    subjects, which = job("plan", lambda: _subjects(job, cases, how, passes))
    plan = subjects[0].plan
    problem, machine, backend = plan.problem, plan.machine, plan.backend
    local = backends.get(backend)
    one = OneRank(problem, peers.size, local, passes)
    peers.idle = local.idle                            # between passes as in one
    total = len(subjects) * (1 + warmup + runs)

    def check():
        read = lru_cache(PIECES)(Tensors(problem).read)
        for subject in subjects:
            subject.check(peers, read)
            progress(1)

    def rounds():
        for i in range(warmup + runs):
            one.run(peers, i >= warmup)
            for subject in subjects:
                subject.run(peers, i >= warmup)
                progress(1)
    with Progress(f"bench of {problem.seqlen} tokens", total, " runs") as progress:
        job("check", check)
        job("measure", rounds)
    told = peers.allgather([subject.told(one) for subject in subjects])
    plans = [{"facts": subject.facts(),
              "passes": {name: [rank[i][name] for rank in told] for name in passes}}
             for i, subject in enumerate(subjects)]
    plan = subjects[which[0]].plan
    measured = [dict(peers.allgather((plan.chunk, plan.trace(name)))) for name in passes]
    timelines = {name: (plan.predicted_trace(name), found) for name, found in zip(passes, measured)}
    for subject in subjects:
        subject.plan.close()
    one.close()
    return Measured(problem, machine, backend, EMULATED if one.known else "real", which, plans, timelines)
