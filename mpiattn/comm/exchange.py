"""Nonblocking messages of flat byte buffers, split where they are too long, and counted.

What leaves may not be ready yet, on a GPU: a message is then posted later, by whoever looks at any message or waits for
one.  A rank that waits to receive so goes on sending, and no rank waits for ever.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mpi4py import MPI

from ..errors import ArgumentError
from .peers import translate_ranks

MAX_MESSAGE = 2 ** 30     # bytes; below the 2^31 - 1 that an MPI count can say
PROGRESS = 3e-4           # seconds between two calls that let MPI move messages while a rank computes


def check_max_message(value):
    """Raise ArgumentError unless a value may be the bytes of the longest message."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2 ** 31:
        raise ArgumentError(f"max_message is {value!r}; it must be from 1 to 2^31 - 1 bytes")


@dataclass(eq=False, slots=True)
class Posted:
    """A request, and for a message that says what is missing, what it does: a verb, bytes, and the rank in a group.

    request: None until the bytes are ready.  peer: None for a collective of all the group.  then: what is called once
    it is complete, None once it has been.
    """

    request: MPI.Request
    verb: str
    nbytes: int
    comm: MPI.Comm
    peer: int = None
    then: Callable = None


class Exchange:
    """Posts and completes transfers for one plan.

    peers: the ranks of the plan, by whose numbers a failure names them.  Messages are of `WireBytes`, collectives of
    flat arrays of uint8, see `whole`.
    max_message: bytes of the longest message; a longer one goes in pieces.  sent_bytes and sent_messages count what was
    handed to MPI for other ranks.
    """

    def __init__(self, peers, max_message=MAX_MESSAGE):
        self.peers, self.max_message = peers, max_message
        self.sent_bytes = self.sent_messages = 0
        self.wait_seconds = 0.0
        self._row_types, self._next = {}, 0.0
        self._later = deque()               # what waits for its bytes, in order: what will be posted, whether, and how
        self._coming = []                   # what was posted and has something to call when it is complete

    def send(self, comm, wire, dest, tag):
        """Post a send, at once or when its bytes are ready; returns what is posted.  No bytes send nothing."""
        posted = self._messages(comm.Isend, "send", comm, wire, dest, tag)
        self.sent_bytes += len(wire.array)
        self.sent_messages += len(posted)
        return posted

    def receive(self, comm, wire, source, tag):
        """Post a receive of exactly the bytes, at once or when they may be written; returns what is posted."""
        return self._messages(comm.Irecv, "receive", comm, wire, source, tag)

    def _messages(self, post, verb, comm, wire, peer, tag):
        posted, size, total = [], min(self.max_message, wire.piece or self.max_message), len(wire.array)
        for start in range(0, total, size):
            stop = min(start + size, total)
            one = Posted(None, verb, stop - start, comm, peer, wire.taken and partial(wire.taken, start, stop))
            message = [wire.array[start:stop] if size < total else wire.array, MPI.BYTE], peer, tag
            if wire.ready is None:
                one.request = post(*message)
            else:
                self._later.append((one, partial(wire.ready, stop), partial(post, *message)))
            if one.then:
                self._coming.append(one)
            posted.append(one)
        if self._later or self._coming:
            self.progress()
        return posted

    def progress(self):
        """Post what has become ready, in order, and pass on what has arrived."""
        while self._later and self._later[0][1]():
            one, _, message = self._later.popleft()
            one.request = message()
        if self._coming:
            there = [one for one in self._coming if one.request is not None]
            for i in MPI.Request.Testsome([one.request for one in there]) or ():
                then, there[i].then = there[i].then, None
                then()
            self._coming = [one for one in self._coming if one.then]

    def whole(self, wire):
        """The array of all bytes, as a collective takes it, once they are ready."""
        def ready():
            self.progress()
            return wire.ready is None or wire.ready(len(wire.array))
        self.peers.until(ready, lambda: "for its own work")
        return wire.array

    def _row_type(self, row_bytes):
        """A datatype of one token's bytes: counts and displacements in tokens cannot overflow."""
        if row_bytes not in self._row_types:
            self._row_types[row_bytes] = MPI.BYTE.Create_contiguous(row_bytes).Commit()
        return self._row_types[row_bytes]

    def _rounds(self, longest, row_bytes):
        """First token and number of tokens of each round that keeps messages within the limit."""
        step = max(1, self.max_message // row_bytes)
        return [(first, step) for first in range(0, longest, step)]

    def allgather(self, comm, chunk, arena, lengths, offsets, row_bytes):
        """Post the gathering of every rank's chunk into `arena`; returns what was posted.

        lengths, offsets: tokens of each rank's chunk and where it goes in the arena, by rank of `comm`.
        """
        row_type, posted = self._row_type(row_bytes), []
        for first, step in self._rounds(max(lengths), row_bytes):
            counts = [min(max(n - first, 0), step) for n in lengths]
            starts = [offset + min(first, n) for offset, n in zip(offsets, lengths)]
            mine = counts[comm.rank]
            piece = chunk[first * row_bytes:(first + mine) * row_bytes]
            request = comm.Iallgatherv([piece, mine, row_type], [arena, counts, starts, row_type])
            posted.append(Posted(request, "gather", sum(counts) * row_bytes, comm))
            self._count(mine * row_bytes, comm.size - 1)
        return posted

    def alltoall(self, comm, outgoing, out_lengths, out_offsets, incoming, in_lengths, in_offsets, row_bytes,
                 longest):
        """Post an exchange of a chunk with every rank; returns what was posted.

        Tokens out_lengths[j] at out_offsets[j] of `outgoing` go to rank j; in_lengths[j] tokens from rank j
        come to in_offsets[j] of `incoming`.  longest: tokens of the longest chunk between any two ranks, by
        which all of them know the number of rounds.
        """
        row_type, posted = self._row_type(row_bytes), []

        def part(lengths, offsets, first, step):
            return ([min(max(n - first, 0), step) for n in lengths],
                    [offset + min(first, n) for offset, n in zip(offsets, lengths)])
        for first, step in self._rounds(longest, row_bytes):
            counts, starts = part(out_lengths, out_offsets, first, step)
            in_counts, in_starts = part(in_lengths, in_offsets, first, step)
            request = comm.Ialltoallv([outgoing, counts, starts, row_type],
                                      [incoming, in_counts, in_starts, row_type])
            posted.append(Posted(request, "exchange", sum(counts + in_counts) * row_bytes, comm))
            for rank, count in enumerate(counts):
                self._count(count * row_bytes, rank != comm.rank)
        return posted

    def _count(self, nbytes, messages):
        if nbytes:
            self.sent_bytes += nbytes * messages
            self.sent_messages += int(messages)

    def due(self):
        """Whether it is time again to let MPI move messages, for whoever computes on the thread that MPI would need."""
        now = time.perf_counter()
        if now < self._next:
            return False
        self._next = now + PROGRESS
        return True

    def complete(self, posted):
        """Let MPI move what was posted; whether it is complete."""
        if self._later or self._coming:
            self.progress()
            if any(one.request is None or one.then for one in posted):
                return False
        return MPI.Request.Testall([one.request for one in posted])

    def wait(self, posted, where=""):
        """Complete what was posted, staying inside MPI so that it makes progress.

        where: in what, for the PeerFailure when it takes longer than the peers are waited for.
        """
        start = time.perf_counter()
        def tell():
            return f"{where} to {self._missing(posted)}".lstrip()
        if self._later or self._coming:
            self.peers.until(lambda: self.complete(posted), tell, posted)
        else:
            self.peers.wait([one.request for one in posted], tell)
        self.wait_seconds += time.perf_counter() - start

    def finish(self, request, verb, nbytes, where):
        """Complete a collective of all peers that was started elsewhere, to which this rank has given `nbytes`."""
        self._count(nbytes, self.peers.size > 1)
        self.wait([Posted(request, verb, nbytes, self.peers.comm)], where)

    def _missing(self, posted):
        """What has not been completed, in words."""
        told = []
        for one in posted:
            if one.request is not None and (one.request == MPI.REQUEST_NULL or one.request.Test()):
                continue
            ranks = range(one.comm.size) if one.peer is None else [one.peer]
            names = ", ".join(str(rank) for rank in translate_ranks(one.comm, ranks, self.peers.comm))
            preposition = {"send": "to rank", "receive": "from rank"}.get(one.verb, "among ranks")
            told.append(f"{one.verb} {one.nbytes} bytes {preposition} {names}")
        return ", ".join(told)

    def close(self):
        """Free the datatypes."""
        while self._row_types:
            self._row_types.popitem()[1].Free()
