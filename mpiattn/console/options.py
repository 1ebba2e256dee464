"""Options that several subcommands share, with the same text and meaning everywhere."""

import argparse
from math import prod
from typing import Any

from ..backends.registry import AUTO, REGISTRY, usages
from ..comm.transport import TRANSPORTS
from ..errors import ArgumentError
from ..files.hdf5 import AXES
from ..files.numbers import MISSING
from ..masks.text import HELP, parse
from ..model.cost import SCHEDULES
from ..model.machine import BUILT_IN
from ..model.search import SAME_TIME
from ..model.space import DIRECTIONS
from ..problem.byte_counts import byte_count
from ..problem.grid import even_dims
from ..problem.layout import GRID, LAYOUTS, Layout
from ..problem.problem import ALIASES, ITEMSIZE
from ..schedule.route import ROUTES


def parse_bytes(text):
    """Bytes, from a number with or without a unit: 512M, 1.5 GiB."""
    try:
        return byte_count("it", text)
    except ArgumentError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes; write 800000000, 512M or 1.5G (1G is 1024M)"
        ) from None


def parse_window(text):
    """(left, right) from the text of --window."""
    try:
        left, right = (int(side) if side.strip() else None for side in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a window; write LEFT,RIGHT, for example 1024,0; leave a side empty for no limit"
        ) from None
    return left, right


def parse_numbers(text):
    """A tuple of whole numbers from 1 on, from the text of --grid and --dims: 721x1440."""
    try:
        numbers = tuple(int(part) for part in text.split("x"))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; write whole numbers with x between, as in 721x1440")
    return numbers


def parse_dtype(text):
    """The name of a dtype here, from one that is used elsewhere."""
    return ALIASES.get(text, text)


def _backends(tests):
    """The back ends for tests, or the others, in words."""
    return "; ".join(f"{entry.usage}: {entry.about}" for entry in REGISTRY.values() if entry.tests == tests)


def _one_of(names):
    """A choice of these names or, by default, auto."""
    return {"default": "auto", "choices": (*names, "auto")}


