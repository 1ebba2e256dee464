"""`mpiattn bench --limits`: operations beside what bounds them on this machine, both measured in the same run, in turn.

A bound is work that no implementation can leave out: matrix products of as many operations by NumPy's BLAS, reading or
copying the bytes once, MPI's own collective into new memory, the messages by which ranks agree that they make the same
call.  A ratio is the operation's time over its bound's, medians of the slowest rank.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from .. import __version__, backends
from ..comm.agreement import agreement
from ..console.table import duration, facts, table
from ..decode.cache import KVCache
from ..decode.tree import tree_decode
from ..errors import ArgumentError, VerificationError
from ..model.machine import PRODUCTS
from ..plan.mesh_attention import MeshAttention
from ..system import host
from ..system.installation import mpi_library
from .clock import reading

OWN = {"limits"}  # options that only --limits takes
SHARED = {"backend", "runs", "timeout", "json"}
PASS = 2.5  # the largest ratio that is near its bound
LEAST = 0.01  # seconds of a measurement, at least: short operations are repeated
MOST = 1000  # repeats, at most
HEADS, KV_HEADS, HEAD_DIM = 8, 1, 64
TOKENS = 2048  # of a rank
SIDE = 1024  # rows and columns of the matrices whose product is a bound
GATHERED = 2**24  # bytes of a rank in scatter and gather


@dataclass
class Operation:
    """An operation and its bound, both collective; worth: how many of the bound's calls the operation is worth."""

    name: str
    bounded_by: str
    run: Callable[[], object]
    bound: Callable[[], object]
    worth: float = 1.0


def add_arguments(parser):
    """Declare the option of `mpiattn bench --limits`."""
    group = parser.add_argument_group(
        "limits", "Of the options above, --limits uses --backend, --runs, --timeout and --json."
    )
    group.add_argument(
        "--limits",
        action="store_true",
        help="measure operations of given sizes beside what bounds them on this machine: products by the BLAS, memory, "
        "MPI's own collectives; ratios up to "
        f"{PASS} pass",
    )


def measure(job, args):
    """The figures as data for JSON; collective.  Raises ArgumentError and VerificationError."""
    peers = job.peers
    with agreement(peers):
        if any(backends.find(name).on_gpu for name in backends.candidates(args.backend)):
            raise ArgumentError(f"--backend is {args.backend!r}; --limits measures back ends of the host's processor")
    results = []
    for operations in (_attention, _decoding, _whole_arrays, _small):
        with operations(peers, args) as rows:
            results += [_measured(peers, row, args.runs) for row in rows]
    blas, threads = host.blas()
    return {
        "mpiattn": __version__,
        "ranks": peers.size,
        "backend": args.backend,
        "runs": args.runs,
        "limit": PASS,
        "results": results,
        "machine": {"processor": host.processor(), "blas": blas, "blas_threads": threads},
        "versions": {"numpy": host.version("numpy"), "mpi": mpi_library()},
    }


def as_text(data):
    """The table of `measure`'s data."""
    machine = data["machine"]
    rows = [
        (
            row["name"],
            duration(row["median"]),
            row["bounded_by"],
            duration(row["bound"]),
            f"{row['ratio']:.2f}",
            "PASS" if row["passes"] else "-",
        )
        for row in data["results"]
    ]
    head = [
        ("ranks", f"{data['ranks']}, {machine['blas_threads']} BLAS threads each"),
        ("processor", machine["processor"]),
        ("back end", data["backend"]),
        ("measured", f"{data['runs']} runs of each operation and its bound, in turn; times of the slowest rank"),
        ("PASS", f"at most {data['limit']} times the bound"),
    ]
    header = "operation", "time", "bounded by", "time", "ratio", ""
    return "\n".join(["", facts(head), "", table(rows, header)])


def _measured(peers, row, runs):
    for work in (row.run, row.bound):
        _seconds(peers, work, 1)  # warm up
    times = [min(MOST, max(1, round(LEAST / max(_seconds(peers, work, 1), 1e-9)))) for work in (row.run, row.bound)]
    seconds = [[], []]
    for _ in range(runs):
        for each, work, count in zip(seconds, (row.run, row.bound), times):
            each.append(_seconds(peers, work, count))
    median, bound = (float(np.median(each)) for each in seconds)
    bound *= row.worth
    return {
        "name": row.name,
        "bounded_by": row.bounded_by,
        "median": median,
        "bound": bound,
        "ratio": median / bound,
        "passes": median <= PASS * bound,
        "seconds": seconds[0],
        "bound_seconds": seconds[1],
    }


def _seconds(peers, work, times):
    """Seconds per call of the slowest rank."""
    peers.barrier()
    start = time.perf_counter()
    for _ in range(times):
        work()
    seconds = np.array([(time.perf_counter() - start) / times])
    peers.reduce(seconds, MPI.MAX)
    return float(seconds[0])


@contextmanager
def _attention(peers, args) -> Iterator[list[Operation]]:
    """Long and short sequences, both passes: the floating-point operations bound them."""
    with ExitStack() as stack:
        rows = []
        for name, shape in (
            ("a sequence", {"seqlen": TOKENS * peers.size}),
            ("64 sequences of 128 tokens", {"seqlen": 128, "batch": 64}),
            ("a window of 256 keys", {"seqlen": TOKENS * peers.size, "causal": True, "window": (255, 0)}),
        ):
            plan = stack.enter_context(
                MeshAttention(peers.comm, heads=HEADS, head_dim=HEAD_DIM, backend=args.backend, **shape)
            )
            rows += _passes(plan, peers, name)
        yield rows


