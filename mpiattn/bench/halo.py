"""Measure a plan against a halo exchange that is written by hand around the same block kernel.

  mpiexec -n 4 python -m mpiattn.bench.halo --seqlen 65536 --window 511
  mpiexec -n 4 python -m mpiattn.bench.halo --seqlen 65536 --window 511 --layout auto --json halo.json
  mpiexec -n 16 python -m mpiattn.bench.halo --grid 256x512 --dims 4x4 --kernel 15x15 --heads 1

A causal window: by hand, ranks hold consecutive tokens, and each sends its last keys and values to the next rank. A
neighbourhood on a grid (--grid): ranks hold blocks of it, and each sends the edges and corners of its block to the
ranks around it. Windows are cut off at the edges of axes that are not cyclic.

A rank computes its own block meanwhile, and then the block of its queries and the keys that came. Both are compared
with each other and then measured in turn: plan, halo, plan, halo, ... A time is that of the slowest rank. Inputs are in
place before.
"""

import sys
from functools import partial
from math import prod

import numpy as np

from .. import backends
from ..comm.agreement import agreement
from ..console import options
from ..console.table import duration, table
from ..errors import ArgumentError, VerificationError
from ..plan.mesh_attention import MeshAttention
from ..problem.layout import Layout
from ..system.words import size
from ..version import __version__
from . import neighborhood, standalone
from .baseline import TOLERANCE
from .halo_exchange import WindowExchange
from .halo_grid import GridExchange
from .turns import difference, in_turn, slowest

SEQLEN, WINDOW = 65536, 511
OF_WINDOW, OF_GRID = ("seqlen", "window"), ("dims", "kernel", "cyclic")  # options of either case


def _arguments():
    parser = standalone.parser_of(
        "halo",
        __doc__,
        ("heads", 8, "heads"),
        ("head-dim", 64, "elements per head"),
        ("runs", 5, "measured runs of each"),
    )
    options.add_dtype(parser)
    parser.add_argument("--seqlen", type=int, help=f"tokens (default: {SEQLEN}, or the points of --grid)")
    parser.add_argument("--window", type=int, help=f"keys before its own that a query sees (default: {WINDOW})")
    options.add(parser, "grid", "dims")
    neighborhood.add(parser)
    options.add(parser, "tile", "schedule", "layout", "route", "backend", "machine", "json")
    return parser


class _Window:
    """A causal window over consecutive tokens."""

    def __init__(self, ranks, args):
        for name in OF_GRID:
            if getattr(args, name) is not None:
                raise ArgumentError(f"--{name} is given without --grid, of which it is")
        self.window = WINDOW if args.window is None else args.window
        self.seqlen = SEQLEN if args.seqlen is None else args.seqlen
        self.mask = {"causal": True, "window": (self.window, 0)}
        self.layout, self.by_hand = args.layout, Layout("contiguous", self.seqlen, ranks)
        self.dims, self.periods = [ranks], [False]
        self.data = {**self.mask, "window": self.window}
        self.words = f"{self.seqlen} tokens", f"causal in a window of {self.window + 1} keys"

    def exchange(self, *how):
        """The one by hand."""
        return WindowExchange(*how, self.by_hand)


class _Grid:
    """A neighbourhood on a grid of two axes."""

    def __init__(self, ranks, args):
        for name in OF_WINDOW:
            if getattr(args, name) is not None:
                raise ArgumentError(f"--{name} is given with --grid, which has no {name} but its points and --kernel")
        mask, self.periods = neighborhood.of(args)
        self.seqlen = prod(args.grid)
        self.layout = self.by_hand = options.layout_of(args, ranks, self.seqlen)
        self.dims = [len(lengths) for lengths in self.layout.sizes]
        self.kernel, self.mask = args.kernel, {"mask": mask}
        self.data = {"mask": str(mask), "grid": args.grid, "dims": self.dims}
        sizes = ("x".join(map(str, shape)) for shape in (args.grid, self.dims))
        self.words = "a grid of {} in {} blocks".format(*sizes), str(mask)

    def exchange(self, *how):
        """The one by hand."""
        return GridExchange(*how, self.layout.sizes, self.kernel)


