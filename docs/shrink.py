"""Attention for every problem of a file, by the ranks that are left when some die.

    mpiexec --with-ft ulfm --mca async_mpi_finalize 1 -n 4 python docs/shrink.py IN.h5 FOLDER

Each group of IN.h5, of one layer say, has q, k and v of shape (batch, seqlen, heads, head_dim).  FOLDER gets the result
of each as GROUP.npy.  Started again, the program goes on after those that are there.
"""

import os
import sys
from pathlib import Path

import h5py
import numpy as np
from mpi4py import MPI

import mpiattn


def write(path, array):
    """Write a file that is there as a whole or not at all."""
    with open(f"{path}.partial", "wb") as file:
        np.save(file, array)
    os.replace(f"{path}.partial", path)


def attend(comm, file, folder):
    """Compute the problems without a result, each on all ranks of the communicator; collective."""
    for name, problem in file.items():
        path = folder / f"{name}.npy"
        if comm.bcast(path.exists()):
            continue
        _, seqlen, heads, head_dim = problem["q"].shape
        with mpiattn.MeshAttention(comm, seqlen=seqlen, heads=heads, head_dim=head_dim, causal=True) as plan:
            q, k, v = (problem[key][:, plan.positions] for key in "qkv")  # of a smaller communicator, more tokens
            out, _ = plan.forward(q, k, v)
            whole = plan.gather(out)
        if comm.rank == 0:
            write(path, whole)


def all_done(comm, done):
    """Whether all ranks are done; they get the same answer, even if one of them dies now."""
    try:
        return bool(comm.Agree(done))
    except MPI.Exception:
        return False


def main():
    """Compute, and shrink whenever a rank has died, until all ranks that are left are done."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    comm, done = MPI.COMM_WORLD, False
    with h5py.File(source) as file:
        while not done:
            try:
                attend(comm, file, folder)
                done = True
            except (mpiattn.PeerFailure, MPI.Exception) as failure:  # MPI's own, from a call on comm
                if comm.Get_failed().size == 0 and not comm.Is_revoked():
                    raise  # all live, but one hangs or has raised an error: the job ends
                print(failure, file=sys.stderr, flush=True)
                comm.Revoke()  # no rank waits in a call on comm any more
            done = all_done(comm, done)
            if not done:
                comm = comm.Shrink()
    if comm.rank == 0:
        print(f"done on {comm.size} of {MPI.COMM_WORLD.size} ranks")


if __name__ == "__main__":
    main()
