"""Moves q, k and v from the caller's ranks to those of the mesh, and results back.

`mpiattn.schedule.regroup` says which sequences, tokens and heads go where.  The caller's arrays are (batch, tokens,
heads, dim), those of the mesh (tokens, sequences * heads, dim); either may lack the last axis.  What lies in a caller's
array as in the message is sent from there, or received there; all else is packed.

Of several sequences that no other rank of the plane needs, chunks of the mesh are (tokens, sequences, heads, dim), and
lie in memory sequence after sequence, if launches take them so: copies between them and the caller's arrays are faster.
"""

from time import perf_counter as clock

import numpy as np

from ..backends.wire import in_place
from ..model import memory
from ..schedule.kinds import GATHERED, TAG, Q
from ..schedule.regroup import GIVEN, TAKEN, arrays_of, plane_problem, rows_of
from .coming import Coming
from .folding import Folding, stays
from .identity import Identity

ARRAYS = tuple(array.name for arrays in (*TAKEN.values(), *GIVEN.values()) for array in arrays)
TAGS = {name: max(TAG.values()) + 16 + i for i, name in enumerate(dict.fromkeys(ARRAYS))}


def _by_head(array):
    """Rows (batch, heads, tokens) as (batch, tokens, heads), and the inverse; other arrays as they are."""
    return array.transpose(0, 2, 1) if array.ndim == 3 else array


