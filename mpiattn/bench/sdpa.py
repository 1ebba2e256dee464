"""Measure mpiattn on the ranks of this launch against PyTorch's scaled_dot_product_attention on the same machine.

  mpiexec -n 2 python -m mpiattn.bench.sdpa --causal
  mpiexec -n 2 python -m mpiattn.bench.sdpa --causal --backward
  mpiexec -n 4 python -m mpiattn.bench.sdpa --all-tiles --seqlen 8192 --json sdpa.json
  mpiexec -n 2 python -m mpiattn.bench.sdpa --bias dense --head-dim 64

PyTorch computes the whole problem on --threads threads of rank 0's process while the other ranks sleep. Both are
warmed up, checked against each other, and then measured in turn: mpiattn, torch, mpiattn, torch, ... The time of
mpiattn is that of the slowest rank. Inputs are in place before the measurement. Needs the extra `bench`.
"""

import os
import sys
import time
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from ..comm.agreement import agreement
from ..comm.mesh import by_node
from ..console import options
from ..console.table import duration, facts, table
from ..errors import ArgumentError, MpiattnError, VerificationError
from ..model.machine import PRODUCTS
from ..plan.mesh_attention import MeshAttention
from ..problem.distances import usual_slopes
from ..schedule.tile import parse_tile, tiles
from ..system import host
from ..system.words import number
from ..version import __version__
from . import environment, standalone
from .baseline import TOLERANCE, Sdpa, load_torch
from .turns import difference, in_turn, slowest, summary

BIASES = "dense", "alibi"
POLL = 2e-3  # seconds between polls of a sleeping rank
SETTLE = 0.05  # seconds for OpenMP threads to stop spinning after their last work


def _arguments():
    parser = standalone.parser_of(
        "sdpa",
        __doc__,
        ("seqlen", 4096, "tokens"),
        ("heads", 8, "heads"),
        ("head-dim", 128, "elements per head"),
        ("runs", 7, "measured runs of each"),
    )
    parser.add_argument("--causal", action="store_true", help="a query sees the keys up to its own position")
    parser.add_argument("--backward", action="store_true", help="measure the backward pass alone")
    options.add_dtype(parser)
    parser.add_argument(
        "--bias",
        choices=BIASES,
        help="add a number of its own to each score (dense, with its gradient), or that of ALiBi; torch gets either as "
        "attn_mask.  mpiattn without it is measured too",
    )
    parser.add_argument("--threads", type=int, help="threads of torch (default: the number of ranks)")
    which = parser.add_mutually_exclusive_group()
    options.add(which, "tile")
    which.add_argument("--all-tiles", action="store_true", help="measure every tile of the ranks")
    options.add(parser, "schedule", "layout", "route", "backend", "json")
    return parser


class _Torch:
    """The baseline, on rank 0: the whole attention in one process.

    It runs on the cores of all ranks of this host, since launchers may bind a rank to one core.
    """

    def __init__(self, threads, cores, arrays, causal, backward, bias, bias_gradient):
        torch, self.cores = load_torch(), cores
        if torch is None:
            raise MpiattnError("torch is not installed; the `bench` extra has it: pip install 'mpiattn[bench]'")
        with _on_cores(cores):
            torch.set_num_threads(threads)
            arrays = [array[0] for array in arrays]
            self.sdpa = Sdpa(torch, arrays, causal, backward, bias=bias, bias_gradient=bias_gradient)

    def seconds(self):
        """Those of one pass."""
        with _on_cores(self.cores):
            return self.sdpa.seconds()

    def results(self):
        """Those of one pass, (tokens, heads, dim)."""
        with _on_cores(self.cores):
            return self.sdpa.results()


@contextmanager
def _on_cores(cores):
    """Run the body on other cores; threads started in it stay on them."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else None
    try:
        if before is not None:
            os.sched_setaffinity(0, cores)
        yield
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)


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
    """A plan and this rank's chunks; calling it runs a pass and returns the results."""

    def __init__(self, plan, chunks, backward, bias):
        self.plan, self.inputs, self.dout, self.bias = plan, chunks[:3], chunks[3], bias
        self.forward = plan.forward(*self.inputs, **bias) if backward else None

    def __call__(self):
        if self.forward is None:
            return self.plan.forward(*self.inputs, **self.bias)[:1]
        grads = self.plan.backward(self.dout, *self.inputs, *self.forward, **self.bias, bias_gradients=["bias"])
        return grads[:3]


def _check(args, ranks):
    """Check the arguments; returns the tiles to measure, as arguments of MeshAttention."""
    for name in ("seqlen", "heads", "head_dim", "runs", "threads"):
        options.check_least(name, getattr(args, name), 1)
    parse_tile(args.tile, ranks)
    if args.bias and args.causal:
        raise ArgumentError("--bias is given with --causal; torch takes only one of attn_mask and is_causal")
    return tiles(ranks) if args.all_tiles else [args.tile]


def _whole_bias(args):
    """The bias that torch gets, (heads, queries, keys), or None."""
    if args.bias == "alibi":
        tokens = np.arange(args.seqlen, dtype=np.float32)
        return -usual_slopes(args.heads).astype(np.float32)[:, None, None] * np.abs(tokens[None] - tokens[:, None])
    if args.bias == "dense":
        return np.random.default_rng(1).standard_normal((args.heads, args.seqlen, args.seqlen), np.float32)
    return None


