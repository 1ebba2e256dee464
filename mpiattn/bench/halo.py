"""Measure a plan with a causal window against a halo exchange that is written by hand around the same block kernel.

  mpiexec -n 4 python -m mpiattn.bench.halo --seqlen 65536 --window 511
  mpiexec -n 4 python -m mpiattn.bench.halo --seqlen 65536 --window 511 --layout auto --json halo.json

By hand, ranks hold consecutive tokens. Each sends its last keys and values to the next rank, computes its own block
meanwhile, and then the block of its first queries and the keys that came. Both are compared with each other and then
measured in turn: plan, halo, plan, halo, ... A time is that of the slowest rank. Inputs are in place before.
"""

import sys
from functools import partial

import numpy as np
from mpi4py import MPI

from .. import backends
from ..backends.block import BlockInputs
from ..comm.agreement import agreement
from ..console import options
from ..console.table import duration, size, table
from ..errors import ArgumentError, VerificationError
from ..plan.mesh_attention import MeshAttention
from ..problem.layout import Layout
from ..version import __version__
from . import standalone
from .baseline import TOLERANCE
from .turns import difference, in_turn, slowest

TAG = 1


def _arguments():
    parser = standalone.parser_of(
        "halo",
        __doc__,
        ("seqlen", 65536, "tokens"),
        ("heads", 8, "heads"),
        ("head-dim", 64, "elements per head"),
        ("window", 511, "keys before its own that a query sees"),
        ("runs", 5, "measured runs of each"),
    )
    options.add_dtype(parser)
    options.add(parser, "tile", "schedule", "layout", "route", "backend", "json")
    return parser


class Halo:
    """Causal attention in a window over consecutive tokens, with messages between neighbours alone.

    backend: has the block kernel.  layout: contiguous.  window: at most the tokens of any chunk.
    """

    def __init__(self, peers, backend, layout, problem):
        comm = peers.comm
        self.peers, self.comm, self.backend, self.problem = peers, comm, backend, problem
        p, rank, tokens = problem, comm.rank, layout.length(comm.rank)
        window = p.window[0]
        if window > min(layout.lengths):
            raise ArgumentError(f"window is {window}; by hand it must be at most a rank's {min(layout.lengths)} tokens")
        self.sends, self.receives = window * (rank + 1 < comm.size), window * (rank > 0)
        self.came = [np.empty((self.receives, p.kv_heads, dim), p.dtype) for dim in (p.head_dim, p.value_dim)]
        self.partial = (
            np.empty((tokens, p.heads, p.value_dim), p.partial_dtype), np.empty((tokens, p.heads), p.partial_dtype),
        )  # fmt: skip
        query = np.arange(tokens, dtype=np.int32)[None]
        self.own = np.maximum(query - window, 0), query + 1
        self.before = query[:, : self.receives], np.full_like(query[:, : self.receives], self.receives)

    def forward(self, q, k, v, out):
        """Attention of this rank's chunks (tokens, heads, dim) into out."""
        tokens, scale, requests = len(k), self.problem.scale, []
        if self.receives:
            requests += [self.comm.Irecv(array.view(np.uint8), self.comm.rank - 1, TAG) for array in self.came]
        if self.sends:
            requests += [
                self.comm.Isend(array[tokens - self.sends :].view(np.uint8), self.comm.rank + 1, TAG)
                for array in (k, v)
            ]
        self.backend.clear(*self.partial)
        own = BlockInputs(q, k, v, *self.own, scale)
        self.backend.attend(own, *self.partial, meanwhile=lambda share: MPI.Request.Testall(requests))
        self.peers.wait(requests, lambda: "for the messages of the exchange by hand")
        if self.receives:
            first = slice(0, self.receives)
            came = BlockInputs(q[first], *self.came, *self.before, scale)
            self.backend.attend(came, *(part[first] for part in self.partial))
        self.backend.copy(out, self.partial[0])


def _measure(job, args):
    """Yield the results as data and text."""
    comm, peers = job.comm, job.peers
    with agreement(peers):
        options.check_least("runs", args.runs, 1)
        if any(backends.find(name).on_gpu for name in backends.candidates(args.backend)):
            raise ArgumentError(f"--backend is {args.backend!r}; the exchange by hand takes arrays on the host")
    shape = options.given(args, "seqlen", "heads", "head-dim", "dtype", "backend")
    shape |= {"causal": True, "window": (args.window, 0)}
    chosen = options.given(args, "tile", "schedule", "layout", "route")
    layout = Layout("contiguous", args.seqlen, comm.size)
    with MeshAttention(comm, **shape, **chosen) as plan, MeshAttention(comm, **shape, layout=layout) as other:
        with agreement(peers):
            halo = Halo(peers, backends.get(plan.backend), layout, plan.problem)
        whole = None
        if comm.rank == 0:
            size_of = (3, 1, args.seqlen, args.heads, args.head_dim)
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
        sent = max(peers.allgather(plan.sent[0] - before))
        works = {
            "plan": partial(slowest, peers, lambda: plan.forward(*inputs, out=out, lse=lse, check=False)),
            "halo": partial(slowest, peers, lambda: halo.forward(q, k, v, out_by_hand[0])),
        }
        seconds = in_turn(works, args.runs)
        by_hand = max(peers.allgather(halo.sends * sum(array[:1].nbytes for array in (k, v))))
        data = {
            "mpiattn": __version__, "ranks": comm.size, **shape, "window": args.window, "runs": args.runs,
            "backend": plan.backend, "tile": str(plan.tile), "schedule": plan.schedule.name, "route": plan.route,
            "layout": plan.q_layout.kind, "difference": apart,
            "sent_bytes": {"plan": sent, "halo": by_hand}, "seconds": seconds,
            "median": {name: float(np.median(times)) for name, times in seconds.items()},
        }  # fmt: skip
    yield data, _text(data)


def _text(data):
    names = {
        "plan": f"plan, tile {data['tile']}, {data['schedule']}, {data['layout']} layout",
        "halo": "halo exchange by hand",
    }
    rows = [
        (names[name], duration(median), f"{median / data['median']['halo']:.3f}", size(data["sent_bytes"][name]))
        for name, median in data["median"].items()
    ]
    head = (
        f"{data['ranks']} ranks, {data['seqlen']} tokens, {data['heads']} heads x {data['head_dim']}, {data['dtype']}, "
        f"causal in a window of {data['window'] + 1} keys, {data['backend']}, medians of {data['runs']} runs"
    )
    return f"{head}\n\n{table(rows, ('', 'time', 'over halo', 'most sent'))}"


def main():
    """Returns the exit code."""
    return standalone.run(_arguments().parse_args(), _measure)


if __name__ == "__main__":
    sys.exit(main())
