"""Options that several subcommands share, with the same text and meaning everywhere."""

import argparse

from ..backends.registry import AUTO, REGISTRY, usages
from ..comm.transport import TRANSPORTS
from ..errors import ArgumentError
from ..files.hdf5 import AXES
from ..model.cost import SCHEDULES
from ..model.machine import BUILT_IN
from ..model.search import SAME_TIME
from ..problem.byte_counts import byte_count
from ..problem.layout import LAYOUTS
from ..problem.problem import ALIASES, ITEMSIZE
from ..schedule.route import ROUTES


def add_tile(parser):
    """--tile, text for `mpiattn.schedule.tile.parse_tile`."""
    parser.add_argument(
        "--tile",
        default="auto",
        metavar="TILE",
        help="shape of the mesh. AxB: every rank computes A query chunks x B KV chunks, A*B = ranks, on B rows x A "
        "columns of ranks. HxAxB: H planes of AxB, each with 1/H of the sequences and heads, H*A*B = ranks. ring is "
        "1xN, qring is Nx1, ulysses is Nx1x1. auto: the shortest predicted time and, among times within "
        f"{100 * SAME_TIME:g} %% of it, the fewest bytes (default: %(default)s)",
    )


def add_schedule(parser):
    """--schedule."""
    parser.add_argument(
        "--schedule",
        default="auto",
        choices=(*SCHEDULES, "auto"),
        help="greedy: transfers go on while blocks are computed (Algorithm 2 of Mesh-Attention); collective: gather "
        "all, compute once, exchange results, without overlap; auto: the shorter predicted time (default: %(default)s)",
    )


def add_values(parser):
    """--value-dim and --shared-kv."""
    parser.add_argument(
        "--value-dim", type=int, metavar="D", help="elements of a value, per head (default: --head-dim)"
    )
    parser.add_argument(
        "--shared-kv",
        action="store_true",
        help="a value is the first --value-dim elements of its key: only keys are held and sent (absorbed MLA)",
    )


def add_layout(parser):
    """--layout."""
    parser.add_argument(
        "--layout",
        default="auto",
        choices=(*LAYOUTS, "auto"),
        help="which tokens a rank holds; auto: the shortest predicted time (default: %(default)s)",
    )


def add_mesh_layout(parser):
    """--mesh-layout."""
    parser.add_argument(
        "--mesh-layout",
        default="auto",
        choices=(*LAYOUTS, "auto"),
        help="layout in which the mesh computes; if it differs from --layout, an all-to-all moves tokens before and "
        "after; auto: the shorter predicted time (default: %(default)s)",
    )


def add_route(parser):
    """--route."""
    parser.add_argument(
        "--route",
        default="auto",
        choices=(*ROUTES, "auto"),
        help="direct: each chunk is sent by its owner, or by MPI's collectives (collective schedule); ring: chunks are "
        "passed on from neighbour to neighbour; both send the same bytes; auto: the shorter predicted time "
        "(default: %(default)s)",
    )


def parse_bytes(text):
    """Bytes, from a number with or without a unit: 512M, 1.5 GiB."""
    try:
        return byte_count("it", text)
    except ArgumentError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes; write 800000000, 512M or 1.5G (1G is 1024M)"
        ) from None


def add_max_memory(parser):
    """--max-memory, bytes."""
    parser.add_argument(
        "--max-memory",
        type=parse_bytes,
        metavar="BYTES",
        help="limit for the chunks, results and buffers of a rank, for example 512M or 1.5G; tiles and schedules that "
        "need more are not used, and transfers are posted fewer steps ahead if need be",
    )


def add_machine(parser):
    """--machine, a name or file for `mpiattn.model.machine.load`."""
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help=f"machine model for predictions and auto: {', '.join(BUILT_IN)}, or a file of `mpiattn tune --out` "
        "(default: what `mpiattn tune` has stored for such a launch, else an assumed machine)",
    )


