"""Posting of transfers: which arrays leave and arrive, between pairs of ranks or by one collective.

Transfers are bound to the rank (`mpiattn.schedule.bound`).  Each carries the tokens that the other end needs, by one
message for every array and range of tokens.  The exchange defines how bytes travel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    begun, arrived: clock in seconds when it was posted and when it was found complete.
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


class Gathering(NamedTuple):
    """What one allgather of a kind carries, the same in all calls with the same `Places`.

    sent: the tokens of this rank's own chunk that travel, None if none do.
    counts, starts: how many tokens of each chunk travel, and the row of the arena from which on they land.
    unsent: the other ranks' chunks of which none travel.
    row_bytes: bytes of one token of every array.
    """

    sent: tuple | None
    counts: list
    starts: list
    unsent: list
    row_bytes: list


def _by_array(parts):
    """(number of the array, array) of some parts of a chunk, in the order of their messages."""
    return [(i, array) for i, arrays in enumerate(zip(*parts)) for array in arrays]


class Transfers:
    """Posts the transfers of a pass.  held: the `Held` chunks that they send and add to."""

    def __init__(self, mesh, backend, exchange, buffers, held):
        self.mesh, self.backend, self.exchange, self.buffers, self.held = mesh, backend, exchange, buffers, held

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
            self.held.clear_rest(arriving, receive.tokens)
            for i, array in _by_array(arriving.parts(receive.tokens)):
                landing.append(array)
                requests += self.exchange.receive(
                    self.mesh.plane, self.backend.incoming(array, before), receive.peer, TAG[kind] + i
                )
        if send:
            chunk = self.held[kind, send.chunk]
            parts, ready = chunk.parts(send.tokens), chunk.ready
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
                lambda: self.held.update({(kind, receive.chunk): arriving}),
            )
        if send:
            del self.held[kind, send.chunk]
        return Posted(
            transfer, requests, leaving, landing, arriving, lambda: self.held.merge(kind, receive.chunk, arriving)
        )

    def _cast(self, kind, parts, ready, slot=0):
        """Parts of a partial in the dtype of the wire, in the wire arrays of a slot, and their events."""
        cast, ready, start = [], list(ready), 0
        for part in parts:
            rows = len(part[0])
            arrays = [
                held if wire is None else wire[start : start + rows]
                for held, wire in zip(part, self.buffers.wire[kind, slot])
            ]
            ready += [self.backend.copy(dst, src) for dst, src in zip(arrays, part) if dst is not src]
            cast.append(tuple(arrays))
            start += rows
        return cast, tuple(ready)

    def _group(self, kind):
        """The communicator of the row or column that a kind moves in; its ranks are in the order of their chunks."""
        return self.mesh.column if kind in IN_COLUMNS else self.mesh.row

    def _gathering(self, transfer):
        """The `Gathering` of a transfer, made once for all calls with the same places."""
        gatherings, kind = self.buffers.places.gatherings, transfer.kind
        if kind not in gatherings:
            rank, held = self.mesh.chunk, self.buffers.tokens(kind)
            messages = [message for hop in transfer.hops for message in (hop.send, hop.receive) if message]
            sent = {message.chunk: message.tokens for message in messages}
            starts = {chunk: self.buffers.packed_start(kind, chunk) for chunk in held}
            starts[rank] += sum(part.start for part in places(held[rank], sent.get(rank, ())))
            gatherings[kind] = Gathering(
                sent.get(rank),
                [total(sent.get(chunk, ())) for chunk in held],
                list(starts.values()),
                [chunk for chunk in held if chunk not in sent and chunk != rank],
                self._row_bytes(kind),
            )
        return gatherings[kind]

    def _row_bytes(self, arena):
        """Bytes of one token of every array of an arena."""
        return [size_of([array]) for array in self.buffers.shapes[arena]]

    def _gather(self, transfer):
        """Post a transfer of all hops of a gathered kind by one allgather."""
        kind, rank = transfer.kind, self.mesh.chunk
        own, gathered = self.held[kind, rank], Chunk(self.buffers.whole(kind), None)
        sent, counts, starts, unsent, row_bytes = self._gathering(transfer)
        (leaving,) = own.parts(sent) if sent else [own.arrays]
        group, requests = self._group(kind), []
        for array, arena, nbytes in zip(leaving, gathered.arrays, row_bytes):
            requests += self.exchange.allgather(
                group,
                self.backend.outgoing(array, own.ready, collective=True),
                self.backend.incoming(arena, collective=True),
                counts,
                starts,
                nbytes,
            )

        def place():
            copied = sent != own.tokens  # the collective has not placed all of this rank's own
            for event in gathered.ready if unsent or copied else ():
                self.backend.wait(event)
            self.held.clear_places(kind, unsent)
            if copied:
                self.held.place_own(kind, own)
            self.held[kind, rank] = gathered

        return Posted(transfer, requests, leaving, gathered.arrays, gathered, place)

    def _exchange_partials(self, transfer):
        """Post a transfer of all hops of a reduced kind by one alltoall, and merge in order of the hops."""
        kind, held = transfer.kind, self.buffers.tokens(transfer.kind)
        arriving = [hop for hop in transfer.hops if hop.receive]
        to = {hop.send.peer: hop.send for hop in transfer.hops if hop.send}
        of = {hop.receive.peer: hop for hop in arriving}
        out_starts = [
            self.buffers.packed_start(kind, peer) + sum(part.start for part in places(held[peer], to[peer].tokens))
            if peer in to
            else 0
            for peer in held
        ]
        parts = [self.buffers.whole(kind)]
        ready = tuple(event for chunk in held for event in self.held[kind, chunk].ready)
        if self.buffers.casts(kind):
            parts, ready = self._cast(kind, parts, ready)
        (leaving,) = parts
        received = Chunk(self.buffers.whole(arena_of(kind)), None)
        out_counts = [total(to[peer].tokens) if peer in to else 0 for peer in held]
        in_counts = [total(of[peer].receive.tokens) if peer in of else 0 for peer in held]
        in_starts = [self.buffers.slot_start(arena_of(kind), of[peer].slot) if peer in of else 0 for peer in held]
        requests = []
        for array, arena, nbytes in zip(leaving, received.arrays, self._row_bytes(arena_of(kind))):
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
                self.held.merge(kind, hop.receive.chunk, partial)

        return Posted(transfer, requests, leaving, received.arrays, received, merge_in_order)
