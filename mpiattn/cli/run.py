"""Exact attention of an HDF5 file over the ranks of this launch.

IN holds q (batch, seqlen, heads, head_dim), k and v (batch, seqlen_k, kv_heads, ...) in natural token order.
Every rank reads one contiguous slab, the ranks exchange tokens into the layout, compute, and give the result
back. OUT holds out, as q, and lse (batch, heads, seqlen), and as attributes what was chosen. It appears whole
or not at all; an existing file is replaced.
"""

import resource
import socket
import time
from dataclasses import asdict
from functools import partial

from .. import __version__, hdf5, io, traffic
from ..activity import Activity
from ..agreement import agreement
from ..errors import VerificationError
from ..exchange import MAX_MESSAGE
from ..plan import MeshAttention
from ..verify import choose_rows, verify
from . import options
from .jsonfile import check_json, write_json
from .launch import on_all_ranks
from .progress import Progress
from .table import duration, facts, percent, size


def add_arguments(parser):
    """Declare the arguments of `mpiattn run`."""
    parser.add_argument("input", metavar="IN", help="HDF5 file with datasets q, k, v")
    parser.add_argument("output", metavar="OUT", help="HDF5 file to make, with datasets out, lse")
    parser.add_argument("--causal", action="store_true",
                        help="a query sees the keys up to its own position; the last query sees all")
    parser.add_argument("--scale", type=float, help="of the scores (default: 1/sqrt(head_dim))")
    options.add_tile(parser)
    options.add_schedule(parser)
    options.add_layout(parser)
    options.add_route(parser)
    options.add_backend(parser)
    parser.add_argument("--max-message", type=int, default=MAX_MESSAGE, metavar="BYTES",
                        help="longest MPI message; longer ones are split (default: %(default)s)")
    parser.add_argument("--verify", action="store_true",
                        help="every rank checks its rows, before they are written, in float64 against Q, K and V read "
                             "again from IN; a sample where that is too much work; code 1 and no OUT if one is off")
    options.add_json(parser)


def run(args):
    """`mpiattn run`."""
    return on_all_ranks(lambda comm: _run(comm, args))


