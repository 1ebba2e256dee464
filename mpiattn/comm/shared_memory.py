"""Memory that the ranks of one host share."""

import mmap
import os
from contextlib import suppress

import numpy as np

from ..system import partial_files
from .agreement import from_rank_0

FOLDER = "/dev/shm"  # of a file system that is in memory
NAME = "mpiattn-shared"  # begins the name of what ranks open; it is removed at once


def shared_memory(peers, nbytes):
    """Memory of this size, uint8, that is the same on all ranks, which must be on one host; collective.

    None on every rank where some rank cannot have it.  It is freed with the arrays that use it.
    """
    if peers.size == 1:
        return np.empty(nbytes, np.uint8)
    path, memory = from_rank_0(peers, lambda: _new_file(nbytes)), None
    if path is None:
        return None
    try:
        with suppress(OSError), open(path, "r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
        all_have = all(peers.allgather(memory is not None))
    finally:  # also if another rank does not come
        if peers.rank == 0:
            partial_files.discard(path)
    return memory if all_have else None


def _new_file(nbytes):
    """The path of a new file in memory, None where there is no room: touching what has none would kill a process."""
    path = None
    try:
        partial_files.remove_stale(FOLDER, NAME)
        path = partial_files.create(NAME, FOLDER, NAME)
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        return path
    except OSError:
        if path is not None:
            partial_files.discard(path)
        return None
