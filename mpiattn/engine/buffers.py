"""The buffers of a plan: one arena per kind, cut into the slots of its schedule.

The kinds are those of `mpiattn.schedule.kinds`.  Arenas "Q" and "KV" hold received chunks.  For a reduced kind X, arena
"X" holds the accumulators, that of the rank's own chunk first, and "+X" the received partials.  A packed arena holds
the chunks of a whole group in order of their numbers, as one long chunk for a fused launch.

If the dtype on the wire differs, `wire` holds by reduced kind the arrays into which partials are cast before they are
sent, in the slots of "+X".  An array that is sent uncast has None there.
"""

from dataclasses import dataclass
from itertools import accumulate

from ..schedule.bound import bound_accumulators
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


def _starts(tokens):
    """{number of a chunk: tokens of the chunks before it}."""
    return dict(zip(tokens, accumulate(tokens.values(), initial=0)))


class Buffers:
    """The arenas for `schedule` on `mesh`, and the place of each chunk, given by its number, in them.

    shapes: by arena, (shape of a token, dtype) of every array.
    """

    def __init__(self, backend, shapes, schedule, mesh, q_layout, k_layout):
        self.schedule, self.own = schedule, mesh.rank
        self.packed = any(step.fused for step in schedule.steps)
        self.accumulators = bound_accumulators(schedule, mesh.rank)
        self._q_tokens = {chunk: q_layout.length(chunk) for chunk in sorted(mesh.tile.row(mesh.rank))}
        self._k_tokens = {chunk: k_layout.length(chunk) for chunk in sorted(mesh.tile.column(mesh.rank))}
        self._q_starts, self._k_starts = _starts(self._q_tokens), _starts(self._k_tokens)
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
                    for held, travelling in zip(shapes[kind], shapes[arena_of(kind)])
                )
        self.occupant = {}  # (arena, slot) -> its latest chunk
        self._of_accumulators = {}  # (reduced kind, chunk) -> arrays

    def tokens(self, kind):
        """{number of a chunk: its tokens} of the row or column that a kind moves in, in the order of its ranks."""
        return self._k_tokens if kind.lstrip("+") in IN_COLUMNS else self._q_tokens

    def _rows(self, arena):
        slots, tokens = self.schedule.slots[arena], self.tokens(arena)
        if arena in self.reduced:  # accumulator #0 comes first
            return sum(tokens.values()) if self.packed else tokens[self.own] + slots * max(tokens.values())
        if self.packed and arena in GATHERED:
            return sum(tokens.values()) if slots else 0
        return self.slot_start(arena, slots)

    def slot_start(self, arena, slot):
        """First row of a slot."""
        return slot * max(self.tokens(arena).values())

    @property
    def nbytes(self):
        """Bytes of all arenas and of the arrays that partials are cast into."""
        return sum(
            array.nbytes
            for arrays in (*self.arena.values(), *self.wire.values())
            for array in arrays
            if array is not None
        )

    def packed_start(self, kind, chunk):
        """First row of a chunk in a packed arena."""
        return (self._k_starts if kind.lstrip("+") in IN_COLUMNS else self._q_starts)[chunk]

    def view(self, arena, start, count):
        """Rows [start, start + count) of every array of an arena."""
        return tuple(array[start : start + count] for array in self.arena[arena])

    def take_slot(self, arena, slot, chunk):
        """A `Chunk` in a slot to receive into, and the events of the last launch that reads the slot's old contents.

        chunk: its number, which determines its tokens and, in a packed arena of received chunks, its place.
        """
        placed = self.packed and arena in GATHERED
        start = self.packed_start(arena, chunk) if placed else self.slot_start(arena, slot)
        received = Chunk(self.view(arena, start, self.tokens(arena)[chunk]))
        before = self.occupant.get((arena, slot))
        self.occupant[arena, slot] = received
        return received, before.used if before else ()

    def accumulator(self, kind, chunk):
        """The arrays of the accumulator of a reduced kind for a chunk."""
        arrays = self._of_accumulators.get((kind, chunk))
        if arrays is None:
            arrays = self._of_accumulators[kind, chunk] = self._accumulator(kind, chunk)
        return arrays

    def _accumulator(self, kind, chunk):
        tokens = self.tokens(kind)
        if self.packed:
            start = self.packed_start(kind, chunk)
        elif chunk == self.own:
            start = 0
        else:
            start = tokens[self.own] + self.slot_start(kind, self.accumulators[kind][chunk])
        return self.view(kind, start, tokens[chunk])
