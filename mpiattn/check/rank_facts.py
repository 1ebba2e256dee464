"""What every rank knows of itself and its place."""

import socket

from ..comm.mesh import nodes_of
from ..system import host, installation
from ..system.launch_variables import launched


def gather(peers):
    """The facts of every rank, as a list by rank of dicts that JSON can say; collective.

    rank, host, node (the first rank that shares memory with this one), local_rank, cores (those it may use),
    versions, blas and mpi as of `mpiattn.system.installation`, launched (ranks that the launcher counts, or None),
    devices (how each is known on the node), device_names and no_devices_why.
    """
    nodes = nodes_of(peers)
    node = nodes[peers.rank]
    names, why = installation.devices()
    return peers.allgather({
        "rank": peers.rank, "host": socket.gethostname(), "node": nodes.index(node),
        "local_rank": nodes[:peers.rank].count(node),
        "cores": sorted(host.cores()), "versions": installation.versions(), "blas": installation.blas(),
        "mpi": installation.mpi(peers.comm), "launched": launched()[0],
        "devices": installation.device_addresses(len(names)), "device_names": names, "no_devices_why": why})
