"""Parts of arrays, sent and received in rounds, a few of which are under way at a time.

A part that is contiguous or lies in long blocks travels from and to where it is; another is packed, a round at a time.
"""

from collections import deque

import numpy as np

from ..backends.wire import WireBytes, in_memory, in_place
from .exchange import Exchange
from .peers import keep_forever

PIECE_BYTES = 4 * 2**20  # that a rank sends, receives, reads or writes in a round
AHEAD = 2  # rounds that are under way while the next is posted
TAG = 31000  # of these messages only, on a communicator that plans and caches do not use for theirs


def native(dtype):
    """A dtype in this machine's byte order, in which ranks send; files and programs may use the other one."""
    return np.dtype(dtype).newbyteorder("=")


def packed(array):
    """The array, or a copy, contiguous and in this machine's byte order."""
    return np.ascontiguousarray(array, native(array.dtype))


def as_bytes(array):
    """The memory of a contiguous array, flat uint8."""
    return array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)


class Rounds:
    """Posts the messages of rounds among `Peers`; every rank sends and receives in the same order.

    A context: if its body raises an exception, the buffers of all its messages stay alive for ever, since MPI may still
    use them.
    max_message: as for `MeshAttention`.
    """

    def __init__(self, peers, max_message):
        self._comm, self._exchange = peers.comm, Exchange(peers, max_message)
        self._posted, self._unpack, self._under_way = [], [], deque()
        self._posting: object = None  # the arrays of the latest message: an interrupt may end its posting

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is not None:
            keep_forever(self)

    def send(self, rank, array):
        """Send an array, which stays as it is until the end."""
        if not self._as_it_lies(array):
            array = packed(array)
        self._posting = array
        self._posted += self._exchange.send(self._comm, in_memory(array), rank, TAG)

    def receive(self, rank, array, at=...):
        """Receive what `rank` sends into an array; at: indices of a part of it."""
        part = array[at]  # a copy where indices are an array, in any order of memory
        if not np.may_share_memory(part, array) or not self._as_it_lies(part):
            part = np.empty(part.shape, native(part.dtype))
            self._unpack.append((array, at, part))
        self._posting = part
        self._posted += self._exchange.receive(self._comm, in_memory(part), rank, TAG)

    def _as_it_lies(self, array):
        """Whether MPI sends or receives an array where it lies."""
        return array.dtype == native(array.dtype) and in_place(array, self._exchange.max_message)

    def allgather(self, array, arena, lengths, starts, row_bytes, unpack=()):
        """Give every rank the arrays of all: lengths[r] rows of rank r, from row starts[r] of the contiguous `arena`.

        unpack: (array, indices, buffer): parts of the arena, and where they go at the end of the round.
        """
        if row_bytes:
            self._posting = own, arena = WireBytes(as_bytes(packed(array))), WireBytes(as_bytes(arena))
            self._posted += self._exchange.allgather(self._comm, own, arena, lengths, starts, row_bytes)
        self._unpack += unpack

    def turn(self, then=None):
        """End a round; then: called when it is complete, and all before it."""
        self._under_way.append((self._posted, self._unpack, then))
        self._posted, self._unpack = [], []
        while len(self._under_way) > AHEAD:
            self._complete()

    def end(self):
        """Complete all rounds."""
        while self._under_way:
            self._complete()
        self._exchange.close()

    def _complete(self):
        posted, unpack, then = self._under_way[0]
        self._exchange.wait(posted)
        self._under_way.popleft()
        for array, at, buffer in unpack:
            array[at] = buffer
        if then:
            then()
