"""One problem of `mpiattn run`: its plan, its passes, the verification and the results."""

import contextlib
import socket
import sys
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ..arguments.arrays import on_host
from ..comm.agreement import agreement, from_rank_0
from ..console import options
from ..console.progress import Progress
from ..errors import FileError, MpiattnError
from ..files.finite import nonfinite
from ..files.input import Input, Wanted
from ..files.output import Contents, Written
from ..files.shapes import place_name
from ..model.machine import PRODUCTS
from ..problem.documents import documents as check_documents
from ..problem.problem import Problem
from ..schedule import travels
from ..schedule.needed import Activity
from ..schedule.tile import MESH, Tile, parse_tile
from ..verify import compare, gradients
from . import biases
from .documents import read_documents
from .report import count_text
from .run_attributes import PLAN, chosen_of, results_of
from .run_plan import RunPlan


class Task(NamedTuple):
    """A problem of IN.

    group: its path in IN and OUT, "" for the file itself.  source: its part of IN.  documents: arguments of
    `MeshAttention.forward`.  added: biases and dropout.  chosen: what the group of OUT and the report say of it.
    """

    group: str
    source: Input
    plan: RunPlan
    documents: dict
    added: biases.RunBiases
    chosen: dict

    @property
    def flops(self):
        """An estimate of the work, to compare problems by."""
        p = self.plan.problem
        return p.flops_per_pair * p.seqlen * p.seqlen_k

    def shares(self, whole):
        """How `whole` is shared by the task's passes, by name."""
        products = {name: PRODUCTS[name] for name in ("forward", "backward")[: 1 + self.chosen["backward"]]}
        return {name: whole * count / sum(products.values()) for name, count in products.items()}


def tasks_of(comm, peers, args, source):
    """Every problem of IN as a `Task`, with a plan for all of one shape; collective.

    A plan expects the documents of its first problem.
    """
    parts = {group: source.part(group, *about) for group, about in source.shapes.items()}
    documents = _documents(peers, args, parts)
    with agreement(peers):  # on all of them at once: there may be thousands
        mask, asked = options.mask_of(args), {}
        for group, part in parts.items():
            with _of_group(group):
                asked[group] = _asked(args, part, documents[group])
    plans, tasks = {}, []
    for group, part in parts.items():
        shape, added = asked[group]
        with _of_group(group):
            if shape not in plans:
                plans[shape] = _plan(comm, peers, args, part, added, documents[group], mask)
        plan = plans[shape]
        chosen = chosen_of(plan, args, part.axes, plan.activity_of(**documents[group])) | added.asked
        unpacked = part.unpacked([*_roles(args, plan.problem, part.names), *added.datasets])
        if unpacked:
            chosen["unpacked"] = unpacked
        tasks.append(Task(group, part, plan, documents[group], added, chosen))
    return tasks


def _roles(args, problem, names):
    """The datasets that are read as q, k, v and dout."""
    roles = ["q", "k"]
    if not problem.shared_kv:
        roles.append("v")
    if args.backward:
        roles.append("dout")
    return [names.get(role, role) for role in roles]


@contextlib.contextmanager
def _of_group(group):
    """Name the group in what all ranks raise."""
    try:
        yield
    except MpiattnError as error:
        if group and repr(group) not in str(error) and place_name("", group) not in str(error):
            error.args = (f"{error} (in group {group!r} of IN)",)
        raise


def _documents(peers, args, parts):
    """The documents of all problems, as arguments of `MeshAttention.forward`, by group; collective."""
    cuts = {"cu_seqlens": ("--documents", args.documents), "cu_seqlens_k": ("--documents-k", args.documents_k)}

    def read():
        files, documents = {}, {}
        for group, part in parts.items():
            with _of_group(group):
                documents[group] = read_documents(part.group, cuts, files)
        return documents

    documents = from_rank_0(peers, read)
    return {group: of | ({"padding": True} if args.padding else {}) for group, of in documents.items()}


def _asked(args, part, documents):
    """What a plan for a problem depends on besides the options, and its biases; raises ArgumentError and FileError."""
    problem = Problem(**part.shapes)
    check_documents(problem, **documents)
    added = biases.RunBiases(args, part, problem)
    return (*part.shapes.items(), *added.plan.items()), added