def _measure(job, args):
    """Yield the results as data and text."""
    comm, peers = job.comm, job.peers
    with agreement(peers):
        options.check_least("runs", args.runs, 1)
        if any(backends.find(name).on_gpu for name in backends.candidates(args.backend)):
            raise ArgumentError(f"--backend is {args.backend!r}; the exchange by hand takes arrays on the host")
        case = (_Window if args.grid is None else _Grid)(comm.size, args)
    cart = comm.Create_cart(case.dims, case.periods)
    shape = {"seqlen": case.seqlen, **options.given(args, "heads", "head-dim", "dtype", "backend"), **case.mask}
    chosen = {**options.given(args, "tile", "schedule", "route", "machine"), "layout": case.layout}
    with MeshAttention(comm, **shape, **chosen) as plan, MeshAttention(comm, **shape, layout=case.by_hand) as other:
        with agreement(peers):
            halo = case.exchange(peers, cart, backends.get(plan.backend), plan.problem)
        whole = None
        if comm.rank == 0:
            size_of = (3, 1, case.seqlen, args.heads, args.head_dim)
            whole = np.random.default_rng(0).standard_normal(size_of, np.float32).astype(plan.problem.dtype)
        inputs, inputs_by_hand = (list(p.scatter(whole, axis=2)) for p in (plan, other))
        out, lse = plan.forward(*inputs)
        out_by_hand = np.empty_like(out, shape=inputs_by_hand[0].shape)
        q, k, v = (array[0] for array in inputs_by_hand)
        halo.forward(q, k, v, out_by_hand[0])
        wholes = plan.gather(out), other.gather(out_by_hand)
        with agreement(peers, only=0):
            apart = 0.0
            if comm.rank == 0:
                apart = difference(wholes[:1], [wholes[1].astype(np.float64)])
                if not apart <= TOLERANCE[args.dtype]:
                    raise VerificationError(f"the plan and the halo exchange differ by {apart:.2g} of the largest")
        before = plan.sent[0]
        plan.forward(*inputs, out=out, lse=lse)
        sent = {"plan": peers.allgather(plan.sent[0] - before), "halo": peers.allgather(halo.sent)}
        works = {
            "plan": partial(slowest, peers, lambda: plan.forward(*inputs, out=out, lse=lse, check=False)),
            "halo": partial(slowest, peers, lambda: halo.forward(q, k, v, out_by_hand[0])),
        }
        seconds = in_turn(works, args.runs)
        data = {
            "mpiattn": __version__, "ranks": comm.size, "seqlen": case.seqlen,
            **options.given(args, "heads", "head-dim", "dtype"), **case.data, "runs": args.runs,
            "backend": plan.backend, "tile": str(plan.tile), "schedule": plan.schedule.name, "route": plan.route,
            "layout": plan.q_layout.kind, "mesh_layout": plan.mesh_layout, "difference": apart,
            "sent_bytes": {name: max(of_ranks) for name, of_ranks in sent.items()},
            "sent_bytes_of_all": {name: sum(of_ranks) for name, of_ranks in sent.items()}, "seconds": seconds,
            "median": {name: float(np.median(times)) for name, times in seconds.items()},
        }  # fmt: skip
    cart.Free()
    yield data, _text(data, case.words)


def _text(data, words):
    """words: the tokens and the mask."""
    layouts = dict.fromkeys((data["layout"], data["mesh_layout"]))
    names = {
        "plan": f"plan, tile {data['tile']}, {data['schedule']}, {' and in the mesh '.join(layouts)} layout",
        "halo": "halo exchange by hand",
    }
    rows = [
        (
            names[name], duration(median), f"{median / data['median']['halo']:.3f}", size(data["sent_bytes"][name]),
            size(data["sent_bytes_of_all"][name]),
        )
        for name, median in data["median"].items()
    ]  # fmt: skip
    head = (
        f"{data['ranks']} ranks, {words[0]}, {data['heads']} heads x {data['head_dim']}, {data['dtype']}, {words[1]}, "
        f"{data['backend']}, medians of {data['runs']} runs"
    )
    return f"{head}\n\n{table(rows, ('', 'time', 'over halo', 'most sent', 'sent by all'))}"


def main():
    """Returns the exit code."""
    return standalone.run(_arguments().parse_args(), _measure)


if __name__ == "__main__":
    sys.exit(main())
