"""The machine that plans of this launch reckon with; collective."""

from collections import Counter

from mpi4py import MPI

from . import host, installation, machines
from .agreement import agreement


def nodes_of(peers):
    """The node of every rank: a list by rank of numbers from 0 on, in order of the nodes' first ranks."""
    local = peers.comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = min(local.Get_group().Translate_ranks(range(local.size), peers.comm.Get_group()))
    local.Free()
    firsts = peers.allgather(first)
    order = sorted(set(firsts))
    return [order.index(first) for first in firsts]


def key_of(backend, nodes, head_dim):
    """The `mpiattn.machines.Key` of this launch, as this process sees it.

    nodes: of every rank (`nodes_of`).
    """
    blas, threads = host.blas()
    return machines.Key(processor=host.processor(), cores=len(host.cores()), blas=blas, threads=threads,
                        backend=f"{backend.name} {getattr(backend, 'version', '')}".strip(),
                        mpi=installation.mpi_library(), ranks_per_node=max(Counter(nodes).values()),
                        several_nodes=len(set(nodes)) > 1, head_dim=head_dim)


def machine_for(peers, nodes, backend, problem, machine=None):
    """The `Machine` that a plan reckons with, the same on every rank: rank 0's.

    nodes: of every rank (`nodes_of`).  machine: None for that of MPIATTN_MACHINE, else of the store that `mpiattn tune`
    writes, else the default; a `Machine`; a built-in one's name; or a file.  Raises ArgumentError on every rank.
    """
    found = None
    with agreement(peers, only=0):
        if peers.rank == 0:
            found, _ = machines.resolve(key_of(backend, nodes, problem.head_dim), machine)
    return peers.allgather(found)[0]