# What argparse takes, by the name of the option.
OPTIONS: dict[str, dict[str, Any]] = {
    # What is asked.  Of `bench` and `generate`:
    "kv-heads": dict(type=int, metavar="H", help="key and value heads, a divisor of --heads (default: --heads)"),
    "batch": dict(type=int, default=1, metavar="B", help="sequences (default: %(default)s)"),
    # Of all commands:
    "value-dim": dict(type=int, metavar="D", help="elements of a value, per head (default: --head-dim)"),
    "shared-kv": dict(
        action="store_true",
        help="a value is the first --value-dim elements of its key: only keys are held and sent (absorbed MLA)",
    ),
    "causal": dict(
        action="store_true",
        help="a query sees the keys up to its own position; of different lengths the ends are aligned: query i sees "
        "key j if j <= i + seqlen_k - seqlen",
    ),
    "prefix": dict(
        type=int,
        default=0,
        metavar="P",
        help="prefix-LM: causal, but every query also sees the first P keys (with --documents: of its document)",
    ),
    "causal-block": dict(type=int, metavar="B", help="causal, but a query sees up to the end of its block of B keys"),
    "window": dict(
        type=parse_window,
        default=(None, None),
        metavar="LEFT,RIGHT",
        help="a query sees LEFT keys before and RIGHT keys after its own position; a side that is left empty has no "
        "limit. '1024,0' is a causal sliding window; '512,' is 512 keys before and all after",
    ),
    "mask": dict(
        metavar="MASK",
        help=f"a query sees only the keys that this mask shows too. MASK is in quotation marks, one of: {HELP}",
    ),
    "documents": dict(
        metavar="SPEC",
        help="the sequence contains several packed documents, and a token sees only its own. SPEC is the name of a "
        "dataset of IN or, if IN has none of that name, a .npy or text file. It lists where each document begins, and "
        "then the end of the last one (cu_seqlens), from 0 to the number of tokens. One row is for all batch entries; "
        "with several rows (two dimensions, or lines of text) each entry has its own",
    ),
    "documents-k": dict(metavar="SPEC", help="as --documents, for keys and values, if their documents begin elsewhere"),
    "softcap": dict(type=float, metavar="C", help="scores s become C * tanh(s / C)"),
    "scale": dict(type=float, help="factor of the scores q.k (default: 1/sqrt(head_dim))"),
    "alibi": dict(
        action="store_true",
        help="ALiBi: -slope * |distance| is added to the scores, with the usual slopes, 2^(-8 h / heads) of head h, "
        "from 1; for heads that are no power of two as in ALiBi's own code",
    ),
    # How it is computed.
    "tile": dict(
        default="auto",
        metavar="TILE",
        help="shape of the mesh. AxB: every rank computes A query chunks x B KV chunks, A*B = ranks, on B rows x A "
        "columns of ranks. HxAxB: H planes of AxB, each with 1/H of the sequences and heads, H*A*B = ranks. ring is "
        "1xN, qring is Nx1, ulysses is Nx1x1. bands: every rank computes pieces of the scores, of any KV heads, with "
        "equal work on any number of ranks, also a prime one. dealt: the same, and the documents of a call are dealt "
        "to ranks. mesh: the fastest AxB or HxAxB. auto: the shortest predicted time and, among times within "
        f"{100 * SAME_TIME:g} %% of it, the fewest bytes (default: %(default)s)",
    ),
    "schedule": dict(
        **_one_of(SCHEDULES),
        help="greedy: transfers go on while blocks are computed (Algorithm 2 of Mesh-Attention); collective: gather "
        "all, compute once, exchange results, without overlap; auto: the shorter predicted time (default: %(default)s)",
    ),
    "layout": dict(**_one_of(LAYOUTS), help="which tokens a rank holds; auto: contiguous ones (default: %(default)s)"),
    "grid": dict(
        type=parse_numbers,
        metavar="SHAPE",
        help="the tokens are the points of a grid in C order, for example 721x1440, and every rank holds a block of "
        "it, as on MPI's Cartesian communicators (instead of --layout)",
    ),
    "dims": dict(
        type=parse_numbers,
        metavar="DIMS",
        help="ranks along the axes of --grid, for example 4x4; axes of which there are none are not divided "
        "(default: as MPI_Dims_create does, as equal as they can be)",
    ),
    "mesh-layout": dict(
        **_one_of((*LAYOUTS, GRID)),
        help="layout in which the mesh computes; if it differs from --layout, an all-to-all moves tokens before and "
        "after; grid: in the blocks of --grid; auto: the shorter predicted time (default: %(default)s)",
    ),
    "route": dict(
        **_one_of(ROUTES),
        help="direct: each chunk is sent by its owner, or by MPI's collectives (collective schedule); ring: chunks are "
        "passed on from neighbour to neighbour; both send the same bytes; auto: the shorter predicted time "
        "(default: %(default)s)",
    ),
    "wire-dtype": dict(
        type=parse_dtype,
        choices=tuple(ITEMSIZE),
        help="dtype in which partial results are sent (default: float32, or float64 for float64). A narrower one sends "
        "fewer bytes and rounds each partial result once. It needs the direct route",
    ),
    "backend": dict(
        default="auto",
        metavar="NAME",
        help=f"what computes the blocks. auto: {', else '.join(AUTO)}; {_backends(tests=False)}. "
        f"For tests only: {_backends(tests=True)} (default: %(default)s)",
    ),
    "transport": dict(
        default="auto",
        choices=TRANSPORTS,
        help=f"how the back end {' or '.join(usages(on_gpu=True))} sends. device: MPI gets GPU memory; ipc: GPUs "
        "of one node copy from each other by CUDA IPC, else staged; staged: copies through pinned host memory; "
        "auto: what works, which is tried at the start; of device and ipc the faster inside nodes "
        "(default: %(default)s)",
    ),
    "max-memory": dict(
        type=parse_bytes,
        metavar="BYTES",
        help="limit for the chunks, results and buffers of a rank, for example 512M or 1.5G; tiles and schedules that "
        "need more are not used, and transfers are posted fewer steps ahead if need be",
    ),
    "machine": dict(  # a name or file for `mpiattn.model.machine.load`
        metavar="NAME|FILE",
        help=f"machine model for predictions and auto: {', '.join(BUILT_IN)}, or a file of `mpiattn tune --out` "
        "(default: what `mpiattn tune` has stored for such a launch, else an assumed machine)",
    ),
    # What is written.
    "plot": dict(  # a path for `mpiattn.plots.style.save`
        metavar="FILE",
        help="draw the result too, as .png, .svg or .pdf, whole or not at all; needs matplotlib (extra `plot`)",
    ),
    "json": dict(  # a path for `mpiattn.console.json_file.report`
        metavar="FILE",
        help="write the result as JSON too, whole or not at all; - is standard output, and replaces the table",
    ),
}
MASKS = "causal", "prefix", "causal-block", "window"
VALUES = "value-dim", "shared-kv"
SHAPE = "heads", "kv-heads", "head-dim", *VALUES, "batch", "dtype"  # besides the tokens


def add(parser, *names):
    """Declare shared options, by their names in `OPTIONS`."""
    for name in names:
        parser.add_argument(f"--{name}", **OPTIONS[name])


def add_numbers(parser, *numbers, metavar=None):
    """Declare options that are whole numbers.  numbers: (name, default, what it is)."""
    for name, default, meaning in numbers:
        help = f"{meaning} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=int, default=default, metavar=metavar, help=help)


