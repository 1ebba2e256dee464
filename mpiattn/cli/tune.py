"""Measure the machine that these ranks run on, and store the figures for plans of launches like this one.

Measures links inside a node and between nodes, how much of a transfer proceeds while a rank computes, blocks of every
dtype, merging, MPI collectives, and every algorithm that combines partial results, all with all ranks busy. Plans use
these figures to choose a tile, a layout and a schedule; decoding uses them to choose an algorithm. Launch it as the
work will be launched: the same ranks per node, cores and threads per rank, and several nodes if the work uses several.
What cannot be measured on one rank or one node (links between nodes, for example) is taken from the default machine.

The figures go to $XDG_CONFIG_HOME/mpiattn/machines.json (default: ~/.config), the store. If MPIATTN_MACHINE=FILE is
set, plans read that file instead. Figures that no machine has, such as a latency of 16 ms inside a node, are shown but
not kept: other programs use the cores, or the ranks have too few. --anyway keeps them.

examples:
  mpiexec -n 4 mpiattn tune
  srun mpiattn tune --quick --head-dim 64 --out cluster.json
"""

import argparse
import json
import math
import os
import sys

from ..comm.agreement import agreement
from ..console import options
from ..console.json_file import check_json, report
from ..console.launch import on_all_ranks
from ..console.progress import Progress
from ..console.table import duration, facts, percent, table, written
from ..errors import ArgumentError
from ..system.atomic_file import JSON, NewFile, check_target
from ..system.words import number

SECONDS, QUICK = 10.0, 2.0
TIMEOUT = 60.0  # seconds; no part of the measurement takes a rank this long


def _dtypes(text):
    from ..problem.problem import dtype_name

    try:
        return tuple(dict.fromkeys(dtype_name(name.strip(), "--dtype") for name in text.split(",")))
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text):
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return seconds


def _whole(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, at least 1")
    return number


def add_arguments(parser):
    """Declare the arguments of `mpiattn tune`."""
    options.add(parser, "backend", "transport")
    parser.add_argument(
        "--head-dim",
        type=_whole,
        default=128,
        metavar="N",
        help="head dim of the blocks that are timed; plans with another one use the nearest that was "
        "measured (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        type=_dtypes,
        metavar="LIST",
        help="dtypes of the blocks that are timed, separated by commas; for a dtype that is left out, "
        "plans use the nearest wider one (default: all that the back end takes)",
    )
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--seconds",
        type=_seconds,
        default=SECONDS,
        metavar="S",
        help="about how long to measure; everything is measured at least three times (default: %(default)g)",
    )
    budget.add_argument("--quick", dest="seconds", action="store_const", const=QUICK, help=f"--seconds {QUICK:g}")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the machine to this file and leave the store as it is; for MeshAttention(machine=FILE) and "
        "MPIATTN_MACHINE=FILE",
    )
    parser.add_argument("--anyway", action="store_true", help="keep the figures even if no machine can have them")
    parser.add_argument("--no-store", action="store_true", help="do not change the store")
    options.add_timeout(parser, TIMEOUT, f"{TIMEOUT:g}")
    options.add(parser, "json")


def run(args):
    """`mpiattn tune`."""
    return on_all_ranks(lambda job: _run(job, args), args.timeout)


def _run(job, args):
    from ..comm.mesh import nodes_of
    from ..comm.transport import check_transport, make_backend
    from ..model import store
    from ..model.tuned import key_of
    from ..tuning.measure import measure
    from ..tuning.plausible import implausible

    peers = job.peers
    stored = not (args.no_store or args.out)
    with agreement(peers):
        check_transport(args.backend, args.transport)
    nodes = nodes_of(peers)
    backend = make_backend(peers, nodes, args.backend, args.transport)
    peers.idle = backend.idle

    def check():  # before time is spent on measuring
        check_json(args.json)
        if args.out:
            check_target("--out", args.out, [args.json] if args.json not in (None, "-") else [], JSON)
        if stored:
            store.check_store()

    job.on_rank_0(check)
    with Progress("tune", args.seconds, " s") as progress:
        tuned = measure(job, nodes, backend, args.dtype or backend.dtypes, args.head_dim, args.seconds, progress)
    backend.close()
    wrong = implausible(tuned.samples)
    refused = bool(wrong) and not args.anyway

    def keep():
        key = key_of(backend, nodes, args.head_dim)
        samples = {name: sample._asdict() for name, sample in tuned.samples.items()}
        entry = store.Entry(key, tuned.machine, store.now(), samples)
        replaced = store.store(entry) if stored and not refused else None
        if args.out and not refused:
            with NewFile("--out", args.out, (), JSON) as new, open(new.partial, "w") as file:
                file.write(json.dumps(tuned.machine.as_dict(), indent=2, allow_nan=False) + "\n")
        data = {
            **entry.as_dict(),
            "default": tuned.lacking,
            "replaced": replaced,
            "store": store.path() if stored and not refused else None,
            "out": None if refused else args.out,
            "implausible": wrong,
            "seconds": job.seconds,
        }
        return data, _text(args, key, nodes, tuned, replaced, sum(job.seconds.values()), refused)

    report(job, args.json, keep)
    if wrong and job.comm.rank == 0:
        print(f"mpiattn tune: {_of_wrong(wrong, refused)}", file=sys.stderr, flush=True)
    return int(refused and bool(stored or args.out))


