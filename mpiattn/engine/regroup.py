"""Moves q, k and v from the caller's ranks to those of the mesh, and results back.

`mpiattn.schedule.regroup` says which tokens and heads go where.  The caller's arrays are (batch, tokens, heads, dim),
those of the mesh (tokens, batch * heads, dim); either may lack the last axis.
"""

import copy

from ..backends.kept import Kept
from ..schedule.kinds import TAG
from ..schedule.regroup import GIVEN, TAKEN, arrays_of, of_keys, plane_problem, rows_of
from .coming import Coming

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
        self._batch, self._plane = regrouping.problem.batch, plane_problem(regrouping.problem, regrouping.tile.h)
        self._tokens = [layout.length(mesh.chunk) for layout in regrouping.inner]
        self.coming = None  # what was taken to the mesh last
        self._parts = {}  # by name and whether it is given: the parts at the caller's end, and at the mesh's end

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
        shape = (rows_of(self.parts(array, given)[not outer]), *array.shape(self._plane))
        return self.packed((array.name, given, outer), shape, self.regrouping.dtype(array, given))

    def chunk(self, array, given=False):
        """Memory for this rank's chunk of the mesh, (tokens, batch * heads, dim), valid until the next request."""
        shape = (self._tokens[of_keys(array)], *array.shape(self._plane))
        return self.kept((array.name, given), shape, self.regrouping.dtype(array, given))

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
        return rest

    def _by_batch(self, rows):
        """Rows (tokens, batch * heads, ...) as (batch, tokens, heads, ...)."""
        tokens, heads, *dim = rows.shape
        return rows.reshape(tokens, self._batch, heads // self._batch, *dim).swapaxes(0, 1)

    def take(self, direction, outer, inner, last):
        """Move arrays to the mesh; collective.  Returns the `Coming` of those of one kind; the others are here.

        outer: {name: the caller's array (batch, tokens, heads, ...)}.  inner: {name: this rank's chunk of the mesh}.
        last: the kind that may still be on its way, "Q" or "KV".
        """
        # An attribute: if the call fails, MPI may still use what it holds.
        coming = self.coming = Coming(self.backend, self.exchange, last, f"regrouping for the {direction} pass")
        sends, receives = [], []
        for array in self.arrays(direction, False):
            whole, chunk = outer[array.name], inner[array.name]
            outward, inward = self.parts(array, False)
            kind = "KV" if of_keys(array) else "Q"
            memory, done = self._memory(array, False, True), {}
            for part in outward:
                if part.peer == self.mesh.rank:
                    self.backend.copy(self._by_batch(chunk[part.shared.inner]), whole[:, part.shared.outer, part.heads])
                    coming.add(kind, part.shared.inner)
                    continue
                if part.packed.start not in done:
                    done[part.packed.start] = rows = memory[part.packed]
                    self.backend.copy(self._by_batch(rows), whole[:, part.shared.outer, part.heads])
                sends.append((kind == last, part.peer, array.name, done[part.packed.start]))
            memory = self._memory(array, False, False)
            for part in inward:
                if part.peer != self.mesh.rank:
                    place = chunk[part.shared.inner]
                    rows, place = (place, None) if part.packed is None else (memory[part.packed], place)
                    receives.append((kind, part.shared.inner, array.name, part.peer, rows, place))
        self.backend.begin()
        for kind, tokens, name, peer, rows, place in receives:
            coming.add(kind, tokens, self._receive(name, peer, rows), rows, place)
        # Every rank sends to the one ahead of it first, so that tokens reach a rank piece by piece.
        sends.sort(key=lambda send: (send[0], (send[1] - self.mesh.rank) % self.mesh.comm.size))
        for _, peer, name, rows in sends:
            coming.send(self._send(name, peer, rows), rows)
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
                    rows = chunk[part.shared.inner]
                    if part.packed is not None:
                        rows = memory[part.packed]
                        self.backend.copy(rows, chunk[part.shared.inner])
                    sends.append((array.name, part.peer, rows))
            memory = self._memory(array, True, True)
            for part in outward:
                rows = memory[part.packed]
                if part.peer != self.mesh.rank:
                    receives.append((array.name, part.peer, rows, whole, part))
                elif adds:
                    self.backend.copy(rows, chunk[part.shared.inner])
                    receives.append((array.name, part.peer, rows, whole, part))
                else:
                    self.backend.copy(whole[:, part.shared.outer, part.heads], self._by_batch(chunk[part.shared.inner]))
        received = [receive[:3] for receive in receives if receive[1] != self.mesh.rank]
        self._exchange(sends, received, f"regrouping after the {direction} pass")
        sums = {}
        for name, _, rows, whole, part in receives:
            key = name, part.shared.outer.start, part.shared.outer.step, part.heads.start
            if key in sums:
                self.backend.add([sums[key][0]], [rows])
            else:
                sums[key] = rows, whole[:, part.shared.outer, part.heads]
        for rows, result in sums.values():
            self.backend.copy(result, self._by_batch(rows))

    def _receive(self, name, peer, rows):
        """Post a message of the array `name`; returns its requests."""
        return self.exchange.receive(self.mesh.comm, self.backend.incoming(rows), peer, TAGS[name])

    def _send(self, name, peer, rows):
        """As `_receive`."""
        return self.exchange.send(self.mesh.comm, self.backend.outgoing(rows), peer, TAGS[name])

    def _exchange(self, sends, receives, where):
        """Exchange messages, (name of the array, peer, rows), after all launches so far; wait until they are here."""
        self.backend.begin()
        requests = [request for message in receives for request in self._receive(*message)]
        requests += [request for message in sends for request in self._send(*message)]
        self.exchange.wait(requests, where)
        for _, _, rows in sends:
            self.backend.sent(rows)
        for event in [self.backend.arrived(rows) for _, _, rows in receives]:
            self.backend.wait(event)
