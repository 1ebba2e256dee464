"""Nonblocking messages of flat byte buffers, split where they are too long, and counted.

Bytes to send may still be computed on a GPU.  Such a message is posted later, when a transfer is posted, tested or
waited for.  So a rank that waits for a receive still posts its sends, and ranks cannot block each other.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mpi4py import MPI

from ..problem.byte_counts import byte_count
from .caller_comm import is_running
from .peers import hold, translate_ranks

MAX_MESSAGE = 2**30  # bytes; MPI counts end at 2^31 - 1
PROGRESS = 3e-4  # seconds between two polls of MPI while a rank computes


def message_limit(value):
    """max_message, the bytes of the longest message, as an int.  Raises ArgumentError."""
    return byte_count("max_message", value, 2**31 - 1)


def _part(lengths, offsets, first, step):
    """Of chunks with these lengths and offsets, the lengths and offsets of the tokens [first, first + step)."""
    if not first and max(lengths) <= step:  # all
        return lengths, offsets
    counts = [min(max(n - first, 0), step) for n in lengths]
    return counts, [offset + min(first, n) for offset, n in zip(offsets, lengths)]


def _bytes(array, first, count, row_bytes):
    """The bytes of some consecutive tokens."""
    return array[first * row_bytes : (first + count) * row_bytes]


def _call_each(function, arguments):
    for each in arguments:
        function(*each)


def _all_true(questions):
    return all(question() for question in questions)


def _post_blocks(post, wire, peer, tag):
    """Post one message of bytes that lie in blocks; MPI packs and unpacks them."""
    blocks = MPI.BYTE.Create_hvector(*wire.blocks).Commit()
    request = post([wire.array, 1, blocks], peer, tag)
    blocks.Free()  # once the message is complete
    return request


@dataclass(eq=False, slots=True)
class Posted:
    """A transfer: its request and, for error messages, its verb, its bytes and its peer's rank in `comm`.

    request: None until the bytes are ready.  peer: None for a collective call.  then: called once when the request is
    complete, then None.  over: called after that until it returns true, then None; the transfer is complete then.
    """

    request: MPI.Request | None
    verb: str
    nbytes: int
    comm: MPI.Comm
    peer: int | None = None
    then: Callable[[], object] | None = None
    over: Callable[[], bool] | None = None

    @property
    def pending(self):
        """Whether something has to be done before or after what the request does."""
        return self.request is None or self.then or self.over


class Exchange:
    """Posts and completes transfers for one plan.

    peers: the ranks of the plan; errors name ranks by their numbers there.  What travels is `WireBytes`.
    max_message: bytes of the longest message; longer ones are split.  sent_bytes, sent_messages: handed to MPI for
    other ranks so far.
    """

    def __init__(self, peers, max_message=MAX_MESSAGE):
        self.peers, self.max_message = peers, message_limit(max_message)
        self.sent_bytes = self.sent_messages = 0
        self.wait_seconds = 0.0
        self._row_types, self._next = {}, 0.0
        # The transfers without bytes yet, in order: (Posted, ready(), post()).  MPI matches messages by the order of
        # the sends, by that of the receives, and by that of the collective calls.  A receive that waited for a send
        # would only be late.
        self._later = {"send": deque(), "receive": deque(), "collective": deque()}
        self._coming = []  # posted transfers with a `then` or an `over` to call
        self._ranks = {}  # by communicator and rank there, the rank in `peers`

    def send(self, comm, wire, dest, tag):
        """Post a send, now or when its bytes are ready; returns a list of Posted.  No bytes: nothing is sent."""
        wire = self._for_peer(wire, comm, dest)
        posted = self._messages(comm.Isend, "send", comm, wire, dest, tag)
        self.sent_bytes += wire.nbytes
        self.sent_messages += len(posted)
        return posted

    def receive(self, comm, wire, source, tag):
        """Post a receive of exactly these bytes, now or when they may be written; returns a list of Posted."""
        return self._messages(comm.Irecv, "receive", comm, self._for_peer(wire, comm, source), source, tag)

    def _for_peer(self, wire, comm, peer):
        if wire.by_peer is None:
            return wire
        key = comm.py2f(), peer
        if key not in self._ranks:
            (self._ranks[key],) = translate_ranks(comm, [peer], self.peers.comm)
        return wire.by_peer(self._ranks[key])

    def _messages(self, post, verb, comm, wire, peer, tag):
        if wire.blocks is not None:
            return [Posted(_post_blocks(post, wire, peer, tag), verb, wire.nbytes, comm, peer)]
        posted, size, total = [], min(self.max_message, wire.piece or self.max_message), len(wire.array)
        for start in range(0, total, size):
            stop = min(start + size, total)
            nbytes = (stop - start) * wire.nbytes // total
            transfer = Posted(None, verb, nbytes, comm, peer)
            transfer.then = wire.taken and partial(wire.taken, start, stop)
            transfer.over = wire.over and partial(wire.over, start, stop)
            message = [wire.array[start:stop] if size < total else wire.array, MPI.BYTE], peer, tag
            if wire.ready is None:
                transfer.request = post(*message)
            else:
                self._later[verb].append((transfer, wire.ready(start, stop), partial(post, *message)))
            if transfer.then or transfer.over:
                self._coming.append(transfer)
            posted.append(transfer)
        if self._unfinished():
            self.progress()
        return posted

    def _unfinished(self):
        """Whether `progress` has anything to do."""
        return bool(self._coming or any(self._later.values()))

    def progress(self):
        """Post the transfers that have become ready; call `then` and `over` of those that MPI has done.

        Sends are posted in their order, receives in theirs, and collective calls in theirs.
        """
        for waiting in self._later.values():
            while waiting and waiting[0][1]():
                transfer, _, post = waiting.popleft()
                transfer.request = post()
        if self._coming:
            requested = [transfer for transfer in self._coming if transfer.request is not None]
            MPI.Request.Testsome([transfer.request for transfer in requested])
            for transfer in requested:
                if transfer.request == MPI.REQUEST_NULL:
                    if transfer.then:
                        then, transfer.then = transfer.then, None
                        then()
                    if transfer.over and transfer.over():
                        transfer.over = None
            self._coming = [transfer for transfer in self._coming if transfer.then or transfer.over]

    def pieces(self, wire, item_bytes):
        """The bytes [start, stop) of consecutive pieces for collective calls; each is yielded when it is ready.

        item_bytes: bytes of an item, which no piece cuts.  Several pieces are made ready at a time.
        """
        size, total = self._step(item_bytes, wire.piece) * item_bytes, len(wire.array)
        pieces = [(start, min(start + size, total)) for start in range(0, total, size)]
        ready = [wire.ready(*piece) for piece in pieces] if wire.ready else None
        for i, piece in enumerate(pieces):
            if ready:
                self.peers.until(ready[i], lambda: "for its own work")
            yield piece

    def _row_type(self, row_bytes):
        """A datatype of one token's bytes, so that counts and displacements, in tokens, do not overflow."""
        if row_bytes not in self._row_types:
            self._row_types[row_bytes] = MPI.BYTE.Create_contiguous(row_bytes).Commit()
        return self._row_types[row_bytes]

    def _step(self, row_bytes, piece, parts=1):
        """Most tokens of a chunk in a round, which keep messages within the limit, and within a piece all `parts`."""
        return max(1, min(self.max_message, (piece or self.max_message * parts) // parts) // row_bytes)

    def allgather(self, comm, chunk, arena, lengths, offsets, row_bytes):
        """Post an allgather of every rank's chunk, all `WireBytes`, into `arena`; returns a list of Posted.

        lengths, offsets: tokens of each rank's chunk and its offset in the arena, by rank of `comm`.
        """
        row_type, posted, step = self._row_type(row_bytes), [], self._step(row_bytes, chunk.piece)
        for first in range(0, max(lengths), step):
            counts, starts = _part(lengths, offsets, first, step)
            own = first, counts[comm.rank]
            piece, total = _bytes(chunk.array, *own, row_bytes), sum(counts) * row_bytes

            def post(piece=piece, own_count=own[1], counts=counts, starts=starts):
                request = comm.Iallgatherv([piece, own_count, row_type], [arena.array, counts, starts, row_type])
                return hold(request, piece, arena.array)

            posted.append(Posted(None, "gather", total, comm))
            self._post_round(posted[-1], post, chunk, [own], arena, zip(starts, counts), row_bytes)
            self._count(own[1] * row_bytes, comm.size - 1)
        self.progress()
        return posted

    def alltoall(self, comm, given, taken, row_bytes, longest):
        """Post an exchange of a chunk with every rank; returns a list of Posted.

        given, taken: the `mpiattn.backends.wire.Pieces` that go to the ranks, and that come from them.
        longest: tokens of the longest chunk between any two ranks, which determines the number of rounds on all ranks.
        """
        (outgoing, *out), (incoming, *into) = given, taken
        row_type, posted = self._row_type(row_bytes), []
        step = self._step(row_bytes, outgoing.piece, max(1, comm.size - 1))
        for first in range(0, longest, step):
            counts, starts = _part(*out, first, step)
            in_counts, in_starts = _part(*into, first, step)
            sent = [outgoing.array, counts, starts, row_type]
            posted.append(Posted(None, "exchange", sum(counts + in_counts) * row_bytes, comm))
            post = partial(comm.Ialltoallv, sent, [incoming.array, in_counts, in_starts, row_type])
            sends, receives = zip(starts, counts), zip(in_starts, in_counts)
            self._post_round(posted[-1], post, outgoing, sends, incoming, receives, row_bytes)
            for rank, count in enumerate(counts):
                self._count(count * row_bytes, rank != comm.rank)
        self.progress()
        return posted

    def _post_round(self, transfer, post, outgoing, sent, incoming, received, row_bytes):
        """Post one collective call, now or when its bytes are ready.

        sent, received: first token and number of tokens of each part of the two arrays.  All ranks post the calls on a
        communicator in one order, since `_later` keeps it.
        """
        if incoming.taken:
            parts = [(start * row_bytes, (start + count) * row_bytes) for start, count in received if count]
            transfer.then = partial(_call_each, incoming.taken, parts)
            self._coming.append(transfer)
        if outgoing.ready is None:
            transfer.request = post()
        else:
            parts = [outgoing.ready(start * row_bytes, (start + count) * row_bytes) for start, count in sent if count]
            self._later["collective"].append((transfer, partial(_all_true, parts), post))

    def _count(self, nbytes, messages):
        if nbytes:
            self.sent_bytes += nbytes * messages
            self.sent_messages += int(messages)

    def due(self):
        """True when MPI should be polled again by a rank that computes on the thread that MPI needs."""
        now = time.perf_counter()
        if now < self._next:
            return False
        self._next = now + PROGRESS
        return True

    def complete(self, posted):
        """Poll MPI; returns whether all transfers of `posted` are complete."""
        if self._unfinished():
            self.progress()
            if any(transfer.pending for transfer in posted):
                return False
        return MPI.Request.Testall([transfer.request for transfer in posted])

    def wait(self, posted, where=""):
        """Complete the transfers of `posted`, polling MPI so that they make progress.

        where: what this rank is doing, for the PeerFailure at the time limit.
        """
        start = time.perf_counter()

        def waiting_for():
            missing = self._missing(posted)  # none of those that MPI has ended with an error
            return f"{where} to {missing}".lstrip() if missing else where or "for a transfer"

        if self._unfinished():
            self.peers.until(partial(self.complete, posted), waiting_for, posted)
        else:
            self.peers.wait([transfer.request for transfer in posted], waiting_for)
        self.wait_seconds += time.perf_counter() - start

    def finish(self, request, verb, nbytes, where):
        """Complete a collective call of all peers that was started elsewhere; this rank has contributed `nbytes`."""
        self._count(nbytes, self.peers.size > 1)
        self.wait([Posted(request, verb, nbytes, self.peers.comm)], where)

    def _missing(self, posted):
        """The incomplete transfers, in words."""
        missing = []
        for transfer in posted:
            request = transfer.request
            if request is not None and not transfer.over and (request == MPI.REQUEST_NULL or request.Test()):
                continue
            ranks = range(transfer.comm.size) if transfer.peer is None else [transfer.peer]
            names = ", ".join(str(rank) for rank in translate_ranks(transfer.comm, ranks, self.peers.comm))
            preposition = {"send": "to rank", "receive": "from rank"}.get(transfer.verb, "among ranks")
            missing.append(f"{transfer.verb} {transfer.nbytes} bytes {preposition} {names}")
        return ", ".join(missing)

    def close(self):
        """Free the datatypes, unless MPI has ended and taken them along."""
        while self._row_types:
            _, datatype = self._row_types.popitem()
            if is_running():
                datatype.Free()
