"""Measures tree decoding over the ranks of a launch, beside rings, a plain MPI_Allreduce, and a plain sum of the keys.

A call decodes one or a few tokens of each sequence; its time is that of the slowest rank, without argument checks.
First every algorithm runs once and is compared with float64 attention and with the others; then all are measured in
turn.  "combining" is an algorithm without the attention, on existing partial results.  MPI_Allreduce and MPI_Iallreduce
are single calls of MPI with the same bytes; ranks wait for the latter as for all other messages.  "keys" is the
attention of each rank alone, as bytes of keys and values per second, beside NumPy's sum over the same memory.
"""

from functools import partial

import numpy as np
from mpi4py import MPI

from ..arguments.arrays import on_host
from ..comm.agreement import agreement, everywhere
from ..console import options
from ..console.table import duration, facts, percent, table
from ..decode import combine
from ..decode.call import DecodeCall
from ..decode.options import DecodeArguments
from ..decode.rings import query_ring_decode, ring_decode
from ..decode.tree import tree_decode
from ..errors import VerificationError
from ..problem.problem import ITEMSIZE
from ..schedule import reduction
from ..system.words import number, size
from ..tuning.combining import combining
from ..version import __version__
from . import environment
from .baseline import TOLERANCE
from .clock import plain_sum
from .decode_inputs import Inputs
from .turns import difference, in_turn, slowest

IN_MPI = "MPI_Allreduce"  # waits for other ranks inside MPI
RINGS = {"ring": ring_decode, "query-ring": query_ring_decode}
OWN = {"decode", "queries", "page_size", "algorithm"}  # options that only --decode takes
SHARED = set("seqlen heads kv_heads head_dim batch dtype backend transport machine runs warmup timeout json".split())


def add_arguments(parser):
    """Declare the options of `mpiattn bench --decode`."""
    group = parser.add_argument_group(
        "decoding",
        "Measure decoding of one or a few tokens at a time instead of "
        "passes. Of the options above, --decode uses the sizes, --dtype, --backend, "
        "--transport, --machine, --runs, --warmup, --timeout and --json.",
    )
    group.add_argument(
        "--decode", action="store_true", help="measure decoding over a cache of --seqlen tokens of each sequence"
    )
    options.add_numbers(group, ("queries", 1, "tokens of each sequence that a call decodes"), metavar="N")
    group.add_argument(
        "--algorithm",
        nargs="+",
        default=["all"],
        choices=("all", "auto", *reduction.ALGORITHMS, *RINGS),
        metavar="NAME",
        help=f"algorithms that combine partial results: {', '.join(reduction.ALGORITHMS)}, auto; for "
        f"comparison: {', '.join(RINGS)}, which are slow for long contexts (default: all)",
    )
    options.add_numbers(group, ("page-size", 64, "tokens of a page of the cache"), metavar="N")


def measure(job, args):
    """Yield after each context the measurement so far, as data for JSON, and the context's text; collective.

    Raises ArgumentError and VerificationError.
    """
    with agreement(job.peers):
        for name, given in (("seqlen", min(args.seqlen)), ("batch", args.batch), ("queries", args.queries)):
            options.check_least(name, given, 1)
    data = {
        "mpiattn": __version__,
        "ranks": job.peers.size,
        **options.given(args, "batch", "queries", "heads", "head_dim", "dtype", "page_size", "runs", "warmup"),
        "kv_heads": args.kv_heads or args.heads,
        "results": [],
        "machine": environment.machine(),
        "versions": environment.versions(),
    }
    for context in args.seqlen:
        result = _measure(job.peers, args, context)
        data |= {name: result.pop(name) for name in ("nodes", "backend", "transport")}
        data["results"].append(result)
        head = head_text(data) + "\n" if len(data["results"]) == 1 else ""
        yield data, head + result_text(result)


def _timed(peers, backend, run, name):
    """Seconds of the slowest rank until all launches of a work are complete."""

    def whole():
        run()
        backend.drain()

    return slowest(peers, whole, in_mpi=name == IN_MPI)


def _algorithms(asked, cache, chosen):
    """The names of the algorithms to measure, each once."""
    names = []
    for name in asked:
        names += [*reduction.algorithms(cache.nodes), *RINGS] if name == "all" else [chosen if name == "auto" else name]
    return list(dict.fromkeys(names))


def _measure(peers, args, context):
    inputs = Inputs(peers, args, context)
    with inputs.cache() as cache:
        peers.idle = cache.combiner.backend.idle  # ranks wait between calls as inside them
        q = inputs.q
        with cache.call("bench") as turn:
            call = DecodeCall(turn, cache, q, DecodeArguments())
        chosen = cache.algorithm(*call.partial_bytes)
        algorithms = _algorithms(args.algorithm, cache, chosen)
        calls = {
            name: (lambda ring=RINGS[name]: ring(q, cache, check=False))
            if name in RINGS
            else (lambda name=name: tree_decode(q, cache, algorithm=name, check=False))
            for name in algorithms
        }
        sent, apart, error = _check(inputs, cache, calls, call.partial_bytes)
        alone = {
            f"combining {name}": combining(cache.combiner, call.backend, name, call.partial(), call.partial())
            for name in algorithms
            if name in reduction.ALGORITHMS
        }
        calls |= {**alone, **_allreduce(cache, call), "keys": _keys(cache, call), "sum": _sum(cache)}
        works = {name: partial(_timed, peers, cache.combiner.backend, run, name) for name, run in calls.items()}
        seconds = in_turn(works, args.runs, args.warmup)
        nbytes = np.array([_key_bytes(cache)])
        peers.reduce(nbytes, MPI.MAX)
        return {
            "context": context,
            "chosen": chosen,
            "nodes": len(set(cache.nodes)),
            "backend": cache.backend,
            "transport": cache.transport,
            "partial_bytes": call.partial_bytes[0],
            "key_bytes": int(nbytes[0]),
            "difference": apart,
            "error": error,
            "sent_bytes": sent,
            "seconds": seconds,
            "median": {name: float(np.median(timed)) for name, timed in seconds.items()},
        }