def _plan(comm, peers, args, part, added, documents, mask):
    """A plan for all problems like this one; collective."""
    with agreement(peers):
        layout = options.layout_of(args, comm.size, part.shapes["seqlen"], part.shapes["seqlen_k"])
        tile = parse_tile(args.tile, comm.size)
        if tile is not None:
            added.check_tile(tile)
    given = options.given(args, *options.MASKS, "softcap", "scale", *PLAN)
    if tile is None and added.dense:
        given["tile"] = MESH  # only its ranks have tiles of a bias
    return RunPlan(
        comm,
        added.gradients,
        **part.shapes,
        **given,
        mask=mask,
        layout=layout,
        **added.plan,
        **options.given(args, "max-message", "max-memory", "machine", "timeout"),
        direction="both" if args.backward else "forward",
        expected_cu_seqlens=None if "cu_seqlens_k" in documents else documents.get("cu_seqlens"),
    )


def contents(task, args, attributes):
    """The `Contents` of the task's group of OUT."""
    of_biases = task.added.gradients if args.backward else {}
    shapes = results_of(task.plan.problem, args.backward) | of_biases
    return Contents(shapes, attributes, task.source.grid_of("q"), of_biases, task.source.is_batched("q"))


def check_places(contents):
    """Raise FileError if a group of OUT would be where a dataset of another one is."""
    datasets = {f"{group}/{name}".lstrip("/") for group, of in contents.items() for name in of.shapes}
    for group in contents:
        parts = group.split("/")
        for path in ("/".join(parts[:count]) for count in range(1, len(parts) + 1)):
            if path in datasets:
                raise FileError(
                    f"IN has a problem in group {group!r}, and {path!r} is a dataset of results in OUT; rename it"
                )


class Solved(NamedTuple):
    """What came of a problem on this rank.

    results: its chunks, by dataset.  local: its part of the report.  reports: of the verification.  odd: number of
    elements that are NaN or infinite, by dataset, in all.  trace: on rank 0, or None.
    """

    results: dict
    local: dict
    reports: dict
    odd: dict
    trace: object


def solve(job, args, task, progress=Progress, last=True):
    """Compute and verify a problem; collective.

    progress: makes the `Progress` of a phase.  last: whether the plan is not needed any more.
    """
    plan, peers = task.plan, job.peers
    activity = plan.activity_of(**task.documents)
    results, local, odd = _compute(job, args, task, activity, progress)
    trace = plan.whole_trace() if args.trace else None
    if last:
        plan.close()  # frees its buffers before the verification
    reports = {}
    if args.verify:
        reports = job("verify", lambda: _verify(peers, task, results, progress))
    return Solved(results, local, reports, odd, trace)


def write(job, output, task, solved, progress=Progress):
    """Write the results of a problem into its group of OUT; collective."""
    plan, results, output = task.plan, solved.results, output.part(task.group)
    layouts = {name: plan.k_layout if name in ("dk", "dv") else plan.q_layout for name in results}

    def write_all():
        with progress("write", sum(layout.seqlen for layout in layouts.values()), " tokens") as done:
            chunks = (
                Written(name, chunk, layouts[name], axis=2 if name == "lse" else 1) for name, chunk in results.items()
            )
            output.write_each(chunks, done)
            task.added.write(output, plan.k_layout)

    job("write", write_all)


