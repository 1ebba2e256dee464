"""The executor of pieces: runs a pass of a rank whose work is pieces of the scores (`mpiattn.schedule.division`).

At the beginning it posts all that it sends of its own tokens, straight from the caller's arrays where they lie so.  It
receives the portions of its pieces in turn, a few ahead, and launches the blocks that each unlocks.  Partials go to the
owners of their tokens as soon as they are complete.  An owner merges what comes in the order of `RankPieces.given`, so
that a call has the same bits each time.
"""

from collections import deque
from itertools import accumulate
from time import perf_counter as clock

from ..backends.wire import in_place
from ..schedule.kinds import GATHERED, IN_COLUMNS, KINDS, REDUCED, TAG
from ..schedule.piece_steps import PORTIONS
from ..schedule.timeline import Moved, StepTimes, Timeline
from ..schedule.travels import token_bytes
from .executor import Advance
from .launches import launch_lists
from .piece_memory import PieceMemory
from .record import Pass, Step, Transfer

# Portions under way: 2 keep the link busy without splitting its bandwidth
UNDER_WAY = 2
# Tags of parcels: above all others, so many apart as arrays of all kinds have, and below 32768, the most that every MPI
# has.  Of so many numbers that the parcels of one need differ; both ends post those with the same tag in one order.
FIRST_TAG, APART, NUMBERS = 256, 16, 1024


def region(source, array, need, tokens, heads):
    """Some tokens of one of the caller's arrays, of the heads of a need: (tokens, heads, dim) or (tokens, heads).

    source: (batch, tokens, heads, dim) or, of numbers of rows or keys, (batch, heads, tokens).
    array: of `mpiattn.schedule.kinds`.  tokens: a slice.  heads: query heads of a KV head.
    """
    width = heads if array.heads == "heads" else 1
    of_need = slice(need.head * width, (need.head + 1) * width)
    if source.ndim == 4:
        return source[need.sequence, tokens, of_need]
    return source[need.sequence, of_need, tokens].transpose(1, 0)


class _Receiving:
    """Messages under way to this rank.

    requests: of the exchange.  arrays: that they are received in.
    places: what came in many runs, and where it belongs: (parcel, its arrays) of each.
    """

    def __init__(self, requests, arrays, places=()):
        self.requests, self.arrays, self.places = requests, arrays, places
        self.begun, self.arrived = clock(), None