def _peak():
    """Most memory that this process has had resident, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Clock:
    """Seconds of each phase, the ranks starting it together."""

    def __init__(self, comm):
        self.comm, self.seconds = comm, {}

    def __call__(self, phase, work):
        self.comm.Barrier()
        start = time.perf_counter()
        result = work()
        self.comm.Barrier()
        self.seconds[phase] = time.perf_counter() - start
        return result


def _run(comm, args):
    with agreement(comm, only=0):
        if comm.rank == 0:
            check_json(args.json, (args.input, args.output))
    clock, before = _Clock(comm), _peak()
    source = io.Input(comm, args.input, args.max_message)
    plan = MeshAttention(comm, **source.shapes, causal=args.causal, scale=args.scale, tile=args.tile,
                         layout=args.layout, schedule=args.schedule, route=args.route, backend=args.backend,
                         max_message=args.max_message)
    p = plan.problem
    shapes = {"out": ((p.batch, p.seqlen, p.heads, p.value_dim), p.dtype),
              "lse": ((p.batch, p.heads, p.seqlen), p.partial_dtype)}
    output = io.Output(comm, args.output, shapes, (args.input,), args.max_message)
    try:
        q, k, v = clock("read", lambda: _read(source, plan))
        out, lse = clock("forward", partial(_forward, plan, q, k, v))
        local = _local(plan, comm)
        chosen = _chosen(plan)
        plan.close()                            # its buffers make room for what follows
        del q, k, v
        report = clock("verify", lambda: _verify(comm, plan, source, out, lse)) if args.verify else None
        source.close()
        clock("write", lambda: _write(output, plan, out, lse, chosen))
    finally:
        output.abandon()                        # does nothing once the file has its name
    local["peak_bytes"], local["peak_bytes_before"] = _peak(), before
    ranks = comm.gather(local)
    with agreement(comm, only=0):
        if comm.rank == 0 and args.json:
            write_json(args.json, _as_json(args, p, chosen, clock.seconds, ranks, report))
    if comm.rank == 0 and args.json != "-":
        print(_as_text(args, p, chosen, clock.seconds, ranks, report), flush=True)
    return 0


def _read(source, plan):
    layouts = {"q": plan.q_layout, "k": plan.k_layout, "v": plan.k_layout}
    slabs = sum(layout.seqlen for layout in layouts.values()) / plan.q_layout.chunks
    with Progress("read", slabs, " tokens") as progress:
        return [source.chunk(name, layout, progress) for name, layout in layouts.items()]


def _forward(plan, q, k, v):
    with Progress("forward", plan.tile[0] * plan.tile[1], " blocks") as progress:
        return plan.forward(q, k, v, progress=progress)


def _verify(comm, plan, source, out, lse):
    def read(name, start, stop):
        with hdf5.file_errors("IN", source.path, "read"):
            return source.file[name][:, start:stop]
    with Progress("verify", len(choose_rows(plan.problem, plan.q_layout, comm.rank)), " rows") as progress:
        report = verify(comm, plan.problem, plan.q_layout, out, lse, read, progress=progress)
    if not report.passed:
        error = VerificationError(f"verification failed, OUT is not written: {report}")
        error.everywhere = True                 # the report is the same on every rank
        raise error
    return report


def _write(output, plan, out, lse, attributes):
    with Progress("write", 2 * plan.problem.seqlen, " tokens") as progress:
        output.write("out", out, plan.q_layout, axis=1, progress=progress)
        output.write("lse", lse, plan.q_layout, axis=2, progress=progress)
    output.commit(attributes)


def _local(plan, comm):
    """What this rank has to say of the forward pass."""
    lengths, rank, (a, b), route = (plan.q_layout.lengths, plan.k_layout.lengths), comm.rank, plan.tile, plan.route
    ring = Activity(plan.problem.mask, plan.q_layout, plan.k_layout, 1, comm.size)
    return {"rank": rank, "host": socket.gethostname(), "tokens": lengths[0][rank], "tokens_k": lengths[1][rank],
            "sent_bytes": plan.sent[0], "sent_messages": plan.sent[1], "wait_seconds": plan.wait_seconds,
            "formula_bytes": traffic.sent(plan.problem, *lengths, a, b, rank, route, activity=plan.activity,
                                          collective=plan.schedule.name == "collective").total,
            "ring_bytes": traffic.sent(plan.problem, *lengths, 1, comm.size, rank, route, activity=ring).total,
            "nbytes": plan.nbytes}


def _chosen(plan):
    """What was chosen and asked, for the attributes of OUT and the report."""
    p, (a, b) = plan.problem, plan.tile
    return {"mpiattn": __version__, "tile": f"{a}x{b}", "ranks": a * b, "layout": plan.q_layout.kind,
            "schedule": plan.schedule.name, "route": plan.route, "backend": plan.backend, "causal": p.causal,
            "scale": p.scale}


def _span(values, show=str):
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"


def _as_json(args, problem, chosen, seconds, ranks, report):
    return {"input": args.input, "output": args.output, **chosen, "problem": asdict(problem), "flops": problem.flops,
            "gflops_per_second": problem.flops / seconds["forward"] / 1e9, "seconds": seconds,
            "verify": report and {**report._asdict(), "passed": report.passed}, "per_rank": ranks}


def _as_text(args, problem, chosen, seconds, ranks, report):
    p, forward = problem, seconds["forward"]
    a, b = map(int, chosen["tile"].split("x"))
    waits = [rank["wait_seconds"] / forward for rank in ranks]
    sent, formula, ring = (sum(rank[name] for rank in ranks) / len(ranks)
                           for name in ("sent_bytes", "formula_bytes", "ring_bytes"))
    equal = all(rank["sent_bytes"] == rank["formula_bytes"] for rank in ranks)
    hosts = len({rank["host"] for rank in ranks})
    rows = [
        ("problem", f"q ({p.batch}, {p.seqlen}, {p.heads}, {p.head_dim}), k ({p.batch}, {p.seqlen_k}, {p.kv_heads}, "
                    f"{p.head_dim}), {p.dtype}, {'causal' if p.causal else 'full'}"),
        ("mesh", f"{b} rows x {a} columns (tile {chosen['tile']}): {len(ranks)} ranks on "
                 f"{hosts} host{'s' * (hosts > 1)}"),
        ("schedule", f"{chosen['schedule']}, {chosen['route']} route, {chosen['layout']} layout, "
                     f"{chosen['backend']} back end"),
        ("tokens per rank", _span([rank["tokens"] for rank in ranks])),
        ("time", f"{duration(forward)} forward; " + ", ".join(
            f"{duration(s)} {phase}" for phase, s in seconds.items() if phase != "forward")),
        ("speed", f"{p.flops / forward / 1e9:.3g} GFLOP/s"),
        ("waiting", f"{percent(sum(waits) / len(waits))} of forward, mean over ranks (most: {percent(max(waits))})"),
        ("sent per rank", f"{size(sent)}; formula: {size(formula)}, {'equal on every rank' if equal else 'DIFFERENT'}; "
                          f"Ring: {size(ring)}" + (f", saved {percent(1 - sent / ring)}" if ring else "")),
        ("memory per rank", f"{_span([rank['nbytes'] for rank in ranks], size)} planned (nbytes); peak resident "
                            f"{_span([rank['peak_bytes'] for rank in ranks], size)}, of which "
                            f"{_span([rank['peak_bytes_before'] for rank in ranks], size)} before the plan"),
    ]
    if report:
        rows.append(("verify", report))
    rows.append(("written", args.output))
    return facts(rows)
