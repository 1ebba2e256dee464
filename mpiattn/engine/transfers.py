"""Posting of transfers: which arrays leave and arrive, between pairs of ranks or by one collective.

Transfers are bound to the rank (`mpiattn.schedule.bound`).  Each carries the tokens that the other end needs, by one
message for every array and range of tokens, or of many ranges for every array.  The exchange defines how bytes travel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..backends.wire import Pieces
from ..schedule.bound import BoundTransfer
from ..schedule.kinds import GATHERED, IN_COLUMNS, TAG, arena_of
from ..schedule.ranges import places, total
from ..schedule.travels import size_of
from .buffers import Chunk


@dataclass(eq=False, slots=True)
class Posted:
    """A posted transfer.

    requests: the requests of the exchange.
    leaving: the arrays being sent.
    landing: the arrays being received.
    arriving: the chunk that they belong to, None if nothing is received.
    then: called when that has arrived.
    step: the number of the step that needs it.
    begun, arrived: clock in seconds before it was posted and when it was found complete.
    """

    transfer: BoundTransfer
    requests: list
    leaving: Sequence
    landing: Sequence
    arriving: Chunk | None
    then: Callable
    step: int = 0
    begun: float = 0.0
    arrived: float | None = None


def _by_array(parts):
    """(number of the array, array) of some parts of a chunk, in the order of their messages."""
    return [(i, array) for i, arrays in enumerate(zip(*parts)) for array in arrays]


class Transfers:
    """Posts the transfers of a pass.  chunks: the `Chunks` that they send and add to."""

    def __init__(self, mesh, backend, exchange, buffers, chunks):
        self.mesh, self.backend, self.exchange, self.buffers, self.chunks = mesh, backend, exchange, buffers, chunks
        self.calls = None  # the `AlikeCalls` of the pass
        # by arena, bytes of one token of every array
        self._row_bytes = {arena: [size_of([array]) for array in arrays] for arena, arrays in buffers.shapes.items()}

    def post(self, transfer):
        """Start a transfer without waiting; returns what is `Posted`."""
        if not transfer.collective:
            return self._pairs(transfer)
        return self._gather(transfer) if transfer.kind in GATHERED else self._exchange_partials(transfer)

    def _pairs(self, transfer):
        """Post a transfer between pairs."""
        kind, ((_, slot, send, receive),) = transfer.kind, transfer.hops
        requests, leaving, landing, arriving = [], [], [], None
        if receive:
            arriving, before = self.buffers.take_slot(arena_of(kind), slot, receive.chunk, receive.tokens)
            self.chunks.clear_rest(arriving, receive.tokens)
            parts = [arriving.arrays] if receive.as_one else arriving.parts(receive.tokens)
            for i, array in _by_array(parts):
                landing.append(array)
                requests += self.exchange.receive(
                    self.mesh.plane, self.backend.incoming(array, before), receive.peer, TAG[kind] + i
                )
        if send:
            chunk = self.chunks[kind, send.chunk]
            parts, ready = self._parts(kind, chunk, send)
            if self.buffers.casts(kind):
                parts, ready = self._cast(kind, parts, ready, slot)
            for i, array in _by_array(parts):
                leaving.append(array)
                requests += self.exchange.send(
                    self.mesh.plane, self.backend.outgoing(array, ready), send.peer, TAG[kind] + i
                )
        if kind in GATHERED:
            return Posted(
                transfer,
                requests,
                leaving,
                landing,
                arriving,
                lambda: self.chunks.update({(kind, receive.chunk): arriving}),
            )
        if send:
            del self.chunks[kind, send.chunk]
        return Posted(
            transfer, requests, leaving, landing, arriving, lambda: self.chunks.merge(kind, receive.chunk, arriving)
        )

    def _parts(self, kind, chunk, send):
        """What a message has of a chunk: the arrays of each of its parts, and the events after which they are there."""
        if not send.as_one:
            return chunk.parts(send.tokens), chunk.ready
        if chunk.tokens == send.tokens:
            return [chunk.arrays], chunk.ready
        packed, rows = self.buffers.outbox(kind, total(send.tokens)), self.calls.rows(chunk.tokens, send.tokens)
        ready = [self.backend.take(dst, src, rows, after=chunk.ready) for dst, src in zip(packed, chunk.arrays)]
        return [packed], tuple(ready)

    def _cast(self, kind, parts, ready, slot=0):
        """Parts of a partial in the dtype of the wire, in the wire arrays of a slot, and their events."""
        cast, ready, start = [], list(ready), 0
        for part in parts:
            rows = len(part[0])
            arrays = [
                array if wire is None else wire[start : start + rows]
                for array, wire in zip(part, self.buffers.wire[kind, slot])
            ]
            ready += [self.backend.copy(dst, src) for dst, src in zip(arrays, part) if dst is not src]
            cast.append(tuple(arrays))
            start += rows
        return cast, tuple(ready)

    def _group(self, kind):
        """The communicator of the row or column that a kind moves in; its ranks are in the order of their chunks."""
        return self.mesh.column if kind in IN_COLUMNS else self.mesh.row

    def _gather(self, transfer):
        """Post a transfer of all hops of a gathered kind by one allgather."""
        kind, rank = transfer.kind, self.mesh.chunk
        own, gathered = self.chunks[kind, rank], Chunk(self.buffers.whole(kind), None)
        sent, counts, starts, unsent = self.buffers.places.gathering(transfer)
        (leaving,) = own.parts(sent) if sent else [own.arrays]
        group, requests = self._group(kind), []
        for array, arena, nbytes in zip(leaving, gathered.arrays, self._row_bytes[kind]):
            requests += self.exchange.allgather(
                group,
                self.backend.outgoing(array, own.ready, collective=True),
                self.backend.incoming(arena, collective=True),
                counts,
                starts,
                nbytes,
            )

        def place():
            copied = sent != own.tokens  # the collective has placed only what it sends of this rank's own
            for event in gathered.ready if unsent or copied else ():
                self.backend.wait(event)
            self.chunks.clear_places(kind, unsent)
            if copied:
                self.chunks.place_own(kind, own)
            self.chunks[kind, rank] = gathered

        return Posted(transfer, requests, leaving, gathered.arrays, gathered, place)

    def _exchange_partials(self, transfer):
        """Post a transfer of all hops of a reduced kind by one alltoall, and merge in order of the hops."""
        kind, tokens = transfer.kind, self.buffers.tokens(transfer.kind)
        arriving = [hop for hop in transfer.hops if hop.receive]
        to = {hop.send.peer: hop.send for hop in transfer.hops if hop.send}
        of = {hop.receive.peer: hop for hop in arriving}
        out_starts = [
            self.buffers.packed_start(kind, peer) + sum(part.start for part in places(tokens[peer], to[peer].tokens))
            if peer in to
            else 0
            for peer in tokens
        ]
        parts = [self.buffers.whole(kind)]
        ready = tuple(event for chunk in tokens for event in self.chunks[kind, chunk].ready)
        if self.buffers.casts(kind):
            parts, ready = self._cast(kind, parts, ready)
        (leaving,) = parts
        received = Chunk(self.buffers.whole(arena_of(kind)), None)
        out_counts = [total(to[peer].tokens) if peer in to else 0 for peer in tokens]
        in_counts = [total(of[peer].receive.tokens) if peer in of else 0 for peer in tokens]
        in_starts = [self.buffers.slot_start(arena_of(kind), of[peer].slot) if peer in of else 0 for peer in tokens]
        requests = []
        for array, arena, nbytes in zip(leaving, received.arrays, self._row_bytes[arena_of(kind)]):
            requests += self.exchange.alltoall(
                self._group(kind),
                Pieces(self.backend.outgoing(array, ready, collective=True), out_counts, out_starts),
                Pieces(self.backend.incoming(arena, self.buffers.launched, collective=True), in_counts, in_starts),
                nbytes,
                self.buffers.places.longest(kind),
            )

        def merge_in_order():
            for hop in arriving:
                partial, _ = self.buffers.take_slot(arena_of(kind), hop.slot, hop.receive.chunk, hop.receive.tokens)
                partial.ready = received.ready
                self.chunks.merge(kind, hop.receive.chunk, partial)

        return Posted(transfer, requests, leaving, received.arrays, received, merge_in_order)
