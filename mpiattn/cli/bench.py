"""Measure the speed of attention on the ranks of this launch: a sweep over sizes, tiles, schedules and routes.

Every rank makes its own tokens. Each case is first run once and compared with float64 attention, on all rows or on a
seeded sample; a wrong result is reported and ends the benchmark. Then the cases of a size are run in turn (run 1 of
each, run 2 of each, ...), so that drift of the machine affects all cases alike. Cases that resolve to the same plan are
run once. After each size its table is printed and the files are rewritten, so an interrupted job keeps the sizes
that are done. With --direction both a run is a forward pass followed by a backward pass.

  median     seconds of the slowest rank, median over runs; "runs": their range; "ranks": range of the ranks' medians
  GFLOP/s    operations of all attended pairs / median: 2 (head_dim + value_dim) per pair and head, backward 2.5 times
  of ideal   time that the busiest rank would take without transfers / median; the speed without transfers is
             measured on all ranks at once, in turn with the cases
  waits      share of its time that a rank waits for transfers, mean over ranks
  algorithm  bytes of the whole q, k, v and out (backward: also dout, dq, dk and dv) / median
  bus        bytes that a rank has sent, mean over ranks, / median
  predicted  time predicted for the plan's machine; see --machine

--decode measures decoding instead, over sequences whose keys are spread over the ranks: every algorithm that combines
the ranks' results, each checked too, beside rings and a plain MPI_Allreduce; see the options at the end.
--kernel measures the back end of one rank, one block at a time without transfers, beside PyTorch's attention where
that is installed: forward, backward, decoding over pages, adding to a partial result, and the cost of a launch.
--limits measures the library's operations beside what bounds them on this machine.

examples:
  mpiattn bench --kernel --seqlen 8192 16384 --heads 32 --dtype bfloat16 --causal --direction both
  mpiexec -n 4 mpiattn bench --seqlen 4096 8192 --tile all --causal
  mpiexec -n 4 mpiattn bench --direction both --tile auto ring --schedule greedy collective --json bench.json
  mpiexec -n 4 mpiattn bench --heads 16 --kv-heads 1 --head-dim 576 --value-dim 512 --shared-kv --causal
  srun mpiattn bench --seqlen 131072 --heads 32 --kv-heads 8 --dtype bfloat16 --no-overlap --hdf5 bench.h5
  mpiexec -n 4 mpiattn bench --decode --seqlen 65536 1000000 --heads 32 --kv-heads 8 --algorithm butterfly allreduce
  mpiexec -n 2 mpiattn bench --limits
"""

import argparse
import math

from ..bench import decode, environment, limits, measure, report
from ..bench.cases import cases
from ..bench.store import write_hdf5
from ..bench.summary import passes_of
from ..comm.agreement import agreement
from ..comm.mesh import by_node
from ..console import options
from ..console.json_file import check_json, report_parts
from ..console.launch import on_all_ranks
from ..console.table import written
from ..errors import ArgumentError
from ..files.trace_file import write as write_trace
from ..model import cost
from ..model.space import DIRECTIONS
from ..plots import style
from ..plots.timeline import timeline
from ..schedule.route import ROUTES
from ..schedule.tile import DIVISIONS, MESH
from ..system import host
from ..system.atomic_file import HDF5, JSON, check_target
from ..version import __version__
from . import kernel

KINDS = {"decode": decode, "kernel": kernel, "limits": limits}  # instead of a sweep, by the option that asks for them
SEQLEN = [4096]
PLAN = "mesh-layout", "wire-dtype", "backend", "transport", "max-memory", "machine"  # options


def add_arguments(parser):
    """Declare the arguments of `mpiattn bench`."""
    parser.add_argument("--seqlen", type=int, nargs="+", default=SEQLEN, metavar="N", help="tokens (default: 4096)")
    parser.add_argument("--heads", type=int, default=8, metavar="H", help="query heads (default: %(default)s)")
    options.add(parser, "kv-heads")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D", help="elements of a head (default: 128)")
    options.add(parser, *options.VALUES, "batch")
    options.add_dtype(parser)
    options.add(parser, *options.MASKS, "mask", "alibi")
    parser.add_argument(
        "--bias",
        action="store_true",
        help="add a dense bias to the scores, (batch, heads, seqlen, seqlen) in the dtype of lse, and compute its "
        "gradient too",
    )
    options.add_direction(parser, "which passes to measure, and to choose for")
    parser.add_argument(
        "--tile",
        nargs="+",
        default=["auto", "ring"],
        metavar="TILE",
        help="tiles, as for `mpiattn run`; all: every tile of these ranks and heads, and bands where the other options "
        "allow it (default: auto ring)",
    )
    for name, known in (("--schedule", cost.SCHEDULES), ("--route", ROUTES)):
        parser.add_argument(
            name,
            nargs="+",
            default=["auto"],
            choices=(*known, "auto"),
            metavar="NAME",
            help=f"{', '.join(known)}, auto (default: auto)",
        )
    parser.add_argument(
        "--no-overlap",
        action="store_true",
        help="measure every case without overlap too (except collective schedules, which have none)",
    )
    options.add(parser, "layout", "grid", "dims", *PLAN)
    runs = ("runs", 5, "measured runs"), ("warmup", 1, "unmeasured runs before them, besides the checked one")
    options.add_numbers(parser, *runs, metavar="N")
    options.add_timeout(parser)
    options.add(parser, "json")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw the timeline of the slowest rank in the last run of the first case, predicted above "
        "measured: FILE.png, .svg or .pdf; needs the extra `plot`",
    )
    options.add_trace(parser, "of the last run of the first case")
    parser.add_argument("--hdf5", metavar="FILE", help="write every run of every rank as HDF5 too, whole or not at all")
    for kind in KINDS.values():
        kind.add_arguments(parser)