def add_direction(parser, meaning):
    """--direction.  meaning: begins the help."""
    parser.add_argument(
        "--direction", default="forward", choices=tuple(DIRECTIONS), help=f"{meaning} (default: %(default)s)"
    )


def add_trace(parser, when):
    """--trace, for `mpiattn.files.trace_file.write`.  when: which passes it has."""
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write what every rank did and when, its blocks, waits and transfers, as a trace that "
        f"https://ui.perfetto.dev opens (JSON), {when}; whole or not at all",
    )


def add_axes(parser, files):
    """--axes, for `mpiattn.files.input.Input`; None where it is not given."""
    parser.add_argument(
        "--axes",
        choices=AXES,
        help=f"the order of dimensions in {files}: bshd is (batch, seqlen, heads, head_dim), bhsd is "
        "(batch, heads, seqlen, head_dim), the order of PyTorch's attention (default: what the file's attribute axes "
        "says, else bshd; an error if there would then be more heads than tokens)",
    )


def add_missing(parser, files):
    """--missing, for `mpiattn.files.input.Input`."""
    parser.add_argument(
        "--missing",
        choices=MISSING,
        default=MISSING[0],
        help=f"numbers that are missing in {files} by the attributes _FillValue, missing_value, valid_range, valid_min "
        "or valid_max of their datasets, as netCDF files have them: an error that counts them, or NaN (default: "
        "%(default)s)",
    )


def add_padding(parser, first):
    """--padding.  first: the first document, in words."""
    parser.add_argument(
        "--padding",
        action="store_true",
        help=f"tokens before {first} and after the last are padding, and are counted; without this option they are an "
        "error",
    )


def add_dtype(parser, of=""):
    """--dtype.  of: begins the help."""
    parser.add_argument(
        "--dtype",
        type=parse_dtype,
        default="float32",
        choices=tuple(ITEMSIZE),
        help=f"{of} (default: %(default)s)".strip(),
    )


def add_max_message(parser):
    """--max-message."""
    from ..comm.exchange import MAX_MESSAGE  # only here, as it loads MPI

    parser.add_argument(
        "--max-message",
        type=parse_bytes,
        default=MAX_MESSAGE,
        metavar="BYTES",
        help="longest MPI message; longer ones are split (default: %(default)s)",
    )


def add_timeout(parser, seconds=None, default="600 or ten times the predicted time, whichever is longer"):
    """--timeout, `seconds` where it is not given.  default: this in words."""
    parser.add_argument(
        "--timeout",
        type=float,
        default=seconds,
        metavar="SECONDS",
        help="how long a rank waits for others before it reports whom it waits for and ends the job "
        f"(default: {default}; inf: for ever)",
    )


def tokens_of(args):
    """The tokens of --seqlen or, without it, of --grid; raises ArgumentError."""
    if args.seqlen is None and args.grid is None:
        raise ArgumentError("--seqlen is missing; give it, or --grid")
    return prod(args.grid) if args.seqlen is None else args.seqlen


def mask_of(args):
    """The mask that --mask asks for, None for none; raises ArgumentError."""
    return None if args.mask is None else parse(args.mask, args.grid)


def layout_of(args, ranks, seqlen, seqlen_k=None):
    """The layout that --layout or --grid and --dims ask for, of so many tokens on some ranks; raises ArgumentError."""
    if args.grid is None:
        if args.dims is not None:
            raise ArgumentError("--dims are given without --grid, whose blocks they would number")
        return args.layout
    text, points = "x".join(map(str, args.grid)), prod(args.grid)
    if args.layout != "auto":
        raise ArgumentError(f"--layout is {args.layout!r}; with --grid ranks hold the blocks of the grid")
    if {points} != {seqlen, seqlen if seqlen_k is None else seqlen_k}:
        tokens = f"{seqlen} queries and {seqlen_k} keys" if seqlen_k not in (None, seqlen) else f"{seqlen} tokens"
        raise ArgumentError(f"--grid is {text}, of {points} points; it must be of the {tokens}")
    dims = even_dims(ranks, len(args.grid)) if args.dims is None else args.dims
    if len(dims) > len(args.grid):
        raise ArgumentError(f"--dims is {'x'.join(map(str, dims))}; it may have at most the axes of --grid {text}")
    if prod(dims) != ranks:
        raise ArgumentError(f"--dims is {'x'.join(map(str, dims))}, {prod(dims)} ranks; there are {ranks}")
    return Layout.grid(args.grid, dims)


def check_least(name, number, least):
    """Raise ArgumentError, which names the option, unless the number is at least `least`."""
    if number < least:
        raise ArgumentError(f"--{name.replace('_', '-')} is {number}; it must be at least {least}")


def given(args, *names):
    """Parsed options as keyword arguments, by the names of the options; those of Python have _ for -."""
    names = [name.replace("-", "_") for name in names]
    return {name: getattr(args, name) for name in names}