class PieceExecutor:
    """The passes of one direction on a rank.

    problem: the plan's.  computation: a pass of `mpiattn.engine.passes`, of one sequence and KV head.
    tokens: numbers of this rank's queries and keys.
    Of the last pass, by the clock: `times` has (begun, computed, ended) of every step, `launched` its blocks,
    `received` (kind, parcel, step, begun, arrived) and `sent` (kind, parcel, begun, posted) of every parcel.
    """

    def __init__(self, mesh, problem, computation, exchange, pool, tokens):
        self.mesh, self.problem, self.computation, self.exchange = mesh, problem, computation, exchange
        self.backend, self.direction = computation.backend, computation.direction
        self.sharing = problem.heads // problem.kv_heads
        self.groups = [(entry, head) for entry in range(problem.batch) for head in range(problem.kv_heads)]
        self._pool, self._tokens = pool, tokens
        self._arrays = {name: kind.arrays_of(computation.problem) for name, kind in KINDS[self.direction].items()}
        self._reduced = REDUCED[self.direction]
        self.memory = self.calls = self.steps = None  # of the last call
        self._made_for = None
        self.times, self.received, self.sent, self.launched = [], [], [], []
        self.began, self.where = 0.0, ""

    def prepare(self, calls, steps, sources):
        """Make what a call needs.

        calls: its `AlikeCalls`.  steps: its `PieceSteps`.
        sources: {name of an argument: the caller's array, or one like it}, of those that are sent.
        """

        def lies_so(array, parcel):
            if len(parcel.tokens) != 1:
                return False
            part = region(sources[array.argument], array, parcel.need, slice(*parcel.tokens[0]), self.sharing)
            return in_place(part, self.exchange.max_message) and (part.flags.c_contiguous or self.backend.sends_blocks)

        made_for = steps, tuple((name, source.strides) for name, source in sources.items())
        if self.memory is None or not self.memory.whole or self._made_for != made_for:
            self.memory = PieceMemory(
                self._pool, self.computation.problem, self.direction, steps.pieces, self.groups, self._tokens
            )
            self.memory.make(lies_so)
            self._made_for = made_for
        self.calls, self.steps = calls, steps

    def run(self, sources, biases=None, progress=None):
        """Run the pass that was prepared; collective.

        sources: as of `prepare`.  biases: function of a need, that returns its `Biases`, or None.
        progress: called with the number of blocks just done: as many in all as there are ranks.
        Returns {reduced kind: {group: partials of this rank's own tokens}}, which the next call overwrites.
        """
        try:
            return self._run(sources, biases, progress)
        except Exception as error:
            error.where = self.where  # for the message of the error
            raise

    def _run(self, sources, biases, progress):
        self.times, self.received, self.sent, self.launched, self.began = [], [], [], [], clock()
        self._biases, self._sources = biases, sources
        self._sends, self._ready, self._own_done = [], {}, {}
        self._to_post, self._coming = deque(self.steps.arrivals), deque()
        given = self.steps.pieces.given
        self._to_merge = deque((kind, parcel) for kind in self._reduced for parcel in given[kind in IN_COLUMNS])
        self._merging, self._merged = deque(), {}
        self._slots = {kind: deque(slot for of, slot in self.memory.merging if of == kind) for kind in self._reduced}
        self.where = f"at the beginning of the {self.direction} pass"
        for kind, group in self.memory.own:
            self.computation.clear(kind, self.memory.own[kind, group])
        for kind, number in self.memory.needs:
            if kind in self._reduced:
                self._ready[kind, number] = self.computation.clear(kind, self.memory.needs[kind, number])
        self._post_given()
        total = sum(self._area(block) for step in self.steps.steps for block in step.blocks)
        self._advance = progress and Advance(progress, self.mesh.size)
        before = 0
        for number, step in enumerate(self.steps.steps):
            self.number = number
            self.where = f"in step {number + 1} of {len(self.steps.steps)} of the {self.direction} pass"
            begun = clock()
            self._post_ahead()
            self.launched.append([])
            for block in step.blocks:
                area = self._area(block)
                # where the block begins, and how much of all it is: for its launches
                self._span = before / total, area / total
                before += area
                if self._run_block(block):
                    row, column = (block.need * PORTIONS + portion for portion in block[1:])
                    self.launched[-1].append((row, column))
                self._note_arrived()
                self._merge()
                if progress:
                    self._advance(before / total)
            for name in step.complete:
                self._give(name)
            computed = clock()
            if step.arrival:
                self._wait_for_next()
            self.times.append((begun, computed, clock()))
        if progress and not total:  # a rank without pieces
            progress(self.mesh.size)
        self.where = f"at the end of the {self.direction} pass"
        self.number, begun = len(self.steps.steps), clock()
        self.launched.append([])
        self._merge(waiting=True)
        self.exchange.wait([request for requests, _ in self._sends for request in requests], self.where)
        for _, array in self._sends:
            self.backend.sent(array)
        self.times.append((begun, begun, clock()))
        # What is the caller's, which may be freed now
        self._sends, self._sources, self._biases, self._advance = [], None, None, None
        return {kind: {group: self.memory.own[kind, group] for group in self.groups} for kind in self._reduced}

    def trace(self):
        """The measured `Timeline` of the last pass on this rank; None before the first."""
        if not self.times:
            return None
        steps = tuple(StepTimes(*(time - self.began for time in times)) for times in self.times)
        moves = tuple(
            Moved(kind, parcel.number + 1, step, begun - self.began, arrived - self.began)
            for kind, parcel, step, begun, arrived in self.received
        )
        return Timeline(self.direction, steps, moves, steps[-1].ended)

    # Own tokens

    def _post_given(self):
        """Send this rank's own tokens to all pieces of others that need them."""
        packed = {}
        for kind in GATHERED:
            for parcel in self.steps.pieces.given[kind in IN_COLUMNS]:
                if parcel.peer == self.mesh.chunk:
                    continue
                key = _group(parcel), parcel.tokens
                if (kind, key) not in packed:
                    packed[kind, key] = self._packed(kind, key, parcel)
        self.backend.begin()  # messages have these copies
        for kind in GATHERED:
            for parcel in self.steps.pieces.given[kind in IN_COLUMNS]:
                if parcel.peer != self.mesh.chunk:
                    key = _group(parcel), parcel.tokens
                    self._send(kind, parcel, packed[kind, key])

    def _packed(self, kind, key, parcel):
        """The arrays of the own tokens of a parcel as they are sent.  key: in `PieceMemory.packed`."""
        arrays = []
        for array, memory in zip(self._arrays[kind], self.memory.packed[kind, key]):
            source = self._sources[array.argument]
            if memory is None:
                arrays.append(region(source, array, parcel.need, slice(*parcel.tokens[0]), self.sharing))
                continue
            for at, run in _one_after_another(parcel.tokens):
                self.backend.copy(memory[at], region(source, array, parcel.need, run, self.sharing))
            arrays.append(memory)
        return arrays

    def _send(self, kind, parcel, arrays, after=()):
        begun = clock()
        for i, array in enumerate(arrays):
            wire = self.backend.outgoing(array, after)
            requests = self.exchange.send(self.mesh.plane, wire, parcel.peer, _tag(kind, i, parcel))
            self._sends.append((requests, array))
        self.sent.append((kind, parcel, begun, clock()))

    # Portions

    def _post_ahead(self):
        """Post the next portions as far as UNDER_WAY allows."""
        while self._to_post and sum(coming.arrived is None for _, coming in self._coming) < UNDER_WAY:
            self._post_portion()

    def _post_portion(self):
        """Post the messages of the next portion, and copy what this rank has of it."""
        name = self._to_post.popleft()
        kind = "KV" if name.column else "Q"
        buffer = self.memory.needs[kind, name.need]
        requests, arrays, places = [], [], []
        for parcel in self.steps.portions[name.need, name.column][name.number].parcels:
            if parcel.peer == self.mesh.chunk:
                self._copy_own(kind, parcel, buffer)
                continue
            landing = buffer
            if parcel.in_one:
                landing = [array[_as_slice(parcel.places[0])] for array in buffer]
            else:
                landing = self.memory.staged[kind, parcel.name]
                places.append((parcel, landing))
            for i, array in enumerate(landing):
                wire = self.backend.incoming(array)
                requests += self.exchange.receive(self.mesh.plane, wire, parcel.peer, _tag(kind, i, parcel))
                arrays.append(array)
        self._coming.append((name, _Receiving(requests, arrays, places)))

    def _copy_own(self, kind, parcel, buffer):
        for run, place in zip(parcel.tokens, parcel.places):
            for array, memory in zip(self._arrays[kind], buffer):
                source = self._sources[array.argument]
                part = region(source, array, parcel.need, slice(*run), self.sharing)
                self.backend.copy(memory[_as_slice(place)], part)

    def _place(self, places, buffer):
        """Copy what came in many runs to its places."""
        for parcel, landing in places:
            for (at, _), place in zip(_one_after_another(parcel.tokens), parcel.places):
                for memory, array in zip(buffer, landing):
                    self.backend.copy(memory[_as_slice(place)], array[at])

    def _wait_for_next(self):
        """Wait until the next portion is here."""
        name, coming = self._coming.popleft()
        if coming.arrived is None:
            self.exchange.wait(coming.requests, self.where)
            coming.arrived = clock()
        for array in coming.arrays:
            self.backend.wait(self.backend.arrived(array))
        kind = "KV" if name.column else "Q"
        self._place(coming.places, self.memory.needs[kind, name.need])
        for parcel in self.steps.portions[name.need, name.column][name.number].parcels:
            if parcel.peer != self.mesh.chunk:
                self.received.append((kind, parcel, self.number, coming.begun, coming.arrived))
        self._post_ahead()

    def _note_arrived(self):
        """Note which portions have arrived, so that more are posted."""
        for _, coming in self._coming:
            if coming.arrived is None and self.exchange.complete(coming.requests):
                coming.arrived = clock()

    # Blocks

    def _area(self, block):
        rows = self.steps.portions[block.need, False][block.row]
        keys = self.steps.portions[block.need, True][block.column]
        return (rows.stop - rows.start) * (keys.stop - keys.start)

    def _run_block(self, block):
        """Launch the parts of a block; returns whether any of its queries sees any of its keys."""
        need, any_work = self.steps.pieces.needs[block.need], False
        parts = self.steps.parts[tuple(block)]
        for number, part in enumerate(parts):
            launches = self.calls.between(need.sequence, part.at_rows, part.at_keys)
            if launches:
                self._part = number, len(parts)
                self._launch(block.need, need, part, launches)
                any_work = True
        return any_work

    def _launch(self, number, need, part, launches):
        """Launch a part of a block.  number: of its need.  launches: of `AlikeCalls.between`."""
        arrays = {
            kind: tuple(
                [array[part.keys if kind in IN_COLUMNS else part.rows] for array in self.memory.needs[kind, number]]
            )
            for kind in KINDS[self.direction]
        }
        event = launch_lists(
            self.computation,
            arrays["Q"],
            arrays["KV"],
            launches,
            {kind: arrays[kind] for kind in self._reduced},
            [self._ready[kind, number] for kind in self._reduced],
            self._meanwhile,
            None if self._biases is None else self._biases(need),
            ((0, part.at_rows), (0, part.at_keys)),
        )
        for kind in self._reduced:
            self._ready[kind, number] = event

    def _meanwhile(self, share):
        """The callback of a launch while it computes: polls MPI, posts what may be posted, and reports the progress."""
        if self._advance:
            begin, size = self._span
            number, count = self._part
            self._advance(begin + size * (number + share) / count)
        if self.exchange.due():
            self._note_arrived()
            self._post_ahead()

    # Partials

    def _give(self, name):
        """Send the partials of a portion to the owners of its tokens."""
        for kind in self._reduced:
            if (kind in IN_COLUMNS) != name.column:
                continue
            buffer, event = self.memory.needs[kind, name.need], self._ready[kind, name.need]
            for parcel in self.steps.portions[name.need, name.column][name.number].parcels:
                if parcel.peer == self.mesh.chunk:
                    self._own_done[kind, parcel.number] = name.need, parcel.places
                    continue
                memory = self.memory.leaving.get((kind, parcel.name))
                if memory is None:
                    arrays = [array[_as_slice(parcel.places[0])] for array in buffer]
                    self._send(kind, parcel, arrays, (event,))
                    continue
                events = []
                for (run, _), place in zip(_one_after_another(parcel.tokens), parcel.places):
                    for dst, src in zip(memory, buffer):
                        events.append(self.backend.copy(dst[run], src[_as_slice(place)]))
                self._send(kind, parcel, memory, tuple(events))

    def _post_partials(self):
        """Post the receives of the next partials of own tokens, as far as there is memory for them."""
        while self._to_merge:
            kind, parcel = self._to_merge[0]
            slot = receiving = None
            if parcel.peer != self.mesh.chunk:
                if not self._slots[kind]:
                    return
                slot = self._slots[kind].popleft()
                receiving = self._receive_partial(kind, parcel, slot)
            self._merging.append((kind, parcel, receiving, slot))
            self._to_merge.popleft()

    def _receive_partial(self, kind, parcel, slot):
        arrays = [array[: parcel.length] for array in self.memory.merging[kind, slot]]
        after, requests = self._merged.get((kind, slot), ()), []
        for i, array in enumerate(arrays):
            wire = self.backend.incoming(array, after)
            requests += self.exchange.receive(self.mesh.plane, wire, parcel.peer, _tag(kind, i, parcel))
        return _Receiving(requests, arrays)

    def _merge(self, waiting=False):
        """Merge partials of own tokens in their order, as many as are here; with `waiting` all."""
        self._post_partials()
        while self._merging:
            kind, parcel, receiving, slot = self._merging[0]
            if receiving is None:
                if (kind, parcel.number) not in self._own_done:
                    return
                self._merge_own(kind, parcel)
            else:
                if waiting:
                    self.exchange.wait(receiving.requests, self.where)
                elif not self.exchange.complete(receiving.requests):
                    return
                self._merge_received(kind, parcel, receiving, slot)
            self._merging.popleft()
            self._post_partials()

    def _merge_own(self, kind, parcel):
        """Merge a partial that a piece of this rank has of its own tokens."""
        need, places = self._own_done[kind, parcel.number]
        buffer, own = self.memory.needs[kind, need], self.memory.own[kind, _group(parcel)]
        memory = self.memory.leaving.get((kind, parcel.name))
        for (at, run), place in zip(_one_after_another(parcel.tokens), places):
            of_piece = [array[_as_slice(place)] for array in buffer]
            if memory is not None:
                memory_of_run = [array[at] for array in memory]
                for dst, src in zip(memory_of_run, of_piece):
                    self.backend.copy(dst, src)
                of_piece = memory_of_run
            self.computation.merge(kind, [array[run] for array in own], of_piece, ())

    def _merge_received(self, kind, parcel, receiving, slot):
        after = tuple([self.backend.arrived(array) for array in receiving.arrays])
        own = self.memory.own[kind, _group(parcel)]
        for at, run in _one_after_another(parcel.tokens):
            received = [array[at] for array in receiving.arrays]
            event = self.computation.merge(kind, [array[run] for array in own], received, after)
        self._merged[kind, slot] = (event,)
        self._slots[kind].append(slot)
        self.received.append((kind, parcel, self.number, receiving.begun, clock()))