def add_backend(parser):
    """--backend."""
    parser.add_argument(
        "--backend",
        default="auto",
        metavar="NAME",
        help=f"what computes the blocks. auto: {', else '.join(AUTO)}; {_backends(tests=False)}. "
        f"For tests only: {_backends(tests=True)} (default: %(default)s)",
    )


def _backends(tests):
    """The back ends for tests, or the others, in words."""
    return "; ".join(f"{entry.usage}: {entry.about}" for entry in REGISTRY.values() if entry.tests == tests)


def add_transport(parser):
    """--transport."""
    parser.add_argument(
        "--transport",
        default="auto",
        choices=TRANSPORTS,
        help=f"how the back end {' or '.join(usages(on_gpu=True))} sends. device: MPI gets GPU memory; ipc: GPUs "
        "of one node copy from each other by CUDA IPC, else staged; staged: copies through pinned host memory; "
        "auto: the first of these that works, which is tried at the start (default: %(default)s)",
    )


def parse_window(text):
    """(left, right) from the text of --window."""
    try:
        left, right = (int(side) if side.strip() else None for side in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a window; write LEFT,RIGHT, for example 1024,0; leave a side empty for no limit"
        ) from None
    return left, right


def add_axes(parser, files):
    """--axes, for `mpiattn.files.io.Input`; None where it is not given."""
    parser.add_argument(
        "--axes",
        choices=AXES,
        help=f"the order of dimensions in {files}: bshd is (batch, seqlen, heads, head_dim), bhsd is "
        "(batch, heads, seqlen, head_dim), the order of PyTorch's attention (default: what the file's attribute axes "
        "says, else bshd; an error if there would then be more heads than tokens)",
    )


def add_masks(parser):
    """--causal, --prefix, --causal-block and --window."""
    parser.add_argument(
        "--causal",
        action="store_true",
        help="a query sees the keys up to its own position; of different lengths the ends are aligned: query i sees "
        "key j if j <= i + seqlen_k - seqlen",
    )
    parser.add_argument(
        "--prefix",
        type=int,
        default=0,
        metavar="P",
        help="prefix-LM: causal, but every query also sees the first P keys (with --documents: of its document)",
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
        help="a query sees LEFT keys before and RIGHT keys after its own position; a side that is left empty has no "
        "limit. '1024,0' is a causal sliding window; '512,' is 512 keys before and all after",
    )


def add_documents(parser):
    """--documents, --documents-k and --padding, for `mpiattn.cli.documents.read_documents`."""
    parser.add_argument(
        "--documents",
        metavar="SPEC",
        help="the sequence contains several packed documents, and a token sees only its own. SPEC is the name of a "
        "dataset of IN or, if IN has none of that name, a .npy or text file. It lists where each document begins, and "
        "then the end of the last one (cu_seqlens), from 0 to the number of tokens. One row is for all batch entries; "
        "with several rows (two dimensions, or lines of text) each entry has its own",
    )
    parser.add_argument(
        "--documents-k", metavar="SPEC", help="as --documents, for keys and values, if their documents begin elsewhere"
    )
    add_padding(parser, "the first document")


def add_padding(parser, first):
    """--padding."""
    parser.add_argument(
        "--padding",
        action="store_true",
        help=f"tokens before {first} and after the last are padding, and are counted; without this option they are an "
        "error",
    )


def parse_dtype(text):
    """The name of a dtype here, from one that is used elsewhere."""
    return ALIASES.get(text, text)


def add_dtype(parser, of=""):
    """--dtype.  of: begins the help."""
    parser.add_argument(
        "--dtype",
        type=parse_dtype,
        default="float32",
        choices=tuple(ITEMSIZE),
        help=f"{of} (default: %(default)s)".strip(),
    )


def add_wire_dtype(parser):
    """--wire-dtype."""
    parser.add_argument(
        "--wire-dtype",
        type=parse_dtype,
        choices=tuple(ITEMSIZE),
        help="dtype in which partial results are sent (default: float32, or float64 for float64). A narrower one sends "
        "fewer bytes and rounds each partial result once. It needs the direct route",
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
