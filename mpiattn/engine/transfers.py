"""Posting of transfers: which arrays leave and arrive, between pairs of ranks or by one collective.

Transfers are bound to the rank (`mpiattn.schedule.bound`).  The exchange defines how bytes travel.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from ..schedule.kinds import GATHERED, IN_COLUMNS, TAG, arena_of
from .buffers import Chunk


class Posted(NamedTuple):
    """What a posted transfer has begun.

    requests: the requests of the exchange.
    leaving: the arrays being sent.
    arriving: the chunk being received, None if there is none.
    then: called when that has arrived.
    """

    requests: list
    leaving: tuple
    arriving: Chunk | None
    then: Callable


def _row_bytes(array):
    """Bytes of one token of an array."""
    return array.dtype.itemsize * math.prod(array.shape[1:])


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
        requests, sending, arriving = [], (), None
        if receive:
            arriving, before = self.buffers.take_slot(arena_of(kind), slot, receive.chunk)
            for i, array in enumerate(arriving.arrays):
                requests += self.exchange.receive(
                    self.mesh.cart, self.backend.incoming(array, before), receive.peer, TAG[kind] + i
                )
        if send:
            leaving = self._travelling(kind, self.held[kind, send.chunk], self.buffers.slot_start(arena_of(kind), slot))
            sending = leaving.arrays
            for i, array in enumerate(sending):
                requests += self.exchange.send(
                    self.mesh.cart, self.backend.outgoing(array, leaving.ready), send.peer, TAG[kind] + i
                )
        if kind in GATHERED:
            return Posted(requests, sending, arriving, lambda: self.held.update({(kind, receive.chunk): arriving}))
        if send:
            del self.held[kind, send.chunk]
        return Posted(requests, sending, arriving, lambda: self.held.merge(kind, receive.chunk, arriving))

    def _travelling(self, kind, chunk, start=0):
        """The chunk itself, or a partial cast to the dtype of the wire, in the wire arrays from row `start` on."""
        if kind not in self.buffers.wire:
            return chunk
        arrays, ready = [], list(chunk.ready)
        for held, wire in zip(chunk.arrays, self.buffers.wire[kind]):
            arrays.append(held if wire is None else wire[start : start + len(held)])
            if wire is not None:
                ready.append(self.backend.copy(arrays[-1], held))
        return Chunk(tuple(arrays), tuple(ready))

    def _group(self, kind):
        """The communicator of the row or column that a kind moves in; its ranks are in the order of their chunks."""
        return self.mesh.column if kind in IN_COLUMNS else self.mesh.row

    def _starts(self, kind):
        """First row in a packed arena of each chunk of the group."""
        return [self.buffers.packed_start(kind, chunk) for chunk in self.buffers.tokens(kind)]

    def _gather(self, transfer):
        """Post a transfer of all hops of a gathered kind by one allgather."""
        kind, rank, tokens = transfer.kind, self.mesh.rank, self.buffers.tokens(transfer.kind)
        own, gathered = self.held[kind, rank], Chunk(self.buffers.arena[kind])
        sent = {hop.receive.chunk for hop in transfer.hops if hop.receive} | {
            hop.send.chunk for hop in transfer.hops if hop.send
        }
        requests = []
        for held, arena in zip(own.arrays, gathered.arrays):
            leaving = self.exchange.whole(self.backend.outgoing(held, own.ready, collective=True))
            requests += self.exchange.allgather(
                self._group(kind),
                leaving if rank in sent else leaving[:0],
                self.exchange.whole(self.backend.incoming(arena, collective=True)),
                [count * (chunk in sent) for chunk, count in tokens.items()],
                self._starts(kind),
                _row_bytes(arena),
            )

        def place():
            unsent = [chunk for chunk in tokens if chunk not in sent]
            for event in gathered.ready if unsent else ():
                self.backend.wait(event)
            self.held.clear_places(kind, [chunk for chunk in unsent if chunk != rank])
            if rank in unsent:  # the collective has not placed this rank's own either
                self.held.place_own(kind, own)
            self.held[kind, rank] = gathered

        return Posted(requests, own.arrays, gathered, place)

    def _exchange_partials(self, transfer):
        """Post a transfer of all hops of a reduced kind by one alltoall, and merge in order of the hops."""
        kind, rank, tokens = transfer.kind, self.mesh.rank, self.buffers.tokens(transfer.kind)
        arriving = [hop for hop in transfer.hops if hop.receive]
        leaving_to = {hop.send.peer for hop in transfer.hops if hop.send}
        slot_of = {hop.receive.peer: hop.slot for hop in arriving}
        ready = tuple(event for chunk in tokens for event in self.held[kind, chunk].ready)
        leaving = self._travelling(kind, Chunk(self.buffers.arena[kind], ready))
        received = Chunk(self.buffers.arena[arena_of(kind)])
        requests = []
        for held, arena in zip(leaving.arrays, received.arrays):
            requests += self.exchange.alltoall(
                self._group(kind),
                self.exchange.whole(self.backend.outgoing(held, leaving.ready, collective=True)),
                [count * (peer in leaving_to) for peer, count in tokens.items()],
                self._starts(kind),
                self.exchange.whole(self.backend.incoming(arena, collective=True)),
                [tokens[rank] * (peer in slot_of) for peer in tokens],
                [self.buffers.slot_start(arena_of(kind), slot_of.get(peer, 0)) for peer in tokens],
                _row_bytes(arena),
                max(tokens.values()),
            )

        def merge_in_order():
            for hop in arriving:
                partial, _ = self.buffers.take_slot(arena_of(kind), hop.slot, hop.receive.chunk)
                partial.ready = received.ready
                self.held.merge(kind, hop.receive.chunk, partial)

        return Posted(requests, leaving.arrays, received, merge_in_order)
