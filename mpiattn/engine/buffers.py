"""The buffers of a pass: one arena per kind, cut into the slots of its schedule, in memory that the passes share.

The kinds are those of `mpiattn.schedule.kinds`.  Arenas "Q" and "KV" hold received chunks.  For a reduced kind X, arena
"X" holds the accumulators of other ranks' chunks, and "+X" the received partials.  A packed arena holds the chunks of a
whole group in order of their numbers, as one long chunk for a fused launch.  Of each chunk a buffer holds only the
tokens that travel (`mpiattn.schedule.places`).

The accumulators of the rank's own chunk are, where it can be, the arrays of the results.  Kinds whose packed arena is
not in order of position have a second one that is, `ordered`.

If the dtype on the wire differs, `wire` holds by reduced kind the arrays into which partials are cast before they are
sent, in the slots of "+X".  An array that is sent uncast has None there.
"""

from dataclasses import dataclass

from ..schedule.kinds import REDUCED, arena_of
from ..schedule.ranges import places, total


@dataclass
class Chunk:
    """The arrays of a chunk or partial, each (tokens, heads, dim) or (tokens, heads).

    tokens: which of the whole chunk's tokens they hold, as `Ranges`.
    ready: events after which the arrays may be read.
    used: events of the last launch that reads them.
    """

    arrays: tuple
    tokens: tuple
    ready: tuple = ()
    used: tuple = ()

    def together(self, ranges):
        """The arrays of all of its tokens, or of one range of them."""
        if ranges == self.tokens:
            return self.arrays
        (arrays,) = self.parts(ranges)
        return arrays

    def parts(self, ranges):
        """The arrays of each of some ranges of its tokens."""
        if len(ranges) == 1 and ranges == self.tokens:
            return [self.arrays]  # themselves: a back end may know them from an earlier message
        return [tuple(array[part] for array in self.arrays) for part in places(self.tokens, ranges)]


class Buffers:
    """The arenas for `schedule`, and the arrays of each chunk, given by its number, in them.

    pool: the `Pool` that they lie in.
    shapes: by arena, (shape of a token, dtype) of every array.
    The attribute `places` is the `Places` of the call.  `fit` sets it, and `accumulate_in` what the results are.
    """

    def __init__(self, pool, shapes, schedule):
        self.pool, self.shapes, self.schedule = pool, shapes, schedule
        self.packed = any(step.fused for step in schedule.steps)
        self.reduced = REDUCED[schedule.direction]
        self.occupant = {}  # (arena, slot) -> its latest chunk
        self.drop()

    def drop(self):
        """Keep no array: the pool's memory is replaced."""
        self.places, self.arena, self.wire, self.ordered = None, {}, {}, {}
        self._held = {}, {}  # rows and shapes of all arrays
        self._of_accumulators = {}  # (reduced kind, chunk) -> arrays
        self._own, self._own_memory = {}, {}  # by reduced kind: own accumulators of the call, memory for them
        self.occupant.clear()

    def fit(self, places, own, ordered=()):
        """Use the pool for a call with these `Places`.

        own: {reduced kind: for each array, whether the rank's own accumulator needs memory}.  A packed arena has the
            own accumulators too, and takes none.
        ordered: the kinds of `ordered`.
        """
        rows = {("arena", arena): count for arena, count in places.rows.items()}
        shapes = {("arena", arena): self.shapes[arena] for arena in places.rows}
        for kind in self.reduced:
            held, travelling = self.shapes[kind], self.shapes[arena_of(kind)]
            if held != travelling and self.schedule.slots[arena_of(kind)]:
                rows["wire", kind] = places.rows[kind if self.packed else arena_of(kind)]
                shapes["wire", kind] = [None if wire == kept else wire for kept, wire in zip(held, travelling)]
            if not self.packed:
                rows["own", kind] = total(places.tokens[kind][places.rank])
                shapes["own", kind] = [shape if want else None for shape, want in zip(held, own[kind])]
        for kind in ordered:
            rows["ordered", kind], shapes["ordered", kind] = places.rows[kind], self.shapes[kind]
        if self._large_enough(rows, shapes):
            self._of_accumulators.clear()
            self.occupant.clear()
        else:
            self._take(rows, shapes)
        self.places = places

    def _large_enough(self, rows, shapes):
        """Whether the arrays of the call before serve this one.  Packed arenas are sent and launched whole."""
        if self.places is None or self.packed or shapes != self._held[1]:
            return False
        return all(count <= self._held[0][name] for name, count in rows.items())

    def _take(self, rows, shapes):
        """Cut arrays of so many rows from the pool; both by part of the buffers and kind."""
        self.drop()
        arrays = self.pool.arrays(
            self, {name: [shape and ((rows[name], *shape[0]), shape[1]) for shape in of] for name, of in shapes.items()}
        )
        self.arena, self.wire, self._own_memory, self.ordered = (
            {kind: taken for (of, kind), taken in arrays.items() if of == part}
            for part in ("arena", "wire", "own", "ordered")
        )
        self._held = rows, shapes
        self.places = places

    def accumulate_in(self, results):
        """Use these arrays as accumulators of the rank's own chunk, and memory of the buffers where one is None.

        results: {reduced kind: arrays}.  A packed arena has the own accumulators too, and takes none.
        """
        for kind, arrays in {} if self.packed else results.items():
            memory = self._own_memory[kind]
            self._own[kind] = tuple([held if array is None else array for array, held in zip(arrays, memory)])

    def tokens(self, kind):
        """{number of a chunk: `Ranges` of its tokens that this rank holds}, of the group that a kind moves in."""
        return self.places.tokens[kind]

    def slot_start(self, arena, slot):
        """First row of a slot."""
        return self.places.slot_start(arena, slot)

    def arrays(self):
        """All arrays that the buffers hold."""
        held = self.arena, self.wire, self._own_memory, self.ordered
        parts = [arrays for by_kind in held for arrays in by_kind.values()]
        return [array for arrays in parts for array in arrays if array is not None]

    @property
    def nbytes(self):
        """Bytes of `arrays`."""
        return sum(array.nbytes for array in self.arrays())

    def packed_start(self, kind, chunk):
        """First row of a chunk in a packed arena."""
        return self.places.start(kind, chunk)

    def view(self, arena, start, count):
        """Rows [start, start + count) of every array of an arena."""
        return tuple([array[start : start + count] for array in self.arena[arena]])

    def whole(self, arena):
        """Every array of an arena."""
        return self.arena[arena]

    def take_slot(self, arena, slot, chunk, tokens):
        """A `Chunk` in a slot to receive into, and the events of the last launch that reads the slot's old contents.

        chunk: its number.  tokens: those that are received; a packed arena has places for more.
        """
        if self.packed and arena in self.places.tokens:
            tokens = self.tokens(arena)[chunk]
            start = self.packed_start(arena, chunk)
        else:
            start = self.slot_start(arena, slot)
        received = Chunk(self.view(arena, start, total(tokens)), tokens)
        before = self.occupant.get((arena, slot))
        self.occupant[arena, slot] = received
        return received, before.used if before else ()

    def accumulator(self, kind, chunk):
        """The arrays of the accumulator of a reduced kind for a chunk."""
        if chunk == self.places.rank and not self.packed:
            return self._own[kind]
        arrays = self._of_accumulators.get((kind, chunk))
        if arrays is None:
            arrays = self.view(kind, self.places.start(kind, chunk), total(self.tokens(kind)[chunk]))
            self._of_accumulators[kind, chunk] = arrays
        return arrays

    def let_go(self):
        """Forget the arrays of the results, and which chunks the slots held."""
        self._own.clear()
        self.occupant.clear()