def _check(inputs, cache, calls, partial_bytes):
    """Run each algorithm once; returns the most bytes that a rank sends in each, and two differences.

    The differences are relative to the largest value: between any two results, and between any result and float64
    attention, for the first and last query of the first and last sequence.
    """
    peers, sent, outs = inputs.peers, {}, {}
    for name, run in calls.items():
        before = cache.sent[0]
        outs[name] = on_host(run()[0]).astype(np.float64)
        of_rank, formula = cache.sent[0] - before, None
        if name in reduction.ALGORITHMS:
            formula = combine.moved_bytes(name, *partial_bytes, cache.nodes, cache.rank)
        by_rank = peers.allgather((of_rank, formula))
        sent[name] = max(nbytes for nbytes, _ in by_rank)
        if any(formula not in (None, nbytes) for nbytes, formula in by_rank):
            text = f"{name}: bytes sent and bytes by the formula differ, by rank: {by_rank}"
            raise everywhere(VerificationError(text), peers)
    first = next(iter(outs.values()))
    rows = {(sequence, query) for sequence in (0, len(first) - 1) for query in (0, first.shape[1] - 1)}
    expected = {row: inputs.expected(*row)[0] for row in sorted(rows) if inputs.context >= inputs.args.queries - row[1]}
    off = np.array(
        [
            max(difference([out], [first]) for out in outs.values()),
            max((difference([out[row]], [ref]) for out in outs.values() for row, ref in expected.items()), default=0.0),
        ]
    )
    peers.reduce(off, MPI.MAX)
    tolerance = TOLERANCE[inputs.args.dtype]
    for other, apart in zip(("one another", "float64 attention"), off):
        if not apart <= tolerance:
            text = f"results differ from {other} by {apart:.2g} of the largest value, more than {tolerance:g}"
            raise everywhere(VerificationError(text), peers)
    return sent, *off.tolist()


def _allreduce(cache, call):
    """MPI_Allreduce, which waits inside MPI, and MPI_Iallreduce, which is completed as all messages of this library."""
    peers, elements = cache.combiner.peers, call.partial_bytes[0] // np.dtype(cache.partial_dtype).itemsize
    given = np.zeros(elements, cache.partial_dtype)
    taken = np.empty_like(given)
    return {
        IN_MPI: lambda: peers.comm.Allreduce(given, taken),
        "MPI_Iallreduce": lambda: peers.wait([peers.comm.Iallreduce(given, taken)]),
    }


def _keys(cache, call):
    partial = call.partial()

    def run():
        call.attend(partial)
        for event in partial.ready:
            cache.combiner.backend.wait(event)

    return run


def _sum(cache):
    """A plain sum over the memory of this rank's keys and values."""
    if not sum(cache.local_lengths):
        return lambda: None
    return plain_sum([pool.reshape(-1)[: _key_bytes(cache) // 2 // pool.itemsize] for pool in cache.storage.pools])


def _key_bytes(cache):
    """Bytes of the keys and values that this rank holds."""
    return sum(cache.local_lengths) * cache.kv_heads * (cache.head_dim + cache.value_dim) * ITEMSIZE[cache.dtype]


def head_text(data):
    """The head of the report, for all contexts."""
    versions, machine = data["versions"], data["machine"]
    return facts(
        [
            (
                "problem",
                f"{number(data['batch'], 'sequence')}, {number(data['queries'], 'query')} "
                f"each, {number(data['heads'], 'head')} over {number(data['kv_heads'], 'KV head')} x "
                f"{data['head_dim']}, {data['dtype']}",
            ),
            ("ranks", f"{data['ranks']} on {number(data['nodes'], 'node')}, {data['backend']} back end"),
            ("transport", data["transport"]),
            (
                "machine",
                f"{machine['processor']}; NumPy {versions['numpy']} ({machine['blas'] or 'unknown BLAS'}, threads: "
                f"{machine['blas_threads'] or 'unknown'}), {versions['mpi']}",
            ),
            ("measured", f"{number(data['runs'], 'call')} of each, in turn"),
        ]
    )


def result_text(result):
    """The measurement of one context as text."""
    median, sent = result["median"], result["sent_bytes"]
    base = result["chosen"] if result["chosen"] in median else next(iter(sent))
    rows = [
        (
            name,
            duration(median[name]),
            size(sent[name]) if name in sent else "",
            f"{median[name] / median[base]:.3g}"
            if name in sent
            else f"{median[name] / median['MPI_Allreduce']:.3g} of MPI_Allreduce"
            if name not in ("keys", "sum")
            else f"{result['key_bytes'] / median[name] / 1e9:.3g} GB/s",
        )
        for name in median
    ]
    return (
        f"\n{number(result['context'], 'token')}, a partial of {size(result['partial_bytes'])}, keys of "
        f"{size(result['key_bytes'])} a rank; auto is {result['chosen']}; results differ by "
        f"{result['difference']:.1e}, from float64 by {result['error']:.1e}; keys are read at "
        f"{percent(median['sum'] / median['keys'])} of a sum's speed\n"
        + table(rows, ("", "median", "sent by a rank", f"times {base}"))
    )
