"""Checks that `mpiattn run` can write files in a folder, and that all ranks read the same from it."""

import contextlib
import os
import secrets

import h5py
import numpy as np

from ..errors import FileError
from ..files.access import parallel
from ..files.output import Contents, Output
from ..problem.layout import Layout

DATA = "numbers"


def gather(peers, folder):
    """Write a small file, read it on every rank, remove it; collective.

    Returns {"folder", "parallel" (h5py has MPI), "written" (None or why not), "read" (by rank: None or why not)}, the
    same on every rank.
    """
    path = peers.allgather(os.path.join(os.path.abspath(folder), f".mpiattn-check-{secrets.token_hex(8)}.h5"))[0]
    facts = {"folder": folder, "parallel": parallel(), "written": None, "read": []}
    layout = Layout("contiguous", 3 * peers.size, peers.size)
    try:
        try:
            output = Output(peers, path, {"": Contents({DATA: ((layout.seqlen,), np.int64)})})
            try:
                output.write(DATA, layout.positions(peers.rank), layout, axis=0)
                output.commit()
            finally:
                output.abandon()
        except FileError as error:  # the same on every rank
            return {**facts, "written": str(error)}
        facts["read"] = peers.allgather(_read(path, layout.seqlen))
        return facts
    finally:
        if peers.rank == 0:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _read(path, length):
    """Why this rank cannot read the file as it was written; None if it can."""
    if not os.path.exists(path):
        return "not there"
    try:
        with h5py.File(path, "r") as file:
            return None if np.array_equal(file[DATA][:], np.arange(length)) else "other contents"
    except (OSError, KeyError) as error:
        return str(error)
