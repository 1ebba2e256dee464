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
        self._of_accumulators = {}  # (reduced kind, chunk) -> arrays
        self._own, self._own_memory = {}, {}  # by reduced kind: own accumulators of the call, memory for them
        self.occupant.clear()

    def fit(self, places, own, ordered=()):
        """Use the pool for a call with these `Places`.

        own: {reduced kind: for each array, whether the rank's own accumulator needs memory}.  A packed arena has the
            own accumulators too, and takes none.
        ordered: the kinds of `ordered`.
        """
        self.drop()
        parts = {"arena": {}, "wire": {}, "own": {}, "ordered": {}}
        for arena, rows in places.rows.items():
            parts["arena"][arena] = rows, self.shapes[arena]
        for kind in self.reduced:
            held, travelling = self.shapes[kind], self.shapes[arena_of(kind)]
            if held != travelling and self.schedule.slots[arena_of(kind)]:
                cast = [None if wire == kept else wire for kept, wire in zip(held, travelling)]
                parts["wire"][kind] = places.rows[kind if self.packed else arena_of(kind)], cast
            if not self.packed:
                wanted = [shape if want else None for shape, want in zip(held, own[kind])]
                parts["own"][kind] = total(places.tokens[kind][places.rank]), wanted
        for kind in ordered:
            parts["ordered"][kind] = places.rows[kind], self.shapes[kind]
        arrays = self.pool.arrays(
            self,
            {
                (part, kind): [shape and ((rows, *shape[0]), shape[1]) for shape in shapes]
                for part, by_kind in parts.items()
                for kind, (rows, shapes) in by_kind.items()
            },
        )
        self.arena, self.wire, self._own_memory, self.ordered = (
            {kind: arrays[part, kind] for kind in by_kind} for part, by_kind in parts.items()
        )
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
