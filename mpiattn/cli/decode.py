"""Compute attention of a few queries of each sequence over a cache of its keys and values, spread over the ranks.

CACHE holds k and v (batch, tokens, kv_heads, ...) in natural token order, as mpiattn.KVCache.save and mpiattn generate
write it. Its sequences are its batch entries or, where it has a dataset cu_seqlens, the documents that cu_seqlens
delimits. QUERIES holds q (sequences, queries, heads, head_dim), the queries of the last tokens of each sequence. OUT
holds out, shaped as q, and lse (sequences, heads, queries); its attributes hold the options, the command and the date.
OUT appears whole or not at all; an existing file is replaced.

examples:
  mpiattn generate cache.h5 --seqlen 100000 --heads 8 --documents 5
  mpiattn generate queries.h5 --batch 5 --seqlen 1 --heads 8
  mpiexec -n 4 mpiattn decode cache.h5 queries.h5 out.h5 --verify
"""

import math
import socket
from functools import partial

import h5py
import numpy as np

from ..arguments.arrays import on_host
from ..comm.agreement import agreement
from ..console import options
from ..console.json_file import check_json, report
from ..console.launch import on_all_ranks
from ..console.progress import Progress
from ..console.table import duration, facts
from ..decode import combine
from ..decode.cache import KVCache
from ..decode.cache_file import load, read_cache_shapes
from ..decode.tree import tree_decode
from ..errors import FileError
from ..files.hdf5 import check_is_file, file_errors, natural
from ..files.input import Input
from ..files.numbers import Numbers
from ..files.output import Contents, Output
from ..files.shapes import order_of
from ..problem.layout import Layout
from ..problem.problem import Problem
from ..schedule.reduction import ALGORITHMS
from ..system.words import number, size, span
from ..verify.decode import choose, verify_decode
from ..verify.gradients import check_passed
from .opening import origin


def add_arguments(parser):
    """Declare the arguments of `mpiattn decode`."""
    parser.add_argument("cache", metavar="CACHE", help="HDF5 file with datasets k, v, and cu_seqlens or not")
    parser.add_argument("queries", metavar="QUERIES", help="HDF5 file with dataset q")
    parser.add_argument("output", metavar="OUT", help="HDF5 file to make, with datasets out and lse")
    options.add_axes(parser, "CACHE, QUERIES and OUT (seqlen is the number of queries in the last two)")
    parser.add_argument(
        "--full", action="store_true", help="a query also sees the tokens of later queries (default: causal)"
    )
    options.add_padding(parser, "the first document of CACHE")
    options.add_missing(parser, "CACHE and QUERIES")
    options.add(parser, "window", "softcap", "scale")
    parser.add_argument(
        "--algorithm",
        default="auto",
        choices=(*ALGORITHMS, "auto"),
        help="how partial results are combined. allreduce: two MPI_Allreduce (Tree Attention's paper); butterfly: "
        "exchange between pairs of ranks, in half as many rounds; levels: inside each node, then between nodes; auto: "
        "the shortest predicted time (default: %(default)s)",
    )
    options.add_numbers(parser, ("page-size", 64, "tokens of a page of the cache"), metavar="TOKENS")
    options.add(parser, "backend", "transport", "machine")
    options.add_max_message(parser)
    parser.add_argument(
        "--verify",
        action="store_true",
        help="before the rows are written, compare them with float64 attention of CACHE, which is read "
        "again; the ranks share the rows; a sample of them where all are too much work; a wrong "
        "row: exit code 1, no OUT",
    )
    options.add_timeout(parser)
    options.add(parser, "json")


def run(args):
    """`mpiattn decode`."""
    return on_all_ranks(lambda job: _run(job, args), args.timeout)


def _query_shape(path, axes, of_cache):
    """Shape (in the order bshd) and dtype of a file's queries, and their order.

    of_cache: the order of CACHE, which they have too where nobody says another.
    """
    check_is_file("QUERIES", path)
    with file_errors("QUERIES", path, "read"), h5py.File(path, "r") as file:
        q, axes = Numbers.of(file, "q"), order_of(file, "QUERIES", axes) or of_cache
        if q is None or len(q.shape) != 4:
            sizes = ", ".join(natural(("sequences", "queries", "heads", "head_dim"), axes))
            raise FileError(f"QUERIES is {str(path)!r}; it must have a dataset q ({sizes})")
        return {"shape": natural(q.shape, axes), "dtype": q.dtype}, axes


