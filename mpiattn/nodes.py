"""Which ranks share a node."""

from mpi4py import MPI


def nodes_of(peers):
    """The node of every rank, numbered in order of rank: a list, the same on every rank; collective."""
    peers.barrier()                            # what follows waits for all ranks without a time limit
    node = peers.comm.Split_type(MPI.COMM_TYPE_SHARED)
    leaders = peers.allgather(min(node.Get_group().Translate_ranks(range(node.size), peers.comm.Get_group())))
    node.Free()
    numbers = {leader: number for number, leader in enumerate(dict.fromkeys(leaders))}
    return [numbers[leader] for leader in leaders]
