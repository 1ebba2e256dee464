"""What `mpiattn run` prints first: the command, the problem, the hosts, the predicted time, and what slows it down."""

import os
import shlex
import socket
from datetime import datetime, timezone
from typing import NamedTuple

import h5py

from ..comm.mesh import by_node
from ..console.table import duration, facts
from ..system import host
from ..system.installation import mpi_library
from ..system.words import as_text, number, span
from ..version import __version__

NAMED = 4  # at most this many hosts are named


class Host(NamedTuple):
    """The ranks of one host: how many, their BLAS threads in all, and the cores that they may use together.

    threads: None where unknown.  all_cores: the cores that the host has.
    """

    name: str
    ranks: int
    threads: int
    cores: int
    all_cores: int


def origin(peers, words):
    """Command, date and versions, for the attributes of OUT; the same on every rank; collective.

    words: the command line without the program.
    """
    return peers.allgather(
        {
            "mpiattn": __version__,
            "command": as_text(shlex.join(["mpiattn", *words])),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "numpy": host.version("numpy"),
            "h5py": h5py.__version__,
            "mpi": mpi_library(),
        }
    )[0]


def hosts_of(peers):
    """Every `Host` of the launch, in order of their lowest ranks; collective."""
    hosts = []
    for ranks in by_node(peers, (socket.gethostname(), host.blas()[1], host.cores(), os.cpu_count())):
        names, threads, cores, all_cores = zip(*ranks)
        threads = None if None in threads else sum(threads)
        hosts.append(Host(names[0], len(names), threads, len(set().union(*cores)), all_cores[0]))
    return hosts


def crowded(hosts):
    """A warning about the host that has the most threads per core; None where no host has more threads than cores."""
    crowd = [each for each in hosts if each.threads is not None and each.threads > each.cores]
    if not crowd:
        return None
    worst = max(crowd, key=lambda each: each.threads / each.cores)
    text = (
        f"{number(worst.ranks, 'rank')} on {worst.name} {'have' if worst.ranks > 1 else 'has'} "
        f"{number(worst.threads, 'thread')} for {number(worst.cores, 'core')}, which can make it many times slower: "
    )
    if worst.cores < min(worst.threads, worst.all_cores):
        text += (
            f"the launcher leaves them {worst.cores} of {worst.all_cores} cores (Open MPI: mpiexec --bind-to "
            "none; Slurm: --cpus-per-task), or "
        )
    if worst.threads > worst.ranks:
        given = [name for name in host.BLAS_VARIABLES if name in os.environ]
        few = given if 0 < len(given) < len(host.BLAS_VARIABLES) else host.BLAS_VARIABLES[:1]
        text += "set " + ", ".join(f"{name}={max(1, worst.cores // worst.ranks)}" for name in few)
    else:
        text += f"take no more than {number(worst.cores, 'rank')} a host"
    return text


def predicted(passes, seconds):
    """The predicted time of some problems, in words.  seconds: of each problem."""
    text, total = " and ".join(passes), duration(sum(seconds))
    if len(seconds) < 2:
        return f"{total} {text}"
    return f"{span(seconds, duration)} {text} of each problem, {total} of all {len(seconds)}"


def text(plan, made, hosts, problem, passes, seconds, warning):
    """The whole text, and an empty line.

    made: from `origin`.  problem: in words.  passes, seconds: as of `predicted`.  warning: text or None.
    """
    names = ", ".join(each.name for each in hosts[:NAMED]) + (", ..." if len(hosts) > NAMED else "")
    counts = [each.threads / each.ranks for each in hosts if each.threads is not None]
    threads = span(counts, lambda count: f"{count:g}") if counts else "an unknown number of"
    machine = plan.machine
    rows = [
        ("mpiattn", f"{made['mpiattn']}, {made['date']}"),
        ("command", made["command"]),
        (
            "ranks",
            f"{sum(each.ranks for each in hosts)} on {number(len(hosts), 'host')} ({names}), "
            f"{number(threads, 'BLAS thread')} each; cores for the ranks of a host: "
            f"{span([each.cores for each in hosts])}",
        ),
        ("MPI", f"{made['mpi']}; NumPy {made['numpy']}, h5py {made['h5py']}"),
        ("problem", problem),
        (
            "predicted",
            f"{predicted(passes, seconds)}, on machine {machine.name}"
            + (f": {machine.assumes}" if machine.assumes else ""),
        ),
        ("transport", plan.transport),
        ("WARNING", warning),
    ]
    return facts(rows) + "\n"
