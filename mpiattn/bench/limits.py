"""`mpiattn bench --limits`: operations beside what bounds them on this machine, both measured in the same run, in turn.

A ratio is the operation's time over its bound's (`bounded.operation`), medians of the slowest rank.
"""

from contextlib import ExitStack
from functools import partial

import numpy as np

from .. import backends
from ..comm.agreement import agreement
from ..comm.mesh import nodes_of
from ..console.progress import Progress
from ..console.table import duration, facts, table
from ..errors import ArgumentError
from ..version import __version__
from . import environment
from .bounded.arrays import half_types, whole_arrays
from .bounded.attention import documents, padding, predictions, whole_sequences
from .bounded.calls import small_calls
from .bounded.decoding import appending, decoding
from .bounded.files import files
from .bounded.operation import Bench
from .bounded.verification import verification
from .turns import in_turn, repeats, slowest

OWN = {"limits"}  # options that only --limits takes
SHARED = {"backend", "runs", "timeout", "json"}
PASS = 2.5  # the largest ratio that is near its bound
CLOSE = 1.5  # and of a time to the predicted one, whichever is longer
MOST = 1000  # repeats, at most
GROUPS = (
    whole_sequences,
    padding,
    documents,
    predictions,
    decoding,
    appending,
    whole_arrays,
    half_types,
    verification,
    files,
    small_calls,
)


def add_arguments(parser):
    """Declare the option of `mpiattn bench --limits`."""
    group = parser.add_argument_group(
        "limits", "Of the options above, --limits uses --backend, --runs, --timeout and --json."
    )
    group.add_argument(
        "--limits",
        action="store_true",
        help="measure operations of fixed sizes beside what bounds them on this machine: matrix products of the BLAS, "
        f"memory, MPI's own collectives, plain NumPy, h5py. PASS: at most {PASS} times the bound; predicted times at "
        f"most {CLOSE} times off",
    )


def measure(job, args):
    """Yield the figures, as data for JSON and as text; collective.  Raises ArgumentError and VerificationError."""
    peers = job.peers
    with agreement(peers):
        if any(backends.find(name).on_gpu for name in backends.candidates(args.backend)):
            raise ArgumentError(f"--backend is {args.backend!r}; --limits measures back ends of the host's processor")
    hosts = max(nodes_of(peers)) + 1
    groups = GROUPS if hosts == 1 else [group for group in GROUPS if group is not files]
    results = []
    with Progress("limits", len(groups), " groups of operations") as progress:
        for group in groups:
            with ExitStack() as stack:
                operations = list(group(Bench(peers, args.backend, stack)))
                for operation in operations:
                    results.append(_measured(peers, operation, args.runs))
                    progress(1 / len(operations))
    data = {
        "mpiattn": __version__,
        "ranks": peers.size,
        "hosts": hosts,
        "backend": args.backend,
        "runs": args.runs,
        "limit": PASS,
        "predicted_limit": CLOSE,
        "results": results,
        "machine": environment.machine(),
        "versions": environment.versions(),
    }
    yield data, as_text(data)


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
        ("PASS", f"at most {data['limit']} times the bound; a predicted time off by {data['predicted_limit']} at most"),
        (
            "left out",
            f"files: the ranks are on {data['hosts']} hosts, whose temporary folders may differ"
            if data["hosts"] > 1
            else None,
        ),
    ]
    header = "operation", "time", "bounded by", "time", "ratio", ""
    return "\n".join(["", facts(head), "", table(rows, header)])


def _measured(peers, row, runs):
    """The figures of an `Operation` and its bound, measured in turn."""
    works = {"run": partial(slowest, peers, row.run)}
    if callable(row.bound):
        works["bound"] = partial(slowest, peers, row.bound, row.in_mpi)
    works = {name: partial(timed, times=repeats(timed, MOST)) for name, timed in works.items()}
    seconds = {"bound": [row.bound], **in_turn(works, runs)}
    median, bound = float(np.median(seconds["run"])), row.worth * float(np.median(seconds["bound"]))
    ratio, limit = median / bound, PASS
    if not callable(row.bound):
        ratio, limit = max(ratio, 1 / ratio), CLOSE
    return {
        "name": row.name,
        "bounded_by": row.bounded_by,
        "median": median,
        "bound": bound,
        "ratio": ratio,
        "limit": limit,
        "passes": ratio <= limit,
        "seconds": seconds["run"],
        "bound_seconds": seconds["bound"],
    }
