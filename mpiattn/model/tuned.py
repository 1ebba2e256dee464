"""The machine that plans of this launch reckon with."""

from collections import Counter

from ..system import host, installation
from . import store


def key_of(backend, nodes, head_dim):
    """The `mpiattn.model.store.Key` of this launch, as this process sees it.

    nodes: of every rank (`mpiattn.comm.mesh.nodes_of`).
    """
    blas, threads = host.blas()
    return store.Key(processor=host.processor(), cores=len(host.cores()), blas=blas, threads=threads,
                        backend=" ".join(filter(None, (backend.name, backend.version, backend.transport))),
                        mpi=installation.mpi_library(), ranks_per_node=max(Counter(nodes).values()),
                        several_nodes=len(set(nodes)) > 1, head_dim=head_dim)


def machine_for(nodes, backend, head_dim, machine=None):
    """The `Machine` that a plan reckons with, as this process sees it.

    nodes: of every rank.  machine: None for that of MPIATTN_MACHINE, else of the store that `mpiattn tune` writes, else
    the default; a `Machine`; a built-in one's name; or a file.  Raises ArgumentError.
    """
    return store.resolve(key_of(backend, nodes, head_dim), machine)[0]
