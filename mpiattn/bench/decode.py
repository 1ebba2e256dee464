"""Tree decoding over the ranks of this launch, against rings, a plain MPI_Allreduce, and a plain sum of the keys.

  mpiexec -n 4 python -m mpiattn.bench.decode --context 65536
  mpiexec -n 2 python -m mpiattn.bench.decode --context 4096 65536 1000000 --no-rings
  python tests/netcluster.py 64 100mbit -- python -m mpiattn.bench.decode --context 4096 --json decode.json

A call is one token of each sequence: its time is that of the slowest rank, without the checks of arguments. Ways are
measured in turn, and their results compared. "Combining" is a way without attention, on results that are there;
Allreduce is MPI's own, once, of the same bytes. "Keys" is attention on each rank alone: bytes of keys and values a
second, beside those of NumPy's sum over the same memory.
"""

import argparse
import sys
import time

import numpy as np
from mpi4py import MPI

from .. import __version__, combine, host
from ..agreement import agreement
from ..cli import Parser, options
from ..cli.jsonfile import write_json
from ..cli.launch import on_all_ranks
from ..cli.table import duration, facts, percent, size, table
from ..decode import tree_decode
from ..decoding import Call
from ..errors import ArgumentError, VerificationError
from ..kvcache import KVCache
from ..layout import Layout
from ..problem import ITEMSIZE
from ..rings import query_ring_decode, ring_decode
from ..tree import WAYS
from .baseline import TOLERANCE
from .clock import plain_sum

PIECE = 16384                # tokens that a rank draws at a time
RINGS = {"ring": ring_decode, "query ring": query_ring_decode}


def _arguments():
    parser = Parser(prog="python -m mpiattn.bench.decode", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, nargs="+", default=[65536], metavar="N",
                        help="tokens of each sequence, over all ranks; several are measured one after another "
                             "(default: 65536)")
    for name, default, what in (("--batch", 1, "sequences"), ("--queries", 1, "queries of each sequence"),
                                ("--heads", 8, "query heads"), ("--head-dim", 128, "elements of a head"),
                                ("--page-size", 64, "tokens of a page"), ("--runs", 7, "measured calls of each way")):
        parser.add_argument(name, type=int, default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, help="key and value heads (default: --heads)")
    parser.add_argument("--dtype", default="float32", choices=tuple(ITEMSIZE), help="(default: %(default)s)")
    parser.add_argument("--no-rings", action="store_true", help="leave out the rings, which long contexts make slow")
    for add in (options.add_backend, options.add_machine, options.add_json):
        add(parser)
    return parser


def _run(job, args):
    with agreement(job.peers):
        for name in ("batch", "queries", "runs"):
            if getattr(args, name) < 1:
                raise ArgumentError(f"--{name} is {getattr(args, name)}; it must be at least 1")
        if min(args.context) < 1:
            raise ArgumentError(f"--context is {min(args.context)}; it must be at least 1")
    results = [_measure(job.peers, args, context) for context in args.context]
    blas, threads = host.blas()
    data = {name: getattr(args, name) for name in ("batch", "queries", "heads", "kv_heads", "head_dim", "dtype",
                                                   "page_size", "runs")}
    data |= {"ranks": job.peers.size, **{name: results[0][name] for name in ("nodes", "backend")}, "results": results,
             "machine": {"processor": host.processor(), "blas": blas, "blas_threads": threads},
             "versions": {"mpiattn": __version__, "numpy": host.version("numpy"),
                          "mpi": " ".join(MPI.Get_library_version().splitlines()[0].split(", ")[0].split())}}
    with agreement(job.peers, only=0):
        if job.peers.rank == 0:
            if args.json:
                write_json(args.json, data)
            if args.json != "-":
                print(_text(data), flush=True)
    return 0


def _filled(comm, args, context):
    """A cache of random keys, drawn where they stay, and queries that are the same on every rank."""
    kv_heads = args.kv_heads or args.heads
    cache = KVCache(comm, capacity=args.batch * context, sequences=args.batch, kv_heads=kv_heads,
                    head_dim=args.head_dim, dtype=args.dtype, page_size=args.page_size, backend=args.backend,
                    machine=args.machine)
    mine = np.random.default_rng([1, comm.rank])
    for first in range(0, context, PIECE * comm.size):
        layout = Layout("contiguous", min(PIECE * comm.size, context - first), comm.size)
        shape = args.batch, layout.length(comm.rank), kv_heads, args.head_dim
        cache.append(*(mine.standard_normal(shape, np.float32).astype(args.dtype) for _ in range(2)), layout=layout)
    shape = args.batch, args.queries, args.heads, args.head_dim
    return cache, np.random.default_rng(0).standard_normal(shape, np.float32).astype(args.dtype)


def _timed(peers, work):
    """Seconds of the slowest rank."""
    peers.barrier()
    start = time.perf_counter()
    work()
    seconds = np.array([time.perf_counter() - start])
    peers.reduce(seconds, MPI.MAX)
    return float(seconds[0])