def _problems(args, cache, asked):
    """The problem of every sequence; FileError where the queries do not fit the cache."""
    sequences, queries, heads, head_dim = asked["shape"]
    fits = (cache.sequences, cache.head_dim, cache.dtype)
    if (sequences, head_dim, asked["dtype"]) != fits or heads % cache.kv_heads:
        raise FileError(
            f"QUERIES is {args.queries!r}; its q is {asked['shape']} in {asked['dtype']}; for CACHE it "
            f"must be (sequences, queries, heads, head_dim) with {fits[0]} sequences and head_dim "
            f"{fits[1]}, in {fits[2]}; kv_heads, which is {cache.kv_heads}, must divide heads"
        )
    if queries and not any(cache.lengths):
        raise FileError(f"CACHE is {args.cache!r}; it holds no token, and must hold those of the queries")
    shape = {name: getattr(cache, name) for name in ("kv_heads", "head_dim", "value_dim", "shared_kv", "dtype")}
    return [Problem(seqlen=queries, seqlen_k=length, heads=heads, **shape, **_mask(args)) for length in cache.lengths]


def _mask(args):
    """What a query sees and how its scores are changed, as arguments of `tree_decode`."""
    return {"causal": not args.full, **options.given(args, "window", "softcap", "scale")}


def _empty(problems):
    """Number of queries of all sequences that see no key."""
    empty = 0
    for problem in problems:
        begin, end = problem.whole_mask.key_interval(np.arange(problem.seqlen))
        empty += int((begin >= end).sum())
    return empty


def _run(job, args):
    comm, peers = job.comm, job.peers
    job.on_rank_0(lambda: check_json(args.json, (args.cache, args.queries, args.output)))
    look = partial(read_cache_shapes, argument="CACHE", padding=args.padding)
    source = Input(peers, args.cache, look=look, argument="CACHE", axes=args.axes, missing=args.missing)
    look = partial(_query_shape, of_cache=source.axes)
    queries = Input(peers, args.queries, look=look, argument="QUERIES", axes=args.axes, missing=args.missing)
    spans, arrays = source.shapes["spans"], 1 if source.shapes["shared_kv"] else 2
    with Progress("read", arrays * sum(length for *_, length in spans) / comm.size, " tokens") as progress:
        how = options.given(args, "page-size", "backend", "transport", "machine", "max-message", "timeout")
        kept = "CACHE", progress, source.axes, args.padding, args.missing
        cache = job("read", lambda: load(KVCache, comm, args.cache, how, *kept))
    with cache:
        with agreement(peers):
            problems = _problems(args, cache, queries.shapes)
            q = np.ascontiguousarray(queries.tokens("q", 0, queries.shapes["shape"][1]))
        queries.check(read_elsewhere=["q"] if comm.rank else [])
        shape = queries.shapes["shape"]
        nbytes = combine.partial_bytes(math.prod(shape[:3]), cache.value_dim, cache.partial_dtype)
        algorithm = args.algorithm if args.algorithm != "auto" else cache.algorithm(*nbytes)
        chosen = {
            **origin(peers, args.words),
            "axes": queries.axes,
            "algorithm": algorithm,
            "ranks": comm.size,
            "nodes": len(set(cache.nodes)),
            "page_size": cache.page_size,
            "backend": cache.backend,
            **({"transport": cache.transport} if cache.transport else {}),
            "causal": not args.full,
            "scale": problems[0].scale,
            **({"padding": source.shapes["padding"]} if args.padding else {}),
        }
        shapes = {
            "out": ((*shape[:3], cache.value_dim), cache.dtype),
            "lse": ((shape[0], shape[2], shape[1]), cache.partial_dtype),
        }
        inputs = args.cache, args.queries
        output = Output(peers, args.output, {"": Contents(shapes, chosen)}, inputs, args.max_message)
        try:
            out, lse = map(on_host, job("decode", lambda: tree_decode(q, cache, algorithm=algorithm, **_mask(args))))
            verified = None
            if args.verify:
                verified = job("verify", lambda: _verify(peers, problems, spans, source, q, out, lse))
            job("write", lambda: _write(output, out, lse, peers))
        finally:
            output.abandon()  # does nothing once the file has its name
            source.close()
            queries.close()
        _tell(job, args, cache, shape, nbytes, {**chosen, "empty": _empty(problems)}, verified)
    return 0


