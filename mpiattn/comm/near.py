"""The ranks of a node that read each other's GPU memory: whether they can is found out by trying it."""

import os

from ..errors import MpiattnError
from .agreement import which_ranks

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Near:
    """The ranks whose slots this rank reads, and that read its own.

    device: the GPU of this rank.  own: its slots; None if no other rank is on its node.  opened: theirs, by rank.
    acks: the `mpiattn.comm.acks.Acks` among all ranks.  failed: whether a call has: slots may then never come back.
    """

    def __init__(self, device, own, opened, acks):
        self.device, self.own, self.opened, self.acks, self.failed = device, own, opened, acks, False

    def take(self):
        """The number of a slot for a piece to send; None if none is free.  Raises MpiattnError if none will ever be."""
        self.collect()
        number = self.own.take(self)
        if number is None and self.own.gone():
            raise MpiattnError(
                "calls that failed on other communicators hold all GPU memory by which this rank sends to its node; a "
                "new plan or cache gets other memory"
            )
        return number

    def collect(self):
        """Take back the slots that have been read."""
        for number in self.acks.receive():
            self.own.give(number)


def _attempt(action):
    """(what it returns, why it has failed or "")."""
    try:
        return action(), ""
    except Exception as error:  # whatever CUDA raises: the ranks go on without
        return None, str(error) if isinstance(error, MpiattnError) else f"{type(error).__name__}: {error}"


def connect(peers, nodes, backend):
    """(the `Near` of this rank, why there is none or ""); collective.  It is None on all ranks or on none.

    nodes: the node of every rank.  backend: of this rank, on a GPU.
    """
    from .acks import Acks  # here: the command line lists the transports without starting MPI

    if len(set(nodes)) == len(nodes):
        return None, "no two ranks share a node"
    node = [rank for rank in range(peers.size) if nodes[rank] == nodes[peers.rank]]
    own, why = _attempt(backend.slots) if len(node) > 1 else (None, "")
    shared = peers.allgather((why, own and own.handles, os.environ.get(VISIBLE)))
    failures = {
        rank: f"rank {rank} cannot share memory of its GPU: {why}" for rank, (why, *_) in enumerate(shared) if why
    }
    opened = {}
    if not failures:
        for rank in node:
            if rank != peers.rank:
                opened[rank], why = _attempt(lambda rank=rank: backend.opened(shared[rank][1]))
                if why:
                    why = f"rank {peers.rank} cannot read the GPU memory of rank {rank}: {why}"
                    break
        failures = {rank: why for rank, why in enumerate(peers.allgather(why)) if why}
    if not failures:
        return Near(backend.device, own, opened, Acks(peers.comm)), ""
    rank, text = next(iter(failures.items()))
    return None, text + _hidden({other: shared[other][2] for other in range(peers.size) if nodes[other] == nodes[rank]})


def _hidden(visible):
    """What may be the reason, of the GPUs that the ranks of a node see: "" if they see the same."""
    ranks = {}
    for rank, value in visible.items():
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return ""
    sets = " and ".join(f"{value!r} on {which_ranks(where)}" for value, where in list(ranks.items())[:2])
    return (
        f"; the ranks of a node see different GPUs ({VISIBLE} is {sets}): let each see all of them (Slurm: "
        "--gpus-per-node, not --gpus-per-task)"
    )
