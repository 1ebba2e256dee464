"""The chunks that a rank holds during a pass: its own, those received, and the accumulators of partials."""

from .buffers import Chunk


class Held(dict):
    """The chunks of one pass at a time: {(kind, number of the chunk): `Chunk`}.

    work: a pass of `mpiattn.engine.passes`.
    own: the number of this rank's own chunks.
    """

    def __init__(self, work, schedule, buffers, own):
        super().__init__()
        self.work, self.schedule, self.buffers, self.own = work, schedule, buffers, own

    def begin(self, q, kv, q_ready):
        """Hold this rank's own chunks, tuples of arrays, and nothing else.  q_ready: events that complete q."""
        self.clear()
        self["Q", self.own], self["KV", self.own] = Chunk(q, q_ready), Chunk(kv)
        self.buffers.occupant.clear()

    def end(self):
        """The arrays of this rank's own accumulator of each reduced kind; drops the caller's arrays."""
        results = {kind: self.accumulator(kind, self.own).arrays for kind in self.buffers.reduced}
        self.clear()
        return results

    def accumulator(self, kind, chunk):
        """The accumulator of a reduced kind for a chunk, cleared at its first use in a pass."""
        if (kind, chunk) not in self:
            arrays = self.buffers.accumulator(kind, chunk)
            self[kind, chunk] = Chunk(arrays, (self.work.clear(kind, arrays),))
        return self[kind, chunk]

    def merge(self, kind, chunk, received):
        """Merge a received partial into the accumulator of its chunk."""
        partial = self.accumulator(kind, chunk)
        partial.ready = received.used = (self.work.merge(kind, partial.arrays, received.arrays, received.ready),)

    def whole(self, kind):
        """The chunks of the whole group, this rank's included, as one packed chunk."""
        own = self[kind, self.own]
        if not self.schedule.slots[kind] or own.arrays is self.buffers.arena[kind]:
            return own  # group of one rank, or a collective has placed it
        self.place_own(kind, own)
        self.clear_places(kind, [chunk for chunk in self.buffers.tokens(kind) if (kind, chunk) not in self])
        ready = tuple(event for (k, _), chunk in self.items() if k == kind for event in chunk.ready)
        return Chunk(self.buffers.arena[kind], ready)

    def place_own(self, kind, own):
        """Copy this rank's own chunk to its place in a packed arena."""
        for dst, src in zip(self._place(kind, self.own), own.arrays):
            self.work.backend.copy(dst, src)

    def clear_places(self, kind, chunks):
        """Zero the places in a packed arena of chunks that are not sent, because the mask leaves them no pairs.

        Uninitialized memory may hold inf or nan.  Launches handle these on another path, which rounds differently.
        """
        for chunk in chunks:
            self.work.backend.zero(self._place(kind, chunk))

    def _place(self, kind, chunk):
        """The place of a chunk in a packed arena."""
        return self.buffers.view(kind, self.buffers.packed_start(kind, chunk), self.buffers.tokens(kind)[chunk])
