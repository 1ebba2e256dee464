"""Options that several subcommands share, so that they read and mean the same everywhere."""

from ..backends import NAMES
from ..cost import SCHEDULES
from ..layout import KINDS
from ..schedule import ROUTES


def add_tile(parser):
    """--tile, text for `mpiattn.tiling.parse_tile`."""
    parser.add_argument("--tile", default="auto", metavar="AxB",
                        help="A query chunks x B KV chunks on every rank, A*B = ranks: a mesh of B rows x A columns; "
                             "ring is 1xN, qring is Nx1, auto the shortest predicted time (default: %(default)s)")


def add_schedule(parser):
    """--schedule."""
    parser.add_argument("--schedule", default="auto", choices=(*SCHEDULES, "auto"),
                        help="greedy: every transfer hidden behind blocks (the paper's Algorithm 2); collective: "
                             "gather, one large block, exchange; auto: the shorter predicted time "
                             "(default: %(default)s)")


def add_layout(parser):
    """--layout."""
    parser.add_argument("--layout", default="auto", choices=(*KINDS, "auto"),
                        help="which tokens a rank holds; auto: the shortest predicted time, so contiguous where that "
                             "balances the work, zigzag for causal attention (default: %(default)s)")


def add_route(parser):
    """--route."""
    parser.add_argument("--route", default="direct", choices=ROUTES,
                        help="direct: a chunk goes straight from its owner, or as MPI's collectives send it; ring: "
                             "from neighbour to neighbour; the bytes are the same (default: %(default)s)")


def add_backend(parser):
    """--backend."""
    parser.add_argument("--backend", default="auto", choices=("auto", *NAMES),
                        help="what computes the blocks; auto: the fastest that this machine can run; deferred: late "
                             "on purpose, for tests (default: %(default)s)")


def add_json(parser):
    """--json, a path for `mpiattn.cli.jsonfile.write_json`."""
    parser.add_argument("--json", metavar="FILE",
                        help="write the result as JSON too, whole or not at all; - is standard output, then without "
                             "the table")
