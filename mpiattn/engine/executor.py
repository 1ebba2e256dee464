"""The executor: runs the steps of a rank on a mesh with a back end, forward or backward.

It posts transfers in the order of the steps, launches the blocks that hide them, and completes each transfer in the
step that needs it.  Its steps are bound to the rank and the call (`mpiattn.schedule.bound`): it knows chunks, slots and
events, and neither hops nor routes.  The pass and the back end define what a block computes, `transfers` what is sent.
"""

from collections import deque
from time import perf_counter as clock

from ..schedule.kinds import GATHERED, IN_COLUMNS, KINDS, chunk_of
from ..schedule.ranges import overlap, total
from ..schedule.timeline import Moved, StepTimes, Timeline
from .buffers import Buffers, Chunk
from .chunks import Chunks
from .folding import stays
from .launches import launch_lists
from .transfers import Transfers

# Prefetched transfers in flight: 2 keep the link busy without splitting its bandwidth.
UNDER_WAY = 2


class Advance:
    """Calls `progress` with the fraction of blocks done since its last call, in steps of 1 / PARTS."""

    PARTS = 128  # parts of a block; a power of 2, so that their sums are exact

    def __init__(self, progress, blocks):
        self.progress, self.blocks, self.parts = progress, blocks, 0

    def __call__(self, share):
        """Report the progress; share: fraction of the blocks done so far, from 0 to 1."""
        parts = int(share * self.blocks * self.PARTS)
        if parts > self.parts:
            self.progress((parts - self.parts) / self.PARTS)
            self.parts = parts


