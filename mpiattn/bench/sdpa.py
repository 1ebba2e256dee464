"""Measure mpiattn on the ranks of this launch against PyTorch's scaled_dot_product_attention on the same machine.

  mpiexec -n 2 python -m mpiattn.bench.sdpa --causal
  mpiexec -n 2 python -m mpiattn.bench.sdpa --causal --backward
  mpiexec -n 4 python -m mpiattn.bench.sdpa --all-tiles --seqlen 8192 --json sdpa.json

PyTorch computes the whole problem on --threads threads of rank 0's process while the other ranks sleep. Both are
warmed up, checked against each other, and then measured in turn: mpiattn, torch, mpiattn, torch, ... The time of
mpiattn is that of the slowest rank. Inputs are in place before the measurement. Needs the extra `bench`.
"""

import argparse
import os
import sys
import time

import numpy as np
from mpi4py import MPI

from ..comm.agreement import agreement
from ..comm.mesh import nodes_of
from ..console import options
from ..console.json_file import write_json
from ..console.launch import on_all_ranks
from ..console.parser import Parser
from ..console.table import duration, facts, table
from ..errors import ArgumentError, MpiattnError, VerificationError
from ..model.machine import PRODUCTS
from ..plan.mesh_attention import MeshAttention
from ..schedule.tile import parse_tile, tiles
from ..system import host
from ..system.installation import mpi_library
from ..system.words import number
from ..version import __version__
from .baseline import TOLERANCE, from_torch, load_torch, to_torch

POLL = 2e-3  # seconds between polls of a sleeping rank
SETTLE = 0.05  # seconds for OpenMP threads to stop spinning after their last work


