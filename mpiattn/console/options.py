"""Options that several subcommands share, with the same text and meaning everywhere."""

import argparse
import re

from ..backends.registry import AUTO, REGISTRY, usages
from ..comm.transport import TRANSPORTS
from ..files.hdf5 import AXES
from ..model.cost import SCHEDULES
from ..model.machine import BUILT_IN
from ..model.search import SAME_TIME
from ..problem.layout import LAYOUTS
from ..problem.problem import ITEMSIZE
from ..schedule.route import ROUTES


def add_tile(parser):
    """--tile, text for `mpiattn.schedule.tile.parse_tile`."""
    parser.add_argument(
        "--tile",
        default="auto",
        metavar="TILE",
        help="AxB: A query chunks x B KV chunks on every rank, A*B = ranks: a mesh of B rows x A columns; HxAxB: H "
        "such meshes, each of which has 1/H of batch and heads, H*A*B = ranks; ring is 1xN, qring is Nx1, ulysses is "
        f"Nx1x1, auto the shortest predicted time and, of times within {100 * SAME_TIME:g} %%, the fewest bytes "
        "(default: %(default)s)",
    )


def add_schedule(parser):
    """--schedule."""
    parser.add_argument(
        "--schedule",
        default="auto",
        choices=(*SCHEDULES, "auto"),
        help="greedy: every transfer hidden behind blocks (the paper's Algorithm 2); collective: "
        "gather, one large block, exchange; auto: the shorter predicted time "
        "(default: %(default)s)",
    )


def add_values(parser):
    """--value-dim and --shared-kv."""
    parser.add_argument(
        "--value-dim", type=int, metavar="D", help="elements of a value, per head (default: --head-dim)"
    )
    parser.add_argument(
        "--shared-kv",
        action="store_true",
        help="a value is the first --value-dim elements of its key: only keys are held and travel (absorbed MLA)",
    )


def add_layout(parser):
    """--layout."""
    parser.add_argument(
        "--layout",
        default="auto",
        choices=(*LAYOUTS, "auto"),
        help="which tokens a rank holds; auto: the shortest predicted time, so contiguous where that "
        "balances the work, zigzag for causal attention (default: %(default)s)",
    )


def add_mesh_layout(parser):
    """--mesh-layout."""
    parser.add_argument(
        "--mesh-layout",
        default="auto",
        choices=(*LAYOUTS, "auto"),
        help="the layout in which the mesh computes: where it is another one than --layout, an all-to-all before and "
        "after moves the tokens; auto: the shorter predicted time (default: %(default)s)",
    )


def add_route(parser):
    """--route."""
    parser.add_argument(
        "--route",
        default="auto",
        choices=(*ROUTES, "auto"),
        help="direct: chunks go straight from their owners, or as MPI's collectives send them; ring: "
        "from neighbour to neighbour; both send the same bytes; auto: the shorter predicted time "
        "(default: %(default)s)",
    )


