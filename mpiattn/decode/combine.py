"""Combining every rank's partial into the whole: by a tree of messages, or as the paper does by MPI's Allreduce.

(Tree Attention, arXiv 2408.04093, Algorithm 3.)  A partial is one array, out and then lse, so that it is one message.
"""

import math

import numpy as np
from mpi4py import MPI

from ..backends.kept import Kept
from ..schedule import reduction

TAG = 0        # of messages on the duplicate of a caller's communicator, where plans have none


class Partial:
    """out (rows, heads, value_dim) and lse (rows, heads) as views of one array of a back end.

    empty: empty(shape, dtype) gives its memory; None for new memory.
    """

    def __init__(self, backend, rows, heads, value_dim, dtype, empty=None):
        cut = rows * heads * value_dim
        self.packed = (empty or backend.empty)((cut + rows * heads,), dtype)
        self.out = self.packed[:cut].reshape(rows, heads, value_dim)
        self.lse = self.packed[cut:].reshape(rows, heads)
        self.ready = ()                                # events of the last launch that writes or reads it

    def absorb(self, backend, other, after=()):
        """Merge another partial into this one."""
        self.ready = other.ready = (backend.merge(self.out, self.lse, other.out, other.lse, after=after),)


class Combiner:
    """Combines partials over the ranks of an `Exchange`'s peers with a back end.

    nodes: the node of every rank.  kept: memory for partials that lasts from call to call.
    """

    def __init__(self, exchange, backend, nodes):
        self.kept = Kept(backend.empty)
        self.exchange, self.backend, self.nodes = exchange, backend, nodes
        self.peers, self.comm = exchange.peers, exchange.peers.comm
        self._moves = {}                               # by way and root: a token takes little longer than finding them

    def run(self, way, mine, spare, root=None):
        """The whole, in `mine` or `spare`: on all ranks, or on `root`; elsewhere what is returned means nothing.

        way: one of `reduction.WAYS`.  spare: a partial of the same shape, whose contents are lost.
        """
        if way == "allreduce":
            return self._allreduce(mine, spare, root)
        if (way, root) not in self._moves:
            self._moves[way, root] = reduction.moves(way, self.nodes, self.peers.rank, root)
        for number, move in enumerate(self._moves[way, root]):
            mine, spare = self._make(move, mine, spare, f"in round {number + 1} of combining partials")
        return mine

    def _make(self, move, mine, spare, where):
        posted = self.post(move.peer if move.sends else None, [(mine.packed, mine.ready)],
                           move.peer if move.receives else None, [(spare.packed, spare.ready)])
        arrived = self.finish(posted, where)
        if not move.receives:
            return mine, spare
        if move.final:
            spare.ready = arrived
            return spare, mine
        left, right = (mine, spare) if self.peers.rank < move.peer else (spare, mine)
        left.absorb(self.backend, right, arrived)
        return left, right

    def post(self, to, leaving, source, arriving):
        """Post the sending of arrays to one rank and the receiving of others from another; either None for neither.

        leaving: pairs of an array and events after which it may be read.  arriving: the same, it may be written.
        """
        leaving, arriving = ([] if to is None else leaving), ([] if source is None else arriving)
        requests = []
        for array, free in arriving:
            requests += self.exchange.receive(self.comm, self.backend.incoming(array, free), source, TAG)
        for array, ready in leaving:
            requests += self.exchange.send(self.comm, self.backend.outgoing(array, ready), to, TAG)
        return requests, leaving, arriving

    def finish(self, posted, where):
        """Complete what was posted; returns the events of what has arrived."""
        requests, leaving, arriving = posted
        self.exchange.wait(requests, where)
        for array, _ in leaving:
            self.backend.sent(array)
        return tuple(self.backend.arrived(array) for array, _ in arriving)

    def _allreduce(self, mine, spare, root):
        """The largest lse of each row, then the sums of exp(lse - largest) and of out weighted so, in one array."""
        top = self.kept("top", mine.lse.shape, mine.lse.dtype)
        top_ready = self._reduce(mine.lse, mine.ready, top, (), MPI.MAX, "combining lse")
        for event in top_ready:
            self.backend.wait(event)
        ready = (self.backend.unnormalize(mine.out, mine.lse, top),)
        for event in self._reduce(mine.packed, ready, spare.packed, spare.ready, MPI.SUM, "adding up partials", root):
            self.backend.wait(event)
        spare.ready = (self.backend.normalize(spare.out, spare.lse, top),)
        return spare

    def _reduce(self, array, ready, result, free, operation, where, root=None):
        """Reduce an array into another, on all ranks or on `root`; returns the events of the result."""
        whole = root is None or root == self.peers.rank
        leaving = self.exchange.whole(self.backend.outgoing(array, ready, collective=True)).view(array.dtype)
        arriving = None
        if whole:
            arriving = self.exchange.whole(self.backend.incoming(result, free, collective=True)).view(array.dtype)
        step = max(1, self.exchange.max_message // array.dtype.itemsize)
        for start in range(0, math.prod(array.shape), step):
            given, taken = leaving[start:start + step], arriving[start:start + step] if whole else None
            request = (self.comm.Iallreduce(given, taken, operation) if root is None
                       else self.comm.Ireduce(given, taken, operation, root))
            self.exchange.finish(request, "reduce", given.nbytes, where)
        self.backend.sent(array)
        return (self.backend.arrived(result),) if whole else ()


def partial_bytes(rows, value_dim, dtype):
    """Bytes of a partial of so many rows, one for each head of a query, and, of these, of its lse."""
    lse = rows * np.dtype(dtype).itemsize
    return lse * (value_dim + 1), lse


def moved_bytes(way, nbytes, lse_bytes, nodes, rank, root=None):
    """Bytes that a rank hands to MPI for other ranks in a call: a partial is `nbytes`, of which lse_bytes are its lse.

    What MPI's Allreduce makes of its two arrays is its own business; it gets each once.
    """
    if len(nodes) == 1:
        return 0
    if way == "allreduce":
        return nbytes + lse_bytes
    return nbytes * sum(move.sends for move in reduction.moves(way, nodes, rank, root))