class Executor:
    """The buffers of one pass and the loop over its schedule.

    computation: a pass of `mpiattn.engine.passes`.
    calls: the `AlikeCalls` for which it makes memory at once: those without documents.
    pool: the `Pool` of its buffers.
    """

    def __init__(self, mesh, schedule, computation, exchange, calls, pool):
        self.mesh, self.schedule, self.computation, self.exchange = mesh, schedule, computation, exchange
        self.backend = computation.backend
        self.buffers = Buffers(pool, computation.shapes(), schedule)
        self.chunks = Chunks(computation, schedule, self.buffers, mesh.chunk)
        self.transfers = Transfers(mesh, self.backend, exchange, self.buffers, self.chunks)
        count = len(schedule.steps)
        self.steps_in_words = [f"in step {n + 1} of {count} of the {schedule.direction} pass" for n in range(count)]
        self.where = ""  # the current step, in words, for error messages
        self.calls = self.steps = None  # those like the last pass, and its `RankSteps`
        self.coming = None  # the `Coming` of the last pass, or None
        self.biases = None  # its `Biases`, or None
        self.needs = None  # of the last pass: needs_memory as for `Buffers.fit`, and whether it had biases
        self.done = None  # the `RankSteps` of the last pass, and by the clock:
        self.times, self.moves = [], []  # its `StepTimes`, and (transfer, step, begun, arrived) of what moved
        self.number, self.began = 0, 0.0  # of the current step, and when the pass began, by the clock
        self.to_post, self.under_way = deque(), deque()  # transfers of the pass, in order of posting
        needs_memory = {}
        for kind in self.buffers.reduced:
            arrays = KINDS[schedule.direction][kind].arrays_of(computation.problem)
            strided = stays(self.backend, schedule.tile, kind)
            needs_memory[kind] = [not array.in_result(computation.problem, strided) for array in arrays]
        self._fit(calls, needs_memory)

    def prepare(self, calls, results, biased=False):
        """Make what one of these `AlikeCalls` needs; afterwards `run` allocates no buffers.

        results: as for `run`.  Nothing keeps them if the call ends before it runs.  biased: whether it has biases.
        """
        self._fit(calls, {kind: [array is None for array in arrays] for kind, arrays in results.items()}, biased)

    def _fit(self, calls, needs_memory, biased=False):
        needs = needs_memory, biased
        if calls is self.calls and needs == self.needs and self.buffers.places:
            return
        steps = calls.steps(self.schedule, self.mesh.chunk)
        ordered, places = (), steps.places
        if places.packed and not biased and calls.sorting(places):
            ordered = ("KV", *(kind for kind in self.buffers.reduced if kind in IN_COLUMNS))
        self.buffers.fit(places, needs_memory, ordered)
        self.calls, self.steps, self.needs = calls, steps, needs
        self.transfers.calls = calls

    def run(self, q, kv, results, progress=None, q_ready=(), coming=None, biases=None):
        """Run the pass that was prepared; collective.  Returns {reduced kind: arrays of this rank's own chunk}.

        q, kv: this rank's own chunks, tuples of arrays (tokens, heads, ...).
        results: {reduced kind: the arrays of the results (tokens, heads, ...)}, in which their partials may be
            accumulated; None in place of an array in which they may not.
        progress: called with the number of blocks just done, or a fraction of a block.
        q_ready: events of launches of this call that write q.
        coming: the `Coming` of q or kv; None if both are here.
        biases: the `Biases` of the pass, or None.
        The returned arrays are `results` or buffers: the last launches may still write them, and the next call
        overwrites the buffers.
        """
        try:
            self.coming, self.biases = coming, biases
            return self._run(q, kv, results, progress, q_ready)
        except Exception as error:
            error.where = self.where  # for the message of the error
            raise
        finally:
            self.biases = None  # the caller's arrays are its own again

    def _run(self, q, kv, results, progress, q_ready):
        self.buffers.accumulate_in(results)
        self.chunks.begin(q, kv, q_ready)
        self.number, self.began = 0, clock()
        self.to_post, self.under_way = deque(self.steps.transfers), deque()
        self.done, self.times, self.moves = self.steps, [], []
        for number, step in enumerate(self.steps.steps):
            self.number, self.where = number, self.steps_in_words[number]
            posted = clock()
            while self.to_post and self.to_post[0][0] == number:  # this step needs them
                self._post_next()
            self._post_ahead()
            for blocks in [step.blocks] if step.fused else [[block] for block in step.blocks]:
                advance = progress and Advance(progress, len(blocks))
                meanwhile = self._meanwhile(advance)
                if not step.fused:
                    self._run_block(*blocks[0], meanwhile)
                elif self.biases is None:
                    self._run_tile(meanwhile)
                else:
                    self._run_each_of_tile(blocks, meanwhile)
                if advance:
                    advance(1)
            computed = clock()
            while self.under_way and self.under_way[0].step == number:
                self._complete(self.under_way.popleft())
            self.times.append((posted, computed, clock()))
        self._wait_for_own()
        return self.chunks.end()

    def trace(self):
        """The measured `Timeline` of the last pass on this rank; None before the first."""
        if not self.times:
            return None
        steps = tuple(StepTimes(*(time - self.began for time in times)) for times in self.times)
        moves = tuple(
            Moved(transfer.kind, transfer.hop, step, begun - self.began, arrived - self.began)
            for transfer, step, begun, arrived in self.moves
        )
        return Timeline(self.schedule.direction, steps, moves, steps[-1].ended)

    # Blocks

    def _run_block(self, i, j, meanwhile):
        """Launch the block of query chunk i and KV chunk j, unless none of its queries sees any of its keys."""
        launches = self.steps.launches[i, j]
        if launches and self.biases is not None:
            launches = self.biases.cut(i, j, launches)
        if not launches:
            return
        area, before = sum(total(rows) * total(keys) for rows, keys in launches) if meanwhile else 0, 0
        if i == j == self.mesh.chunk and self.coming is not None and self.coming.receiving:
            launches = self._as_they_come(launches)
        else:
            self._wait_for_own()
        q, kv = self.chunks["Q", i], self.chunks["KV", j]
        reduced = {kind: self.chunks.accumulator(kind, chunk_of(kind, i, j)) for kind in self.buffers.reduced}
        for rows, keys in launches:
            of_launch = None
            if meanwhile:
                done, part = before / area, total(rows) * total(keys) / area
                before += total(rows) * total(keys)

                def of_launch(share, done=done, part=part):
                    meanwhile(done + share * part)

            event = launch_lists(
                self.computation,
                q.together(rows),
                kv.together(keys),
                self.calls.intervals(((i, rows),), ((j, keys),)),
                {kind: c.together(keys if kind in IN_COLUMNS else rows) for kind, c in reduced.items()},
                (*q.ready, *kv.ready),
                of_launch,
                self.biases,
                ((i, rows), (j, keys)),
            )
        q.used = kv.used = (event,)
        for chunk in reduced.values():
            chunk.ready = (event,)

    def _wait_for_own(self):
        """Wait until this rank's own chunks are here."""
        if self.coming is not None and self.coming.receiving:
            self.coming.wait()

    def _as_they_come(self, launches):
        """The launches of this rank's own block, cut into those of the pieces in which its tokens come."""
        of_keys = self.coming.kind == "KV"
        for piece in self.coming.pieces():
            for rows, keys in launches:
                for part in overlap(piece, keys if of_keys else rows):
                    yield (rows, (part,)) if of_keys else ((part,), keys)

    def _run_tile(self, meanwhile):
        """Launch all blocks as one, over the packed arenas."""
        self._wait_for_own()
        q, kv, places = self.chunks.whole("Q"), self.chunks.whole("KV"), self.steps.places
        sorting = self.calls.sorting(places)
        keys, ordered = kv.arrays, self.buffers.ordered if sorting else {}
        if sorting:  # first of all: what follows may lie where the keys were
            (order, inverse), keys = sorting, ordered["KV"]
            for dst, src in zip(keys, kv.arrays):
                self.backend.take(dst, src, order, after=kv.ready)
        accumulators = [
            self.chunks.accumulator(kind, chunk, clear=kind not in ordered)
            for kind in self.buffers.reduced
            for chunk in places.tokens[kind]
        ]
        reduced = {kind: ordered.get(kind) or self.buffers.whole(kind) for kind in self.buffers.reduced}
        unsorted = {kind: self.buffers.whole(kind) for kind in reduced if kind in ordered}
        for kind in unsorted:
            self.computation.clear(kind, ordered[kind])
        lists = self.calls.intervals(*(tuple(places.tokens[kind].items()) for kind in GATHERED))
        event = launch_lists(self.computation, q.arrays, keys, lists, reduced, (*q.ready, *kv.ready), meanwhile)
        for kind, arrays in unsorted.items():
            for dst, src in zip(arrays, ordered[kind]):
                event = self.backend.take(dst, src, inverse)
        self.buffers.launched = (event,)
        for chunk in accumulators:
            chunk.ready = (event,)

    def _run_each_of_tile(self, blocks, meanwhile):
        """Launch the blocks of packed arenas one after the other: a bias does not lie in the order of the arenas."""
        self._wait_for_own()
        places, accumulators = self.steps.places, []
        for kind in GATHERED:
            whole = self.chunks.whole(kind)
            for number, tokens in places.tokens[kind].items():
                rows = slice(places.start(kind, number), places.start(kind, number) + total(tokens))
                self.chunks[kind, number] = Chunk(tuple([array[rows] for array in whole.arrays]), tokens, whole.ready)
        for kind in self.buffers.reduced:
            accumulators += [self.chunks.accumulator(kind, chunk) for chunk in places.tokens[kind]]
        for i, j in blocks:
            self._run_block(i, j, meanwhile)
        self.buffers.launched = tuple(event for chunk in accumulators for event in chunk.ready)

    # Transfers

    def _post_next(self):
        """Post the next transfer."""
        step, transfer = self.to_post.popleft()
        if self.coming is not None and transfer.kind == self.coming.kind:
            self._wait_for_own()
        begun = clock()  # before: the other rank may have it all before this one looks at its clock again
        posted = self.transfers.post(transfer)
        posted.step, posted.begun = step, begun
        self.under_way.append(posted)

    def _post_ahead(self):
        """Prefetch: post the next transfers as far as the schedule and UNDER_WAY allow."""
        while (
            self.to_post
            and self.to_post[0][1].earliest <= self.number
            and not (self.coming is not None and self.coming.receiving and self.to_post[0][1].kind == self.coming.kind)
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
            self.moves.append((transfer, posted.step, posted.begun, posted.arrived))
        for array in posted.leaving:
            self.backend.sent(array)
        if posted.arriving is not None:
            posted.arriving.ready = tuple(map(self.backend.arrived, posted.landing))
            posted.then()
