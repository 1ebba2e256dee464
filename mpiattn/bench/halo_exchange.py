"""What a halo exchange written by hand is, around the block kernel of a back end; and that of a window over tokens."""

import numpy as np
from mpi4py import MPI

from ..backends.block import BlockInputs
from ..errors import ArgumentError

TAG = 1


class HaloExchange:
    """Attention of this rank's queries to its own keys, while messages travel, and then to those that came.

    Subclasses set `own`, the launches for a rank's own keys, and `sent`, the bytes that a pass sends.

    cart: a Cartesian communicator of the ranks of peers, in the same order.  backend: has the block kernel.
    tokens: of this rank.
    """

    def __init__(self, peers, cart, backend, problem, tokens):
        self.peers, self.cart, self.backend, self.problem = peers, cart, backend, problem
        shapes = (tokens, problem.heads, problem.value_dim), (tokens, problem.heads)
        self.partial = [np.empty(shape, problem.partial_dtype) for shape in shapes]

    def launches(self, begin, end):
        """The launches for lists of intervals: (rows, begin, end), rows from the first to the last that sees a key.

        begin, end: whole numbers (lists, queries), the columns of the keys that each query sees; empty if end <= begin.
        All lists are one launch where the back end takes them so.
        """
        some = begin < end
        lists = np.flatnonzero(some.any(axis=1))
        if len(lists) > 1 and self.backend.takes_lists:
            rows = np.flatnonzero(some.any(axis=0))
            rows = slice(int(rows[0]), int(rows[-1]) + 1)
            return [(rows, *(np.ascontiguousarray(side[lists, rows].T[None], np.int32) for side in (begin, end)))]
        made = []
        for number in lists:
            rows = np.flatnonzero(some[number])
            rows = slice(int(rows[0]), int(rows[-1]) + 1)
            made.append((rows, *(np.ascontiguousarray(side[number, rows][None], np.int32) for side in (begin, end))))
        return made

    def post(self, k, v):
        """Begin all messages; returns their requests."""
        raise NotImplementedError

    def add_halo(self, q):
        """Add what the queries see of the halo to the partial; all messages are here."""
        raise NotImplementedError

    def forward(self, q, k, v, out):
        """Attention of this rank's chunks (tokens, heads, dim) into out."""
        requests = self.post(k, v)
        self.backend.clear(*self.partial)
        self.launch(self.own, self.partial, q, k, v, lambda share: MPI.Request.Testall(requests))
        self.peers.wait(requests, lambda: "for the messages of the exchange by hand")
        self.add_halo(q)
        self.backend.copy(out, self.partial[0])

    def launch(self, lists, partial, q, k, v, meanwhile=None):
        """Add the attention of queries to keys to their partial.  lists: of `launches`."""
        for rows, begin, end in lists:
            block = BlockInputs(q[rows], k, v, begin, end, self.problem.scale)
            self.backend.attend(block, *(part[rows] for part in partial), meanwhile=meanwhile)


class WindowExchange(HaloExchange):
    """Causal attention in a window over consecutive tokens: the last keys and values go to the next rank.

    cart: of one axis.  layout: contiguous.  The window is at most the tokens of any chunk.
    """

    def __init__(self, peers, cart, backend, problem, layout):
        window, tokens = problem.window[0], layout.length(peers.rank)
        super().__init__(peers, cart, backend, problem, tokens)
        if window > min(layout.lengths):
            raise ArgumentError(f"window is {window}; by hand it must be at most a rank's {min(layout.lengths)} tokens")
        self.before, self.after = cart.Shift(0, 1)
        self.sends, receives = (window * (rank != MPI.PROC_NULL) for rank in (self.after, self.before))
        shapes = [(problem.kv_heads, dim) for dim in (problem.head_dim, problem.value_dim)]
        self.arrays = [np.empty((receives, *shape), problem.dtype) for shape in shapes]
        self.sent = self.sends * sum(shape[0] * shape[1] for shape in shapes) * self.arrays[0].itemsize
        query = np.arange(tokens)[None]
        self.own = self.launches(np.maximum(query - window, 0), query + 1)
        self.came = self.launches(query, np.full_like(query, receives))

    def post(self, k, v):
        """As of `HaloExchange`."""
        requests, tokens = [], len(k)
        if len(self.arrays[0]):
            requests += [self.cart.Irecv(array.view(np.uint8), self.before, TAG) for array in self.arrays]
        if self.sends:
            parts = (array[tokens - self.sends :] for array in (k, v))
            requests += [self.cart.Isend(part.view(np.uint8), self.after, TAG) for part in parts]
        return requests

    def add_halo(self, q):
        """As of `HaloExchange`."""
        self.launch(self.came, self.partial, q, *self.arrays)