def parse_bytes(text):
    """Bytes, from a number with or without a unit: 512M, 1.5 GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([kKMGT]?)(?:i?B)?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes; write 800000000, 512M or 1.5G (1G is 1024 M)"
        )
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def add_max_memory(parser):
    """--max-memory, bytes."""
    parser.add_argument(
        "--max-memory",
        type=parse_bytes,
        metavar="BYTES",
        help="limit for the chunks, results and buffers of a rank, for example 512M or 1.5G: tiles and "
        "schedules that need more are excluded, and chunks are received fewer steps ahead",
    )


def add_machine(parser):
    """--machine, a name or file for `mpiattn.model.machine.load`."""
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help=f"machine whose links and speed predictions assume: {', '.join(BUILT_IN)}, or a JSON file "
        f"written by `mpiattn tune`",
    )


def add_backend(parser):
    """--backend."""
    parser.add_argument(
        "--backend",
        default="auto",
        metavar="NAME",
        help=f"what computes the blocks: {_backends(tests=False)}; auto, which is {' or '.join(AUTO)}; "
        f"for tests {_backends(tests=True)} (default: %(default)s)",
    )


def _backends(tests):
    """The back ends for tests, or the others, in words."""
    return "; ".join(f"{entry.usage}, {entry.about}" for entry in REGISTRY.values() if entry.tests == tests)


def add_transport(parser):
    """--transport."""
    parser.add_argument(
        "--transport",
        default="auto",
        choices=TRANSPORTS,
        help=f"how the back end {' or '.join(usages(on_gpu=True))} sends; staged: through pinned host "
        "memory; device: MPI takes device memory; auto: device where a probe has shown that it "
        "works (default: %(default)s)",
    )


def parse_window(text):
    """(left, right) from the text of --window."""
    try:
        left, right = (int(side) if side.strip() else None for side in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not LEFT,RIGHT, whole numbers, empty for no limit") from None
    return left, right


def add_axes(parser, files):
    """--axes, for `mpiattn.files.io.Input`; None where it is not given, which means bshd."""
    parser.add_argument(
        "--axes",
        choices=AXES,
        help=f"the order of dimensions in {files}: bshd is (batch, seqlen, heads, head_dim), bhsd is "
        "(batch, heads, seqlen, head_dim), the order of PyTorch's attention (default: bshd)",
    )


def add_masks(parser):
    """--causal, --prefix, --causal-block and --window."""
    parser.add_argument(
        "--causal",
        action="store_true",
        help="a query sees the keys up to its own position; the last query sees all keys",
    )
    parser.add_argument(
        "--prefix",
        type=int,
        default=0,
        metavar="P",
        help="causal, but every query also sees the first P keys, with documents the first P of its "
        "document (prefix-LM)",
    )
    parser.add_argument(
        "--causal-block", type=int, metavar="B", help="causal, but a query sees up to the end of its block of B keys"
    )
    add_window(parser)


def add_window(parser):
    """--window."""
    parser.add_argument(
        "--window",
        type=parse_window,
        default=(None, None),
        metavar="LEFT,RIGHT",
        help="how many keys before and after its own position a query sees; an empty side has no "
        "limit: 1024,0 is a causal sliding window, 512, has no limit to the right",
    )


def add_documents(parser):
    """--documents and --documents-k, for `mpiattn.cli.documents.read_documents`."""
    parser.add_argument(
        "--documents",
        metavar="SPEC",
        help="several documents packed in the sequence; tokens see only their own document. SPEC holds "
        "the positions where documents begin, and the end of the last (cu_seqlens). It is the "
        "name of a dataset in IN or, if IN has none of that name, the path of a .npy or text "
        "file; two dimensions, or lines of text: one row per batch entry; else one for all "
        "entries",
    )
    parser.add_argument(
        "--documents-k", metavar="SPEC", help="the same for keys and values, where their documents begin elsewhere"
    )


def add_wire_dtype(parser):
    """--wire-dtype."""
    parser.add_argument(
        "--wire-dtype",
        choices=tuple(ITEMSIZE),
        help="dtype in which partial results are sent; a narrower one sends fewer bytes and rounds "
        "each once, on the direct route only (default: the dtype in which they accumulate, "
        "float32, or float64 for float64)",
    )


def add_timeout(parser):
    """--timeout."""
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="how long a rank waits for others before it reports whom it waits for and ends the job "
        "(default: 600 or ten times the predicted time, whichever is longer; inf: for ever)",
    )


def add_plot(parser):
    """--plot, a path for `mpiattn.plots.style.save`."""
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw the result too, as .png, .svg or .pdf, whole or not at all; needs matplotlib (extra `plot`)",
    )


def add_json(parser):
    """--json, a path for `mpiattn.console.json_file.write_json`."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the result as JSON too, whole or not at all; - is standard output, and replaces the table",
    )
