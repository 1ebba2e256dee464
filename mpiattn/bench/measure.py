"""Measures the cases of one size: makes plans, checks every result, and then runs the passes in turn.

Run 1 of every case, run 2 of every case, ...: so drift of the machine affects all cases alike.
"""

import time
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from .. import backends
from ..arguments.arrays import on_host
from ..console.progress import Progress
from ..files.trace_file import Trace
from ..model.machine import PRODUCTS
from ..plan.mesh_attention import MeshAttention
from ..verify import compare, gradients
from .biases import BenchBiases
from .summary import EMULATED
from .tensors import Tensors

CHECK_WORK = 2e9  # operations of float64 attention to check rows, over all ranks, without the edge rows
SHAPE = "heads", "kv_heads", "head_dim", "value_dim", "shared_kv", "batch", "dtype"  # of a problem, besides the tokens
PIECES = 16  # pieces of tensors that are cached during the check, 4 MiB each


class Taken(NamedTuple):
    """Measurements of one pass of one case on this rank, a list with a number per run.

    seconds, waiting: of the pass, and of waiting for transfers in it.  sent: bytes.
    """

    seconds: list
    waiting: list
    sent: list


class Subject:
    """A plan with this rank's inputs.  taken: its measurements so far, by pass.  reports: of its check, by pass.

    alibi, bias: as of `BenchBiases`.
    """

    def __init__(self, plan, inputs, passes, alibi=False, bias=False):
        self.plan, self.passes, self.reports = plan, passes, {}
        self.biases = BenchBiases(plan, alibi, bias)
        *self.inputs, self.dout = [None if array is None else plan.give(array) for array in inputs]
        self.forward = ()  # (out, lse), for the gradients
        self.taken = {name: Taken([], [], []) for name in passes}

    def check(self, peers, read, case):
        """Compare results with float64 attention, all rows or a sample; collective.

        case: in words.  Raises VerificationError, the same on every rank.
        """
        plan, layouts = self.plan, (self.plan.q_layout, self.plan.k_layout)
        source, of_biases = compare.Source(plan.problem, read, None, self.biases.rules()), None
        self.forward = results = plan.forward(*self.inputs, **self.biases.call)
        if "backward" in self.passes:
            grads = plan.backward(self.dout, *self.inputs, *self.forward, **self.biases.call, **self.biases.of_backward)
            results = *results, *grads[:3]
            of_biases = self.biases.verification(peers, source, grads[3:])
        results = [None if array is None else on_host(array) for array in results]
        limit = CHECK_WORK / peers.size
        reports = gradients.verify_results(peers, source, layouts, results, limit, biases=of_biases)
        gradients.check_passed(peers, reports, f"{case} is wrong, nothing is measured: ")
        self.reports = dict(zip(("forward", "backward", "biases"), reports))

    def run(self, peers, keep):
        """Run every pass once, each after a barrier; collective.  keep: append the measurements to `taken`."""
        for name in self.passes:
            plan, call = self.plan, self.biases.call
            peers.barrier()
            waited, sent, start = plan.wait_seconds, plan.sent[0], time.perf_counter()
            if name == "forward":
                plan.forward(*self.inputs, **call, check=False)
            else:
                given = self.dout, *self.inputs, *self.forward
                plan.backward(*given, **call, **self.biases.of_backward, check=False)
            plan.drain()
            seconds = time.perf_counter() - start
            if keep:
                for figure, kept in zip((seconds, plan.wait_seconds - waited, plan.sent[0] - sent), self.taken[name]):
                    kept.append(figure)

    def measurements(self, one_rank):
        """This rank's part of the result, by pass.  one_rank: a `OneRank`, whose speed the ideal time assumes."""
        plan = self.plan
        flops = plan.problem.flops_per_pair * plan.pairs()  # of this rank's blocks, attended pairs only
        return {
            name: {
                **taken._asdict(),
                "formula": plan.formula(name),
                "nbytes": plan.nbytes,
                "ideal": PRODUCTS[name] * flops / one_rank.speed(name),
            }
            for name, taken in self.taken.items()
        }

    def facts(self):
        """The chosen plan and the reports of its check, the same on every rank."""
        plan, schedule = self.plan, self.plan.schedule
        return {
            "tile": str(plan.tile),
            "schedule": schedule.name,
            "route": plan.route,
            "layout": plan.q_layout.kind,
            "mesh_layout": plan.mesh_layout,
            "ahead": schedule.ahead,
            "balance": plan.balance,
            "predicted_seconds": plan.predicted_seconds,
            "checked": {name: {**report._asdict(), "summary": str(report)} for name, report in self.reports.items()},
        }


