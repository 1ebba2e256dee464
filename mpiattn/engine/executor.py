"""The executor: runs the steps of a rank on a mesh with a back end, forward or backward.

It posts transfers in the order of the steps, launches the blocks that hide them, and completes each transfer in the
step that needs it.  Its steps are bound to the rank and the call (`mpiattn.schedule.bound`): it knows chunks, slots and
events, and neither hops nor routes.  The pass and the back end define what a block computes, the exchange how bytes
travel.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from ..problem.mask import local_interval
from ..schedule.bound import BoundTransfer, bind
from ..schedule.kinds import GATHERED, IN_COLUMNS, TAG, arena_of, chunk_of
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
    transfer: BoundTransfer
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
        self.bound = WeakKeyDictionary()    # the steps of this rank, by the activity of a call
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
        """Run one pass; collective.  Returns {reduced kind: arrays of this rank's own chunk}.

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
        self.activity, own = activity, self.mesh.rank
        steps = self.bound.get(activity)
        if steps is None:
            steps = self.bound[activity] = bind(self.schedule, own, activity)
        self.chunks = {("Q", own): Chunk(q, q_ready), ("KV", own): Chunk(kv)}      # and accumulators, by chunk
        self.buffers.occupant.clear()
        self.number, self.began = 0, time.perf_counter()
        self.to_post = deque((number, t) for number, step in enumerate(steps) for t in step.transfers)
        self.under_way = deque()             # in order of posting
        self.times, self.moves = [], []
        for number, step in enumerate(steps):
            self.number = number
            self.where = (f"in step {number + 1} of {len(steps)} of the {self.schedule.direction} pass")
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
        results = {kind: self._accumulator(kind, own).arrays for kind in self.buffers.reduced}
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

    def _accumulator(self, kind, chunk):
        """The accumulator of a reduced kind for a chunk, cleared at its first use in a pass."""
        if (kind, chunk) not in self.chunks:
            arrays = self.buffers.accumulator(kind, chunk)
            self.chunks[kind, chunk] = Chunk(arrays, (self.work.clear(kind, arrays),))
        return self.chunks[kind, chunk]

    def _run_block(self, i, j, meanwhile):
        """Launch the block of query chunk i and KV chunk j, unless none of its queries sees any of its keys."""
        if not self.activity.block(i, j):
            return
        q, kv = self.chunks["Q", i], self.chunks["KV", j]
        reduced = {kind: self._accumulator(kind, chunk_of(kind, i, j)) for kind in self.buffers.reduced}
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
        return np.concatenate([self.k_layout.positions(chunk) for chunk in self.buffers.tokens("KV")])

    def _run_tile(self, meanwhile):
        """Launch all blocks as one, over the packed arenas."""
        q, kv = self._whole("Q"), self._whole("KV")
        accumulators = [self._accumulator(kind, chunk) for kind in self.buffers.reduced
                        for chunk in self.buffers.tokens(kind)]

        def intervals():
            bounds = [self.activity.interval(chunk) for chunk in self.buffers.tokens("Q")]
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
        for chunk in accumulators:
            chunk.ready = (event,)

    def _whole(self, kind):
        """The chunks of the whole group, this rank's included, as one packed chunk."""
        own = self.chunks[kind, self.mesh.rank]
        if not self.schedule.slots[kind] or own.arrays is self.buffers.arena[kind]:
            return own                                # group of one rank, or a collective has placed it
        self._place_own(kind, own)
        self._clear(kind, [chunk for chunk in self.buffers.tokens(kind) if (kind, chunk) not in self.chunks])
        ready = tuple(event for (k, _), chunk in self.chunks.items() if k == kind for event in chunk.ready)
        return Chunk(self.buffers.arena[kind], ready)

    def _packed(self, kind, chunk):
        """The place of a chunk in a packed arena."""
        return self.buffers.view(kind, self.buffers.packed_start(kind, chunk), self.buffers.tokens(kind)[chunk])

    def _place_own(self, kind, own):
        """Copy this rank's own chunk to its place in a packed arena."""
        for dst, src in zip(self._packed(kind, self.mesh.rank), own.arrays):
            self.backend.copy(dst, src)

    def _clear(self, kind, chunks):
        """Zero the places in a packed arena of chunks that are not sent, because the mask leaves them no pairs.

        Uninitialized memory may hold inf or nan.  Launches handle these on another path, which rounds differently.
        """
        for chunk in chunks:
            self.backend.zero(self._packed(kind, chunk))

    # Transfers

    def _group(self, kind):
        """The communicator of the row or column that a kind moves in; its ranks are in the order of their chunks."""
        return self.mesh.column if kind in IN_COLUMNS else self.mesh.row

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
        kind, ((_, slot, send, receive),) = transfer.kind, transfer.hops
        posted, sending, arriving = [], (), None
        if receive:
            arriving, before = self.buffers.take_slot(arena_of(kind), slot, receive.chunk)
            for i, array in enumerate(arriving.arrays):
                posted += self.exchange.receive(self.mesh.cart, self.backend.incoming(array, before), receive.peer,
                                                TAG[kind] + i)
        if send:
            leaving = self._travelling(kind, self.chunks[kind, send.chunk],
                                       self.buffers.slot_start(arena_of(kind), slot))
            sending = leaving.arrays
            for i, array in enumerate(sending):
                posted += self.exchange.send(self.mesh.cart, self.backend.outgoing(array, leaving.ready), send.peer,
                                             TAG[kind] + i)
        if kind in GATHERED:
            return posted, sending, arriving, lambda: self.chunks.update({(kind, receive.chunk): arriving})
        if send:
            del self.chunks[kind, send.chunk]
        return posted, sending, arriving, lambda: self._merge(kind, receive.chunk, arriving)

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

    def _merge(self, kind, chunk, received):
        """Merge a received partial into the accumulator of its chunk."""
        partial = self._accumulator(kind, chunk)
        partial.ready = received.used = (self.work.merge(kind, partial.arrays, received.arrays, received.ready),)

    def _post_collective(self, transfer):
        """Post a transfer of all hops by one collective."""
        return self._gather(transfer) if transfer.kind in GATHERED else self._exchange_partials(transfer)

    def _starts(self, kind):
        """First row in a packed arena of each chunk of the group."""
        return [self.buffers.packed_start(kind, chunk) for chunk in self.buffers.tokens(kind)]

    def _gather(self, transfer):
        kind, rank, tokens = transfer.kind, self.mesh.rank, self.buffers.tokens(transfer.kind)
        own, gathered = self.chunks[kind, rank], Chunk(self.buffers.arena[kind])
        sent = {hop.receive.chunk for hop in transfer.hops if hop.receive} | {
            hop.send.chunk for hop in transfer.hops if hop.send}
        posted = []
        for held, arena in zip(own.arrays, gathered.arrays):
            leaving = self.exchange.whole(self.backend.outgoing(held, own.ready, collective=True))
            posted += self.exchange.allgather(
                self._group(kind), leaving if rank in sent else leaving[:0],
                self.exchange.whole(self.backend.incoming(arena, collective=True)),
                [count * (chunk in sent) for chunk, count in tokens.items()], self._starts(kind), _row_bytes(arena))

        def place():
            unsent = [chunk for chunk in tokens if chunk not in sent]
            for event in gathered.ready if unsent else ():
                self.backend.wait(event)
            self._clear(kind, [chunk for chunk in unsent if chunk != rank])
            if rank in unsent:                            # the collective has not placed this rank's own either
                self._place_own(kind, own)
            self.chunks[kind, rank] = gathered
        return posted, own.arrays, gathered, place

    def _exchange_partials(self, transfer):
        kind, rank, tokens = transfer.kind, self.mesh.rank, self.buffers.tokens(transfer.kind)
        arriving = [hop for hop in transfer.hops if hop.receive]
        leaving_to = {hop.send.peer for hop in transfer.hops if hop.send}
        slot_of = {hop.receive.peer: hop.slot for hop in arriving}
        ready = tuple(event for chunk in tokens for event in self.chunks[kind, chunk].ready)
        leaving = self._travelling(kind, Chunk(self.buffers.arena[kind], ready))
        received = Chunk(self.buffers.arena[arena_of(kind)])
        posted = []
        for held, arena in zip(leaving.arrays, received.arrays):
            posted += self.exchange.alltoall(
                self._group(kind), self.exchange.whole(self.backend.outgoing(held, leaving.ready, collective=True)),
                [count * (peer in leaving_to) for peer, count in tokens.items()], self._starts(kind),
                self.exchange.whole(self.backend.incoming(arena, collective=True)),
                [tokens[rank] * (peer in slot_of) for peer in tokens],
                [self.buffers.slot_start(arena_of(kind), slot_of.get(peer, 0)) for peer in tokens], _row_bytes(arena),
                max(tokens.values()))

        def merge_in_order():
            for hop in arriving:
                partial, _ = self.buffers.take_slot(arena_of(kind), hop.slot, hop.receive.chunk)
                partial.ready = received.ready
                self._merge(kind, hop.receive.chunk, partial)
        return posted, leaving.arrays, received, merge_in_order

    def _complete(self, pending):
        """Wait for a transfer, then store or merge what arrived."""
        if pending.arrived is None:
            self.exchange.wait(pending.posted, self.where)
            pending.arrived = self._now()
        if pending.posted:
            transfer = pending.transfer
            self.moves.append(Moved(transfer.kind, 0 if transfer.collective else transfer.hops[0].hop, pending.step,
                                    pending.begun, pending.arrived))
        for array in pending.leaving:
            self.backend.sent(array)
        if pending.arriving is not None:
            pending.arriving.ready = tuple(self.backend.arrived(array) for array in pending.arriving.arrays)
            pending.then()
