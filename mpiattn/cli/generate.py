"""Make an HDF5 file of random queries, keys and values.

The datasets q (batch, seqlen, heads, head_dim), k and v (batch, seqlen_k, kv_heads, ...), with --dout dout
(batch, seqlen, heads, value_dim), and with --bias bias (batch, heads, seqlen, seqlen_k), hold standard normal numbers
in natural token order. They are written a piece at a time, so the file may be larger than memory. With --problems N
they are in each of the groups 0 to N - 1, with other numbers. The same seed and shapes give the same file.
"""

import math
import os

import numpy as np

from ..console import options
from ..console.progress import Progress
from ..errors import ArgumentError
from ..files import hdf5
from ..files.grids import spread
from ..problem.problem import ITEMSIZE, Problem
from ..system.atomic_file import HDF5, NewFile
from ..system.launch_variables import launch_rank
from ..system.values import whole_number
from ..system.words import number, size

PIECE_ELEMENTS = 2**22
MOST_PROBLEMS = 2**24 - 1  # whose names fit in memory
NAMES = "q", "k", "v", "dout"  # of tensors


def add_arguments(parser):
    """Declare the arguments of `mpiattn generate`."""
    parser.add_argument("file", metavar="FILE", help="HDF5 file to make; an existing one is replaced")
    parser.add_argument("--seqlen", type=int, metavar="N", help="tokens (default: those of --grid)")
    parser.add_argument(
        "--grid",
        type=options.parse_numbers,
        metavar="SHAPE",
        help="the tokens are the points of a grid, for example 721x1440, whose axes the datasets have in place of "
        "seqlen, for run --grid",
    )
    parser.add_argument("--heads", type=int, required=True, metavar="H", help="query heads")
    options.add(parser, "kv-heads")
    parser.add_argument("--head-dim", type=int, default=64, metavar="D", help="elements of a head (default: 64)")
    options.add(parser, *options.VALUES)
    parser.add_argument("--seqlen-k", type=int, metavar="N", help="tokens of keys and values (default: --seqlen)")
    options.add(parser, "batch")
    parser.add_argument(
        "--dout", action="store_true", help="add a gradient of the result, dataset dout, for run --backward"
    )
    parser.add_argument(
        "--bias",
        action="store_true",
        help="add a bias of standard normal numbers, dataset bias (batch, heads, seqlen, seqlen_k) in the dtype of "
        "lse, for run --bias bias",
    )
    parser.add_argument("--shared-bias", action="store_true", help="one --bias for all sequences: (1, heads, ...)")
    parser.add_argument(
        "--documents",
        type=int,
        metavar="N",
        help="add the boundaries of N documents of random lengths, dataset cu_seqlens (and "
        "cu_seqlens_k with --seqlen-k), for run --documents cu_seqlens",
    )
    parser.add_argument("--problems", type=int, metavar="N", help="this many problems, a group each")
    parser.add_argument("--dtype", default="float32", metavar="TYPE", help=f"{', '.join(ITEMSIZE)} (default: float32)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the random numbers (default: 0)")


