"""The biases and the dropout of one pass: what each launch gets of them, and where their gradients go.

A bias of one part is, where it can be, a view of what there is: of the caller's tile, or of one row of values by
distance.  Else the rows of a launch are cut into pieces whose values, or whose gradients, fit in a work array.
"""

from functools import partial

import numpy as np

from ..backends.block import Dropout
from ..schedule.kinds import IN_COLUMNS
from .bias_parts import Side, by_runs

PIECE = 2**22  # numbers of a work array


class Biases:
    """What the launches of a pass have besides their chunks.

    parts: the `Part`s of the bias.
    dropout: (threshold, seed, numbers of the heads (sequences * heads,)) or None.
    layouts: of the queries and of the keys on the mesh.
    sequences, heads: that this rank computes, the heads of each sequence.
    dtype: of partials.
    """

    def __init__(self, backend, parts, dropout, layouts, sequences, heads, dtype):
        self.backend, self.parts, self._dropout, self.layouts = backend, parts, dropout, layouts
        self._shape, self._dtype = (sequences, heads), dtype

    def cut(self, i, j, launches):
        """The launches (queries, keys) of a block, cut where that gives its biases a simpler form."""
        return by_runs(launches, self.layouts, (i, j)) if any(part.by_distance for part in self.parts) else launches

    def launch(self, computation, chunks, some, q, kv, fields, reduced, after, meanwhile):
        """Launch a block with its biases; returns the event.

        chunks: ((number, `Ranges`) of the queries, the same of the keys).  some: which of these queries, None for all.
        All else: as for the pass's `launch`.
        """
        block = Side(self.layouts[0], *chunks[0], some), Side(self.layouts[1], *chunks[1])
        gradients = [part for part in self.parts if part.wanted] if "dQ" in reduced else []
        count, size = len(block[0]), len(block[0])
        if self._needs_work(block, gradients):
            width = len(block[1]) + count * any(part.by_distance for part in gradients)
            size = max(1, PIECE // max(1, self._shape[0] * self._shape[1] * width))
        if size >= count:
            return self._piece(computation, block, gradients, q, kv, fields, reduced, after, meanwhile)
        for start in range(0, count, size):
            rows = slice(start, min(start + size, count))
            event = self._piece(
                computation,
                (block[0].only(rows), block[1]),
                gradients,
                tuple([array[rows] for array in q]),
                kv,
                {name: self.backend.contiguous(side[:, rows]) for name, side in fields.items()},
                {
                    kind: arrays if kind in IN_COLUMNS else tuple([array[rows] for array in arrays])
                    for kind, arrays in reduced.items()
                },
                after,
                meanwhile and partial(_part_of, meanwhile, start / count, len(range(count)[rows]) / count),
            )
        return event

    def _needs_work(self, block, gradients):
        """Whether a launch needs a work array for each of its pairs."""
        if any(part.by_distance for part in gradients):
            return True
        return len(self.parts) > 1 or not all(part.is_view(block) for part in self.parts)

    def _piece(self, computation, block, gradients, q, kv, fields, reduced, after, meanwhile):
        """Launch some rows of a block, few enough for work arrays."""
        arrays = None
        if computation.problem.key_bias:
            arrays = kv[-1], reduced["dKV"][-1] if "dQ" in reduced else None, after
        with_bias = fields | {"bias": self._values(block, arrays), "dropout": self._of_block(block)}
        dscores, collect = self._gradients(block, gradients, arrays)
        event = computation.launch(q, kv, with_bias, reduced, after, meanwhile, dscores)
        return next((later for later in collect() if later is not None), event)

    def _values(self, block, arrays):
        """The bias of a block, or None."""
        if not self.parts:
            return None
        (part, *others) = self.parts
        if not others and part.is_view(block):
            return part.view(block, arrays)
        values = self._zeros(*map(len, block))
        for part in self.parts:
            part.add_to(values, block, arrays)
        return values

    def _gradients(self, block, gradients, arrays):
        """Where a launch adds the gradient of its bias, or None, and what to call afterwards.

        That returns the events of what it launches, None for most: only the gradient of a `KeyBias` is sent to others.
        """
        if not gradients:
            return None, lambda: ()
        (part, *others) = gradients
        rows, keys = map(len, block)
        if not others and part.is_view(block):
            if not part.by_distance:
                view = part.gradient_view(block, arrays)
                return view, lambda: [part.collect_view(view, arrays)]
            distances = part.distances(block)
            by_distance = self._zeros(rows, len(distances))
            return self.backend.sheared(by_distance, rows), lambda: [self._sum(part, by_distance, distances)]
        dscores = self._zeros(rows, keys)
        return dscores, lambda: [each.collect(dscores, block, arrays) for each in gradients]

    def _sum(self, part, by_distance, distances):
        sums = self.backend.empty((1, self._shape[1], 1, len(distances)), self._dtype)
        self.backend.zero([sums])
        self.backend.accumulate(sums, by_distance)
        part.collect_sums(sums, distances)

    def _zeros(self, rows, columns):
        array = self.backend.empty((*self._shape, rows, columns), self._dtype)
        self.backend.zero([array])
        return array

    def _of_block(self, block):
        """The `Dropout` of a block, or None."""
        if self._dropout is None:
            return None
        threshold, seed, heads = self._dropout
        of = [side.positions for side in block] + [heads]
        return Dropout(threshold, seed, *[self.backend.contiguous(numbers.astype(np.int32)) for numbers in of])


def _part_of(meanwhile, before, share, done):
    meanwhile(before + share * done)
