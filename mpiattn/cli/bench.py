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
from dataclasses import asdict

from .. import __version__
from ..bench import decode, limits, measure, report
from ..bench.cases import cases
from ..bench.store import write_hdf5
from ..bench.summary import passes_of
from ..comm.agreement import agreement
from ..comm.mesh import nodes_of
from ..console import options
from ..console.json_file import check_json, is_stream, write_json
from ..console.launch import on_all_ranks
from ..errors import ArgumentError
from ..model import cost
from ..model.space import DIRECTIONS
from ..plots import style
from ..plots.timeline import timeline
from ..schedule.route import ROUTES
from ..system import host
from ..system.atomic_file import HDF5, check_target
from ..system.installation import mpi_library
from . import kernel


def add_arguments(parser):
    """Declare the arguments of `mpiattn bench`."""
    parser.add_argument("--seqlen", type=int, nargs="+", default=[4096], metavar="N", help="tokens (default: 4096)")
    parser.add_argument("--heads", type=int, default=8, metavar="H", help="query heads (default: %(default)s)")
    parser.add_argument(
        "--kv-heads", type=int, metavar="H", help="key and value heads, a divisor of --heads (default: --heads)"
    )
    parser.add_argument("--head-dim", type=int, default=128, metavar="D", help="elements of a head (default: 128)")
    options.add_values(parser)
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default: %(default)s)")
    options.add_dtype(parser)
    options.add_masks(parser)
    parser.add_argument(
        "--direction",
        default="forward",
        choices=tuple(DIRECTIONS),
        help="which passes to measure, and to choose for (default: %(default)s)",
    )
    parser.add_argument(
        "--tile",
        nargs="+",
        default=["auto", "ring"],
        metavar="TILE",
        help="tiles, as for `mpiattn run`; all: every tile of these ranks and heads (default: auto ring)",
    )
    parser.add_argument(
        "--schedule",
        nargs="+",
        default=["auto"],
        choices=(*cost.SCHEDULES, "auto"),
        metavar="NAME",
        help=f"{', '.join(cost.SCHEDULES)}, auto (default: auto)",
    )
    parser.add_argument(
        "--route",
        nargs="+",
        default=["auto"],
        choices=(*ROUTES, "auto"),
        metavar="NAME",
        help=f"{', '.join(ROUTES)}, auto (default: auto)",
    )
    parser.add_argument(
        "--no-overlap",
        action="store_true",
        help="measure every case without overlap too (except collective schedules, which have none)",
    )
    options.add_layout(parser)
    options.add_mesh_layout(parser)
    options.add_wire_dtype(parser)
    options.add_backend(parser)
    options.add_transport(parser)
    options.add_max_memory(parser)
    options.add_machine(parser)
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="measured runs (default: %(default)s)")
    parser.add_argument(
        "--warmup",
        type=int,
        default=1,
        metavar="N",
        help="unmeasured runs before them, besides the checked one (default: %(default)s)",
    )
    options.add_timeout(parser)
    options.add_json(parser)
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw the timeline of the slowest rank in the last run of the first case, predicted above "
        "measured: FILE.png, .svg or .pdf; needs the extra `plot`",
    )
    parser.add_argument("--hdf5", metavar="FILE", help="write every run of every rank as HDF5 too, whole or not at all")
    decode.add_arguments(parser)
    kernel.add_arguments(parser)
    limits.add_arguments(parser)


def run(args):
    """`mpiattn bench`."""
    work = kernel.run if args.kernel else _decode if args.decode else _limits if args.limits else _run
    return on_all_ranks(lambda job: _checked(work, job, args), args.timeout)


def _checked(work, job, args):
    with agreement(job.peers, only=0):
        if job.comm.rank == 0:
            _check(args)
    return work(job, args)


def _decode(job, args):
    for number, data in enumerate(decode.measure(job, args), 1):
        with agreement(job.peers, only=0):
            if job.comm.rank == 0:
                _keep(args, data, number == len(args.seqlen))
                if args.json != "-":
                    print(
                        *[decode.head_text(data)][number - 1 :],
                        decode.result_text(data["results"][-1]),
                        sep="\n",
                        flush=True,
                    )
    return 0


def _limits(job, args):
    data = limits.measure(job, args)
    with agreement(job.peers, only=0):
        if job.comm.rank == 0:
            _keep(args, data, True)
            if args.json != "-":
                print(limits.as_text(data), flush=True)
    return 0


