"""The parts of a bias: a dense tile, a function of distances, a number for each key.  Each has its gradient beside it.

All values are (sequences, heads, tokens, keys), where the length of an axis is 1 if it is the same for all.
"""

from functools import cached_property
from itertools import accumulate, pairwise, product

import numpy as np

from ..arguments.arrays import on_host
from ..schedule.ranges import overlap, positions, runs_of, total

FEW_RUNS = 4  # runs of consecutive tokens of a chunk, up to which each is launched by itself

QUIET = np.errstate(all="ignore")  # NaN and overflow are valid results, whatever the program wants of its own


def as_slices(indices):
    """Increasing indices as (where among them, slice) of each run of consecutive numbers."""
    cuts = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
    return [(slice(a, b), slice(int(indices[a]), int(indices[b - 1]) + 1)) for a, b in pairwise(cuts) if a < b]


def evenly(tokens):
    """(first, step) of positions that increase evenly, or None; the step of a single one is None."""
    if len(tokens) < 2:
        return int(tokens[0]), None
    steps = np.diff(tokens)
    # places of drafts may stay or step back
    return (int(tokens[0]), int(steps[0])) if steps[0] > 0 and (steps == steps[0]).all() else None


def rows_in_one_piece(array):
    """Whether the numbers along the last axis of an array lie one after another in memory."""
    return array.shape[-1] < 2 or array.strides[-1] == array.itemsize


class Side:
    """The queries or the keys of a launch: tokens of one chunk.

    chunk: its number.  layout: of the chunks.  ranges: of the tokens, as `Ranges`.
    some: a slice or an array of indices, which of these tokens; None for all.
    """

    def __init__(self, layout, chunk, ranges, some=None):
        self.layout, self.chunk, self.ranges, self.some = layout, chunk, ranges, some

    def only(self, some):
        """Some of these tokens, a slice."""
        return Side(self.layout, self.chunk, self.ranges, np.arange(total(self.ranges))[self._picked][some])

    @property
    def _picked(self):
        return slice(None) if self.some is None else self.some

    def __len__(self):
        count = total(self.ranges)
        if isinstance(self.some, np.ndarray):
            return len(self.some)
        return count if self.some is None else len(range(count)[self.some])

    @cached_property
    def indices(self):
        """Their numbers in the chunk: increasing, int64."""
        return np.concatenate([np.arange(*tokens) for tokens in self.ranges])[self._picked]

    @cached_property
    def positions(self):
        """Their positions in the sequence: int64."""
        parts = positions(self.layout, self.chunk, self.ranges)
        return np.concatenate([np.arange(t.start, t.stop, t.step) for t in parts])[self._picked]


class Part:
    """What all parts have.

    name: of the argument.  wanted: whether its gradient is.  arrays, in what follows: of a launch in a plan with
    key_bias, (the numbers of its keys (keys, sequences * heads), their gradient or None, events after which these are
    there).
    """

    by_distance = False

    def __init__(self, backend, name, wanted):
        self.backend, self.name, self.wanted = backend, name, wanted

    def is_view(self, block):
        """Whether the values of a block, (queries, keys) as `Side`s, lie in memory as launches take them."""
        return True

    def view(self, block, arrays):
        """These values."""
        raise NotImplementedError

    def add_to(self, values, block, arrays):
        """Add the values of a block to a work array."""
        self.backend.accumulate(values, self.view(block, arrays))

    def gradient_view(self, block, arrays):
        """Where a launch adds the gradient of such a block."""
        raise NotImplementedError

    def collect_view(self, view, arrays):
        """Take what a launch has added there; returns the event of it, or None."""

    def collect(self, dscores, block, arrays):
        """Add the gradient of a block, a work array (sequences, heads, tokens, keys); returns the event or None."""
        raise NotImplementedError