def recorded(executor, rank_of):
    """The last pass of an executor as a `Pass`; None before the first.

    rank_of: the rank of the caller's communicator that a rank of the executor's plane is.
    Blocks are numbered by portions, those of each need after those of the need before.  A transfer is a parcel.
    """
    if not executor.times:
        return None
    groups = len(executor.groups)
    nbytes = {kind: of_token // groups for kind, of_token in token_bytes(executor.problem, executor.direction).items()}
    last = len(executor.times) - 1
    steps = [Step(*times, blocks) for times, blocks in zip(executor.times, executor.launched)]
    transfers = []
    for kind, parcel, step, begun, arrived in executor.received:
        message = rank_of(parcel.peer), parcel.length * nbytes[kind]
        transfers.append(Transfer(kind, parcel.number + 1, step, begun, arrived, [], [message]))
    for kind, parcel, begun, posted in executor.sent:
        message = rank_of(parcel.peer), parcel.length * nbytes[kind]
        transfers.append(Transfer(kind, parcel.number + 1, last, begun, posted, [message], []))
    return Pass(executor.direction, executor.began, steps, transfers, [])


def _group(parcel):
    """The sequence and the KV head of a parcel."""
    return parcel.need.sequence, parcel.need.head


def _tag(kind, number, parcel):
    """The tag of the message of one array of a parcel."""
    return FIRST_TAG + APART * (parcel.number % NUMBERS) + TAG[kind] + number


def _as_slice(place):
    return slice(place.start, place.stop, place.step)


def _one_after_another(tokens):
    """(where among them, slice) of each range of some tokens that lie one after another."""
    ends = accumulate(stop - start for start, stop in tokens)
    for (start, stop), end in zip(tokens, ends):
        yield slice(end - (stop - start), end), slice(start, stop)