class OneRank:
    """The speed of one rank on one block, a chunk of queries by a chunk of keys, without a mask and transfers.

    It is measured on all ranks at once, so that they share the host's resources as in a pass.  Emulated compute has a
    known speed, and no subject.
    """

    def __init__(self, problem, ranks, backend, passes):
        self.known, self.subject = backend.emulated_flops, None
        if self.known:
            return
        tokens = -(-problem.seqlen // ranks)
        shape = {name: getattr(problem, name) for name in (*SHAPE, "scale")}
        plan = MeshAttention(MPI.COMM_SELF, seqlen=tokens, backend=backend.name, **shape)
        self.subject = Subject(plan, Tensors(plan.problem).inputs(range(tokens), range(tokens)), passes)
        self.subject.forward = plan.forward(*self.subject.inputs)

    def run(self, peers, keep):
        """Run every pass once, on all ranks at once; collective."""
        if self.subject:
            self.subject.run(peers, keep)

    def speed(self, name):
        """Floating-point operations per second in a pass."""
        if self.known:
            return self.known
        return PRODUCTS[name] * self.subject.plan.problem.flops / float(np.median(self.subject.taken[name].seconds))

    def close(self):
        """Close the plan."""
        if self.subject:
            self.subject.plan.close()


class Measured(NamedTuple):
    """The measurements of one size on all ranks.

    plan: one of its plans, closed.  compute: "real" or EMULATED.
    which: the index of each case's plan.
    plans: for each its "facts" and its "passes", by pass a list by rank of `Subject.measurements`.
    timelines: (predicted, measured) of the first case by pass, each by rank of the mesh.
    trace: the `Trace` of its last run, on rank 0, if it was asked for; else None.
    """

    plan: MeshAttention
    compute: str
    which: list
    plans: list
    timelines: dict
    trace: Trace | None


def _chosen(case, plan):
    """What identifies a plan: cases for which it is the same are measured once."""
    schedule = plan.schedule
    return (
        plan.tile,
        schedule.name,
        plan.route,
        plan.q_layout,
        plan.k_layout,
        plan.mesh_layout,
        schedule.ahead,
        case.overlap or schedule.name == "collective",
    )


def _subjects(job, cases, how, passes, biases):
    """The distinct plans, each as (its first case, `Subject`), and the index of each case's plan; collective."""
    subjects, inputs, which = {}, {}, []
    for case in cases:
        plan = MeshAttention(job.comm, **case._asdict(), **how)
        chosen = _chosen(case, plan)
        if chosen in subjects:
            plan.close()
        else:
            job.peers.timeout = max(job.peers.timeout, plan.timeout)  # ranks wait between passes as inside them
            tensors, place = Tensors(plan.problem), (plan.q_layout, plan.k_layout)
            if place not in inputs:
                inputs[place] = tensors.inputs(plan.positions, plan.positions_k, "backward" in passes)
            subjects[chosen] = case, Subject(plan, inputs[place], passes, **biases)
        which.append(list(subjects).index(chosen))
    return list(subjects.values()), which


def measure(job, cases, how, passes, runs, warmup, biases, traced=False):
    """Measure every case of one size; returns `Measured`; collective.

    how: keyword arguments of `mpiattn.MeshAttention` that the cases share.  passes: names of directions, in order.
    biases: more arguments of `Subject`.  traced: whether to keep the trace of the first case.
    """
    peers = job.peers
    asked, which = job("plan", lambda: _subjects(job, cases, how, passes, biases))
    subjects = [subject for _, subject in asked]
    problem, local = subjects[0].plan.problem, backends.get(subjects[0].plan.backend)
    one_rank = OneRank(problem, peers.size, local, passes)
    peers.idle = local.idle  # ranks wait between passes as inside them
    total = len(subjects) * (1 + warmup + runs)

    def check():
        read = lru_cache(PIECES)(Tensors(problem).read)
        for case, subject in asked:
            subject.check(peers, read, case)
            progress(1)

    def rounds():
        for i in range(warmup + runs):
            one_rank.run(peers, i >= warmup)
            for subject in subjects:
                subject.run(peers, i >= warmup)
                progress(1)

    with Progress(f"bench of {problem.seqlen} tokens", total, " runs") as progress:
        job("check", check)
        job("measure", rounds)
    by_rank = peers.allgather([subject.measurements(one_rank) for subject in subjects])
    plans = [
        {"facts": subject.facts(), "passes": {name: [rank[i][name] for rank in by_rank] for name in passes}}
        for i, subject in enumerate(subjects)
    ]
    plan = subjects[which[0]].plan
    traces = [dict(peers.allgather((plan.chunk, plan.trace(name)))) for name in passes]
    timelines = {name: (plan.predicted_trace(name), trace) for name, trace in zip(passes, traces)}
    trace = plan.whole_trace() if traced else None
    for subject in subjects:
        subject.plan.close()
    one_rank.close()
    compute = EMULATED if one_rank.known else "real"
    return Measured(plan, compute, which, plans, timelines, trace)
