"""The executor: runs the steps of a rank on a mesh with a back end, forward or backward.

It posts transfers in the order of the steps, launches the blocks that hide them, and completes each transfer in the
step that needs it.  Its steps are bound to the rank and the call (`mpiattn.schedule.bound`): it knows chunks, slots and
events, and neither hops nor routes.  The pass and the back end define what a block computes, `transfers` what is sent.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import chain, pairwise, product
from time import perf_counter as clock
from weakref import WeakKeyDictionary

import numpy as np

from ..problem.layout import increasing
from ..schedule.bound import bind
from ..schedule.kinds import IN_COLUMNS, KINDS, chunk_of
from ..schedule.places import Places
from ..schedule.ranges import overlap, positions, total
from ..schedule.timeline import Moved, StepTimes, Timeline
from .buffers import Buffers
from .folding import stays
from .held import Held
from .progress import Advance
from .transfers import Transfers

# Prefetched transfers in flight: 2 keep the link busy without splitting its bandwidth.
UNDER_WAY = 2


@dataclass
class _RankSteps:
    """What a call does on this rank: its steps, and where chunks lie.

    transfers: those of all steps, each with the number of its step.
    launches: by block that has run, the queries and the keys of each of its launches, as `Ranges`.
    """

    steps: tuple
    transfers: list
    places: Places
    launches: dict = field(default_factory=dict)


# Limit in bytes for the row intervals of blocks that are kept for calls to come: 8 million rows.
KEPT_BYTES = 64 * 2**20


class Executor:
    """The buffers of one pass and the loop over its schedule.

    work: a pass of `mpiattn.engine.passes`.
    activity: the `Activity` of calls without documents, for which memory is made at once.
    pool: the `Pool` of its buffers.
    rank_steps: that of an executor of the same schedule, rank and activity, to save making it; or None.
    """

    def __init__(self, mesh, schedule, work, exchange, activity, pool, rank_steps=None):
        self.mesh, self.schedule, self.work, self.exchange = mesh, schedule, work, exchange
        self.backend, self.k_layout = work.backend, activity.k_layout
        self.buffers = Buffers(pool, work.shapes(), schedule)
        self.held = Held(work, schedule, self.buffers, mesh.chunk)
        self.transfers = Transfers(mesh, self.backend, exchange, self.buffers, self.held)
        count = len(schedule.steps)
        self.steps_in_words = [f"in step {n + 1} of {count} of the {schedule.direction} pass" for n in range(count)]
        self.where = ""  # the current step, in words
        self.activity = self.rank_steps = None  # of the last pass, and its `_RankSteps`
        self.coming = None  # what is `Coming`, or None
        self.own = {}  # of the last pass, as for `Buffers.fit`
        self.times, self.moves = [], []  # of the last pass: its `StepTimes` and `Moved`, by the clock
        self._by_activity = WeakKeyDictionary()  # `_RankSteps` of this rank, by the activity of a call
        if rank_steps is not None:
            self._by_activity[activity] = rank_steps
        own = {}
        for kind in self.buffers.reduced:
            arrays, strided = (
                KINDS[schedule.direction][kind].arrays_of(work.problem),
                stays(self.backend, schedule.tile, kind),
            )
            own[kind] = [not array.in_place(work.problem, strided) for array in arrays]
        self._fit(activity, own)

    def prepare(self, activity, results):
        """Make what a call with this activity needs; afterwards `run` allocates no buffers.

        results: as for `run`.  Nothing keeps them if the call ends before it runs.
        """
        self._fit(activity, {kind: [array is None for array in arrays] for kind, arrays in results.items()})

    def _fit(self, activity, own):
        if activity is self.activity and own == self.own and self.buffers.places:
            return
        rank_steps = self._by_activity.get(activity)
        if rank_steps is None:
            steps = bind(self.schedule, self.mesh.chunk, activity)
            transfers = [(number, t) for number, step in enumerate(steps) for t in step.transfers]
            rank_steps = self._by_activity[activity] = _RankSteps(
                steps, transfers, Places(self.schedule, self.mesh.chunk, activity)
            )
            activity.trim()
        ordered, places = (), rank_steps.places
        if places.packed and places.rows["KV"] and self._kept_sorting(activity, places):
            ordered = ("KV", *(kind for kind in self.buffers.reduced if kind in IN_COLUMNS))
        self.buffers.fit(places, own, ordered)
        self.activity, self.rank_steps, self.own = activity, rank_steps, own

    def _kept_sorting(self, activity, places):
        """The rows of packed keys in order of position, and the inverse; () if they lie in that order.

        They are in the back end's memory, made once for all calls with the same activity.
        """
        if "sorting" in activity.kept:
            return activity.kept["sorting"]
        chunks = (positions(self.k_layout, *chunk) for chunk in places.tokens["KV"].items())
        parts, rows = list(filter(len, chain(*chunks))), ()
        if any(tokens[-1] > others[0] for tokens, others in pairwise(parts)):
            order = np.argsort(np.concatenate([np.arange(t.start, t.stop, t.step) for t in parts]), kind="stable")
            rows = order, np.argsort(order)
        sorting = activity.kept["sorting"] = tuple(self.backend.contiguous(part, part.itemsize) for part in rows)
        return sorting

    @property
    def kept_bytes(self):
        """Bytes of the rows by which packed keys are sorted, besides those of the buffers."""
        return sum(array.nbytes for array in self.activity.kept.get("sorting", ()))

    def run(self, q, kv, results, progress=None, q_ready=(), coming=None):
        """Run the pass that was prepared; collective.  Returns {reduced kind: arrays of this rank's own chunk}.

        q, kv: this rank's own chunks, tuples of arrays (tokens, heads, ...).
        results: {reduced kind: the arrays of the results (tokens, heads, ...)}, in which their partials may be
            accumulated; None in place of an array in which they may not.
        progress: called with the number of blocks just done, or a fraction of a block.
        q_ready: events of launches of this call that write q.
        coming: the `Coming` of q or kv; None if both are here.
        The returned arrays are `results` or buffers: the last launches may still write them, and the next call
        overwrites the buffers.
        """
        try:
            self.coming = coming
            return self._run(q, kv, results, progress, q_ready)
        except Exception as error:
            error.where = self.where  # for the message of the error
            raise

    def _run(self, q, kv, results, progress, q_ready):
        self.buffers.accumulate_in(results)
        self.held.begin(q, kv, q_ready)
        self.number, self.began = 0, clock()
        self.to_post = deque(self.rank_steps.transfers)
        self.under_way = deque()  # in order of posting
        self.times, self.moves = [], []
        for number, step in enumerate(self.rank_steps.steps):
            self.number, self.where = number, self.steps_in_words[number]
            posted = clock()
            while self.to_post and self.to_post[0][0] == number:  # this step needs them
                self._post_next()
            self._post_ahead()
            for blocks in [step.blocks] if step.fused else [[block] for block in step.blocks]:
                advance = progress and Advance(progress, len(blocks))
                meanwhile = self._meanwhile(advance)
                self._run_tile(meanwhile) if step.fused else self._run_block(*blocks[0], meanwhile)
                if advance:
                    advance(1)
            computed = clock()
            while self.under_way and self.under_way[0].step == number:
                self._complete(self.under_way.popleft())
            self.times.append((posted, computed, clock()))
        self._wait_for_own()
        return self.held.end()

    def trace(self):
        """The measured `Timeline` of the last pass on this rank; None before the first."""
        if not self.times:
            return None
        steps = tuple(StepTimes(*(time - self.began for time in times)) for times in self.times)
        moves = tuple(Moved(*which, begun - self.began, arrived - self.began) for *which, begun, arrived in self.moves)
        return Timeline(self.schedule.direction, steps, moves, steps[-1].ended)

    # Blocks

    def _run_block(self, i, j, meanwhile):
        """Launch the block of query chunk i and KV chunk j, unless none of its queries sees any of its keys."""
        launches = self.rank_steps.launches.get((i, j))
        if launches is None:
            launches = self.rank_steps.launches[i, j] = self._launches(i, j)
        if not launches:
            return
        area, before = sum(total(rows) * total(keys) for rows, keys in launches), 0
        if i == j == self.mesh.chunk and self.coming:
            launches = self._as_they_come(launches)
        else:
            self._wait_for_own()
        q, kv, reduced = self._chunks(i, j)
        for rows, keys in launches:
            done, part = before / area, total(rows) * total(keys) / area
            event = self.work.launch(
                q.together(rows),
                kv.together(keys),
                self._kept((i, j, rows, keys), self._columns, i, j, rows, keys),
                {kind: c.together(keys if kind in IN_COLUMNS else rows) for kind, c in reduced.items()},
                (*q.ready, *kv.ready),
                meanwhile and (lambda share, done=done, part=part: meanwhile(done + share * part)),
            )
            before += total(rows) * total(keys)
        q.used = kv.used = (event,)
        for chunk in reduced.values():
            chunk.ready = (event,)

    def _wait_for_own(self):
        """Wait until this rank's own chunks are here."""
        if self.coming:
            self.coming.wait()

    def _as_they_come(self, launches):
        """The launches of this rank's own block, cut into those of the pieces in which its tokens come."""
        of_keys = self.coming.kind == "KV"
        for piece in self.coming.pieces():
            for rows, keys in launches:
                for part in overlap(piece, keys if of_keys else rows):
                    yield (rows, (part,)) if of_keys else ((part,), keys)

    def _chunks(self, i, j):
        """The chunks of the block of query chunk i and KV chunk j, and {reduced kind: its accumulator}."""
        reduced = {kind: self.held.accumulator(kind, chunk_of(kind, i, j)) for kind in self.buffers.reduced}
        return self.held["Q", i], self.held["KV", j], reduced

    def _launches(self, i, j):
        """Queries and keys of each launch of a block, as `Ranges`; none if no query sees any key."""
        if not self.activity.block(i, j):
            return ()
        q, kv, reduced = self._chunks(i, j)
        return tuple(product(self._together(q, reduced, False, i), self._together(kv, reduced, True, j)))

    def _together(self, gathered, reduced, in_columns, chunk):
        """The tokens of a chunk that this rank needs, as `Ranges` of which each is one launch.

        All are one launch if the gathered chunk and its accumulators hold the same tokens.  On the ring route either
        may hold more, for other ranks.
        """
        if all(c.tokens == gathered.tokens for kind, c in reduced.items() if (kind in IN_COLUMNS) == in_columns):
            return [gathered.tokens]
        return [(part,) for part in self.activity.needed(in_columns, chunk, self.mesh.chunk)]

    def _columns(self, i, j, rows, keys):
        """The columns [begin, end) of some keys of chunk j that some queries of chunk i see."""
        return self.activity.columns(i, positions(self.k_layout, j, keys), rows)

    def _kept(self, key, make, *arguments):
        """Row intervals make(*arguments) in the back end's memory, made once for all calls with the same activity."""
        held = self.activity.kept.get(key)
        if held is None:
            made = make(*arguments)
            held = tuple(self.backend.contiguous(bound, bound.itemsize) for bound in made)
            if self.activity.kept_bytes + 2 * made[0].nbytes <= KEPT_BYTES:
                self.activity.kept[key] = held
        return held

    def _run_tile(self, meanwhile):
        """Launch all blocks as one, over the packed arenas."""
        self._wait_for_own()
        q, kv, places, sorting = (
            self.held.whole("Q"),
            self.held.whole("KV"),
            self.rank_steps.places,
            self.activity.kept.get("sorting"),
        )

        def intervals():
            keys = increasing(positions(self.k_layout, *chunk) for chunk in places.tokens["KV"].items())
            pairs = [self.activity.columns(chunk, keys, rows) for chunk, rows in places.tokens["Q"].items()]
            return tuple(np.concatenate(side, axis=1) for side in zip(*pairs))

        keys, ordered = kv.arrays, self.buffers.ordered if sorting else {}
        if sorting:  # first of all: what follows may lie where the keys were
            (order, inverse), keys = sorting, ordered["KV"]
            for dst, src in zip(keys, kv.arrays):
                self.backend.take(dst, src, order, after=kv.ready)
        accumulators = [
            self.held.accumulator(kind, chunk, clear=kind not in ordered)
            for kind in self.buffers.reduced
            for chunk in places.tokens[kind]
        ]
        reduced = {kind: ordered.get(kind) or self.buffers.whole(kind) for kind in self.buffers.reduced}
        unsorted = {kind: self.buffers.whole(kind) for kind in reduced if kind in ordered}
        for kind in unsorted:
            self.work.clear(kind, ordered[kind])
        event = self.work.launch(
            q.arrays, keys, self._kept("tile", intervals), reduced, (*q.ready, *kv.ready), meanwhile
        )
        for kind, arrays in unsorted.items():
            for dst, src in zip(arrays, ordered[kind]):
                event = self.backend.take(dst, src, inverse)
        self.buffers.launched = (event,)
        for chunk in accumulators:
            chunk.ready = (event,)

    # Transfers

    def _post_next(self):
        """Post the next transfer."""
        step, transfer = self.to_post.popleft()
        if self.coming and transfer.kind == self.coming.kind:
            self._wait_for_own()
        posted = self.transfers.post(transfer)
        posted.step, posted.begun = step, clock()
        self.under_way.append(posted)

    def _post_ahead(self):
        """Prefetch: post the next transfers as far as the schedule and UNDER_WAY allow."""
        while (
            self.to_post
            and self.to_post[0][1].earliest <= self.number
            and not (self.coming and self.to_post[0][1].kind == self.coming.kind)
            and sum(posted.arrived is None for posted in self.under_way) < UNDER_WAY
        ):
            self._post_next()

    def _meanwhile(self, advance):
        """The callback of a launch while it computes: polls MPI and calls `advance`; None if neither is needed."""
        if not (self.under_way or advance or self.coming is not None):
            return None

        def meanwhile(share):
            if (self.under_way or self.coming is not None) and self.exchange.due():
                if self.coming is not None:  # what it sends may still be under way when all that it receives is here
                    self.coming.poll()
                self._look()
                self._post_ahead()
            if advance:
                advance(share)

        return meanwhile

    def _look(self):
        """Note which transfers have arrived."""
        for posted in self.under_way:
            if posted.arrived is None and self.exchange.complete(posted.requests):
                posted.arrived = clock()

    def _complete(self, posted):
        """Wait for a transfer, then store or merge what arrived."""
        transfer = posted.transfer
        if posted.arrived is None:
            self.exchange.wait(posted.requests, self.where)
            posted.arrived = clock()
        if posted.requests:
            hop = 0 if transfer.collective else transfer.hops[0].hop
            self.moves.append((transfer.kind, hop, posted.step, posted.begun, posted.arrived))
        for array in posted.leaving:
            self.backend.sent(array)
        if posted.arriving is not None:
            posted.arriving.ready = tuple(map(self.backend.arrived, posted.landing))
            posted.then()
