"""The buffers of a plan: one arena a kind, cut into the slots of its schedule.

Kinds as in `mpiattn.schedule.kinds`: "Q" and "KV" hold chunks received, a reduced kind X its accumulators X#0, X#1, ...
and "+X" the partials received.  A packed arena holds the chunks of a whole group in order of rank instead, so that
it is itself one long chunk: what a fused launch works on.  Where partials travel in a dtype of their own, `wire` holds
by reduced kind the arrays that they are cast into to leave, cut as "+X" is, None for one that leaves as it is.
"""

from dataclasses import dataclass

from ..schedule.kinds import GATHERED, IN_COLUMNS, REDUCED, arena_of
from ..schedule.travels import in_column, in_row


@dataclass
class Chunk:
    """Arrays of a chunk or of a partial, (tokens, heads, dim) or (tokens, heads) each.

    ready: events after which they can be read.  used: events of the last launch that reads them.
    """

    arrays: tuple
    ready: tuple = ()
    used: tuple = ()


class Buffers:
    """Arenas for `schedule` on `mesh`, and where in them each hop's chunk lies.

    shapes: by arena, shape of a token and dtype of every array.  q_chunks, k_chunks: the chunk 0, 1, ... hops back in
    my row and in my column; q_tokens, k_tokens: their lengths.
    """

    def __init__(self, backend, shapes, schedule, mesh, q_layout, k_layout):
        self.schedule = schedule
        self.packed = any(step.fused for step in schedule.steps)
        a, b, rank = mesh.a, mesh.b, mesh.rank
        self.q_chunks = [in_row(rank, a, u) for u in range(a)]
        self.k_chunks = [in_column(rank, a, b, w) for w in range(b)]
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
        self.occupant = {}                  # (arena, slot) -> the chunk that was last there

    def tokens(self, kind):
        """Tokens of a kind's chunk or accumulator at every hop."""
        return self.k_tokens if kind.lstrip("+") in IN_COLUMNS else self.q_tokens

    def _rows(self, arena):
        slots, tokens = self.schedule.slots[arena], self.tokens(arena)
        if arena in self.reduced:           # O#0 and the like come first
            return sum(tokens) if self.packed else tokens[0] + slots * max(tokens)
        if self.packed and arena in GATHERED:
            return sum(tokens) if slots else 0
        return self.slot_start(arena, slots)

    def slot_start(self, arena, slot):
        """First row of a slot."""
        return slot * max(self.tokens(arena))

    @property
    def nbytes(self):
        """Bytes of all arenas, and of what partials are cast into."""
        return sum(array.nbytes for arrays in (*self.arena.values(), *self.wire.values()) for array in arrays
                   if array is not None)

    def packed_start(self, kind, hop):
        """First row, in a packed arena, of the chunk `hop` hops back."""
        chunks = self.k_chunks if kind in IN_COLUMNS else self.q_chunks
        return sum(n for chunk, n in zip(chunks, self.tokens(kind)) if chunk < chunks[hop])

    def view(self, arena, start, count):
        """Rows [start, start + count) of every array of an arena."""
        return tuple(array[start:start + count] for array in self.arena[arena])

    def take_slot(self, arena, slot, tokens, hop=None):
        """A chunk of `tokens` tokens in a slot, and the events of the last use of what was there.

        hop: whose chunk it is, which in a packed arena of chunks received decides its place.
        """
        placed = self.packed and arena in GATHERED
        start = self.packed_start(arena, hop) if placed else self.slot_start(arena, slot)
        chunk = Chunk(self.view(arena, start, tokens))
        before = self.occupant.get((arena, slot))
        self.occupant[arena, slot] = chunk
        return chunk, before.used if before else ()

    def accumulator(self, kind, hop):
        """The arrays of the accumulator of a reduced kind at a hop."""
        tokens = self.tokens(kind)
        if self.packed:
            start = self.packed_start(kind, hop)
        else:
            start = tokens[0] + self.slot_start(kind, self.schedule.accumulators[kind][hop - 1]) if hop else 0
        return self.view(kind, start, tokens[hop])