def _passes(plan, peers, name):
    rng, tokens = np.random.default_rng(peers.rank), len(plan.positions)
    q, k, v = rng.standard_normal((3, plan.problem.batch, tokens, HEADS, HEAD_DIM), np.float32)
    out, lse = plan.forward(q, k, v)
    gradients = [np.empty_like(array) for array in (q, k, v)]
    into = dict(zip(("dq", "dk", "dv"), gradients))
    for direction, run in (
        ("forward", lambda: plan.forward(q, k, v, out=out, lse=lse)),
        ("backward", lambda: plan.backward(out, q, k, v, out, lse, **into)),
    ):
        operations = plan.problem.flops * PRODUCTS[direction] / peers.size
        bound, worth = _products(operations)
        yield Operation(f"{direction}, {name}", "matrix products", run, bound, worth)


def _products(operations):
    """Matrix products by NumPy's BLAS, and how many times theirs a number of operations is."""
    a, b, c = np.ones((3, SIDE, SIDE), np.float32)
    count = max(1, round(operations / (2 * SIDE**3)))

    def multiply():
        for _ in range(count):
            np.matmul(a, b, out=c)

    return multiply, operations / (count * 2 * SIDE**3)


@contextmanager
def _decoding(peers, args) -> Iterator[list[Operation]]:
    """A token of each of 64 sequences: reading their keys once bounds decoding, storing the tokens bounds appending."""
    sequences, keys = 64, 1024
    rng = np.random.default_rng(0)
    with KVCache(
        peers.comm,
        capacity=sequences * 4 * keys,
        sequences=sequences,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        backend=args.backend,
    ) as cache:
        k, v = rng.standard_normal((2, sequences, keys, KV_HEADS, HEAD_DIM), np.float32)
        cache.append(k, v)
        q = rng.standard_normal((sequences, 1, HEADS, HEAD_DIM), np.float32)
        read = reading(2 * k.nbytes // peers.size)
        token, lengths = (k[:, :1], v[:, :1]), cache.lengths
        store = [np.empty_like(array) for array in token]

        def decode():
            tree_decode(q, cache)

        def append():
            cache.append(*token)
            if min(cache.lengths) >= 3 * keys:
                cache.truncate(lengths)

        def copy():
            for to, array in zip(store, token):
                to[...] = array

        yield [
            Operation("decode, 64 sequences x 1024 keys", "reading them", decode, read),
            Operation("append a token to 64 sequences", "copying it, agreeing", append, _both(copy, _agreeing(peers))),
        ]


@contextmanager
def _whole_arrays(peers, args) -> Iterator[list[Operation]]:
    """A whole array in and out of the ranks' chunks: MPI's own collectives bound this."""
    row = HEADS * HEAD_DIM * 4
    with ExitStack() as stack:
        rows = []
        for layout in ("contiguous", "zigzag"):
            plan = stack.enter_context(
                MeshAttention(
                    peers.comm,
                    seqlen=peers.size * (GATHERED // row),
                    heads=HEADS,
                    head_dim=HEAD_DIM,
                    layout=layout,
                    backend=args.backend,
                )
            )
            rows += _moves(plan, peers, layout)
        yield rows


def _moves(plan, peers, layout):
    comm, root = peers.comm, peers.rank == 0
    shape = 1, plan.problem.seqlen, HEADS, HEAD_DIM
    whole = np.random.default_rng(0).standard_normal(shape, np.float32)
    chunk = plan.scatter(whole if root else None)
    with agreement(peers):
        if not np.array_equal(chunk[0], whole[0, plan.positions]):
            raise VerificationError(f"scatter with a {layout} layout does not give every rank its tokens")
    again = plan.gather(chunk, root=None)
    with agreement(peers):
        if not np.array_equal(again, whole):
            raise VerificationError(f"gather with a {layout} layout does not give the array that was scattered")
    size = chunk.size
    yield Operation(
        f"scatter, {layout}",
        "MPI_Scatter",
        lambda: plan.scatter(whole if root else None),
        lambda: comm.Scatter(whole if root else None, np.empty(size, np.float32)),
    )
    yield Operation(
        f"gather, {layout}",
        "MPI_Gather",
        lambda: plan.gather(chunk),
        lambda: comm.Gather(chunk, np.empty(shape, np.float32) if root else None),
    )
    yield Operation(
        f"gather to all, {layout}",
        "MPI_Allgather",
        lambda: plan.gather(chunk, root=None),
        lambda: comm.Allgather(chunk, np.empty(shape, np.float32)),
    )


@contextmanager
def _small(peers, args) -> Iterator[list[Operation]]:
    """What a call and a plan cost however few the tokens."""
    shape = {"seqlen": peers.size, "heads": 1, "head_dim": HEAD_DIM, "backend": args.backend}
    with MeshAttention(peers.comm, **shape) as plan:
        q = np.ones((1, 1, 1, HEAD_DIM), np.float32)
        out, lse = plan.forward(q, q, q)
        agreeing = _agreeing(peers)

        def make():
            MeshAttention(peers.comm, **shape).close()

        def duplicate():
            peers.comm.Dup().Free()

        yield [
            Operation("forward, a token a rank", "agreeing", lambda: plan.forward(q, q, q, out=out, lse=lse), agreeing),
            Operation("making a plan again", "MPI_Comm_dup and MPI_Comm_free", make, duplicate),
        ]


def _agreeing(peers):
    """Two allreduces of a few bytes, by which ranks find out that they make the same call, and that it ended."""
    given, taken = np.zeros((2, 4), np.int64)

    def agree():
        peers.comm.Allreduce(given, taken, MPI.MAX)
        peers.comm.Allreduce(given, taken, MPI.MAX)

    return agree


def _both(first, second):
    def run():
        first()
        second()

    return run
