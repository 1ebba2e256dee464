"""The executor: runs any schedule on a mesh with a back end, forward or backward.

It posts transfers in the order of the schedule, launches the blocks that hide them, and completes each transfer in the
step that needs it.  It handles hops, slots and events.  The pass and the back end define what a block computes, the
exchange how bytes travel.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..problem.mask import local_interval
from ..schedule.kinds import GATHERED, IN_COLUMNS, TAG, arena_of, hop_of
from ..schedule.route import leg_of
from ..schedule.steps import Transfer
from ..schedule.timeline import Moved, StepTimes, Timeline
from .buffers import Buffers, Chunk
from .progress import Advance

# Prefetched transfers in flight: 2 keep the link busy without splitting its bandwidth.
UNDER_WAY = 2


@dataclass
class _Pending:
    """A posted transfer of a step.

    begun, arrived: seconds since the pass began when it was posted and when it was found complete.
    posted: the requests of the exchange.
    leaving: the arrays being sent.
    arriving: the chunk being received, None if there is none.
    then: called when that has arrived.
    """

    step: int
    transfer: Transfer
    begun: float
    posted: list
    leaving: tuple
    arriving: Chunk
    then: Callable
    arrived: float | None = None


# Limit in bytes for the row intervals of an activity's blocks that are kept for the next call: 8 million rows.
KEPT_BYTES = 64 * 2 ** 20


def _row_bytes(array):
    """Bytes of one token of an array."""
    return array.dtype.itemsize * math.prod(array.shape[1:])


class Executor:
    """The buffers of one pass and the loop over its schedule.

    work: a pass of `mpiattn.engine.passes`.
    q_layout, k_layout: the layouts of queries and keys.
    """

    def __init__(self, mesh, schedule, work, exchange, q_layout, k_layout):
        self.mesh, self.schedule, self.work, self.exchange = mesh, schedule, work, exchange
        self.backend, self.q_layout, self.k_layout = work.backend, q_layout, k_layout
        self.buffers = Buffers(self.backend, work.shapes(), schedule, mesh, self.q_layout, self.k_layout)
        self.where = ""                     # the current step, in words
        self.times, self.moves = [], []     # of the last pass: steps, transfers
        self.sorting = None                 # keys of a packed arena by position: order, its inverse, arrays
        if self.buffers.packed and schedule.slots["KV"]:
            order = np.argsort(self._arena_key_positions(), kind="stable")
            if (order[1:] < order[:-1]).any():
                kinds = ["KV", *(kind for kind in self.buffers.reduced if kind in IN_COLUMNS)]
                self.sorting = (order, np.argsort(order),
                                {kind: tuple(self.backend.empty(array.shape, array.dtype)
                                             for array in self.buffers.arena[kind]) for kind in kinds})

    @property
    def nbytes(self):
        """Bytes of all buffers."""
        if not self.sorting:
            return self.buffers.nbytes
        order, inverse, arrays = self.sorting
        return (self.buffers.nbytes + order.nbytes + inverse.nbytes
                + sum(array.nbytes for kind in arrays.values() for array in kind))

    def run(self, q, kv, activity, progress=None, q_ready=()):
        """Run one pass; collective.  Returns {reduced kind: arrays of #0}.

        q, kv: this rank's own chunks, tuples of arrays (tokens, heads, ...).
        activity: the `Activity` of this call.
        progress: called with the number of blocks just done, or a fraction of a block.
        q_ready: events of launches of this call that write q.
        The returned arrays are buffers: the last launches may still write them, and the next call overwrites them.
        """
        try:
            return self._run(q, kv, activity, progress, q_ready)
        except Exception as error:
            error.where = self.where            # for the message of the error
            raise

    def _run(self, q, kv, activity, progress, q_ready):
        self.activity = activity
        self.chunks = {("Q", 0): Chunk(q, q_ready), ("KV", 0): Chunk(kv)}
        self.buffers.occupant.clear()
        self.number, self.began = 0, time.perf_counter()
        self.to_post = deque((number, t) for number, step in enumerate(self.schedule.steps) for t in step.transfers)
        self.under_way = deque()             # in order of posting
        self.times, self.moves = [], []
        for number, step in enumerate(self.schedule.steps):
            self.number = number
            self.where = (f"in step {number + 1} of {len(self.schedule.steps)} of the {self.schedule.direction} pass")
            posted = self._now()
            while self.to_post and self.to_post[0][0] == number:      # this step needs them
                self._post_next()
            self._post_ahead()
            for blocks in [step.blocks] if step.fused else [[block] for block in step.blocks]:
                advance = progress and Advance(progress, len(blocks))
                meanwhile = self._meanwhile(advance)
                self._run_tile(meanwhile) if step.fused else self._run_block(*blocks[0], meanwhile)
                if advance:
                    advance(1)
            computed = self._now()
            while self.under_way and self.under_way[0].step == number:
                self._complete(self.under_way.popleft())
            self.times.append(StepTimes(posted, computed, self._now()))
        results = {kind: self._accumulator(kind, 0).arrays for kind in self.buffers.reduced}
        self.chunks = {}                    # keep no reference to the caller's arrays
        return results

    def _now(self):
        return time.perf_counter() - self.began

    def trace(self):
        """The measured `Timeline` of the last pass on this rank; None before the first."""
        if not self.times:
            return None
        return Timeline(self.schedule.direction, tuple(self.times), tuple(self.moves), self.times[-1].ended)

    def forget(self):
        """Tell the back end that the contents of the buffers are no longer needed."""
        for arrays in self.buffers.arena.values():
            for array in arrays:
                self.backend.forget(array)

    # Blocks

    def _accumulator(self, kind, hop):
        """The accumulator of a reduced kind at a hop, cleared at its first use in a pass."""
        if (kind, hop) not in self.chunks:
            arrays = self.buffers.accumulator(kind, hop)
            self.chunks[kind, hop] = Chunk(arrays, (self.work.clear(kind, arrays),))
        return self.chunks[kind, hop]

    def _run_block(self, u, w, meanwhile):
        """Launch block (u, w), unless none of its queries sees any of its keys."""
        i, j = self.buffers.q_chunks[u], self.buffers.k_chunks[w]
        if not self.activity.block(i, j):
            return
        q, kv = self.chunks["Q", u], self.chunks["KV", w]
        reduced = {kind: self._accumulator(kind, hop_of(kind, u, w)) for kind in self.buffers.reduced}
        interval = self._kept((i, j), lambda: local_interval(*self.activity.interval(i), self.k_layout.positions(j)))
        event = self.work.launch(q.arrays, kv.arrays, interval, {kind: c.arrays for kind, c in reduced.items()},
                                 (*q.ready, *kv.ready), meanwhile)
        q.used = kv.used = (event,)
        for chunk in reduced.values():
            chunk.ready = (event,)

    def _kept(self, key, make):
        """Row intervals in the back end's memory, made once for all calls with the same activity."""
        kept = self.activity.kept
        if key not in kept:
            made = make()
            held = tuple(self.backend.contiguous(bound, bound.itemsize) for bound in made)
            if sum(bound.nbytes for pair in kept.values() for bound in pair) + 2 * made[0].nbytes > KEPT_BYTES:
                return held
            kept[key] = held
        return kept[key]

    def _arena_key_positions(self):
        return np.concatenate([self.k_layout.positions(chunk) for chunk in sorted(self.buffers.k_chunks)])

    def _run_tile(self, meanwhile):
        """Launch all blocks as one, over the packed arenas."""
        q, kv = self._whole("Q"), self._whole("KV")
        accumulators = {kind: [self._accumulator(kind, hop) for hop in range(self.schedule.tile.extent(kind))]
                        for kind in self.buffers.reduced}

        def intervals():
            bounds = [self.activity.interval(chunk) for chunk in sorted(self.buffers.q_chunks)]
            lo, hi = (np.concatenate([pair[side] for pair in bounds], axis=1) for side in (0, 1))
            k_positions = self._arena_key_positions()
            return local_interval(lo, hi, k_positions[self.sorting[0]] if self.sorting else k_positions)

        keys = kv.arrays
        reduced = {kind: self.buffers.arena[kind] for kind in self.buffers.reduced}
        if self.sorting:
            order, inverse, arrays = self.sorting
            keys = arrays["KV"]
            for dst, src in zip(keys, kv.arrays):
                self.backend.take(dst, src, order, after=kv.ready)
            unsorted = {kind: reduced[kind] for kind in arrays if kind in reduced}
            for kind in unsorted:
                reduced[kind] = arrays[kind]
                self.work.clear(kind, arrays[kind])
        event = self.work.launch(q.arrays, keys, self._kept(("tile", bool(self.sorting)), intervals), reduced,
                                 (*q.ready, *kv.ready), meanwhile)
        if self.sorting:
            for kind in unsorted:
                for dst, src in zip(unsorted[kind], arrays[kind]):
                    event = self.backend.take(dst, src, inverse)
        for chunk in (chunk for chunks in accumulators.values() for chunk in chunks):
            chunk.ready = (event,)

    def _whole(self, kind):
        """The chunks of the whole group, this rank's included, as one packed chunk."""
        own, tokens = self.chunks[kind, 0], self.buffers.tokens(kind)
        if not self.schedule.slots[kind] or own.arrays is self.buffers.arena[kind]:
            return own                                # group of one rank, or a collective has placed it
        for dst, src in zip(self.buffers.view(kind, self.buffers.packed_start(kind, 0), tokens[0]), own.arrays):
            self.backend.copy(dst, src)
        self._clear(kind, [hop for hop in range(1, len(tokens)) if (kind, hop) not in self.chunks])
        ready = tuple(event for (k, _), chunk in self.chunks.items() if k == kind for event in chunk.ready)
        return Chunk(self.buffers.arena[kind], ready)

    def _clear(self, kind, hops):
        """Zero the places in a packed arena of chunks that are not sent, because the mask leaves them no pairs.

        Uninitialized memory may hold inf or nan.  Launches handle these on another path, which rounds differently.
        """
        for hop in hops:
            self.backend.zero(self.buffers.view(kind, self.buffers.packed_start(kind, hop),
                                                self.buffers.tokens(kind)[hop]))

    # Transfers

    def _group(self, kind):
        """The communicator of the row or column that a kind moves in, and this rank's number in it."""
        return (self.mesh.column, self.mesh.r) if kind in IN_COLUMNS else (self.mesh.row, self.mesh.c)

    def _post_next(self):
        """Post the next transfer."""
        step, transfer = self.to_post.popleft()
        posted, *rest = self._post_collective(transfer) if transfer.collective else self._post(transfer)
        self.under_way.append(_Pending(step, transfer, self._now(), posted, *rest))

    def _post_ahead(self):
        """Prefetch: post the next transfers as far as the schedule and UNDER_WAY allow."""
        while (self.to_post and self.to_post[0][1].after <= self.number
               and sum(pending.arrived is None for pending in self.under_way) < UNDER_WAY):
            self._post_next()

    def _meanwhile(self, advance):
        """The callback of a launch while it computes: polls MPI and calls `advance`; None if neither is needed."""
        if not (self.under_way or advance):
            return None

        def meanwhile(share):
            if self.under_way and self.exchange.due():
                self._look()
                self._post_ahead()
            if advance:
                advance(share)
        return meanwhile

    def _look(self):
        """Note which transfers have arrived."""
        for pending in self.under_way:
            if pending.arrived is None and self.exchange.complete(pending.posted):
                pending.arrived = self._now()

    def _post(self, transfer):
        """Post a transfer between pairs."""
        kind, (hop,), (slot,) = transfer.kind, transfer.hops, transfer.slots
        route, rank = self.schedule.route, self.mesh.rank
        ahead, leaves, lands, _ = leg_of(kind, hop, self.schedule.tile.extent(kind), route)
        comm, me = self._group(kind)
        posted, sending, arriving = [], (), None
        if self.activity.receives(kind, rank, hop, route):
            arriving, before = self.buffers.take_slot(arena_of(kind), slot, self.buffers.tokens(kind)[lands], hop)
            for i, array in enumerate(arriving.arrays):
                posted += self.exchange.receive(comm, self.backend.incoming(array, before),
                                                  (me - ahead) % comm.size, TAG[kind] + i)
        if self.activity.sends(kind, rank, hop, route):
            leaving = self._travelling(kind, self.chunks[kind, leaves], self.buffers.slot_start(arena_of(kind), slot))
            sending = leaving.arrays
            for i, array in enumerate(sending):
                posted += self.exchange.send(comm, self.backend.outgoing(array, leaving.ready),
                                               (me + ahead) % comm.size, TAG[kind] + i)
        if kind not in GATHERED:
            self.chunks.pop((kind, hop), None)
            return posted, sending, arriving, lambda: self._merge(kind, lands, arriving)
        return posted, sending, arriving, lambda: self.chunks.update({(kind, hop): arriving})

    def _travelling(self, kind, chunk, start=0):
        """The chunk itself, or a partial cast to the dtype of the wire, in the wire arrays from row `start` on."""
        if kind not in self.buffers.wire:
            return chunk
        arrays, ready = [], list(chunk.ready)
        for held, wire in zip(chunk.arrays, self.buffers.wire[kind]):
            arrays.append(held if wire is None else wire[start:start + len(held)])
            if wire is not None:
                ready.append(self.backend.copy(arrays[-1], held))
        return Chunk(tuple(arrays), tuple(ready))

    def _merge(self, kind, hop, received):
        """Merge a received partial into the accumulator at a hop."""
        partial = self._accumulator(kind, hop)
        partial.ready = received.used = (self.work.merge(kind, partial.arrays, received.arrays, received.ready),)

    def _post_collective(self, transfer):
        """Post a transfer of all hops by one collective."""
        return self._gather(transfer.kind) if transfer.kind in GATHERED else self._exchange_partials(transfer)

    def _packing(self, kind):
        """Number of tokens and first row in a packed arena of each chunk of the group, by rank in the group."""
        comm, me = self._group(kind)
        hops = [(me - rank) % comm.size for rank in range(comm.size)]
        tokens = self.buffers.tokens(kind)
        return [tokens[hop] for hop in hops], [self.buffers.packed_start(kind, hop) for hop in hops]

    def _gather(self, kind):
        own, (comm, me) = self.chunks[kind, 0], self._group(kind)
        gathered = Chunk(self.buffers.arena[kind])
        tokens, starts = self._packing(kind)
        owners = [self.mesh.tile.in_group(kind, self.mesh.rank, (me - rank) % comm.size) for rank in range(comm.size)]
        wanted = [self.activity.sends(kind, owner, 1, collective=True) for owner in owners]
        tokens = [count * want for count, want in zip(tokens, wanted)]
        posted = []
        for mine, arena in zip(own.arrays, gathered.arrays):
            leaving = self.exchange.whole(self.backend.outgoing(mine, own.ready, collective=True))
            posted += self.exchange.allgather(
                comm, leaving if wanted[me] else leaving[:0],
                self.exchange.whole(self.backend.incoming(arena, collective=True)), tokens, starts, _row_bytes(arena))

        def place():
            unsent = [(me - other) % comm.size for other in range(comm.size) if not wanted[other]]
            for event in gathered.ready if unsent else ():
                self.backend.wait(event)
            self._clear(kind, [hop for hop in unsent if hop])
            if 0 in unsent:                               # the collective has not placed this rank's own either
                for dst, src in zip(self.buffers.view(kind, starts[me], self.buffers.tokens(kind)[0]), own.arrays):
                    self.backend.copy(dst, src)
            self.chunks[kind, 0] = gathered
        return posted, own.arrays, gathered, place

    def _exchange_partials(self, transfer):
        kind = transfer.kind
        comm, me = self._group(kind)
        tokens, starts = self._packing(kind)
        own, longest, rank = tokens[me], max(tokens), self.mesh.rank
        # This rank sends to the rank `hop` back and receives from the rank `hop` ahead.
        tokens = [n * (other != me and self.activity.sends(kind, rank, (me - other) % comm.size))
                  for other, n in enumerate(tokens)]
        received_tokens = [own * (other != me and self.activity.receives(kind, rank, (other - me) % comm.size))
                           for other in range(comm.size)]
        slot_of = dict(zip(transfer.hops, transfer.slots))
        slots = [slot_of.get((other - me) % comm.size, 0) for other in range(comm.size)]
        ready = tuple(event for hop in range(comm.size) for event in self.chunks[kind, hop].ready)
        leaving = self._travelling(kind, Chunk(self.buffers.arena[kind], ready))
        received = Chunk(self.buffers.arena[arena_of(kind)])
        posted = []
        for mine, arena in zip(leaving.arrays, received.arrays):
            posted += self.exchange.alltoall(
                comm, self.exchange.whole(self.backend.outgoing(mine, leaving.ready, collective=True)), tokens, starts,
                self.exchange.whole(self.backend.incoming(arena, collective=True)), received_tokens,
                [self.buffers.slot_start(arena_of(kind), slot) for slot in slots], _row_bytes(arena), longest)

        def merge_in_order():
            for hop in filter(lambda hop: self.activity.receives(kind, rank, hop), transfer.hops):
                partial, _ = self.buffers.take_slot(arena_of(kind), slot_of[hop], own)
                partial.ready = received.ready
                self._merge(kind, 0, partial)
        return posted, leaving.arrays, received, merge_in_order

    def _complete(self, pending):
        """Wait for a transfer, then store or merge what arrived."""
        if pending.arrived is None:
            self.exchange.wait(pending.posted, self.where)
            pending.arrived = self._now()
        if pending.posted:
            kind, hops = pending.transfer.kind, pending.transfer.hops
            self.moves.append(Moved(kind, 0 if pending.transfer.collective else hops[0], pending.step, pending.begun,
                                    pending.arrived))
        for array in pending.leaving:
            self.backend.sent(array)
        if pending.arriving is not None:
            pending.arriving.ready = tuple(self.backend.arrived(array) for array in pending.arriving.arrays)
            pending.then()