def _run(job, args):
    comm, peers = job.comm, job.peers
    with agreement(peers):
        which = args.tile, args.schedule, args.route, args.no_overlap, args.heads, args.kv_heads, args.batch
        asked = cases(comm.size, args.seqlen, *which)
    how = {
        name: getattr(args, name)
        for name in (
            "heads",
            "kv_heads",
            "head_dim",
            "value_dim",
            "shared_kv",
            "batch",
            "dtype",
            "causal",
            "prefix",
            "causal_block",
            "window",
            "direction",
            "layout",
            "mesh_layout",
            "wire_dtype",
            "backend",
            "transport",
            "max_memory",
            "machine",
            "timeout",
        )
    }
    data, passes = {"mpiattn": __version__, "ranks": comm.size, **_environment(peers)}, []
    for number, of_size in enumerate(asked, 1):
        measured = measure.measure(job, of_size, how, DIRECTIONS[args.direction], args.runs, args.warmup)
        by_plan = [passes_of(plan, measured.problem) for plan in measured.plans]
        summaries = [{name: timed.summary() for name, timed in of_plan.items()} for of_plan in by_plan]
        measured_cases = report.cases_as_data(of_size, measured.which, measured.plans, summaries)
        passes += [by_plan[i] for i in measured.which]
        data |= {
            "backend": measured.backend,
            "transport": measured.transport,
            "compute": measured.compute,
            "machine": measured.machine.as_dict(),
            "problem": _problem(measured.problem),
            "direction": args.direction,
            "runs": args.runs,
            "warmup": args.warmup,
            "cases": [*data.get("cases", []), *measured_cases],
        }
        with agreement(peers, only=0):
            if comm.rank == 0:
                if args.hdf5:
                    write_hdf5(args.hdf5, data, passes)
                if args.plot and number == len(asked):
                    _plot(args.plot, measured, measured_cases[0])
                _keep(args, data, number == len(asked))
        if comm.rank == 0 and args.json != "-":
            print(*[report.head_text(data)][number - 1 :], report.size_text(measured_cases, data), sep="\n", flush=True)
    return 0


def _keep(args, data, last):
    """Write JSON: a file after each size, so that an interrupted job keeps it; a stream once, at the end."""
    if args.json and (last or not is_stream(args.json)):
        write_json(args.json, data)


def _check(args):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    for kind, module in (("decode", decode), ("kernel", kernel), ("limits", limits)):
        asked = getattr(args, kind)
        unused = defaults.keys() - module.SHARED - module.OWN if asked else module.OWN
        for name in sorted(unused):
            if getattr(args, name) != defaults[name]:
                raise ArgumentError(
                    f"--{name.replace('_', '-')} is {getattr(args, name)!r}; it has no meaning "
                    f"{'with' if asked else 'without'} --{kind}"
                )
    for name, least in (("runs", 1), ("warmup", 0)):
        if getattr(args, name) < least:
            raise ArgumentError(f"--{name} is {getattr(args, name)}; it must be at least {least}")
    check_json(args.json)
    if args.hdf5:
        check_target("--hdf5", args.hdf5, (), HDF5)
    if args.plot:
        style.check("--plot", args.plot)


def _plot(path, measured, case):
    """Draw the first case of the last size."""
    pairs = []
    for name, (predicted, traced) in measured.timelines.items():
        pairs += [
            (f"{name}, predicted for {measured.machine.name}", predicted),
            (f"{name}, measured{', emulated compute' * (measured.compute != 'real')}", traced),
        ]
    p = measured.problem
    title = (
        f"{p.seqlen} tokens x {p.heads} heads x {p.head_dim}, {p.dtype}, tile {case['tile']}, {case['schedule']}, "
        f"{case['route']} route"
    )
    style.save(timeline(pairs, title=title), path, "--plot")


def _problem(problem):
    """The part of a problem that is the same for all sizes."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(problem).items()
        if name not in ("seqlen", "seqlen_k")
    }


def _environment(peers):
    """The hosts, cores, BLAS and versions of this launch; collective."""
    nodes, cores = nodes_of(peers), peers.allgather(len(host.cores()))
    blas, threads = host.blas()
    ranks, cores = max(
        ((nodes.count(node), count) for node, count in zip(nodes, cores)), key=lambda pair: pair[0] / pair[1]
    )
    return {
        "hosts": max(nodes) + 1,
        "environment": {
            "processor": host.processor(),
            "cores": cores,
            "ranks_on_host": ranks,
            "blas": blas,
            "blas_threads": threads,
        },
        "versions": {"numpy": host.version("numpy"), "mpi": mpi_library()},
    }
