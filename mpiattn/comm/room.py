"""Whether there is memory for what the ranks need, before it is allocated.

The ranks of a node share its memory, and often that of a cgroup, of a Slurm job, of a GPU: what they need is added up.
"""

import copy
import hashlib
from typing import NamedTuple

import numpy as np

from ..errors import MemoryShortage
from ..system import memory_limits
from ..system.memory_limits import Limit
from ..system.words import number, size, span
from .agreement import everywhere, from_rank_0

LEAST = 2**26  # bytes of a node; for less nobody looks, since that takes a millisecond
# What is advised must leave room for what is not foreseen: scratch, libraries that are loaded with the first call.
SPARE, SPARE_SHARE = 2**24, 1 / 32  # bytes a rank, and of all that is left


class Shared(NamedTuple):
    """Ranks that are under a limit together, and the bytes that are left to them."""

    ranks: list[int]
    left: int

    def lacking(self, needs):
        """How many bytes more they need; negative if there are enough.  needs: of all ranks."""
        return int(needs[self.ranks].sum()) - self.left


class Room:
    """The memory that there is for the ranks.

    nodes: the node of every rank.  limits: of every rank, [(bytes left, bytes used, mark)] of its `Limit`s; those of a
    node with the same mark are shared, and one at most has none, 0.
    """

    def __init__(self, nodes, limits):
        self.nodes, groups = nodes, {}
        for rank, of_rank in enumerate(limits):
            for left, used, mark in of_rank:
                group = groups.setdefault((nodes[rank], mark if mark else f"rank {rank}"), ([], [], [], mark))
                for of_group, value in zip(group, (rank, left, used)):
                    of_group.append(value)
        # each rank has read what was left at its own time; what a rank uses may be in no other's `left`
        self.shared = [Shared(ranks, min(left) - sum(used)) for ranks, left, used, _ in groups.values()]
        self._marks = [mark for *_, mark in groups.values()]

    def shortage(self, needs):
        """The number in `shared` of what lacks the most bytes; None if all have enough."""
        lacking = [of.lacking(needs) for of in self.shared]
        return int(np.argmax(lacking)) if lacking and max(lacking) > 0 else None

    def least(self):
        """The fewest bytes that are left for a rank, if those that share a limit have equal parts."""
        return max(0, min(of.left // len(of.ranks) for of in self.shared))

    def tighter(self):
        """The same, with room for what is not foreseen taken away."""
        less = copy.copy(self)
        less.shared = [
            Shared(ranks, left - int(SPARE_SHARE * max(left, 0)) - SPARE * len(ranks)) for ranks, left in self.shared
        ]
        return less

    def mark(self, which):
        """The mark of one of `shared`."""
        return self._marks[which]


def _limits(backend):
    """The `Limit`s of the memory that a back end's arrays are in, of those of this process alone the tightest only."""
    device = backend.device_memory()
    if device is None:
        every = memory_limits.limits()
        own = [limit for limit in every if not limit.shared]
        return [limit for limit in every if limit.shared] + sorted(own, key=lambda limit: limit.left - limit.used)[:1]
    free, name = device
    return [Limit(f"the memory of GPU {name}", free, shared=name)]


def _mark(limit):
    """What ranks compare instead of a limit's text: short, so that all fit in one message."""
    return int.from_bytes(hashlib.sha256(limit.shared.encode()).digest()[:7], "big") if limit.shared else 0


def is_small(home, needs):
    """Whether no node needs so much that it is looked at: the same on all ranks."""
    return bool(np.bincount(home.nodes, needs).max() < LEAST)


def check_room(peers, home, backend, needs, what, advise):
    """Raise MemoryShortage on every rank if some ranks need more than there is; collective.

    home: the `mpiattn.comm.mesh.Home`.  needs: bytes that every rank will allocate, the same array on all ranks.
    what: in words.  advise(room): what would fit in some of it, in words; called on rank 0.
    Costs one small allgather, and nothing where no node needs LEAST bytes.
    """
    if is_small(home, needs):
        return
    limits = _limits(backend)
    room = Room(home.nodes, peers.allgather([(limit.left, limit.used, _mark(limit)) for limit in limits]))
    which = room.shortage(needs)
    if which is None:
        return
    ranks, left = room.shared[which]
    first, mark = ranks[0], room.mark(which)
    names = peers.allgather([limit.name for limit in limits if _mark(limit) == mark])
    where = home.hosts[first]
    if not mark and peers.size > 1:  # a limit of this rank alone, as others of the host may have none
        where = f"rank {first} ({where})"
    each = needs[ranks]
    share = f", {span(each.tolist(), size)} for each of {number(len(ranks), 'rank')}" if len(ranks) > 1 else ""
    text = (
        f"{what} needs {size(int(each.sum()))} on {where}{share}; {size(max(left, 0))} are left of "
        f"{names[first][0]}; {from_rank_0(peers, lambda: advise(room.tighter()))}"
    )
    raise everywhere(MemoryShortage(text), peers, first)


def spread(room, needs):
    """What more nodes would do for ranks that each need so many bytes, in words.

    needs: of every rank, the fewest that they can do with.
    """
    which, most, ranks = room.shortage(needs), int(needs.max()), len(needs)
    if which is None:
        return "other programs may take memory on some node; try again"
    together, left = room.shared[which]
    fitting = max(left, 0) // most
    if len(together) == 1 or not fitting:
        return "take more ranks, on more nodes: each then needs less"
    return f"a node has room for {fitting} of these {ranks} ranks: take at least {number(-(-ranks // fitting), 'node')}"