def run(args):
    """`mpiattn generate`; under a launcher only rank 0 works."""
    if launch_rank():
        return 0
    tokens = options.tokens_of(args)
    if args.grid is not None and {tokens, args.seqlen_k or tokens} != {math.prod(args.grid)}:
        raise ArgumentError(
            f"--grid has {math.prod(args.grid)} points; --seqlen and --seqlen-k are other numbers, {tokens} and "
            f"{args.seqlen_k or tokens}"
        )
    problem = Problem(**options.given(args, "seqlen-k", *options.SHAPE), seqlen=tokens)
    whole_number("seed", args.seed, 0)  # an attribute of the file
    if args.problems is not None:
        whole_number("problems", args.problems, 1, most=MOST_PROBLEMS)
    groups = [""] if args.problems is None else list(map(str, range(args.problems)))
    p = problem
    shapes = {
        "q": (p.batch, p.seqlen, p.heads, p.head_dim),
        "k": (p.batch, p.seqlen_k, p.kv_heads, p.head_dim),
        "v": (p.batch, p.seqlen_k, p.kv_heads, p.value_dim),
    }
    if p.shared_kv:
        del shapes["v"]
    if args.dout:
        shapes["dout"] = (p.batch, p.seqlen, p.heads, p.value_dim)
    if args.shared_bias and not args.bias:
        raise ArgumentError("--shared-bias is given without --bias, which it is about")
    of_pairs = {"bias": (1 if args.shared_bias else p.batch, p.heads, p.seqlen, p.seqlen_k)} if args.bias else {}
    cuts = _documents(args, tokens)
    shapes = {name: spread(shape, 1, args.grid) for name, shape in shapes.items()}
    with NewFile("FILE", args.file, (), HDF5) as new, hdf5.file_errors("FILE", args.file, "written"):
        with hdf5.writing(new.partial, create=True) as file:
            for group in groups:
                hdf5.create_datasets(
                    hdf5.group(file, group),
                    {name: (shape, p.dtype) for name, shape in shapes.items()}
                    | {name: (shape, p.partial_dtype) for name, shape in of_pairs.items()}
                    | {name: (cut.shape, cut.dtype) for name, cut in cuts.items()},
                )
            file.attrs["seed"], file.attrs["axes"] = args.seed, hdf5.AXES[0]
            if p.shared_kv:
                file.attrs["value_dim"] = p.value_dim
        hdf5.reserve(new.partial)
        total = len(groups) * sum(math.prod(shape) for shape in (*shapes.values(), *of_pairs.values()))
        with hdf5.writing(new.partial) as file, Progress("generate", total, " elements") as progress:
            for path in groups:
                group, seed = hdf5.group(file, path), [args.seed, *map(int, filter(None, [path]))]
                for i, name in enumerate(shapes):
                    _fill(group[name], np.random.default_rng([*seed, i]), p.dtype, progress)
                for name in of_pairs:
                    _fill_pairs(group[name], np.random.default_rng([*seed, len(NAMES)]), p.partial_dtype, progress)
                for name, cut in cuts.items():
                    hdf5.write(group[name], (0,), cut)
    listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    listed += "".join(f", {name} {shape} in {p.partial_dtype}" for name, shape in of_pairs.items())
    listed += "".join(f", {name} {cut.tolist() if len(cut) < 9 else cut.shape}" for name, cut in cuts.items())
    of_groups = "" if args.problems is None else f"{number(len(groups), 'problem')}, each with "
    print(f"{args.file}: {of_groups}{listed}, {p.dtype}, {size(os.path.getsize(args.file))}")
    return 0


def _documents(args, tokens):
    """The boundaries of random documents, none of them empty, by dataset."""
    cuts = {}
    if args.documents is None:
        return cuts
    for name, length in (("cu_seqlens", tokens), ("cu_seqlens_k", args.seqlen_k)):
        if length is not None:
            if not 1 <= args.documents <= length:
                raise ArgumentError(f"documents is {args.documents}; it must be from 1 to {length}, the tokens")
            rng = np.random.default_rng([args.seed, len(cuts), length])
            inner = rng.choice(length - 1, args.documents - 1, replace=False, shuffle=False) + 1
            cuts[name] = np.array([0, *sorted(inner.tolist()), length], np.int64)
    return cuts


def _fill(data, rng, dtype, progress):
    batch, *points, heads, dim = data.shape
    tokens = math.prod(points)
    step = max(1, PIECE_ELEMENTS // (heads * dim))
    for b in range(batch):
        for start in range(0, tokens, step):
            count = min(step, tokens - start)
            drawn = rng.standard_normal((1, count, heads, dim), np.float64 if dtype == "float64" else np.float32)
            hdf5.write(data, (b, start, 0, 0), drawn.astype(dtype), axis=1)
            progress(drawn.size)


def _fill_pairs(data, rng, dtype, progress):
    *lead, rows, columns = data.shape
    step = max(1, PIECE_ELEMENTS // max(1, columns))
    for b, h in np.ndindex(*lead):
        for start in range(0, rows, step):
            drawn = rng.standard_normal((1, 1, min(step, rows - start), columns), dtype)
            hdf5.write(data, (b, h, start, 0), drawn)
            progress(drawn.size)