def _verify(peers, problems, spans, source, q, out, lse):
    """The report; VerificationError if the result is wrong."""

    def read(sequence, name, start, stop):
        entry, first, _ = spans[sequence]
        return source.tokens(name, first + start, first + stop, entry)

    with Progress("verify", len(choose(problems, peers.rank, peers.size)[0]), " rows") as progress:
        verified = verify_decode(peers, problems, q, out, lse, read, progress=progress)
    source.check()  # HDF5 reads zeros past the end of a file
    check_passed(peers, [verified], "verification failed, OUT is not written: ")
    return verified


def _write(output, out, lse, peers):
    layout = Layout("contiguous", out.shape[1], peers.size)
    positions = layout.positions(peers.rank)
    output.write("out", out[:, positions], layout)
    output.write("lse", lse[..., positions], layout, axis=2)
    output.commit()


def _tell(job, args, cache, shape, nbytes, chosen, verified):
    """Print the table, or write JSON, on rank 0."""
    ranks = job.peers.allgather(
        {
            "rank": cache.rank,
            "host": socket.gethostname(),
            "tokens": sum(cache.local_lengths),
            "nbytes": cache.nbytes,
            "sent_bytes": cache.sent[0],
            "sent_messages": cache.sent[1],
            "formula_bytes": combine.moved_bytes(chosen["algorithm"], *nbytes, cache.nodes, cache.rank),
        }
    )
    data = {
        **options.given(args, "cache", "queries", "output"),
        **chosen,
        "seconds": job.seconds,
        "sequences": list(cache.lengths),
        "heads": shape[2],
        "kv_heads": cache.kv_heads,
        "dtype": cache.dtype,
        "per_rank": ranks,
        **({"verify": {**verified._asdict(), "passed": verified.passed}} if verified else {}),
    }
    report(job, args.json, lambda: (data, _text(data, cache, shape, verified)))


def _text(data, cache, shape, verified):
    def of_ranks(name, show=str):
        return span([rank[name] for rank in data["per_rank"]], show)

    padding, empty, lengths = data.get("padding"), data["empty"], cache.lengths
    equal = all(rank["sent_bytes"] == rank["formula_bytes"] for rank in data["per_rank"])
    queries = number(shape[0] * shape[1], "query")
    rows = [
        (
            "cache",
            f"{number(len(lengths), 'sequence')} of {number(span(lengths), 'token')}, "
            f"{number(cache.kv_heads, 'KV head')}, head_dim {cache.head_dim}, {cache.dtype}",
        ),
        ("padding", f"{number(padding, 'more token')} of CACHE" if padding else None),
        ("queries", f"{shape[1]} of each sequence, {number(shape[2], 'head')}"),
        ("ranks", f"{data['ranks']} on {number(data['nodes'], 'node')}, {cache.backend} back end"),
        ("transport", cache.transport),
        ("tokens per rank", of_ranks("tokens")),
        ("memory per rank", f"{of_ranks('nbytes', size)} of pages"),
        ("combined by", data["algorithm"]),
        ("time", ", ".join(f"{duration(seconds)} {phase}" for phase, seconds in data["seconds"].items())),
        (
            "sent per rank",
            f"{of_ranks('sent_bytes', size)}; formula: {of_ranks('formula_bytes', size)}, "
            f"{'equal on every rank' if equal else 'DIFFERENT'}",
        ),
        ("no keys", f"{empty} of {queries} without a visible key; out 0, lse -inf" if empty else None),
        ("verify", verified),
        ("written", data["output"]),
    ]
    return facts(rows)
