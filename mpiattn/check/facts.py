"""What every rank knows of itself and its place."""

import socket

from mpi4py import MPI

from .. import host, installation

# Without PMI, srun starts as many programs of one rank as it was asked for ranks, and says so here only.
LAUNCHED = (*installation.LAUNCHED_RANKS, "SLURM_STEP_NUM_TASKS")


def gather(peers):
    """The facts of every rank, as a list by rank of dicts that JSON can say; collective.

    rank, host, node (the first rank that shares memory with this one), local_rank, cores (those it may use),
    versions, blas and mpi as of `mpiattn.installation`, launched (ranks that the launcher counts, or None),
    devices (how each is known on the node), device_names and no_devices_why.
    """
    local = peers.comm.Split_type(MPI.COMM_TYPE_SHARED)
    node, local_rank = local.bcast(peers.rank), local.rank
    local.Free()
    names, why = installation.devices()
    return peers.allgather({
        "rank": peers.rank, "host": socket.gethostname(), "node": node, "local_rank": local_rank,
        "cores": sorted(host.cores()), "versions": installation.versions(), "blas": installation.blas(),
        "mpi": installation.mpi(peers.comm), "launched": installation.launched_ranks(LAUNCHED),
        "devices": installation.device_addresses(len(names)), "device_names": names, "no_devices_why": why})
