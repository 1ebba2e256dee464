"""The buffers of a plan: one arena a kind, cut into the slots of its schedule.

Kinds: "Q" and "KV", chunks received; "O", the accumulators O#0, O#1, ...; "P", partials received.  A packed
arena holds the chunks of a whole group in order of rank instead, so that it is itself one long chunk: what a
fused launch works on.
"""

from dataclasses import dataclass

from .traffic import in_column, in_row


@dataclass
class Chunk:
    """Arrays of a chunk, (tokens, heads, dim) each, or of a partial (out, lse).

    ready: events after which they can be read.  used: events of the last launch that reads them.
    """

    arrays: tuple
    ready: tuple = ()
    used: tuple = ()


class Buffers:
    """Arenas for `schedule` on `mesh`, and where in them each hop's chunk lies.

    q_tokens, k_tokens: length of the chunk 0, 1, ... hops back in my row and in my column.
    """

    def __init__(self, backend, problem, schedule, mesh, q_layout, k_layout):
        self.schedule = schedule
        self.packed = any(step.fused for step in schedule.steps)
        a, b, rank = mesh.a, mesh.b, mesh.rank
        self.q_chunks = [in_row(rank, a, u) for u in range(a)]
        self.k_chunks = [in_column(rank, a, b, w) for w in range(b)]
        self.q_tokens = [q_layout.length(chunk) for chunk in self.q_chunks]
        self.k_tokens = [k_layout.length(chunk) for chunk in self.k_chunks]
        heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
        arrays = {"Q": [(heads, problem.head_dim)],
                  "KV": [(kv_heads, problem.head_dim), (kv_heads, problem.value_dim)],
                  "O": [(heads, problem.value_dim), (heads,)],
                  "P": [(heads, problem.value_dim), (heads,)]}
        dtypes = {"Q": problem.dtype, "KV": problem.dtype, "O": problem.partial_dtype, "P": problem.partial_dtype}
        self.arena = {kind: tuple(backend.empty((self._rows(kind), *shape), dtypes[kind]) for shape in shapes)
                      for kind, shapes in arrays.items()}
        self.occupant = {}                  # (kind, slot) -> the chunk that was last there

    def _rows(self, kind):
        slots = self.schedule.slots[kind]
        if not self.packed or kind == "P":
            own = self.q_tokens[0] if kind == "O" else 0
            return own + slots * max(self._tokens(kind))
        return sum(self._tokens(kind)) if slots or kind == "O" else 0

    def _tokens(self, kind):
        return self.k_tokens if kind == "KV" else self.q_tokens

    @property
    def nbytes(self):
        """Bytes of all arenas."""
        return sum(array.nbytes for arrays in self.arena.values() for array in arrays)

    def start_of(self, kind, hop, slot=None):
        """First row, in its arena, of the chunk `hop` hops back, which has taken `slot`."""
        tokens = self._tokens(kind)
        if self.packed:
            chunks = self.k_chunks if kind == "KV" else self.q_chunks
            return sum(n for chunk, n in zip(chunks, tokens) if chunk < chunks[hop])
        if kind == "O":
            return tokens[0] + slot * max(tokens) if hop else 0
        return self.slot_start(kind, slot)

    def view(self, kind, start, count):
        """Rows [start, start + count) of every array of an arena."""
        return tuple(array[start:start + count] for array in self.arena[kind])

    def slot_start(self, kind, slot):
        """First row of a slot of "Q", "KV" or "P"."""
        return slot * max(self._tokens(kind))

    def take_slot(self, kind, slot, tokens, hop=None):
        """A chunk of `tokens` tokens in a slot of "Q", "KV" or "P", and the last use of what was there.

        hop: whose chunk it is, where chunks have their places in a packed arena.
        """
        placed = self.packed and kind != "P"
        start = self.start_of(kind, hop) if placed else self.slot_start(kind, slot)
        chunk = Chunk(self.view(kind, start, tokens))
        before = self.occupant.get((kind, slot))
        self.occupant[kind, slot] = chunk
        return chunk, before.used if before else ()

    def accumulator(self, hop):
        """The arrays of the partial O#hop."""
        slot = self.schedule.rows[hop - 1] if hop else None
        return self.view("O", self.start_of("O", hop, slot), self.q_tokens[hop])
