"""The buffers of a plan: one arena per kind, cut into the slots of its schedule.

The kinds are those of `mpiattn.schedule.kinds`.  Arenas "Q" and "KV" hold received chunks.  For a reduced kind X, arena
"X" holds the accumulators X#0, X#1, ... and "+X" the received partials.  A packed arena holds the chunks of a whole
group in order of rank, as one long chunk for a fused launch.

If the dtype on the wire differs, `wire` holds by reduced kind the arrays into which partials are cast before they are
sent, in the slots of "+X".  An array that is sent uncast has None there.
"""

from dataclasses import dataclass

from ..schedule.kinds import GATHERED, IN_COLUMNS, REDUCED, arena_of


@dataclass
class Chunk:
    """The arrays of a chunk or partial, each (tokens, heads, dim) or (tokens, heads).

    ready: events after which the arrays may be read.
    used: events of the last launch that reads them.
    """

    arrays: tuple
    ready: tuple = ()
    used: tuple = ()


class Buffers:
    """The arenas for `schedule` on `mesh`, and the place of each hop's chunk in them.

    shapes: by arena, (shape of a token, dtype) of every array.
    The attributes q_chunks and k_chunks are the chunks 0, 1, ... hops back in this rank's row and column, q_tokens and
    k_tokens their lengths.
    """

    def __init__(self, backend, shapes, schedule, mesh, q_layout, k_layout):
        self.schedule = schedule
        self.packed = any(step.fused for step in schedule.steps)
        self.q_chunks, self.k_chunks = mesh.tile.row(mesh.rank), mesh.tile.column(mesh.rank)
        self.q_tokens = [q_layout.length(chunk) for chunk in self.q_chunks]
        self.k_tokens = [k_layout.length(chunk) for chunk in self.k_chunks]
        self.reduced = REDUCED[schedule.direction]
        self.arena = {}
        for arena in (*GATHERED, *self.reduced, *map(arena_of, self.reduced)):
            rows = self._rows(arena)
            self.arena[arena] = tuple(backend.empty((rows, *shape), dtype) for shape, dtype in shapes[arena])
        self.wire = {}
        for kind in self.reduced:
            if shapes[kind] != shapes[arena_of(kind)] and schedule.slots[arena_of(kind)]:
                rows = len(self.arena[kind][0]) if self.packed else self._rows(arena_of(kind))
                self.wire[kind] = tuple(
                    None if travelling == held else backend.empty((rows, *travelling[0]), travelling[1])
                    for held, travelling in zip(shapes[kind], shapes[arena_of(kind)]))
        self.occupant = {}                  # (arena, slot) -> its latest chunk

    def tokens(self, kind):
        """Number of tokens in a kind's chunk or accumulator, for every hop."""
        return self.k_tokens if kind.lstrip("+") in IN_COLUMNS else self.q_tokens

    def _rows(self, arena):
        slots, tokens = self.schedule.slots[arena], self.tokens(arena)
        if arena in self.reduced:           # accumulator #0 comes first
            return sum(tokens) if self.packed else tokens[0] + slots * max(tokens)
        if self.packed and arena in GATHERED:
            return sum(tokens) if slots else 0
        return self.slot_start(arena, slots)

    def slot_start(self, arena, slot):
        """First row of a slot."""
        return slot * max(self.tokens(arena))

    @property
    def nbytes(self):
        """Bytes of all arenas and of the arrays that partials are cast into."""
        return sum(array.nbytes for arrays in (*self.arena.values(), *self.wire.values()) for array in arrays
                   if array is not None)

    def packed_start(self, kind, hop):
        """First row of the chunk `hop` hops back in a packed arena."""
        chunks = self.k_chunks if kind in IN_COLUMNS else self.q_chunks
        return sum(n for chunk, n in zip(chunks, self.tokens(kind)) if chunk < chunks[hop])

    def view(self, arena, start, count):
        """Rows [start, start + count) of every array of an arena."""
        return tuple(array[start:start + count] for array in self.arena[arena])

    def take_slot(self, arena, slot, tokens, hop=None):
        """A `Chunk` of `tokens` tokens in a slot, and the events of the last launch that reads the slot's old contents.

        hop: hop of the chunk, which determines its place in a packed arena of received chunks.
        """
        placed = self.packed and arena in GATHERED
        start = self.packed_start(arena, hop) if placed else self.slot_start(arena, slot)
        chunk = Chunk(self.view(arena, start, tokens))
        before = self.occupant.get((arena, slot))
        self.occupant[arena, slot] = chunk
        return chunk, before.used if before else ()

    def accumulator(self, kind, hop):
        """The arrays of a reduced kind's accumulator at a hop."""
        tokens = self.tokens(kind)
        if self.packed:
            start = self.packed_start(kind, hop)
        else:
            start = tokens[0] + self.slot_start(kind, self.schedule.accumulators[kind][hop - 1]) if hop else 0
        return self.view(kind, start, tokens[hop])
