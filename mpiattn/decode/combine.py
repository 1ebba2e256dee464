"""Combining the partial results of all ranks: by a tree of messages, or by MPI's Allreduce as in the paper.

The paper is Tree Attention, arXiv 2408.04093, Algorithm 3.  A partial is one array, out followed by lse, so that it
travels as one message.
"""

import numpy as np
from mpi4py import MPI

from ..backends.kept import Kept
from ..comm.peers import keeping
from ..schedule import reduction

TAG = 0  # for messages on the duplicated communicator, where plans send none


class Partial:
    """A partial result: out (rows, heads, value_dim) and lse (rows, heads) as views of one array of a back end.

    empty: empty(shape, dtype) allocates the array; None for new memory.
    """

    def __init__(self, backend, rows, heads, value_dim, dtype, empty=None):
        cut = rows * heads * value_dim
        self.packed = (empty or backend.empty)((cut + rows * heads,), dtype)
        self.out = self.packed[:cut].reshape(rows, heads, value_dim)
        self.lse = self.packed[cut:].reshape(rows, heads)
        self.ready = ()  # events of the last launch that reads or writes it

    def absorb(self, backend, other, after=()):
        """Merge another partial into this one."""
        self.ready = other.ready = (backend.merge(self.out, self.lse, other.out, other.lse, after=after),)


class Combiner:
    """Combines partials over all ranks.

    nodes: node of every rank.  kept: buffers for partials that are reused from call to call.
    """

    def __init__(self, exchange, backend, nodes):
        self.kept = Kept(backend.empty)
        self.exchange, self.backend, self.nodes = exchange, backend, nodes
        self.peers, self.comm = exchange.peers, exchange.peers.comm
        self._moves = {}  # by (algorithm, root), cached: costs nearly a token's time

    def run(self, algorithm, own, spare, root=None):
        """The combined partial, which is `own` or `spare`, on all ranks or on `root` only; undefined on other ranks.

        algorithm: one of `reduction.ALGORITHMS`.  spare: a partial of the same shape, which is overwritten.
        """
        if algorithm == "allreduce":
            return self._allreduce(own, spare, root)
        if (algorithm, root) not in self._moves:
            self._moves[algorithm, root] = reduction.moves(algorithm, self.nodes, self.peers.rank, root)
        for number, move in enumerate(self._moves[algorithm, root]):
            own, spare = self._make(move, own, spare, f"in round {number + 1} of combining partials")
        return own

    def _make(self, move, own, spare, where):
        posted = self.post(
            move.peer if move.sends else None,
            [(own.packed, own.ready)],
            move.peer if move.receives else None,
            [(spare.packed, spare.ready)],
        )
        arrived = self.finish(posted, where)
        if not move.receives:
            return own, spare
        if move.final:
            spare.ready = arrived
            return spare, own
        left, right = (own, spare) if self.peers.rank < move.peer else (spare, own)
        left.absorb(self.backend, right, arrived)
        return left, right

    def post(self, to, leaving, source, arriving):
        """Post sends of arrays to rank `to` and receives from rank `source`; a rank of None posts nothing.

        leaving: pairs of an array and the events after which it may be read.
        arriving: pairs of an array and the events after which it may be written.
        """
        leaving, arriving = ([] if to is None else leaving), ([] if source is None else arriving)
        requests = []
        for array, free in arriving:
            requests += self.exchange.receive(self.comm, self.backend.incoming(array, free), source, TAG)
        for array, ready in leaving:
            requests += self.exchange.send(self.comm, self.backend.outgoing(array, ready), to, TAG)
        return requests, leaving, arriving

    def finish(self, posted, where):
        """Wait for the posted sends and receives; returns the events of the received arrays."""
        requests, leaving, arriving = posted
        self.exchange.wait(requests, where)
        for array, _ in leaving:
            self.backend.sent(array)
        return tuple(self.backend.arrived(array) for array, _ in arriving)

    def _allreduce(self, own, spare, root):
        """Allreduce each row's maximum lse, then the sums of exp(lse - maximum) and of out with that weight."""
        top = self.kept("top", own.lse.shape, own.lse.dtype)
        top_ready = self._reduce(own.lse, own.ready, top, (), MPI.MAX, "combining lse")
        for event in top_ready:
            self.backend.wait(event)
        ready = (self.backend.unnormalize(own.out, own.lse, top),)
        for event in self._reduce(own.packed, ready, spare.packed, spare.ready, MPI.SUM, "adding up partials", root):
            self.backend.wait(event)
        spare.ready = (self.backend.normalize(spare.out, spare.lse, top),)
        return spare

    def _reduce(self, array, ready, result, free, operation, where, root=None):
        """Reduce an array into `result`, on all ranks or on `root`; returns the events of the result."""
        whole = root is None or root == self.peers.rank
        leaving = self.backend.outgoing(array, ready, collective=True)
        arriving = self.backend.incoming(result, free, collective=True) if whole else None
        for start, stop in self.exchange.pieces(leaving, array.dtype.itemsize):
            given = leaving.array[start:stop].view(array.dtype)
            taken = arriving.array[start:stop].view(array.dtype) if whole else None
            with keeping(given, taken):
                request = (
                    self.comm.Iallreduce(given, taken, operation)
                    if root is None
                    else self.comm.Ireduce(given, taken, operation, root)
                )
                self.exchange.finish(request, "reduce", given.nbytes, where)
            if whole and arriving.taken:
                arriving.taken(start, stop)
        self.backend.sent(array)
        return (self.backend.arrived(result),) if whole else ()


def partial_bytes(rows, value_dim, dtype):
    """Bytes of a partial, and how many of these are its lse.  rows: queries x heads."""
    lse = rows * np.dtype(dtype).itemsize
    return lse * (value_dim + 1), lse


def moved_bytes(algorithm, nbytes, lse_bytes, nodes, rank, root=None):
    """Bytes that a rank passes to MPI to combine one partial.

    nbytes: bytes of the partial, of which lse_bytes are its lse.  The two arrays for MPI's Allreduce count once each;
    MPI's own traffic for them is not known.
    """
    if len(nodes) == 1:
        return 0
    if algorithm == "allreduce":
        return nbytes + lse_bytes
    return nbytes * sum(move.sends for move in reduction.moves(algorithm, nodes, rank, root))
