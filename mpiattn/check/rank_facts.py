"""The facts of every rank: host, node, cores, versions, MPI, devices."""

import socket

from .. import backends
from ..backends.cpu import choice
from ..comm.mesh import nodes_of
from ..system import host, installation, memory_limits
from ..system.launch_variables import launched


def gather(peers):
    """The facts of all ranks, a list of dicts by rank, fit for JSON; collective.

    rank, host, node (the first rank that shares memory with this one), local_rank, cores (that it may use), memory
    (bytes that are left for it, or None, and by which limit), versions, blas and mpi (from
    `mpiattn.system.installation`), launched (ranks that the launcher started, or None), devices (their addresses on the
    node), device_names, no_devices_why, kernels (the instruction set of the CPU kernels, or None) and better_kernels
    (a faster set that the processor has and that was not compiled, or None).
    """
    nodes = nodes_of(peers)
    node = nodes[peers.rank]
    names, why = installation.devices()
    compiled = not backends.find("cpu").missing()
    limit, nbytes = memory_limits.least(memory_limits.limits(), nodes.count(node))
    return peers.allgather(
        {
            "rank": peers.rank,
            "host": socket.gethostname(),
            "node": nodes.index(node),
            "local_rank": nodes[: peers.rank].count(node),
            "cores": sorted(host.cores()),
            "memory": {"bytes": nbytes, "limit": limit and limit.name},
            "versions": installation.versions(),
            "blas": installation.blas(),
            "mpi": installation.mpi(peers.comm),
            "launched": launched()[0],
            "devices": installation.device_addresses(len(names)),
            "device_names": names,
            "no_devices_why": why,
            "kernels": choice.chosen() if compiled else None,
            "better_kernels": choice.better() if compiled else None,
        }
    )