def run(args):
    """`mpiattn bench`."""
    chosen = next((kind for name, kind in KINDS.items() if getattr(args, name)), None)
    measured = chosen.measure if chosen else _sweep

    def work(job):
        job.on_rank_0(lambda: _check(args))
        return report_parts(job, args.json, measured(job, args))

    return on_all_ranks(work, args.timeout)


def _check(args):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    for name, kind in KINDS.items():
        asked = getattr(args, name)
        unused = defaults.keys() - kind.SHARED - kind.OWN if asked else kind.OWN
        for option in sorted(unused):
            if getattr(args, option) != defaults[option]:
                raise ArgumentError(
                    f"--{option.replace('_', '-')} is {getattr(args, option)!r}; it has no meaning "
                    f"{'with' if asked else 'without'} --{name}"
                )
    options.check_least("runs", args.runs, 1)
    options.check_least("warmup", args.warmup, 0)
    check_json(args.json)
    if args.hdf5:
        check_target("--hdf5", args.hdf5, (), HDF5)
    if args.plot:
        style.check("--plot", args.plot)
    if args.trace is not None:
        check_target("--trace", args.trace, filter(None, [args.json, args.hdf5]), JSON)


def _sweep(job, args):
    """Yield the results so far after each size, as data and text; write the other files."""
    comm, peers = job.comm, job.peers
    with agreement(peers):
        planes = args.heads, args.kv_heads or args.heads, args.batch
        seqlens = [math.prod(args.grid)] if args.grid is not None and args.seqlen == SEQLEN else args.seqlen
        mask = options.mask_of(args)
        layouts = [options.layout_of(args, comm.size, seqlen) for seqlen in seqlens]
        if args.bias and not set(DIVISIONS).isdisjoint(args.tile):
            raise ArgumentError(
                f"--bias and --tile {' '.join(args.tile)} are given; ranks that compute pieces of the scores have no "
                "tile of a bias"
            )
        tiles = args.tile
        if args.bias:  # of which only ranks of a mesh have tiles
            tiles = [MESH if tile == "auto" else tile for tile in tiles]
        # "all" are the tiles of which there are plans with these options
        pieces = not args.bias and args.mesh_layout == "auto"
        asked = cases(comm.size, seqlens, tiles, args.schedule, args.route, args.no_overlap, planes, pieces)
    how = options.given(args, *options.SHAPE, *options.MASKS, *PLAN, "direction", "timeout")
    how["scale"] = how["head_dim"] ** -0.5  # that of random numbers, also where it has no default
    how |= {"layout": layouts[0], "mask": mask}
    biases = options.given(args, "alibi", "bias")
    data, passes = {"mpiattn": __version__, "ranks": comm.size, **_environment(peers)}, []
    for number, of_size in enumerate(asked, 1):
        last = number == len(asked)
        counts = args.runs, args.warmup
        traced = bool(args.trace) and last
        measured = measure.measure(job, of_size, how, DIRECTIONS[args.direction], *counts, biases, traced)
        plan = measured.plan
        by_plan = [passes_of(figures, plan.problem) for figures in measured.plans]
        summaries = [{name: timed.summary() for name, timed in of_plan.items()} for of_plan in by_plan]
        measured_cases = report.cases_as_data(of_size, measured.which, measured.plans, summaries)
        passes += [by_plan[i] for i in measured.which]
        data |= {
            "backend": plan.backend,
            "transport": plan.transport,
            "compute": measured.compute,
            "machine": plan.machine.as_dict(),
            "problem": _problem(plan.problem),
            **options.given(args, "direction", "runs", "warmup"),
            **biases,
            "cases": [*data.get("cases", []), *measured_cases],
        }
        with agreement(peers, only=0):
            if comm.rank == 0 and args.hdf5:
                write_hdf5(args.hdf5, data, passes)
            if comm.rank == 0 and args.plot and last:
                _plot(args.plot, measured, measured_cases[0])
            if measured.trace:
                write_trace("--trace", args.trace, measured.trace)
        head = report.head_text(data) + "\n" if number == 1 else ""
        files = written(args.plot, args.trace, args.hdf5, args.json) if last else ""
        yield data, head + report.size_text(measured_cases, data) + (f"\n\nwritten  {files}" if files else "")


def _plot(path, measured, case):
    """Draw the first case of the last size."""
    pairs = []
    for name, (predicted, traced) in measured.timelines.items():
        pairs += [
            (f"{name}, predicted for {measured.plan.machine.name}", predicted),
            (f"{name}, measured{', emulated compute' * (measured.compute != 'real')}", traced),
        ]
    p = measured.plan.problem
    title = (
        f"{p.seqlen} tokens x {p.heads} heads x {p.head_dim}, {p.dtype}, tile {case['tile']}, {case['schedule']}, "
        f"{case['route']} route"
    )
    style.save(timeline(pairs, title=title), path, "--plot")


def _problem(problem):
    """The part of a problem that is the same for all sizes."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in problem.as_dict().items()
        if name not in ("seqlen", "seqlen_k")
    }


def _environment(peers):
    """The hosts, cores, BLAS and versions of this launch; collective."""
    hosts = by_node(peers, len(host.cores()))
    ranks, cores = max(
        ((len(counts), count) for counts in hosts for count in counts), key=lambda pair: pair[0] / pair[1]
    )
    return {
        "hosts": len(hosts),
        "environment": environment.machine(cores=cores, ranks_on_host=ranks),
        "versions": environment.versions(),
    }