def _own_bias(args, plan, whole):
    """The arguments of a call of mpiattn that add the same; whole: on rank 0."""
    if args.bias == "alibi":
        return {"alibi_slopes": usual_slopes(args.heads).astype(np.float32)}
    if args.bias == "dense":
        return {"bias": plan.scatter_bias(None if whole is None else whole[None])}
    return {}


def _host_of_rank_0(peers):
    """Ranks on the host of rank 0, and the cores that they may use together."""
    cores = by_node(peers, host.cores())[0]
    return len(cores), set().union(*cores)


def _measure(job, args):
    """Yield the results as data and text."""
    comm, peers = job.comm, job.peers
    args.threads = comm.size if args.threads is None else args.threads
    local_ranks, cores = _host_of_rank_0(peers)
    arrays, torch, whole = [None] * 4, None, None
    with agreement(peers):
        shapes = _check(args, comm.size)
        if comm.rank == 0:
            shape = (1, args.seqlen, args.heads, args.head_dim)
            random = np.random.default_rng(0)
            arrays = [random.standard_normal(shape, np.float32).astype(args.dtype, copy=False) for _ in arrays]
            whole = _whole_bias(args)
            torch = _Torch(args.threads, cores, arrays, args.causal, args.backward, whole, args.bias == "dense")
    how = options.given(args, "seqlen", "heads", "head-dim", "dtype", "causal", "schedule", "route", "backend")
    plans, layout = [], args.layout
    with ExitStack() as stack:
        for shape in shapes:
            plans.append(stack.enter_context(MeshAttention(comm, tile=shape, layout=layout, **how)))
            layout = plans[0].q_layout, plans[0].k_layout  # the first plan's layout, for all
        chunks = [plans[0].scatter(array) for array in arrays]
        passes = [_Mesh(plan, chunks, args.backward, _own_bias(args, plan, whole)) for plan in plans]
        differences = _compare(peers, args, passes, torch)
        works = {str(run.plan.tile): partial(slowest, peers, run) for run in passes}
        if args.bias:
            plain = _Mesh(plans[0], chunks, args.backward, {})
            works["plain"] = partial(slowest, peers, plain)
        works["torch"] = lambda: asleep(peers, lambda: torch.seconds())
        seconds, differences = peers.allgather((in_turn(works, args.runs), differences))[0]
    direction, first = "backward" if args.backward else "forward", plans[0]
    flops, of_torch = first.problem.flops * PRODUCTS[direction], float(np.median(seconds["torch"]))

    def result(name, seconds, **more):
        median = float(np.median(seconds))
        speed = {"gflops_per_second": flops / median / 1e9, "time_over_torch": median / of_torch}
        return summary(name, seconds, **more, **speed)

    data = {
        **options.given(args, "seqlen", "heads", "head-dim", "dtype", "causal", "bias"),
        "direction": direction,
        "flops": flops,
        "runs": args.runs,
        "ranks": comm.size,
        "ranks_on_host": local_ranks,
        "layout": first.q_layout.kind,
        "route": first.route,
        "backend": first.backend,
        "machine": environment.machine(cores=len(cores)),
        "versions": {"mpiattn": __version__, "torch": host.version("torch"), **environment.versions()},
        "results": [
            *(
                result("mpiattn", seconds[tile], tile=tile, schedule=plan.schedule.name, difference=apart)
                for tile, plan, apart in zip(seconds, plans, differences)
            ),
            *(result("mpiattn without", seconds[name]) for name in ("plain",) if args.bias),
            result("torch", seconds["torch"], threads=args.threads),
        ],
    }
    yield data, _text(data)


def _compare(peers, args, passes, torch):
    """Warm up; returns each plan's largest difference from torch's results, relative to torch's largest value."""
    expected = asleep(peers, lambda: torch.results())
    differences = []
    for run in passes:
        wholes = [run.plan.gather(result) for result in run()]
        with agreement(peers, only=0):
            if peers.rank == 0:
                differences.append(difference(wholes, expected))
                if not differences[-1] <= TOLERANCE[args.dtype]:
                    raise VerificationError(
                        f"tile {run.plan.tile} differs from torch by {differences[-1]:.2g} of "
                        f"the largest value, more than {TOLERANCE[args.dtype]:g}"
                    )
    return differences


def _text(data):
    machine, versions = data["machine"], data["versions"]
    worst = max(row["difference"] for row in data["results"] if "difference" in row)
    head = [
        (
            "problem",
            f"{data['seqlen']} tokens, {data['heads']} heads x {data['head_dim']}, {data['dtype']}, "
            f"{'causal' if data['causal'] else 'full'}{', bias: ' + data['bias'] if data['bias'] else ''}, "
            f"{data['direction']}: {data['flops'] / 1e9:.4g} Gflop",
        ),
        (
            "mpiattn",
            f"{versions['mpiattn']}: {data['ranks']} ranks, {data['ranks_on_host']} of them on the host of "
            f"torch; BLAS threads of each: {machine['blas_threads'] or 'unknown'}",
        ),
        ("plan", f"{data['layout']} layout, {data['route']} route, {data['backend']} back end"),
        ("machine", f"{machine['processor']}, {machine['cores']} cores in use"),
        ("versions", f"{environment.numpy_in_words(data, machine)}, torch {versions['torch']}, {versions['mpi']}"),
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
            else f"mpiattn {data['results'][0]['tile']} without bias"
            if row["name"] == "mpiattn without"
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
    return standalone.run(_arguments().parse_args(argv), _measure)


if __name__ == "__main__":
    sys.exit(main())