class Regroup:
    """The way of a plan with regrouping.

    regrouping: the plan's `Regrouping`.
    tokens, heads, sequences: as of `Identity`; tokens are those of the caller's arrays.
    times: {direction: when the exchange before its last pass began and ended, and that after it, by the clock}.
    """

    def __init__(self, regrouping, tokens, mesh, backend, exchange):
        self.regrouping, self.tokens = regrouping, tokens
        self.mesh, self.backend, self.exchange = mesh, backend, exchange
        p = self._problem = regrouping.problem
        self._plane = plane_problem(p, regrouping.tile.h)
        self.heads = regrouping.heads(Q, mesh.rank)
        self.sequences = p.batch // regrouping.split[0]
        self._tokens = [layout.length(mesh.chunk) for layout in regrouping.inner]
        self._inner = Identity(self._plane, self._tokens, mesh, backend)
        self._folding = Folding(backend, p.batch)  # of what delta is made of
        self.coming, self._giving = None, ()  # what was taken to the mesh last, and what is given back now
        self._chunks = {}  # this rank's chunks of the mesh, by name and whether they are given
        self._packed = {}  # rows of messages, by these and the end at which they are packed
        self._memory = []  # what both lie in
        self.times, self._began = {}, 0.0
        self._results = {}  # by direction whose memory is made, the results of the mesh as its caller has them
        self._prepare("forward")

    def nbytes(self, backward):
        """As of `Identity`: bytes here and on the mesh, and of the exchange between them."""
        nbytes = memory.outer_bytes(self._problem, self.tokens, backward, strided=True)
        widened = sum(  # results of the mesh are longer than the caller's, as they are still to be added
            self.regrouping.widened_bytes(array) * self._tokens[array.keys]
            for array in (arrays_of(self._problem, "backward", True) if backward else ())
        )
        packed = sum(rows.nbytes for rows in self._packed.values())
        copies = self._folding.copies.nbytes(("dout", "out"))
        return nbytes + widened + packed + copies + self._inner.nbytes(backward)

    def work_arrays(self):
        """As of `Identity`."""
        return self._folding.copies.arrays() + self._memory

    def _prepare(self, direction):
        """Make the memory of the exchange of a pass; returns the results of the mesh as its caller has them."""
        if direction not in self._results:
            taken, given = (arrays_of(self._problem, direction, given) for given in (False, True))
            for array in taken:
                if (array.name, False) not in self._chunks:  # both passes take q, k and v
                    self._make_memory(array, False)
            for array in given:
                self._make_memory(array, True)
            self._results[direction] = [_by_head(self._chunks[array.name, True][np.newaxis]) for array in given]
        return self._results[direction]

    def _make_memory(self, array, given):
        """Make this rank's chunk of the mesh, and the rows in which messages are packed at either end."""
        dtype, (heads, *dim) = self.regrouping.dtype(array, given), array.shape(self._plane)
        tokens, kind = self._tokens[array.keys], "KV" if array.keys else "Q"
        if self.regrouping.by_sequence and dim and stays(self.backend, self.mesh.tile, kind):
            chunk = self._empty((self.sequences, tokens, heads // self.sequences, *dim), dtype).swapaxes(0, 1)
        else:
            chunk = self._empty((tokens, heads, *dim), dtype)
        self._chunks[array.name, given] = chunk
        for end, parts in zip(("outer", "inner"), self._parts(array, given)):
            self._packed[array.name, given, end] = self._empty((rows_of(parts), heads, *dim), dtype)

    def _empty(self, shape, dtype):
        self._memory.append(self.backend.empty(shape, dtype))
        return self._memory[-1]

    def _parts(self, array, given):
        """The `Part`s of an array at the caller's end, and at the mesh's."""
        return self.regrouping.parts(self.mesh.rank, array, given)

    def prepare(self, direction, arrays):
        """Make all memory that a pass needs; returns what `take` needs.  arrays: as of `Identity`."""
        self._prepare(direction)
        outer = {name: _by_head(array) for name, array in arrays.items()}
        if direction == "forward":
            return outer, ()
        of_delta = [self._folding.view(outer[name]) for name in ("dout", "out")]
        if any(view is None for view in of_delta):
            of_delta = [self._folding.fold(name, outer[name]) for name in ("dout", "out")]
        of_delta.append(self._folding.fold("dlse", outer["dlse"]) if "dlse" in outer else None)
        p = self._problem
        delta = self._folding.copies("delta", (self.tokens[0], p.batch * p.heads), p.partial_dtype)
        outer["delta"] = self._folding.by_batch(delta).swapaxes(0, 1)
        return outer, (delta, *of_delta)

    def accumulators(self, direction, results):
        """As of `Identity`, of the results of the mesh."""
        return self._inner.accumulators(direction, self._prepare(direction))

    def _as_caller(self, rows):
        """Rows of a chunk as (sequences, tokens, heads, ...)."""
        if rows.ndim == 4:
            return rows.swapaxes(0, 1)
        tokens, heads, *dim = rows.shape
        return rows.reshape(tokens, self.sequences, heads // self.sequences, *dim).swapaxes(0, 1)

    def _unpacked(self, rows):
        """The same of packed rows, which have the numbers as the message has them."""
        if not self.regrouping.by_sequence:
            return self._as_caller(rows)
        tokens, heads, *dim = rows.shape
        return rows.reshape(self.sequences, tokens, heads // self.sequences, *dim)

    def _as_message(self, region):
        """Whether a region (sequences, tokens, heads, ...) of an array can be sent from there, or received there."""
        if not (self.regrouping.by_sequence or self.sequences == 1):
            return False  # a message has token after token, the region sequence after sequence
        return region.flags.c_contiguous or (self.backend.sends_blocks and in_place(region, self.exchange.max_message))

    def _of_mesh(self, chunk, part, memory):
        """The rows of a message at the mesh's end, and where they belong in the chunk, or None if they are there.

        memory: packed rows, for a message that does not lie in the chunk as it travels.
        """
        rows = chunk[part.shared.inner]
        if part.packed is None:
            return rows, None
        region = self._as_caller(rows)
        if self._as_message(region):
            return region, None
        place, packed = self._packed_place(chunk, part, memory)
        return packed, place

    def _packed_place(self, chunk, part, memory):
        """Where a part belongs in the chunk of the mesh, and its packed rows, of the same shape."""
        rows, packed = chunk[part.shared.inner], memory[part.packed]
        return (self._as_caller(rows), self._unpacked(packed)) if self.regrouping.by_sequence else (rows, packed)

    def take(self, schedule, prepared):
        """Move arrays to the mesh; collective.  Returns its chunks by argument, (), and the `Coming` of one kind.

        prepared: of `prepare`.  The chunks of the other kind are here.
        """
        self._began = clock()
        outer, of_delta = prepared
        if of_delta:
            self.backend.delta(*of_delta)
        # The kind that may come last is not that of the first transfer.
        first = next((t.kind for step in schedule.steps for t in step.transfers if t.kind in GATHERED), "Q")
        direction, last = schedule.direction, "Q" if first == "KV" else "KV"
        # An attribute: if the call fails, MPI may still use what it holds.
        coming = self.coming = Coming(self.backend, self.exchange, last, f"regrouping for the {direction} pass")
        sends, receives, staying = [], [], []
        for array in arrays_of(self._problem, direction, False):
            whole, chunk = outer[array.argument], self._chunks[array.name, False]
            outward, inward = self._parts(array, False)
            kind = "KV" if array.keys else "Q"
            joined, everything = self.regrouping.joined(array.keys), slice(0, self._tokens[array.keys])
            memory, done = self._packed[array.name, False, "outer"], {}
            for part in outward:
                region = whole[part.sequences, part.shared.outer, part.heads]
                if part.peer == self.mesh.rank:
                    staying.append((self._as_caller(chunk[part.shared.inner]), region))
                    coming.add(kind, everything if joined else part.shared.inner)
                    continue
                rows = done.get(part.packed.start)
                if rows is None and not joined and self._as_message(region):
                    rows = region
                elif rows is None:
                    rows = memory[part.packed]
                    self.backend.copy(self._unpacked(rows), region)
                done[part.packed.start] = rows
                if part.message or not joined:
                    sends.append((kind == last, part.peer, array.name, memory[part.message] if joined else rows))
            memory, places = self._packed[array.name, False, "inner"], []
            for part in inward:
                if part.peer == self.mesh.rank:
                    continue
                if not joined:
                    rows, place = self._of_mesh(chunk, part, memory)
                    places = [] if place is None else [(place, rows)]
                    receives.append((kind, part.shared.inner, array.name, part.peer, rows, places))
                    continue
                places.append(self._packed_place(chunk, part, memory))
                if part.message:
                    receives.append((kind, everything, array.name, part.peer, memory[part.message], places))
                    places = []
        coming.posting = sends, receives
        self.backend.begin()
        for kind, tokens, name, peer, rows, places in receives:
            coming.add(kind, tokens, self._receive(name, peer, rows), rows, places)
        # Every rank sends to the one ahead of it first, so that tokens reach a rank piece by piece.
        sends.sort(key=lambda send: (send[0], (send[1] - self.mesh.rank) % self.mesh.comm.size))
        for _, peer, name, rows in sends:
            coming.send(self._send(name, peer, rows), rows)
        for place, region in staying:  # while messages are on their way
            self.backend.copy(place, region)
        coming.wait_for_other()
        self.backend.begin()  # messages of the pass have these copies
        return (
            {array.argument: self._chunks[array.name, False] for array in arrays_of(self._problem, direction, False)},
            (),
            coming,
        )

    def give(self, direction, partials, accumulators, results):
        """Move results back, and add those of planes that share a head, in the order of the planes; collective.

        Arguments as of `Identity`.
        """
        giving = clock()
        self._inner.give(direction, partials, accumulators, self._prepare(direction))
        self.backend.finish()
        self.coming.finish()
        self.backend.begin()
        sends, received, receives = [], [], []
        for array, result in zip(arrays_of(self._problem, direction, True), results):
            whole, chunk = _by_head(result), self._chunks[array.name, True]
            outward, inward = self._parts(array, True)
            joined = self.regrouping.joined(array.keys)
            memory, adds = self._packed[array.name, True, "inner"], self.regrouping.sharing(array) > 1
            for part in inward:
                if part.peer == self.mesh.rank:
                    continue
                if joined:
                    place, rows = self._packed_place(chunk, part, memory)
                else:
                    rows, place = self._of_mesh(chunk, part, memory)
                if place is not None:
                    self.backend.copy(rows, place)
                if part.message or not joined:
                    sends.append((array.name, part.peer, memory[part.message] if joined else rows))
            memory = self._packed[array.name, True, "outer"]
            for part in outward:
                region = whole[part.sequences, part.shared.outer, part.heads]
                if part.peer == self.mesh.rank and not adds:
                    self.backend.copy(region, self._as_caller(chunk[part.shared.inner]))
                elif not adds and not joined and self._as_message(region):
                    received.append((array.name, part.peer, region))
                else:
                    rows = memory[part.packed]
                    if part.peer == self.mesh.rank:
                        self.backend.copy(self._unpacked(rows), self._as_caller(chunk[part.shared.inner]))
                    tokens = part.shared.outer
                    place = array.name, part.sequences.start, tokens.start, tokens.step, part.heads.start
                    receives.append((rows, place, region))
                    if part.peer != self.mesh.rank and (part.message or not joined):
                        received.append((array.name, part.peer, memory[part.message] if joined else rows))
        self._exchange(sends, received, f"regrouping after the {direction} pass")
        sums = {}
        for rows, place, region in receives:
            if place in sums:
                self.backend.add([sums[place][0]], [rows])
            else:
                sums[place] = rows, region
        for rows, region in sums.values():
            self.backend.copy(region, self._unpacked(rows))
        self.times[direction] = self._began, self.coming.arrived, giving, clock()

    def _receive(self, name, peer, rows):
        """Post a message of the array `name`; returns its requests."""
        return self.exchange.receive(self.mesh.comm, self.backend.incoming(rows), peer, TAGS[name])

    def _send(self, name, peer, rows):
        """As `_receive`."""
        return self.exchange.send(self.mesh.comm, self.backend.outgoing(rows), peer, TAGS[name])

    def _exchange(self, sends, receives, where):
        """Exchange messages, (name of the array, peer, rows), after all launches so far; wait until they are here."""
        self.backend.begin()
        # An attribute: if the call fails, MPI may still write to the caller's arrays.
        requests, self._giving = [], (sends, receives)
        for message in receives:
            requests += self._receive(*message)
        for message in sends:
            requests += self._send(*message)
        self.exchange.wait(requests, where)
        for _, _, rows in sends:
            self.backend.sent(rows)
        for event in [self.backend.arrived(rows) for _, _, rows in receives]:
            self.backend.wait(event)
        self._giving = ()
