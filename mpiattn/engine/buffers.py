"""The buffers of a pass, in memory that the passes share: the slots of its schedule, by arena.

The kinds are those of `mpiattn.schedule.kinds`.  Arenas "Q" and "KV" hold received chunks.  For a reduced kind X, arena
"X" holds the accumulators of other ranks' chunks, and "+X" the received partials.  A packed arena is one buffer: it
holds the chunks of a whole group in order of their numbers, as one long chunk for a fused launch.  Of each chunk a
buffer holds only the tokens that travel (`mpiattn.schedule.places`).  Buffers that no step needs together lie in the
same memory (`mpiattn.schedule.sharing`): partials land where chunks were that all blocks have read.

The accumulators of the rank's own chunk are, where it can be, the arrays of the results.  Kinds whose packed arena is
not in order of position have a second one that is, `ordered`.

Of a gathered kind, `outbox` holds what lies in many ranges of the rank's own chunk, one message after another.

If the dtype on the wire differs, `wire` holds by reduced kind and slot of "+X" the arrays into which partials are cast
before they are sent.  An array that is sent uncast has None there.
"""

from dataclasses import dataclass

from ..schedule.kinds import REDUCED, arena_of
from ..schedule.ranges import places, total
from ..schedule.sharing import below, stack
from ..schedule.travels import size_of


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
        self.packed = schedule.packed
        self.reduced = REDUCED[schedule.direction]
        self._cast = {  # by kind, the arrays into which partials are cast
            kind: [None if wire == own else wire for own, wire in zip(shapes[kind], shapes[arena_of(kind)])]
            for kind in self.reduced
            if shapes[kind] != shapes[arena_of(kind)] and schedule.slots[arena_of(kind)]
        }
        self._below = {}  # by the kinds of `ordered`, the order of the buffers in memory
        self.occupant = {}  # (arena, slot) -> its latest chunk
        self.launched = ()  # events of the fused launch, which reads packed arenas
        self.drop()

    def drop(self):
        """Keep no array: the pool's memory is replaced."""
        self.places, self.arena, self.wire, self.ordered = None, {}, {}, {}
        self._outbox, self._in_outbox = {}, {}  # by gathered kind: arrays, and how many of their rows are used
        self.nbytes = 0  # that the buffers span, without gaps for alignment
        self._fitted = {}, {}  # rows and shapes of all arrays
        self._beside = {}  # by name in `arena`, the names of others in the same memory
        self._of_accumulators = {}  # (reduced kind, chunk) -> arrays
        self._own, self._own_memory = {}, {}  # by reduced kind: own accumulators of the call, memory for them
        self.occupant.clear()

    def fit(self, places, needs_memory, ordered=()):
        """Use the pool for a call with these `Places`.

        needs_memory: {reduced kind: of each array of the rank's own accumulator, whether it needs memory here because
            the result cannot be it}.  A packed arena has the own accumulators too, and takes no result.
        ordered: the kinds of `ordered`.
        """
        rows, shapes, order = {}, {}, {}
        for kind in () if self.packed else self.reduced:
            order["own", kind, 0] = list(order)  # they live as long as the pass
            rows["own", kind, 0] = total(places.tokens[kind][places.rank])
            shapes["own", kind, 0] = [
                shape if want else None for shape, want in zip(self.shapes[kind], needs_memory[kind])
            ]
        for kind, count in places.outbox.items():
            if count:  # messages of any step may be under way together
                order["outbox", kind, 0] = list(order)
                rows["outbox", kind, 0], shapes["outbox", kind, 0] = count, self.shapes[kind]
        lowest = list(order)
        for name, others in self._in_order(tuple(ordered)).items():
            role, kind, _ = name
            order[name] = lowest + others
            rows[name] = places.rows[arena_of(kind) if role == "wire" and not self.packed else kind]
            shapes[name] = self._cast[kind] if role == "wire" else self.shapes[kind]
        if self._large_enough(rows, shapes):
            self._of_accumulators.clear()
            self.occupant.clear()
        else:
            self._take(rows, shapes, order)
        self.places = places

    def _in_order(self, ordered):
        """`sharing.below` of the buffers."""
        if ordered not in self._below:
            token_bytes = {("arena", arena): size_of(arrays) for arena, arrays in self.shapes.items()}
            token_bytes |= {("wire", kind): size_of(filter(None, arrays)) for kind, arrays in self._cast.items()}
            self._below[ordered] = below(self.schedule, token_bytes, ordered)
        return self._below[ordered]

    def _large_enough(self, rows, shapes):
        """Whether the arrays of the call before serve this one.  Packed arenas are sent and launched whole."""
        if self.places is None or self.packed or shapes != self._fitted[1]:
            return False
        return all(count <= self._fitted[0][name] for name, count in rows.items())

    def _take(self, rows, shapes, order):
        """Cut arrays of so many rows from the pool; all by `BufferName` as of `sharing`, with the role "own" too."""
        self.drop()
        arrays, spans = self.pool.arrays(
            self,
            {name: [shape and ((rows[name], *shape[0]), shape[1]) for shape in of] for name, of in shapes.items()},
            order,
        )
        self.arena = {(kind, slot): taken for (role, kind, slot), taken in arrays.items() if role == "arena"}
        self.wire = {(kind, slot): taken for (role, kind, slot), taken in arrays.items() if role == "wire"}
        self._own_memory, self._outbox, self.ordered = (
            {kind: taken for (of, kind, _), taken in arrays.items() if of == role}
            for role in ("own", "outbox", "ordered")
        )
        sizes = {name: rows[name] * size_of(filter(None, of)) for name, of in shapes.items()}
        _, self.nbytes = stack(order, sizes)
        spans = {(kind, slot): span for (role, kind, slot), span in spans.items() if role == "arena"}
        self._beside = {
            name: {other for other, (begin, end) in spans.items() if other != name and begin < stop and start < end}
            for name, (start, stop) in spans.items()
        }
        self._fitted = rows, shapes

    def accumulate_in(self, results):
        """Use these arrays as accumulators of the rank's own chunk, and memory of the buffers where one is None.

        results: {reduced kind: arrays}.  A packed arena has the own accumulators too, and takes none of these.
        """
        for kind, arrays in {} if self.packed else results.items():
            memory = self._own_memory[kind]
            self._own[kind] = tuple([own if array is None else array for array, own in zip(arrays, memory)])

    def tokens(self, kind):
        """{number of a chunk: `Ranges` of its tokens that this rank holds}, of the group that a kind moves in."""
        return self.places.tokens[kind]

    def slot_start(self, arena, slot):
        """First row of a slot of a packed arena of partials."""
        return self.places.slot_start(arena, slot)

    def packed_start(self, kind, chunk):
        """First row of a chunk in a packed arena."""
        return self.places.start(kind, chunk)

    def view(self, arena, start, count):
        """Rows [start, start + count) of every array of a packed arena."""
        return tuple([array[start : start + count] for array in self.arena[arena, 0]])

    def whole(self, arena):
        """Every array of a packed arena."""
        return self.arena[arena, 0]

    def outbox(self, kind, count):
        """The next rows of every array of a gathered kind's outbox."""
        start = self._in_outbox.get(kind, 0)
        self._in_outbox[kind] = start + count
        return tuple([array[start : start + count] for array in self._outbox[kind]])

    def casts(self, kind):
        """Whether partials of a kind are cast before they are sent."""
        return kind in self._cast

    def take_slot(self, arena, slot, chunk, tokens):
        """A `Chunk` in a slot to receive into, and the events of the last launches that read what was there.

        chunk: its number.  tokens: those that are received; a packed arena has places for more.
        """
        if not self.packed:
            count = total(tokens)
            arrays = tuple([array[:count] for array in self.arena[arena, slot]])
        elif arena in self.places.tokens:
            tokens = self.tokens(arena)[chunk]
            arrays = self.view(arena, self.packed_start(arena, chunk), total(tokens))
        else:
            arrays = self.view(arena, self.slot_start(arena, slot), total(tokens))
        received = Chunk(arrays, tokens)
        before, beside = list(self.launched), self._beside[self._buffer(arena, slot)]
        for other, chunk_there in self.occupant.items():
            if other == (arena, slot) or self._buffer(*other) in beside:
                before += chunk_there.used
        self.occupant[arena, slot] = received
        return received, tuple(before)

    def _buffer(self, arena, slot):
        """The name in `arena` of the buffer that has a slot."""
        return arena, 0 if self.packed else slot

    def accumulator(self, kind, chunk):
        """The arrays of the accumulator of a reduced kind for a chunk."""
        if chunk == self.places.rank and not self.packed:
            return self._own[kind]
        arrays = self._of_accumulators.get((kind, chunk))
        if arrays is None:
            count = total(self.tokens(kind)[chunk])
            if self.packed:
                arrays = self.view(kind, self.packed_start(kind, chunk), count)
            else:
                arrays = tuple([array[:count] for array in self.arena[kind, self.places.slot(kind, chunk)]])
            self._of_accumulators[kind, chunk] = arrays
        return arrays

    def begin(self):
        """Forget what a call before has left."""
        self.occupant.clear()
        self._in_outbox.clear()
        self.launched = ()

    def let_go(self):
        """Forget the arrays of the results, and which chunks the slots held."""
        self._own.clear()
        self.begin()
