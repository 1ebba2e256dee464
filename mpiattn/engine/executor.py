"""The executor: runs the steps of a rank on a mesh with a back end, forward or backward.

It posts transfers in the order of the steps, launches the blocks that hide them, and completes each transfer in the
step that needs it.  Its steps are bound to the rank and the call (`mpiattn.schedule.bound`): it knows chunks, slots and
events, and neither hops nor routes.  The pass and the back end define what a block computes, `transfers` what is sent.
"""

import time
from collections import deque
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from ..problem.layout import increasing
from ..schedule.bound import BoundTransfer, bind
from ..schedule.kinds import IN_COLUMNS, chunk_of
from ..schedule.timeline import Moved, StepTimes, Timeline
from .buffers import Buffers
from .held import Held
from .progress import Advance
from .transfers import Posted, Transfers

# Prefetched transfers in flight: 2 keep the link busy without splitting its bandwidth.
UNDER_WAY = 2


@dataclass
class _Pending:
    """A posted transfer of a step.

    begun, arrived: seconds since the pass began when it was posted and when it was found complete.
    """

    step: int
    transfer: BoundTransfer
    begun: float
    posted: Posted
    arrived: float | None = None


# Limit in bytes for the row intervals of blocks that are kept for calls to come: 8 million rows.
KEPT_BYTES = 64 * 2**20


