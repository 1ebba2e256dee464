"""Compute exact attention of an HDF5 file on the ranks of this launch.

IN holds q (batch, seqlen, heads, head_dim), k and v (batch, seqlen_k, kv_heads, ...) in natural token order; with
--axes bhsd, heads come before tokens. Every rank reads its own tokens. With a striped layout on several hosts, every
rank reads consecutive tokens, and the ranks exchange them. OUT holds out, shaped as q, and lse (batch, heads, seqlen).
Its attributes hold the chosen plan, the command, the date and the versions. OUT appears whole or not at all; an
existing file is replaced.

A field on a grid has the grid's axes in place of seqlen, (batch, 721, 1440, heads, head_dim), or its points in C order;
with --grid every rank holds a block of it, and OUT has the axes of IN.

With --backward IN also holds dout, shaped as out, and OUT gets dq, dk, dv: the gradients of sum(dout * out). With
biases it gets their gradients too: dbias and dkey_bias in the shapes of what --bias and --key-bias name, dalibi_slopes.

examples:
  mpiexec -n 4 mpiattn run qkv.h5 out.h5 --window 1024,0 --verify
  mpiexec -n 4 mpiattn run qkv.h5 out.h5 --causal --documents cu_seqlens --backward
  mpiexec -n 16 mpiattn run field.h5 out.h5 --grid 721x1440 --dims 4x4
"""

import resource
import socket
import sys
from functools import partial

import numpy as np
from mpi4py import MPI

from .. import backends
from ..arguments.arrays import on_host
from ..comm.agreement import agreement
from ..console import options
from ..console.json_file import check_json, report
from ..console.launch import on_all_ranks
from ..console.progress import Progress
from ..files.finite import nonfinite
from ..files.hdf5 import read_shapes
from ..files.io import Input, Output, Wanted, Written
from ..files.trace_file import write as write_trace
from ..problem.documents import documents as check_documents
from ..problem.documents import padding_of
from ..problem.problem import Problem
from ..schedule import travels
from ..schedule.needed import Activity
from ..schedule.tile import Tile
from ..system.atomic_file import JSON, check_target
from ..verify import compare, gradients
from . import biases, opening
from .documents import read_documents
from .names import add_names
from .report import as_json, as_text, count_text, problem_text
from .run_plan import RunPlan

PLAN = "tile", "schedule", "mesh-layout", "route", "wire-dtype", "backend", "transport"  # options


def add_arguments(parser):
    """Declare the arguments of `mpiattn run`."""
    parser.add_argument("input", metavar="IN", help="HDF5 file with datasets q, k, v, and dout for --backward")
    parser.add_argument("output", metavar="OUT", help="HDF5 file to make, with datasets out, lse, and dq, dk, dv")
    add_names(parser)
    parser.add_argument("--backward", action="store_true", help="gradients too: dq, dk, dv of sum(dout * out)")
    options.add_axes(parser, "IN and OUT")
    options.add(parser, *options.MASKS, "mask", "documents", "documents-k")
    options.add_padding(parser, "the first document")
    options.add(parser, "softcap", "scale")
    biases.add_arguments(parser)
    options.add(parser, "layout", "grid", "dims", *PLAN)
    options.add_max_message(parser)
    options.add(parser, "max-memory", "machine")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check the results before OUT is written: every rank compares its rows, and with --backward its keys, "
        "with float64 attention of IN, or a sample of them if all are too much work; a wrong row or key gives exit "
        "code 1 and no OUT",
    )
    options.add_timeout(parser)
    options.add(parser, "json")
    options.add_trace(parser, "of the forward pass and, with --backward, the backward pass")


def run(args):
    """`mpiattn run`."""
    return on_all_ranks(lambda job: _run(job, args), args.timeout)


def _check(args):
    """Raise FileError if a file that the run makes could not be written, or is one that it needs."""
    others = args.input, args.output
    check_json(args.json, others)
    if args.trace is not None:
        check_target("--trace", args.trace, [*others, *filter(None, [args.json])], JSON)