def _measure(peers, args, context):
    cache, q = _filled(peers.comm, args, context)
    with cache:
        call = Call(cache, q)
        chosen = cache.way(*call.partial_bytes)
        ways = [way for way in WAYS if way != "levels" or 1 < len(set(cache.nodes)) < cache.ranks]
        calls = {way: (lambda way=way: tree_decode(q, cache, way=way, check=False)) for way in ways}
        if not args.no_rings:
            calls |= {name: (lambda ring=ring: ring(q, cache, check=False)) for name, ring in RINGS.items()}
        sent, difference = _compare(peers, args, cache, calls, call.partial_bytes)
        work = {**calls, **{f"combining {way}": _combining(cache, call, way) for way in ways},
                "MPI_Allreduce": _allreduce(peers.comm, call), "keys": _keys(cache, call),
                "sum": _sum(cache)}
        for name in work:
            work[name]()                                # warm, also what _compare has not run
        seconds = {name: [] for name in work}
        for _ in range(args.runs):
            for name, timed in seconds.items():
                timed.append(_timed(peers, work[name]))
        nbytes = np.array([_key_bytes(cache)])
        peers.reduce(nbytes, MPI.MAX)
        return {"context": context, "chosen": chosen, "nodes": len(set(cache.nodes)), "backend": cache.backend,
                "partial_bytes": call.partial_bytes[0], "key_bytes": int(nbytes[0]), "difference": difference,
                "sent_bytes": sent, "seconds": seconds,
                "median": {name: float(np.median(timed)) for name, timed in seconds.items()}}


def _compare(peers, args, cache, calls, partial_bytes):
    """Run each way once: the most bytes that a rank sends in it, and the largest difference between any two results."""
    sent, outs = {}, {}
    for name, run in calls.items():
        before = cache.sent[0]
        outs[name] = run()[0].astype(np.float64)
        of_rank = cache.sent[0] - before
        formula = None
        if name in WAYS:
            formula = combine.moved_bytes(name, *partial_bytes, cache.nodes, cache.rank)
        told = peers.allgather((of_rank, formula))
        sent[name] = max(of for of, _ in told)
        if any(formula not in (None, of) for of, formula in told):
            _fail(f"{name} sent {told} bytes, which is not the formula")
    first = next(iter(outs.values()))
    off = np.array([max(float(np.abs(out - first).max() / np.abs(first).max()) for out in outs.values())])
    peers.reduce(off, MPI.MAX)
    if not off[0] <= TOLERANCE[args.dtype]:
        _fail(f"results differ by {off[0]:.2g} of the largest value, more than {TOLERANCE[args.dtype]:g}")
    return sent, float(off[0])


def _fail(text):
    """Raise what every rank has found alike."""
    error = VerificationError(text)
    error.everywhere = True
    raise error


def _combining(cache, call, way):
    mine, spare = call.partial(), call.partial()

    def run():
        mine.ready = spare.ready = ()
        event = cache._backend.clear(mine.out, mine.lse)
        mine.ready = (event,)
        whole = cache._combiner.run(way, mine, spare)
        for event in whole.ready:
            cache._backend.wait(event)
    return run


def _allreduce(comm, call):
    elements = call.partial_bytes[0] // np.dtype(call.cache.partial_dtype).itemsize
    given = np.zeros(elements, call.cache.partial_dtype)
    taken = np.empty_like(given)
    return lambda: comm.Allreduce(given, taken)


def _keys(cache, call):
    partial = call.partial()

    def run():
        call.attend(partial)
        for event in partial.ready:
            cache._backend.wait(event)
    return run


def _sum(cache):
    """A plain sum over the memory of this rank's keys and values."""
    if not sum(cache.local_lengths):
        return lambda: None
    return plain_sum([pool.reshape(-1)[:_key_bytes(cache) // 2 // pool.itemsize] for pool in cache._pools])


def _key_bytes(cache):
    """Bytes of the keys and values that this rank holds."""
    return sum(cache.local_lengths) * cache.kv_heads * (cache.head_dim + cache.value_dim) * ITEMSIZE[cache.dtype]


def _text(data):
    kv_heads = data["kv_heads"] or data["heads"]
    versions = data["versions"]
    lines = [facts([
        ("problem", f"{data['batch']} sequence{'s' * (data['batch'] > 1)}, {data['queries']} queries each, "
                    f"{data['heads']} heads over {kv_heads} KV heads x {data['head_dim']}, {data['dtype']}"),
        ("ranks", f"{data['ranks']} on {data['nodes']} node{'s' * (data['nodes'] > 1)}, {data['backend']} back end"),
        ("machine", f"{data['machine']['processor']}; NumPy {versions['numpy']} "
                    f"({data['machine']['blas'] or 'unknown BLAS'}, threads: "
                    f"{data['machine']['blas_threads'] or 'unknown'}), {versions['mpi']}"),
        ("measured", f"{data['runs']} calls of each, in turn")])]
    for result in data["results"]:
        median, sent = result["median"], result["sent_bytes"]
        best = median[result["chosen"]]
        rows = [(name, duration(median[name]), size(sent[name]) if name in sent else "",
                 f"{median[name] / best:.3g}" if name in sent else
                 f"{median[name] / median['MPI_Allreduce']:.3g} of MPI_Allreduce" if name not in ("keys", "sum") else
                 f"{result['key_bytes'] / median[name] / 1e9:.3g} GB/s")
                for name in median]
        lines.append(f"\n{result['context']} tokens, a partial of {size(result['partial_bytes'])}, keys of "
                     f"{size(result['key_bytes'])} a rank; auto is {result['chosen']}; results differ by "
                     f"{result['difference']:.1e}; keys are read at {percent(median['sum'] / median['keys'])} of a "
                     "sum's speed\n"
                     + table(rows, ("", "median", "sent by a rank", f"times {result['chosen']}")))
    return "\n".join(lines)


def main(argv=None):
    """Run the benchmark; returns the exit code."""
    args = _arguments().parse_args(argv)
    return on_all_ranks(lambda job: _run(job, args))


if __name__ == "__main__":
    sys.exit(main())
