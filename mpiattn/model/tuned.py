"""The machine model that the plans of this launch use."""

from collections import Counter

from ..system import host, installation
from . import store


def key_of(backend, nodes, head_dim):
    """The `mpiattn.model.store.Key` of this launch, as this process sees it.

    nodes: the node of every rank (`mpiattn.comm.mesh.nodes_of`).
    """
    blas, threads = host.blas()
    return store.Key(
        processor=host.processor(),
        cores=len(host.cores()),
        blas=blas,
        threads=threads,
        backend=" ".join(filter(None, (backend.name, backend.version, backend.transport))),
        mpi=installation.mpi_library(),
        ranks_per_node=max(Counter(nodes).values()),
        several_nodes=len(set(nodes)) > 1,
        head_dim=head_dim,
    )


def machine_for(nodes, backend, head_dim, machine=None):
    """The `Machine` that a plan uses, as this process sees it.  Raises ArgumentError.

    nodes: the node of every rank.
    machine: a `Machine`, the name of a built-in one or a file.  None: MPIATTN_MACHINE, else the store that
        `mpiattn tune` writes, else what the back end assumes.
    """
    return store.resolve(key_of(backend, nodes, head_dim), machine, backend.assumed_machine)[0]