def _compute(job, args, task, activity, progress):
    """Run the passes.

    Returns this rank's chunks of the results by dataset, its part of the report, and the number of elements of every
    dataset of IN and OUT that are NaN or infinite, summed over the ranks.
    """
    plan, source, added, documents = task.plan, task.source, task.added, task.documents
    layouts = {"q": plan.q_layout, "k": plan.k_layout, "v": plan.k_layout}
    if args.backward:
        layouts["dout"] = plan.q_layout
    if plan.problem.shared_kv:
        del layouts["v"]
    chunks = dict(zip(layouts, job("read", lambda: _read(source, layouts, job.peers, plan, added, progress))))
    results, local = {}, _local(job.comm, plan, activity)
    odd = {name: nonfinite(array) for name, array in chunks.items()} | added.odd()
    inputs = [chunks.get(name) for name in ("q", "k", "v")]

    def whole(call, how):
        results = call(**how)
        plan.drain()
        return results

    def measured(direction, call):
        before = *plan.sent, plan.wait_seconds
        with progress(direction, plan.tile.a * plan.tile.b, " blocks") as done:
            chunks = job(direction, lambda: whole(call, {"progress": done, **documents, **added.call}))
        sent, messages, waited = (now - then for now, then in zip((*plan.sent, plan.wait_seconds), before))
        return chunks, {
            "sent_bytes": sent,
            "sent_messages": messages,
            "wait_seconds": waited,
            "steps": [step._asdict() for step in plan.trace(direction).steps],
            **_formulas(plan, job.comm.rank, activity, direction),
        }

    (out, lse), local["forward"] = measured("forward", lambda **how: plan.forward(*inputs, **how))
    results |= {"out": on_host(out), "lse": on_host(lse)}
    if args.backward:
        given, more = (chunks["dout"], *inputs, out, lse), added.of_backward
        grads, local["backward"] = measured("backward", lambda **how: plan.backward(*given, **how, **more))
        results |= {name: on_host(grad) for name, grad in zip(("dq", "dk", "dv"), grads) if grad is not None}
        odd |= added.keep(grads[3:])
    odd |= {
        name: nonfinite(array.swapaxes(1, 2), True) if name == "lse" else nonfinite(array)
        for name, array in results.items()
    }
    return results, {**local, "nbytes": plan.nbytes}, _of_all(job.peers, odd, task.group)


def _of_all(peers, odd, group):
    """Sums over the ranks; rank 0 warns if there is anything to warn of."""
    counts = np.array(list(odd.values()))
    peers.reduce(counts, MPI.SUM)
    odd = dict(zip(odd, counts.tolist()))
    if peers.rank == 0 and any(odd.values()):
        where = f" in group {group!r}" if group else ""
        text = f"mpiattn run: WARNING: elements that are NaN or infinite{where}: {count_text(odd)}"
        print(text, file=sys.stderr, flush=True)
    return odd


def _read(source, layouts, peers, plan, added, progress):
    slabs = sum(layout.seqlen for layout in layouts.values()) / peers.size
    with progress("read", slabs, " tokens") as done:
        chunks = source.chunks([Wanted(name, layout) for name, layout in layouts.items()], done)
    added.read(peers, plan)
    return chunks


def _verify(peers, task, results, progress):
    """Reports of the results and of the gradients; VerificationError if one is wrong."""
    plan, source, added = task.plan, task.source, task.added
    p, layouts = plan.problem, (plan.q_layout, plan.k_layout)
    backward, results = "dq" in results, list(results.values())
    inputs = compare.Source(p, source.tokens, task.documents, added.rules(p))
    chosen = [compare.choose(inputs, layouts[0], peers.rank)]
    if backward:
        results += [None] * p.shared_kv  # dv
        of_gradients = gradients.choose(peers, inputs, layouts)
        chosen += of_gradients.rows, of_gradients.keys
    with progress("verify", sum(map(len, chosen)), " rows and keys" if backward else " rows") as done:
        of_biases = added.verification(peers, inputs)
        reports = gradients.verify_results(peers, inputs, layouts, results, progress=done, biases=of_biases)
    source.check()  # HDF5 reads zeros past the end of a file, which results could match
    with _of_group(task.group):
        gradients.check_passed(peers, reports, "verification failed, OUT is not written: ")
    return dict(zip(("verify", "verify_gradients", "verify_biases"), reports))


def _local(comm, plan, activity):
    """The work of this rank; pairs: of one head, summed over the batch; empty: tokens of the batch that see no key."""
    entries = plan.problem.batch // len(activity.documents or [0])  # batch entries per group of documents
    begin, end = plan.problem.whole_mask.key_intervals(plan.positions, activity.documents)
    return {
        "rank": comm.rank,
        "host": socket.gethostname(),
        "tokens": len(plan.positions),
        "tokens_k": len(plan.positions_k),
        "pairs": entries * plan.pairs(activity),
        "empty": entries * int((begin >= end).all(axis=0).sum()),
    }


def _formulas(plan, rank, activity, direction):
    """Bytes that this rank should send in a pass by the formula, and would send on a ring."""
    layouts = plan.q_layout, plan.k_layout
    ring = Activity(plan.problem.whole_mask, *layouts, Tile(1, 1, plan.tile.ranks), activity.documents)
    lengths = [layout.lengths for layout in layouts]
    ring_bytes = travels.sent(plan.problem, lengths, ring.tile, rank, plan.route, direction, ring).total
    return {"formula_bytes": plan.formula(direction, activity), "ring_bytes": ring_bytes}