def _peak():
    """Peak resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _run(job, args):
    comm, peers = job.comm, job.peers
    job.on_rank_0(lambda: _check(args))
    before = _peak()
    look = partial(read_shapes, backward=args.backward, names=args.names, grid=args.grid)
    source = Input(peers, args.input, args.max_message, look, names=args.names, axes=args.axes, grid=args.grid)
    documents = read_documents(
        peers,
        source.file,
        {"cu_seqlens": ("--documents", args.documents), "cu_seqlens_k": ("--documents-k", args.documents_k)},
    ) | ({"padding": True} if args.padding else {})
    with agreement(peers):
        check_documents(Problem(**source.shapes), **documents)
        added = biases.RunBiases(args, source, Problem(**source.shapes))
        mask = options.mask_of(args)
        layout = options.layout_of(args, comm.size, source.shapes["seqlen"], source.shapes["seqlen_k"])
    plan = RunPlan(
        comm,
        added.gradients,
        **source.shapes,
        **options.given(args, *options.MASKS, "softcap", "scale", *PLAN),
        mask=mask,
        layout=layout,
        **added.plan,
        **options.given(args, "max-message", "max-memory", "machine", "timeout"),
        direction="both" if args.backward else "forward",
        expected_cu_seqlens=None if "cu_seqlens_k" in documents else documents.get("cu_seqlens"),
    )
    peers.timeout = max(peers.timeout, plan.timeout)  # phases may take as long as a pass
    activity = plan.activity_of(**documents)
    chosen = {**opening.origin(peers, args.words), **_chosen(plan, args, source.axes, activity), **added.asked}
    _open(peers, args, plan, chosen)
    results, axes = _results(plan.problem, args.backward), source.grid_of("q")
    of_biases = added.gradients if args.backward else {}
    how = {"grid": axes, "plain": of_biases}
    output = Output(peers, args.output, results | of_biases, chosen, (args.input,), args.max_message, **how)
    try:
        results, local, odd = _compute(job, args, plan, source, documents, activity, added)
        trace = plan.whole_trace() if args.trace else None
        plan.close()  # frees its buffers before the verification
        reports = job("verify", lambda: _verify(peers, plan, source, results, documents, added)) if args.verify else {}
        source.close()
        job("write", lambda: _write(output, plan, results, added))
    finally:
        output.abandon()  # does nothing once the file has its name
    local["peak_bytes"], local["peak_bytes_before"] = _peak(), before
    ranks = peers.allgather(local)
    results = args, plan, chosen, job.seconds, ranks, reports, odd
    if args.trace:
        job.on_rank_0(lambda: write_trace("--trace", args.trace, trace))
    report(job, args.json, lambda: (as_json(*results), as_text(*results)))
    return 0


def _open(peers, args, plan, chosen):
    """Print the opening text on rank 0; collective."""
    hosts = opening.hosts_of(peers)
    if peers.rank:
        return
    on_cores = not backends.find(plan.backend).on_gpu and not backends.find(plan.backend).tests
    warning = opening.crowded(hosts) if on_cores else None
    if args.json == "-":
        if warning:
            print(f"mpiattn run: WARNING: {warning}", file=sys.stderr, flush=True)
    else:
        passes = ["forward", "backward"][: 1 + args.backward]
        print(opening.text(plan, chosen, hosts, problem_text(plan.problem, chosen), passes, warning), flush=True)


def _results(p, backward):
    """Shape and dtype of every dataset of OUT."""
    shapes = {
        "out": ((p.batch, p.seqlen, p.heads, p.value_dim), p.dtype),
        "lse": ((p.batch, p.heads, p.seqlen), p.partial_dtype),
    }
    if backward:
        shapes |= {
            "dq": ((p.batch, p.seqlen, p.heads, p.head_dim), p.dtype),
            "dk": ((p.batch, p.seqlen_k, p.kv_heads, p.head_dim), p.dtype),
            "dv": ((p.batch, p.seqlen_k, p.kv_heads, p.value_dim), p.dtype),
        }
    return {name: shape for name, shape in shapes.items() if not (name == "dv" and p.shared_kv)}


def _compute(job, args, plan, source, documents, activity, added):
    """Run the passes.

    Returns this rank's chunks of the results by dataset, its part of the report, and the number of elements of every
    dataset of IN and OUT that are NaN or infinite, summed over the ranks.
    """
    layouts = {"q": plan.q_layout, "k": plan.k_layout, "v": plan.k_layout}
    if args.backward:
        layouts["dout"] = plan.q_layout
    if plan.problem.shared_kv:
        del layouts["v"]
    chunks = dict(zip(layouts, job("read", lambda: _read(source, layouts, job.peers, plan, added))))
    results, local = {}, _local(job.comm, plan, activity)
    odd = {name: nonfinite(array) for name, array in chunks.items()} | added.odd()
    inputs = [chunks.get(name) for name in ("q", "k", "v")]

    def whole(call, how):
        results = call(**how)
        plan.drain()
        return results

    def measured(direction, call):
        before = *plan.sent, plan.wait_seconds
        with Progress(direction, plan.tile.a * plan.tile.b, " blocks") as progress:
            chunks = job(direction, lambda: whole(call, {"progress": progress, **documents, **added.call}))
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
    return results, {**local, "nbytes": plan.nbytes}, _of_all(job.peers, odd)


def _of_all(peers, odd):
    """Sums over the ranks; rank 0 warns if there is anything to warn of."""
    counts = np.array(list(odd.values()))
    peers.reduce(counts, MPI.SUM)
    odd = dict(zip(odd, counts.tolist()))
    if peers.rank == 0 and any(odd.values()):
        print(
            f"mpiattn run: WARNING: elements that are NaN or infinite: {count_text(odd)}", file=sys.stderr, flush=True
        )
    return odd


def _read(source, layouts, peers, plan, added):
    slabs = sum(layout.seqlen for layout in layouts.values()) / peers.size
    with Progress("read", slabs, " tokens") as progress:
        chunks = source.chunks([Wanted(name, layout) for name, layout in layouts.items()], progress)
    added.read(peers, plan)
    return chunks


def _verify(peers, plan, source, results, documents, added):
    """Reports of the results and of the gradients; VerificationError if one is wrong."""
    p, layouts = plan.problem, (plan.q_layout, plan.k_layout)
    backward, results = "dq" in results, list(results.values())
    inputs = compare.Source(p, source.tokens, documents, added.rules())
    chosen = [compare.choose(inputs, layouts[0], peers.rank)]
    if backward:
        results += [None] * p.shared_kv  # dv
        of_gradients = gradients.choose(peers, inputs, layouts)
        chosen += of_gradients.rows, of_gradients.keys
    with Progress("verify", sum(map(len, chosen)), " rows and keys" if backward else " rows") as progress:
        of_biases = added.verification(peers, inputs)
        reports = gradients.verify_results(peers, inputs, layouts, results, progress=progress, biases=of_biases)
    source.check()  # HDF5 reads zeros past the end of a file, which results could match
    gradients.check_passed(peers, reports, "verification failed, OUT is not written: ")
    return dict(zip(("verify", "verify_gradients", "verify_biases"), reports))


def _write(output, plan, results, added):
    layouts = {name: plan.k_layout if name in ("dk", "dv") else plan.q_layout for name in results}
    with Progress("write", sum(layout.seqlen for layout in layouts.values()), " tokens") as progress:
        chunks = (
            Written(name, chunk, layouts[name], axis=2 if name == "lse" else 1) for name, chunk in results.items()
        )
        output.write_each(chunks, progress)
        added.write(output, plan.k_layout)
    output.commit()


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


def _chosen(plan, args, axes, activity):
    """The chosen plan and the options given, for the attributes of OUT and the report; unset options are left out.

    padding, padding_k: tokens of the batch.
    """
    p = plan.problem
    asked = {
        "prefix": p.prefix or None,
        "causal_block": p.causal_block,
        "mask": None if p.mask is None else str(p.mask),
        "softcap": p.softcap,
        "documents": args.documents,
        "transport": plan.transport or None,
        "documents_k": args.documents_k,
    }
    if args.grid is not None:
        dims = [len(of_axis) for of_axis in plan.q_layout.sizes]
        asked |= {"grid": "x".join(map(str, args.grid)), "dims": "x".join(map(str, dims))}
    if args.padding:
        of_batch = padding_of(activity.documents, p.batch, p.seqlen, p.seqlen_k)
        asked |= dict(zip(("padding", "padding_k"), of_batch))
    if p.window != (None, None):
        asked["window"] = ",".join("" if side in (None, -1) else str(side) for side in args.window)
    if args.max_memory is not None:
        asked |= {"max_memory": args.max_memory, "memory_cost": plan.memory_cost}
    return {
        "axes": axes,
        "tile": str(plan.tile),
        "ranks": plan.tile.ranks,
        "machine": plan.machine.name,
        "predicted_seconds": plan.predicted_seconds,
        "layout": plan.q_layout.kind,
        "mesh_layout": plan.mesh_layout,
        "schedule": plan.schedule.name,
        "route": plan.route,
        "wire_dtype": p.wire_dtype,
        "backend": plan.backend,
        "causal": p.causal,
        "scale": p.scale,
        "backward": args.backward,
        **{name: value for name, value in asked.items() if value is not None},
    }
