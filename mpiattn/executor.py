"""The executor: runs any schedule on a mesh with a back end.

It posts a step's transfers, launches the blocks that hide them, and completes the transfers.  It knows hops,
slots and events; what a block computes is the back end's business, how bytes travel the exchange's.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .buffers import Buffers, Chunk
from .mask import local_interval

# Message tags, one for each array that travels; between two ranks, messages of one tag keep their order.
_TAG = {"Q": 0, "KV": 1, "O": 3}


class _Pending(NamedTuple):
    """A posted transfer: its requests, the arrays that leave, what arrives, and what to do with that."""

    requests: list
    leaving: tuple
    arriving: Chunk
    then: Callable


def _row_bytes(array):
    """Bytes of one token of an array."""
    return array.dtype.itemsize * math.prod(array.shape[1:])


class Executor:
    """One plan's buffers and the loop over its schedule.

    q_layout, k_layout: which tokens the ranks' chunks of queries and of keys hold.
    """

    def __init__(self, mesh, schedule, backend, exchange, problem, q_layout, k_layout):
        self.mesh, self.schedule, self.backend, self.exchange = mesh, schedule, backend, exchange
        self.problem, self.q_layout, self.k_layout = problem, q_layout, k_layout
        self.buffers = Buffers(backend, problem, schedule, mesh, q_layout, k_layout)
        self.in_order = None                # keys and values of a packed arena in order of position, and that order
        if self.buffers.packed and self.buffers.schedule.slots["KV"]:
            rows = np.argsort(self._arena_key_positions(), kind="stable")
            if (rows[1:] < rows[:-1]).any():
                keys, values = self.buffers.arena["KV"]
                self.in_order = (rows, backend.empty(keys.shape, keys.dtype), backend.empty(values.shape, values.dtype))

    @property
    def nbytes(self):
        """Bytes of the buffers held."""
        return self.buffers.nbytes + sum(array.nbytes for array in self.in_order or ())

    # Blocks

    def forward(self, q, k, v, progress=None):
        """Attention of this rank's chunks q, k and v, (tokens, heads, dim) each; collective.

        progress: called with the number of blocks that each launch did.  Returns out and lse, the partial
        O#0, in buffers that the next call overwrites and that the last launches may still be writing.
        """
        self.chunks = {("Q", 0): Chunk((q,)), ("KV", 0): Chunk((k, v))}
        self.buffers.occupant.clear()
        for step in self.schedule.steps:
            pending = [self._post_collective(t) if t.collective else self._post(t) for t in step.transfers]
            for blocks in [step.blocks] if step.fused else [[block] for block in step.blocks]:
                self._attend_tile() if step.fused else self._attend(*blocks[0])
                if progress:
                    progress(len(blocks))
            for p in pending:
                self._complete(p)
        out = self._accumulator(0).arrays
        self.chunks = {}                    # the caller's arrays are the caller's
        return out

    def forget(self):
        """Nothing in the buffers is needed any more."""
        for arrays in self.buffers.arena.values():
            for array in arrays:
                self.backend.forget(array)

    def _accumulator(self, hop):
        """The partial O#hop, made empty when it is first asked for."""
        if ("O", hop) not in self.chunks:
            out, lse = self.buffers.accumulator(hop)
            self.chunks["O", hop] = Chunk((out, lse), (self.backend.clear(out, lse),))
        return self.chunks["O", hop]

    def _intervals(self, q_positions, k_positions):
        begin, end = local_interval(*self.problem.mask.key_interval(q_positions), k_positions)
        return begin[None], end[None]

    def _attend(self, u, w):
        """Block (u, w), unless no query of it sees a key of it."""
        q, kv, partial = self.chunks["Q", u], self.chunks["KV", w], self._accumulator(u)
        begin, end = self._intervals(self.q_layout.positions(self.buffers.q_chunks[u]),
                                     self.k_layout.positions(self.buffers.k_chunks[w]))
        if (begin < end).any():
            q.used = kv.used = partial.ready = (self.backend.attend(
                *q.arrays, *kv.arrays, begin, end, *partial.arrays, self.problem.scale, after=(*q.ready, *kv.ready)),)

    def _arena_key_positions(self):
        return np.concatenate([self.k_layout.positions(chunk) for chunk in sorted(self.buffers.k_chunks)])

    def _attend_tile(self):
        """All blocks as one launch over the packed arenas."""
        q, kv = self._whole("Q"), self._whole("KV")
        q_positions = np.concatenate([self.q_layout.positions(chunk) for chunk in sorted(self.buffers.q_chunks)])
        k_positions = self._arena_key_positions()
        arrays = kv.arrays
        if self.in_order:
            rows, *arrays = self.in_order
            k_positions = k_positions[rows]
            for dst, src in zip(arrays, kv.arrays):
                self.backend.take(dst, src, rows, after=kv.ready)
        accumulators = [self._accumulator(hop) for hop in range(self.mesh.a)]
        event = self.backend.attend(*q.arrays, *arrays, *self._intervals(q_positions, k_positions),
                                    *self.buffers.arena["O"], self.problem.scale, after=(*q.ready, *kv.ready))
        for chunk in accumulators:
            chunk.ready = (event,)

    def _whole(self, kind):
        """The chunks of my whole group as one, packed, with my own among them."""
        own = self.chunks[kind, 0]
        if (kind, 1) not in self.chunks:              # alone, or gathered by a collective, which has placed it
            return own
        arena, tokens = self.buffers.arena[kind], self._tokens(kind, 0)
        for dst, src in zip(self.buffers.view(kind, self.buffers.start_of(kind, 0), tokens), own.arrays):
            self.backend.copy(dst, src)
        return Chunk(arena, tuple(event for (k, _), chunk in self.chunks.items() if k == kind for event in chunk.ready))

    # Transfers

    def _group(self, kind):
        """The communicator that a kind moves in, and my rank there."""
        return (self.mesh.column, self.mesh.r) if kind == "KV" else (self.mesh.row, self.mesh.c)

    def _post(self, transfer):
        """Post a transfer between pairs: my own chunk over the hop's distance, or a neighbour's one further."""
        kind, (hop,), (slot,) = transfer.kind, transfer.hops, transfer.slots
        ring = self.schedule.route == "ring"
        if kind == "O":                         # a partial goes to the owner of its queries, hop ranks back
            ahead, target = (1, (hop + 1) % self.mesh.a) if ring else (-hop, 0)
            leaving, arena = self.chunks.pop(("O", hop)), "P"
        else:
            ahead, target = (1 if ring else hop), hop
            leaving, arena = self.chunks[kind, hop - 1 if ring else 0], kind
        arriving, before = self.buffers.take_slot(arena, slot, self._tokens(kind, target), hop)
        comm, me = self._group(kind)
        requests = []
        for i, array in enumerate(arriving.arrays):
            requests += self.exchange.receive(comm, self.backend.incoming(array, before),
                                              (me - ahead) % comm.size, _TAG[kind] + i)
        for i, array in enumerate(leaving.arrays):
            requests += self.exchange.send(comm, self.backend.outgoing(array, leaving.ready),
                                           (me + ahead) % comm.size, _TAG[kind] + i)
        if kind == "O":
            return _Pending(requests, leaving.arrays, arriving, lambda: self._merge(target, arriving))
        return _Pending(requests, leaving.arrays, arriving, lambda: self.chunks.update({(kind, hop): arriving}))

    def _tokens(self, kind, hop):
        return (self.buffers.k_tokens if kind == "KV" else self.buffers.q_tokens)[hop]

    def _merge(self, hop, received):
        """Merge a partial that was received into O#hop."""
        partial = self._accumulator(hop)
        partial.ready = received.used = (self.backend.merge(*partial.arrays, *received.arrays, after=received.ready),)

    def _post_collective(self, transfer):
        """Post a transfer of all hops at once."""
        return self._exchange_partials(transfer) if transfer.kind == "O" else self._gather(transfer.kind)

    def _packing(self, kind):
        """Tokens of my group's chunks and where each starts in a packed arena, by rank in the group."""
        comm, me = self._group(kind)
        hops = [(me - rank) % comm.size for rank in range(comm.size)]
        return [self._tokens(kind, hop) for hop in hops], [self.buffers.start_of(kind, hop) for hop in hops]

    def _gather(self, kind):
        own, comm = self.chunks[kind, 0], self._group(kind)[0]
        gathered = Chunk(self.buffers.arena[kind])
        requests = []
        for mine, arena in zip(own.arrays, gathered.arrays):
            requests += self.exchange.allgather(comm, self.backend.outgoing(mine), self.backend.incoming(arena),
                                                *self._packing(kind), _row_bytes(arena))
        return _Pending(requests, own.arrays, gathered, lambda: self.chunks.update({(kind, 0): gathered}))

    def _exchange_partials(self, transfer):
        comm, me = self._group("O")
        tokens, starts = self._packing("O")
        own, longest = tokens[me], max(tokens)
        tokens[me] = 0
        slot_of = dict(zip(transfer.hops, transfer.slots))
        slots = [slot_of.get((rank - me) % comm.size, 0) for rank in range(comm.size)]
        leaving, received = self.buffers.arena["O"], Chunk(self.buffers.arena["P"])
        ready = [event for hop in range(self.mesh.a) for event in self.chunks["O", hop].ready]
        requests = []
        for mine, arena in zip(leaving, received.arrays):
            requests += self.exchange.alltoall(
                comm, self.backend.outgoing(mine, ready), tokens, starts,
                self.backend.incoming(arena), [own * (rank != me) for rank in range(comm.size)],
                [self.buffers.slot_start("P", slot) for slot in slots], _row_bytes(arena), longest)

        def merge_in_order():
            for hop in transfer.hops:
                partial, _ = self.buffers.take_slot("P", slot_of[hop], own)
                partial.ready = received.ready
                self._merge(0, partial)
        return _Pending(requests, leaving, received, merge_in_order)

    def _complete(self, pending):
        """Wait for a transfer and put what arrived to its use."""
        self.exchange.wait(pending.requests)
        for array in pending.leaving:
            self.backend.sent(array)
        pending.arriving.ready = tuple(self.backend.arrived(array) for array in pending.arriving.arrays)
        pending.then()
