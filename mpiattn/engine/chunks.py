"""The chunks that a rank holds during a pass: its own, those received, and the accumulators of partials."""

from ..schedule.ranges import places, rest, total
from .buffers import Chunk


class Chunks(dict):
    """The chunks of one pass at a time: {(kind, number of the chunk): `Chunk`}.

    computation: a pass of `mpiattn.engine.passes`.
    own: the number of this rank's own chunks.
    """

    def __init__(self, computation, schedule, buffers, own):
        super().__init__()
        self.computation, self.schedule, self.buffers, self.own = computation, schedule, buffers, own

    def begin(self, q, kv, q_ready):
        """Hold this rank's own chunks, tuples of arrays, and nothing else.  q_ready: events that complete q."""
        self.clear()
        self["Q", self.own] = Chunk(q, self.buffers.tokens("Q")[self.own], q_ready)
        self["KV", self.own] = Chunk(kv, self.buffers.tokens("KV")[self.own])
        self.buffers.begin()

    def end(self):
        """The arrays of this rank's own accumulator of each reduced kind; drops the caller's arrays."""
        results = {kind: self.accumulator(kind, self.own).arrays for kind in self.buffers.reduced}
        self.clear()
        self.buffers.let_go()
        return results

    def accumulator(self, kind, chunk, clear=True):
        """The accumulator of a reduced kind for a chunk.  clear: whether to clear it at its first use in a pass."""
        if (kind, chunk) not in self:
            arrays = self.buffers.accumulator(kind, chunk)
            ready = (self.computation.clear(kind, arrays),) if clear else ()
            self[kind, chunk] = Chunk(arrays, self.buffers.tokens(kind)[chunk], ready)
        return self[kind, chunk]

    def merge(self, kind, chunk, received):
        """Merge a received partial into the same rows of the accumulator of its chunk."""
        partial = self.accumulator(kind, chunk)
        parts = [(part,) for part in received.tokens]
        if partial.tokens == received.tokens:
            parts = [received.tokens]  # all at once
        for part in parts:
            event = self.computation.merge(kind, partial.together(part), received.together(part), received.ready)
            partial.ready = received.used = (event,)

    def whole(self, kind):
        """The chunks of the whole group, this rank's included, as one packed chunk."""
        own = self[kind, self.own]
        if not self.schedule.slots[kind] or own.tokens is None:
            return own  # alone in its group, or already the whole, by a collective
        self.place_own(kind, own)
        self.clear_places(kind, [chunk for chunk in self.buffers.tokens(kind) if (kind, chunk) not in self])
        ready = tuple(event for (k, _), chunk in self.items() if k == kind for event in chunk.ready)
        return Chunk(self.buffers.whole(kind), None, ready)

    def place_own(self, kind, own):
        """Copy this rank's own chunk to its place in a packed arena."""
        for dst, src in zip(self._place(kind, self.own), own.arrays):
            self.computation.backend.copy(dst, src)

    def clear_places(self, kind, chunks):
        """Zero the places in a packed arena of chunks that are not sent, because the mask leaves them no pairs.

        Uninitialized memory may hold inf or nan.  Launches handle these on another path, which rounds differently.
        """
        for chunk in chunks:
            self.computation.backend.zero(self._place(kind, chunk))

    def clear_rest(self, chunk, tokens):
        """Zero what a chunk holds besides `tokens`, for the reason of `clear_places`."""
        for part in places(chunk.tokens, rest(chunk.tokens, tokens)):
            self.computation.backend.zero([array[part] for array in chunk.arrays])

    def _place(self, kind, chunk):
        """The place of a chunk in a packed arena."""
        return self.buffers.view(kind, self.buffers.packed_start(kind, chunk), total(self.buffers.tokens(kind)[chunk]))