class Executor:
    """The buffers of one pass and the loop over its schedule.

    work: a pass of `mpiattn.engine.passes`.
    q_layout, k_layout: the layouts of queries and keys.
    """

    def __init__(self, mesh, schedule, work, exchange, q_layout, k_layout):
        self.mesh, self.schedule, self.work, self.exchange = mesh, schedule, work, exchange
        self.backend, self.q_layout, self.k_layout = work.backend, q_layout, k_layout
        self.buffers = Buffers(self.backend, work.shapes(), schedule, mesh, self.q_layout, self.k_layout)
        self.held = Held(work, schedule, self.buffers, mesh.rank)
        self.transfers = Transfers(mesh, self.backend, exchange, self.buffers, self.held)
        self.where = ""  # the current step, in words
        self.times, self.moves = [], []  # of the last pass: steps, transfers
        self.bound = WeakKeyDictionary()  # the steps of this rank, by the activity of a call
        self.sorting = None  # keys of a packed arena by position: order, its inverse, arrays
        if self.buffers.packed and schedule.slots["KV"]:
            order = np.argsort(self._arena_key_positions(), kind="stable")
            if (order[1:] < order[:-1]).any():
                kinds = ["KV", *(kind for kind in self.buffers.reduced if kind in IN_COLUMNS)]
                self.sorting = (
                    *(self.backend.contiguous(rows, rows.itemsize) for rows in (order, np.argsort(order))),
                    {
                        kind: tuple(self.backend.empty(array.shape, array.dtype) for array in self.buffers.arena[kind])
                        for kind in kinds
                    },
                )

    @property
    def nbytes(self):
        """Bytes of all buffers."""
        if not self.sorting:
            return self.buffers.nbytes
        order, inverse, arrays = self.sorting
        return (
            self.buffers.nbytes
            + order.nbytes
            + inverse.nbytes
            + sum(array.nbytes for kind in arrays.values() for array in kind)
        )

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
            error.where = self.where  # for the message of the error
            raise

    def _run(self, q, kv, activity, progress, q_ready):
        self.activity = activity
        steps = self.bound.get(activity)
        if steps is None:
            steps = self.bound[activity] = bind(self.schedule, self.mesh.rank, activity)
        self.held.begin(q, kv, q_ready)
        self.number, self.began = 0, time.perf_counter()
        self.to_post = deque((number, t) for number, step in enumerate(steps) for t in step.transfers)
        self.under_way = deque()  # in order of posting
        self.times, self.moves = [], []
        for number, step in enumerate(steps):
            self.number = number
            self.where = f"in step {number + 1} of {len(steps)} of the {self.schedule.direction} pass"
            posted = self._now()
            while self.to_post and self.to_post[0][0] == number:  # this step needs them
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
        return self.held.end()

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

    def _run_block(self, i, j, meanwhile):
        """Launch the block of query chunk i and KV chunk j, unless none of its queries sees any of its keys."""
        if not self.activity.block(i, j):
            return
        q, kv = self.held["Q", i], self.held["KV", j]
        reduced = {kind: self.held.accumulator(kind, chunk_of(kind, i, j)) for kind in self.buffers.reduced}
        interval = self._kept((i, j), lambda: self.activity.columns(i, self.k_layout.ranges(j)))
        event = self.work.launch(
            q.arrays,
            kv.arrays,
            interval,
            {kind: c.arrays for kind, c in reduced.items()},
            (*q.ready, *kv.ready),
            meanwhile,
        )
        q.used = kv.used = (event,)
        for chunk in reduced.values():
            chunk.ready = (event,)

    def _kept(self, key, make):
        """Row intervals in the back end's memory, made once for all calls with the same activity."""
        kept = self.activity.kept
        if key not in kept:
            made = make()
            held = tuple(self.backend.contiguous(bound, bound.itemsize) for bound in made)
            if self.activity.kept_bytes + 2 * made[0].nbytes > KEPT_BYTES:
                return held
            kept[key] = held
        return kept[key]

    def _arena_key_positions(self):
        return np.concatenate([self.k_layout.positions(chunk) for chunk in self.buffers.tokens("KV")])

    def _run_tile(self, meanwhile):
        """Launch all blocks as one, over the packed arenas."""
        q, kv = self.held.whole("Q"), self.held.whole("KV")
        accumulators = [
            self.held.accumulator(kind, chunk) for kind in self.buffers.reduced for chunk in self.buffers.tokens(kind)
        ]

        def intervals():
            keys = increasing(self.k_layout.ranges(chunk) for chunk in self.buffers.tokens("KV"))  # as `sorting` sorts
            pairs = [self.activity.columns(chunk, keys) for chunk in self.buffers.tokens("Q")]
            return tuple(np.concatenate(side, axis=1) for side in zip(*pairs))

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
        event = self.work.launch(
            q.arrays,
            keys,
            self._kept(("tile", bool(self.sorting)), intervals),
            reduced,
            (*q.ready, *kv.ready),
            meanwhile,
        )
        if self.sorting:
            for kind in unsorted:
                for dst, src in zip(unsorted[kind], arrays[kind]):
                    event = self.backend.take(dst, src, inverse)
        for chunk in accumulators:
            chunk.ready = (event,)

    # Transfers

    def _post_next(self):
        """Post the next transfer."""
        step, transfer = self.to_post.popleft()
        posted = self.transfers.post(transfer)
        self.under_way.append(_Pending(step, transfer, self._now(), posted))

    def _post_ahead(self):
        """Prefetch: post the next transfers as far as the schedule and UNDER_WAY allow."""
        while (
            self.to_post
            and self.to_post[0][1].earliest <= self.number
            and sum(pending.arrived is None for pending in self.under_way) < UNDER_WAY
        ):
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
            if pending.arrived is None and self.exchange.complete(pending.posted.requests):
                pending.arrived = self._now()

    def _complete(self, pending):
        """Wait for a transfer, then store or merge what arrived."""
        transfer, posted = pending.transfer, pending.posted
        if pending.arrived is None:
            self.exchange.wait(posted.requests, self.where)
            pending.arrived = self._now()
        if posted.requests:
            self.moves.append(
                Moved(
                    transfer.kind,
                    0 if transfer.collective else transfer.hops[0].hop,
                    pending.step,
                    pending.begun,
                    pending.arrived,
                )
            )
        for array in posted.leaving:
            self.backend.sent(array)
        if posted.arriving is not None:
            posted.arriving.ready = tuple(self.backend.arrived(array) for array in posted.arriving.arrays)
            posted.then()