class TileBias(Part):
    """The caller's tile: what the queries of this rank's row and the keys of its column have.

    array, gradient: (batch or 1, heads or 1, rows, columns) of all chunks of the row and of the column in order of
        their numbers; the gradient is of the dtype of partials, or None.
    layouts: of queries and keys.  chunks: numbers of the chunks of the row, and of the column.
    """

    def __init__(self, backend, name, array, gradient, layouts, chunks):
        super().__init__(backend, name, gradient is not None)
        self.array, self.gradient = array, gradient
        # Launches read and write a row in one piece.  The bias lies so; a caller's memory for its gradient may not.
        self._rows_in_pieces = gradient is not None and not rows_in_one_piece(gradient)
        self._starts = [
            dict(zip(numbers, accumulate(map(layout.length, numbers), initial=0)))
            for layout, numbers in zip(layouts, chunks)
        ]

    def _pieces(self, block):
        """(where in the block, where in the tile) of each rectangle of the block that lies together in the tile."""
        rows, columns = (
            as_slices(side.indices + starts[side.chunk]) for side, starts in zip(block, self._starts, strict=True)
        )
        return [((..., r, c), (..., tile_r, tile_c)) for r, tile_r in rows for c, tile_c in columns]

    def is_view(self, block):
        """As of `Part`."""
        return not self._rows_in_pieces and len(self._pieces(block)) == 1

    def view(self, block, arrays):
        """As of `Part`."""
        ((_, tile),) = self._pieces(block)
        return self.array[tile]

    def add_to(self, values, block, arrays):
        """As of `Part`."""
        for inside, tile in self._pieces(block):
            self.backend.accumulate(values[inside], self.array[tile])

    def gradient_view(self, block, arrays):
        """As of `Part`."""
        ((_, tile),) = self._pieces(block)
        return self.gradient[tile]

    def collect(self, dscores, block, arrays):
        """As of `Part`."""
        for inside, tile in self._pieces(block):
            self.backend.accumulate(self.gradient[tile], dscores[inside])


class KeyBias(Part):
    """A number for each key and head, which travels with the keys.

    sequences, heads: that this rank computes, the heads of each sequence.
    """

    def __init__(self, backend, name, sequences, heads, dtype, wanted):
        super().__init__(backend, name, wanted)
        self._shape, self._dtype = (sequences, heads, 1), dtype

    def _by_head(self, array, after):
        values = self.backend.empty((*self._shape, len(array)), self._dtype)
        self.backend.copy(values.reshape(-1, len(array)), array.transpose(1, 0), after=after)
        return values

    def view(self, block, arrays):
        """As of `Part`."""
        of_keys, _, ready = arrays
        return self._by_head(of_keys, ready)

    def gradient_view(self, block, arrays):
        """As of `Part`."""
        _, gradient, ready = arrays
        return self._by_head(gradient, ready)

    def collect_view(self, view, arrays):
        """As of `Part`."""
        return self.backend.copy(arrays[1], view.reshape(-1, len(arrays[1])).transpose(1, 0))

    def collect(self, dscores, block, arrays):
        """As of `Part`."""
        view = self.gradient_view(block, arrays)
        self.backend.accumulate(view, dscores)
        return self.collect_view(view, arrays)


class DistanceBias(Part):
    """A function of `mpiattn.problem.distances`, of the heads that this rank computes."""

    by_distance = True

    def __init__(self, backend, function, dtype, wanted):
        super().__init__(backend, function.name, wanted)
        self.function, self._dtype = function, dtype

    def distances(self, block):
        """Those between a block's last query and first key to its first query and last key, if all steps are alike.

        Else None.
        """
        queries, keys = block
        if not self.function.of_line or not all(map(len, block)):
            return None
        places = self.function.of_queries(queries.positions), self.function.of_keys(keys.positions)
        sides = list(map(evenly, places))
        if None in sides:
            return None
        (first_q, step_q), (first_k, step_k) = sides
        step = step_q or step_k or 1
        if step != (step_k or step):
            return None
        return first_k - first_q + step * np.arange(1 - len(queries), len(keys))

    def is_view(self, block):
        """As of `Part`."""
        return self.distances(block) is not None

    @QUIET
    def view(self, block, arrays):
        """As of `Part`."""
        values = self.function.of_distances(self.distances(block)).astype(self._dtype)[None, :, None]
        return self.backend.sheared(self.backend.contiguous(values), len(block[0]))

    @QUIET
    def add_to(self, values, block, arrays):
        """As of `Part`."""
        queries, keys = (side.positions for side in block)
        own = self.function.of_pairs(queries, keys).astype(self._dtype)[None]
        self.backend.accumulate(values, self.backend.contiguous(own))

    @QUIET
    def collect(self, dscores, block, arrays):
        """As of `Part`."""
        queries, keys = (side.positions for side in block)
        self.backend.drain()
        self.function.add_gradient(queries, keys, on_host(dscores).sum(axis=0))

    @QUIET
    def collect_sums(self, sums, distances):
        """Add the sums (1, heads, 1, distances) of a block's gradient along its diagonals."""
        self.backend.drain()
        self.function.add_gradient_of_distances(distances, on_host(sums)[0, :, 0])


def by_runs(launches, layouts, chunks):
    """Launches (rows, keys) of a block, cut so that the positions of each increase evenly, where that makes few more.

    layouts, chunks: of queries and keys, and the numbers of their chunks.
    """
    runs = [runs_of(layout, chunk) for layout, chunk in zip(layouts, chunks)]
    cut = []
    for launch in launches:
        parts = [[(part,) for part in overlap(of_side, side)] for of_side, side in zip(runs, launch)]
        cut += product(*parts) if max(map(len, parts)) <= FEW_RUNS else [launch]
    return cut