def _arguments():
    parser = Parser(
        prog="python -m mpiattn.bench.sdpa", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, meaning in (
        ("--seqlen", 4096, "tokens"),
        ("--heads", 8, "heads"),
        ("--head-dim", 128, "elements per head"),
        ("--runs", 7, "measured runs of each"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{meaning} (default: %(default)s)")
    parser.add_argument("--causal", action="store_true", help="a query sees the keys up to its own position")
    parser.add_argument("--backward", action="store_true", help="measure the backward pass alone")
    options.add_dtype(parser)
    parser.add_argument("--threads", type=int, help="threads of torch (default: the number of ranks)")
    which = parser.add_mutually_exclusive_group()
    options.add_tile(which)
    which.add_argument("--all-tiles", action="store_true", help="measure every tile of the ranks")
    for add in (options.add_schedule, options.add_layout, options.add_route, options.add_backend, options.add_json):
        add(parser)
    return parser


class _Torch:
    """The baseline, on rank 0: the whole attention in one process.

    It runs on the cores of all ranks of this host, since launchers may bind a rank to one core.
    """

    def __init__(self, threads, cores, arrays, causal, backward):
        torch = load_torch()
        if torch is None:
            raise MpiattnError("torch is not installed; the `bench` extra has it: pip install 'mpiattn[bench]'")
        self.torch, self.cores, self.causal = torch, cores, causal
        with self.spread():
            torch.set_num_threads(threads)
            arrays = [to_torch(torch, array[0], "cpu") for array in arrays]
            self.arrays, self.dout, self.out = arrays[:3], arrays[3], None
            if backward:
                for array in self.arrays:
                    array.requires_grad_()
                self.out = self._attention()

    def spread(self):
        return _Affinity(self.cores)

    def _attention(self):
        return self.torch.nn.functional.scaled_dot_product_attention(*self.arrays, is_causal=self.causal)

    def __call__(self):
        """Run the pass; returns seconds, and out or dq, dk, dv as tensors."""
        with self.spread(), self.torch.inference_mode(self.out is None):
            start = time.perf_counter()
            if self.out is None:
                results = [self._attention()]
            else:
                results = self.torch.autograd.grad(self.out, self.arrays, self.dout, retain_graph=True)
            seconds = time.perf_counter() - start
        return seconds, results

    def results(self):
        """Those of the pass in float64, as (1, tokens, heads, dim)."""
        return [from_torch(self.torch, result).astype(np.float64)[None] for result in self()[1]]


class _Affinity:
    """Runs its body on other cores; threads started in it stay on them."""

    def __init__(self, cores):
        self.cores, self.before = cores, None

    def __enter__(self):
        if hasattr(os, "sched_setaffinity"):
            self.before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self.cores)

    def __exit__(self, *exception):
        if self.before is not None:
            os.sched_setaffinity(0, self.before)


def asleep(peers, work):
    """Run work() on rank 0 while the other ranks sleep; returns its result there, None elsewhere; collective.

    A blocking MPI call would occupy a core that the work needs.
    """
    result = work() if peers.rank == 0 else None
    idle, peers.idle = peers.idle, lambda: time.sleep(POLL)
    peers.barrier()
    peers.idle = idle
    time.sleep(SETTLE)
    return result


class _Mesh:
    """A plan and this rank's chunks; calling it runs a pass and returns seconds of the slowest rank and the results."""

    def __init__(self, peers, plan, chunks, backward):
        self.peers, self.plan, self.inputs, self.dout = peers, plan, chunks[:3], chunks[3]
        self.forward = plan.forward(*self.inputs) if backward else None

    def __call__(self):
        self.peers.barrier()
        start = time.perf_counter()
        if self.forward is None:
            results = self.plan.forward(*self.inputs)[:1]
        else:
            results = self.plan.backward(self.dout, *self.inputs, *self.forward)
        seconds = np.array([time.perf_counter() - start])
        self.peers.reduce(seconds, MPI.MAX)
        return float(seconds[0]), results


def _check(args, ranks):
    """Check the arguments; returns the tiles to measure, as arguments of MeshAttention."""
    for name, least in (("seqlen", 1), ("heads", 1), ("head_dim", 1), ("runs", 1), ("threads", 1)):
        if getattr(args, name) < least:
            raise ArgumentError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least {least}")
    parse_tile(args.tile, ranks)
    return tiles(ranks) if args.all_tiles else [args.tile]


def _host_of_rank_0(peers):
    """Ranks on the host of rank 0, and the cores that they may use together."""
    cores = [cores for node, cores in zip(nodes_of(peers), peers.allgather(host.cores())) if node == 0]
    return len(cores), set().union(*cores)


def _run(job, args):
    comm, peers = job.comm, job.peers
    args.threads = comm.size if args.threads is None else args.threads
    local_ranks, cores = _host_of_rank_0(peers)
    arrays, torch = [None] * 4, None
    with agreement(peers):
        shapes = _check(args, comm.size)
        if comm.rank == 0:
            shape = (1, args.seqlen, args.heads, args.head_dim)
            random = np.random.default_rng(0)
            arrays = [random.standard_normal(shape, np.float32).astype(args.dtype, copy=False) for _ in arrays]
            torch = _Torch(args.threads, cores, arrays, args.causal, args.backward)
    plans, layout = [], args.layout
    for shape in shapes:
        plans.append(
            MeshAttention(
                comm,
                seqlen=args.seqlen,
                heads=args.heads,
                head_dim=args.head_dim,
                dtype=args.dtype,
                causal=args.causal,
                tile=shape,
                schedule=args.schedule,
                layout=layout,
                route=args.route,
                backend=args.backend,
            )
        )
        layout = plans[0].q_layout, plans[0].k_layout  # the first plan's layout, for all
    chunks = [plans[0].scatter(array) for array in arrays]
    passes = [_Mesh(peers, plan, chunks, args.backward) for plan in plans]
    differences = _compare(peers, args, passes, torch)
    seconds, baseline = [[] for _ in plans], []
    for _ in range(args.runs):
        for run, of_plan in zip(passes, seconds):
            of_plan.append(run()[0])
        baseline.append(asleep(peers, lambda: torch()[0]))
    with agreement(peers):
        if comm.rank == 0:
            _tell(args, comm.size, local_ranks, len(cores), plans, seconds, baseline, differences)
    for plan in plans:
        plan.close()
    return 0


def _compare(peers, args, passes, torch):
    """Warm up; returns each plan's largest difference from torch's results, relative to torch's largest value."""
    expected = asleep(peers, lambda: torch.results())
    differences = []
    for run in passes:
        wholes = [run.plan.gather(result) for result in run()[1]]
        with agreement(peers, only=0):
            if peers.rank == 0:
                differences.append(
                    max(
                        float(np.abs(whole.astype(np.float64) - result).max() / np.abs(result).max())
                        for whole, result in zip(wholes, expected)
                    )
                )
                if not differences[-1] <= TOLERANCE[args.dtype]:
                    raise VerificationError(
                        f"tile {run.plan.tile} differs from torch by {differences[-1]:.2g} of "
                        f"the largest value, more than {TOLERANCE[args.dtype]:g}"
                    )
    return differences


# Output


def _result(name, seconds, flops, baseline, **more):
    low, median, high = (float(x) for x in np.percentile(seconds, (25, 50, 75)))
    return {
        "name": name,
        **more,
        "median": median,
        "quartiles": [low, high],
        "gflops_per_second": flops / median / 1e9,
        "time_over_torch": median / float(np.median(baseline)),
        "seconds": seconds,
    }


def _tell(args, ranks, local_ranks, cores, plans, seconds, baseline, differences):
    direction = "backward" if args.backward else "forward"
    flops = plans[0].problem.flops * PRODUCTS[direction]
    results = [
        _result(
            "mpiattn", of_plan, flops, baseline, tile=str(plan.tile), schedule=plan.schedule.name, difference=difference
        )
        for plan, of_plan, difference in zip(plans, seconds, differences)
    ]
    results.append(_result("torch", baseline, flops, baseline, threads=args.threads))
    blas, threads = host.blas()
    data = {
        "seqlen": args.seqlen,
        "heads": args.heads,
        "head_dim": args.head_dim,
        "dtype": args.dtype,
        "causal": args.causal,
        "direction": direction,
        "flops": flops,
        "runs": args.runs,
        "ranks": ranks,
        "ranks_on_host": local_ranks,
        "layout": plans[0].q_layout.kind,
        "route": plans[0].route,
        "backend": plans[0].backend,
        "machine": {"processor": host.processor(), "cores": cores, "blas": blas, "blas_threads": threads},
        "versions": {
            "mpiattn": __version__,
            "numpy": host.version("numpy"),
            "torch": host.version("torch"),
            "mpi": mpi_library(),
        },
        "results": results,
    }
    if args.json:
        write_json(args.json, data)
    if args.json != "-":
        print(_text(data), flush=True)


def _text(data):
    machine, versions = data["machine"], data["versions"]
    worst = max(row["difference"] for row in data["results"][:-1])
    head = [
        (
            "problem",
            f"{data['seqlen']} tokens, {data['heads']} heads x {data['head_dim']}, {data['dtype']}, "
            f"{'causal' if data['causal'] else 'full'}, {data['direction']}: "
            f"{data['flops'] / 1e9:.4g} Gflop",
        ),
        (
            "mpiattn",
            f"{versions['mpiattn']}: {data['ranks']} ranks, {data['ranks_on_host']} of them on the host of "
            f"torch; BLAS threads of each: {machine['blas_threads'] or 'unknown'}",
        ),
        ("plan", f"{data['layout']} layout, {data['route']} route, {data['backend']} back end"),
        ("machine", f"{machine['processor']}, {machine['cores']} cores in use"),
        (
            "versions",
            f"NumPy {versions['numpy']} ({machine['blas'] or 'unknown BLAS'}), torch {versions['torch']}, "
            f"{versions['mpi']}",
        ),
        ("difference", f"{worst:.2g} of the largest value, at most; {TOLERANCE[data['dtype']]:g} is allowed"),
        ("measured", f"{data['runs']} runs of each, in turn"),
    ]
    if machine["cores"] < max(data["ranks_on_host"], data["results"][-1]["threads"]):
        head.append(("WARNING", "fewer cores than ranks or threads: these times say little"))
    rows = []
    for row in data["results"]:
        name = (
            f"mpiattn {row['tile']} {row['schedule']}"
            if row["name"] == "mpiattn"
            else f"torch, {number(row['threads'], 'thread')}"
        )
        rows.append(
            (
                name,
                duration(row["median"]),
                " - ".join(map(duration, row["quartiles"])),
                f"{row['gflops_per_second']:.3g}",
                f"{row['time_over_torch']:.3f}",
            )
        )
    return f"{facts(head)}\n\n{table(rows, ('', 'median', 'quartiles', 'GFLOP/s', 'time over torch'))}"


def main(argv=None):
    """Run the benchmark; returns the exit code."""
    args = _arguments().parse_args(argv)
    return on_all_ranks(lambda job: _run(job, args))


if __name__ == "__main__":
    sys.exit(main())