# Output


def _rate(speed):
    return f"{speed / 1e9:.3g} GB/s"


def _operations(speed):
    return f"{speed / 1e9:.4g} GFLOP/s"


def _times(ratio):
    return f"{ratio:.3g} times"


# The samples of fixed names, in the order of the table: what they are called, and how they are shown.
FIGURES = {
    "inside latency": ("inside a node: latency", duration),
    "inside bandwidth": ("  bandwidth of a rank", _rate),
    "inside overlap": ("  hidden by blocks", percent),
    "between latency": ("between nodes: latency", duration),
    "between bandwidth": ("  bandwidth of a rank", _rate),
    "node_bandwidth": ("  bandwidth of a node", _rate),
    "between overlap": ("  hidden by blocks", percent),
    "launch": ("overhead of a block", duration),
    "backward": ("  backward, of forward's speed", _times),
    "merging": ("merging partials", _rate),
    "collective": ("collectives, over pairs of messages", _times),
}


def _row(name, sample):
    kind, *of = name.split()
    if kind == "flops":
        called, show = f"  {of[0]} blocks", _operations
    elif kind == "combining":
        called, show = f"combining {of[0]} heads: {of[1]}", duration
    else:
        called, show = FIGURES[name]
    typical, low, high = map(show, sample[:3])
    return called, typical, f"{low} to {high}", sample.samples


def _of_wrong(wrong, refused):
    """What to do about implausible figures."""
    text = (
        f"implausible: {'; '.join(wrong)}. Measure when no other programs use the cores, with at most as many ranks on "
        "a node as it has cores, and bound as the work will be; `mpiattn check` says what the ranks have. "
    )
    if refused:
        return f"{text}Nothing was kept; --anyway keeps such figures."
    return f"{text}The figures were kept all the same, as --anyway asks."


def _text(args, key, nodes, tuned, replaced, seconds, refused):
    from ..model import store

    names = [
        *(name for name in FIGURES if name in tuned.samples and name.startswith(("inside", "between", "node"))),
        "launch",
        *(name for name in tuned.samples if name.startswith("flops ")),
        "backward",
        "merging",
        *(name for name in tuned.samples if name.startswith(("collective", "combining"))),
    ]
    threads = "unknown" if key.threads is None else key.threads
    head = [
        ("ranks", f"{len(nodes)} on {number(max(nodes) + 1, 'node')}, {key.ranks_per_node} a node at most"),
        (
            "a rank",
            f"{key.processor}; {number(key.cores, 'core')}, BLAS threads: {threads} ({key.blas or 'BLAS unknown'})",
        ),
        ("back end", f"{key.backend}, head_dim {key.head_dim}"),
        ("MPI", key.mpi),
    ]
    lacking = "; ".join(f"{field} ({why})" for field, why in tuned.lacking.items())
    tail = [
        ("took", f"{duration(seconds)}; quartiles over all ranks and repetitions"),
        ("not measured", f"the default's: {lacking}" if lacking else None),
        ("written", None if refused else written(args.out, args.json)),
    ]
    if refused or args.no_store or args.out:
        tail += [("stored", "no"), ("plans", "unchanged")]
    else:
        tail.append(("stored", f"{store.path()}{', in place of what was measured before' * replaced}"))
        tail.append(
            (
                "plans",
                f"of launches like this one, on {'several nodes' if key.several_nodes else 'one node'}, "
                "use it from now on",
            )
        )
    if os.environ.get(store.VARIABLE):
        tail.append(("", f"but {store.VARIABLE}={os.environ[store.VARIABLE]} is set and overrides the store"))
    rows = [_row(name, tuned.samples[name]) for name in names]
    return "\n\n".join([facts(head), table(rows, ("", "typical", "quartiles", "samples")), facts(tail)])
