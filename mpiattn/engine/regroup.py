"""Moves q, k and v from the caller's ranks to those of the mesh, and results back.

`mpiattn.schedule.regroup` says which sequences, tokens and heads go where.  The caller's arrays are (batch, tokens,
heads, dim), those of the mesh (tokens, sequences * heads, dim); either may lack the last axis.  What lies in a caller's
array as in the message is sent from there, or received there; all else is packed.

Of several sequences that no other rank of the plane needs, chunks of the mesh are (tokens, sequences, heads, dim), and
lie in memory sequence after sequence, if launches take them so: copies between them and the caller's arrays are faster.
"""

import copy

from ..backends.kept import Kept
from ..backends.wire import in_place
from ..schedule.kinds import TAG
from ..schedule.regroup import GIVEN, TAKEN, arrays_of, of_keys, plane_problem, rows_of
from .coming import Coming
from .folding import stays

ARRAYS = tuple(array.name for arrays in (*TAKEN.values(), *GIVEN.values()) for array in arrays)
TAGS = {name: max(TAG.values()) + 16 + i for i, name in enumerate(dict.fromkeys(ARRAYS))}


class Regroup:
    """The exchange of a plan on this rank.

    regrouping: the plan's `Regrouping`.
    The attribute `kept` holds the memory of this rank's chunks of the mesh, and `packed` that of messages.
    """

    def __init__(self, regrouping, mesh, backend, exchange):
        self.regrouping, self.mesh, self.backend, self.exchange = regrouping, mesh, backend, exchange
        self.kept, self.packed = Kept(backend.empty), Kept(backend.empty)
        self._plane = plane_problem(regrouping.problem, regrouping.tile.h)
        self._sequences = regrouping.problem.batch // regrouping.split[0]  # of the batch, that a plane has
        self._tokens = [layout.length(mesh.chunk) for layout in regrouping.inner]
        self.coming, self._giving = None, ()  # what was taken to the mesh last, and what is given back now
        self._parts = {}  # by name and whether it is given: the parts at the caller's end, and at the mesh's end
        self._arrays = {}  # made once, in that memory: chunks by name and whether it is given, packed rows by end too

    def arrays(self, direction, given):
        """The arrays that a pass takes to the mesh, or gives back."""
        return arrays_of(self.regrouping.problem, direction, given)

    def parts(self, array, given):
        """`Regrouping.parts` of this rank, made once."""
        if (array.name, given) not in self._parts:
            self._parts[array.name, given] = self.regrouping.parts(self.mesh.rank, array, given)
        return self._parts[array.name, given]

    def _memory(self, array, given, outer):
        """Packed rows of an array."""
        key = array.name, given, outer
        if key not in self._arrays:
            shape = (rows_of(self.parts(array, given)[not outer]), *array.shape(self._plane))
            self._arrays[key] = self.packed(key, shape, self.regrouping.dtype(array, given))
        return self._arrays[key]

    def chunk(self, array, given=False):
        """Memory for this rank's chunk of the mesh, the same for all calls."""
        key = array.name, given
        if key not in self._arrays:
            self._arrays[key] = self._new_chunk(array, given)
        return self._arrays[key]

    def _new_chunk(self, array, given):
        dtype, (heads, *dim) = self.regrouping.dtype(array, given), array.shape(self._plane)
        tokens, kind = self._tokens[of_keys(array)], "KV" if of_keys(array) else "Q"
        apart = self.regrouping.by_sequence and dim and stays(self.backend, self.mesh.tile, kind)
        if not apart:
            return self.kept((array.name, given), (tokens, heads, *dim), dtype)
        shape = self._sequences, tokens, heads // self._sequences, *dim
        return self.kept((array.name, given), shape, dtype).swapaxes(0, 1)

    def prepare(self, direction):
        """Make all memory of a pass."""
        for given in (False, True):
            for array in self.arrays(direction, given):
                for outer in (False, True):
                    self._memory(array, given, outer)

    @property
    def packed_bytes(self):
        """Bytes of the memory in which messages are packed."""
        return self.packed.nbytes()

    @property
    def widened_bytes(self):
        """Bytes by which results of the mesh are longer than the caller's, as they are still to be added."""
        return sum(
            self.regrouping.widened_bytes(array) * self._tokens[of_keys(array)]
            for array in self.arrays("backward", True)
            if (array.name, True) in self.kept.names()
        )

    def released(self):
        """A copy without memory."""
        rest = copy.copy(self)
        rest.kept, rest.packed, rest.coming = Kept(self.backend.empty), Kept(self.backend.empty), None
        rest._arrays, rest._giving = {}, ()
        return rest

    def _as_caller(self, rows):
        """Rows of a chunk as (sequences, tokens, heads, ...)."""
        if rows.ndim == 4:
            return rows.swapaxes(0, 1)
        tokens, heads, *dim = rows.shape
        return rows.reshape(tokens, self._sequences, heads // self._sequences, *dim).swapaxes(0, 1)

    def _unpacked(self, rows):
        """The same of packed rows, which have the numbers as the message has them."""
        if not self.regrouping.by_sequence:
            return self._as_caller(rows)
        tokens, heads, *dim = rows.shape
        return rows.reshape(self._sequences, tokens, heads // self._sequences, *dim)

    def _as_message(self, region):
        """Whether a region (sequences, tokens, heads, ...) of an array can be sent from there, or received there."""
        if not (self.regrouping.by_sequence or self._sequences == 1):
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
        packed = memory[part.packed]
        return (self._unpacked(packed), region) if self.regrouping.by_sequence else (packed, rows)

    def take(self, direction, outer, inner, last):
        """Move arrays to the mesh; collective.  Returns the `Coming` of those of one kind; the others are here.

        outer: {name: the caller's array (batch, tokens, heads, ...)}.  inner: {name: this rank's chunk of the mesh}.
        last: the kind that may still be on its way, "Q" or "KV".
        """
        # An attribute: if the call fails, MPI may still use what it holds.
        coming = self.coming = Coming(self.backend, self.exchange, last, f"regrouping for the {direction} pass")
        sends, receives, staying = [], [], []
        for array in self.arrays(direction, False):
            whole, chunk = outer[array.name], inner[array.name]
            outward, inward = self.parts(array, False)
            kind = "KV" if of_keys(array) else "Q"
            memory, done = self._memory(array, False, True), {}
            for part in outward:
                region = whole[part.sequences, part.shared.outer, part.heads]
                if part.peer == self.mesh.rank:
                    staying.append((self._as_caller(chunk[part.shared.inner]), region))
                    coming.add(kind, part.shared.inner)
                    continue
                rows = done.get(part.packed.start)
                if rows is None and self._as_message(region):
                    rows = region
                elif rows is None:
                    rows = memory[part.packed]
                    self.backend.copy(self._unpacked(rows), region)
                done[part.packed.start] = rows
                sends.append((kind == last, part.peer, array.name, rows))
            memory = self._memory(array, False, False)
            for part in inward:
                if part.peer != self.mesh.rank:
                    rows, place = self._of_mesh(chunk, part, memory)
                    receives.append((kind, part.shared.inner, array.name, part.peer, rows, place))
        coming.posting = sends, receives
        self.backend.begin()
        for kind, tokens, name, peer, rows, place in receives:
            coming.add(kind, tokens, self._receive(name, peer, rows), rows, place)
        # Every rank sends to the one ahead of it first, so that tokens reach a rank piece by piece.
        sends.sort(key=lambda send: (send[0], (send[1] - self.mesh.rank) % self.mesh.cart.size))
        for _, peer, name, rows in sends:
            coming.send(self._send(name, peer, rows), rows)
        for place, region in staying:  # while messages are on their way
            self.backend.copy(place, region)
        self.backend.begin()  # messages of the pass have these copies
        coming.wait_for_other()
        return coming

    def give(self, direction, inner, outer):
        """Move results back, and add those of planes that share a head, in the order of the planes; collective.

        inner, outer: as for `take`.
        """
        sends, receives = [], []
        for array in self.arrays(direction, True):
            whole, chunk = outer[array.name], inner[array.name]
            outward, inward = self.parts(array, True)
            memory, adds = self._memory(array, True, False), self.regrouping.sharing(array) > 1
            for part in inward:
                if part.peer != self.mesh.rank:
                    rows, place = self._of_mesh(chunk, part, memory)
                    if place is not None:
                        self.backend.copy(rows, place)
                    sends.append((array.name, part.peer, rows))
            memory = self._memory(array, True, True)
            for part in outward:
                region = whole[part.sequences, part.shared.outer, part.heads]
                if part.peer == self.mesh.rank and not adds:
                    self.backend.copy(region, self._as_caller(chunk[part.shared.inner]))
                elif not adds and self._as_message(region):
                    receives.append((array.name, part.peer, region, None, None))
                else:
                    rows = memory[part.packed]
                    if part.peer == self.mesh.rank:
                        self.backend.copy(self._unpacked(rows), self._as_caller(chunk[part.shared.inner]))
                    tokens = part.shared.outer
                    place = array.name, part.sequences.start, tokens.start, tokens.step, part.heads.start
                    receives.append((array.name, part.peer, rows, place, region))
        received = [receive[:3] for receive in receives if receive[1] != self.mesh.rank]
        self._exchange(sends, received, f"regrouping after the {direction} pass")
        sums = {}
        for _, _, rows, place, region in receives:
            if place in sums:
                self.backend.add([sums[place][0]], [rows])
            elif region is not None:
                sums[place] = rows, region
        for rows, region in sums.values():
            self.backend.copy(region, self._unpacked(rows))

    def _receive(self, name, peer, rows):
        """Post a message of the array `name`; returns its requests."""
        return self.exchange.receive(self.mesh.cart, self.backend.incoming(rows), peer, TAGS[name])

    def _send(self, name, peer, rows):
        """As `_receive`."""
        return self.exchange.send(self.mesh.cart, self.backend.outgoing(rows), peer, TAGS[name])

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
