"""The ranks of this host that do not take part while the others wait in MPI's start or end: stopped, or not there yet.

MPI cannot be asked then, so the system is: the processes whose parents are the launcher's process on this host, and
their children.
"""

import contextlib
import os

from ..system.launch_variables import launch_rank, launched, local_ranks

STATES = {"T": "is stopped", "t": "is stopped by a debugger", "D": "waits for the disk or the network"}  # of Linux
MPI_LIBRARY = "libmpi"  # begins the name of the file that is mapped once a process comes to MPI


def absent(launcher, starting):
    """What keeps ranks away, in words, such as "on this host rank 2 is stopped"; "" if nothing is known.

    launcher: number of the launcher's process on this host.  starting: whether those that take part are in MPI's start,
    and none of them has given up; else only ranks that are stopped are told.
    """
    parents, said, there = _parents(), {}, set()
    for child in (pid for pid, parent in parents.items() if parent == launcher):
        pid = next((below for below, parent in parents.items() if parent == child), child)  # the witness's rank
        with contextlib.suppress(OSError, ValueError, IndexError):
            rank = launch_rank(None, _environment(pid))
            there.add(rank)
            why = STATES.get(_status(pid)[0]) or ("has not come" if starting and not _has_mpi(pid) else "")
            if rank is not None and why:
                said[rank] = f"rank {rank} {why}"
    size, _ = launched()
    if starting and size == local_ranks():  # then all ranks are on this host
        said |= {rank: f"rank {rank} has ended" for rank in set(range(size)) - there}
    return f"on this host {', '.join(said[rank] for rank in sorted(said))}" if said else ""


def all_there(launcher):
    """Whether every rank of this launch is on this host and its process, or its witness, has not ended.

    False too where that is not known, as where a script stands between launcher and rank.
    """
    with contextlib.suppress(OSError, IndexError):
        children = [pid for pid, parent in _parents().items() if parent == launcher]
        living = sum(_status(pid)[0] != "Z" for pid in children)
        return launched()[0] == local_ranks() == living
    return False


def _parents():
    """The parent of every process of this host."""
    parents = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(name)] = parent(name)
    return parents


def _status(pid):
    """The fields of a process's status: its state, its parent, and so on."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()


def parent(pid):
    """The parent of a process of this host."""
    return int(_status(pid)[1])


def _environment(pid):
    with open(f"/proc/{pid}/environ", errors="replace") as file:
        return dict(entry.split("=", 1) for entry in file.read().split("\0") if "=" in entry)


def _has_mpi(pid):
    with open(f"/proc/{pid}/maps", errors="replace") as file:
        return any(os.path.basename(line.rstrip()).startswith(MPI_LIBRARY) for line in file)
