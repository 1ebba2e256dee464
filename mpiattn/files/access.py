"""How the ranks reach an HDF5 file: all of them by an h5py that has MPI, or each by itself."""

import h5py

from ..comm.mesh import nodes_of
from . import hdf5


def parallel():
    """Whether this h5py has MPI, and so reads and writes one file from many ranks."""
    return bool(h5py.get_config().mpi)


def open_file(path, mode, comm):
    """Open a file to read ("r") or to write ("r+"); collective where h5py has MPI."""
    if parallel():
        return h5py.File(path, mode, driver="mpio", comm=comm)
    return h5py.File(path, mode) if mode == "r" else hdf5.open_to_write(path)


def collective():
    """Transfer properties: collective where h5py has MPI."""
    how = h5py.h5p.create(h5py.h5p.DATASET_XFER)
    if parallel():
        how.set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE)
    return how


def on_one_host(peers):
    """Whether all ranks are on one host, and so read and write without MPI in HDF5; collective."""
    return not any(nodes_of(peers)) and not parallel()  # by shared memory: hosts may have the same name
