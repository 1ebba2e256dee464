"""The biases by distance of a decoding call: each launch gets their values for the keys that its queries see.

The values are made where they are used and sent nowhere.  A launch has at most PIECE of them or, where that is more,
those of LEAST keys or one page: it is of several sequences with few keys, or of some pages of one sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arguments.biases import BiasArguments
from ..errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ..backends.base import Backend
    from ..backends.block import Array, BlockInputs
    from ..masks.interval_mask import IntervalMask
    from ..problem.distances import ByDistance
    from ..problem.problem import Problem
    from .ledgers import Ledgers

    Integers = NDArray[np.integer[Any]]

PIECE = 2**20  # numbers of a bias
LEAST = 256  # keys


class Launch(NamedTuple):
    """A part of a launch over a rank's keys.

    rows: of the call, a slice.  block: of these rows and some of their keys; None where they see none at all.
    more: whether the rows have the partial of other keys already.
    """

    rows: slice
    block: BlockInputs | None
    more: bool


class DecodeBiases:
    """The biases of a call.

    functions: at least one `ByDistance`.
    sequences: numbers of those of the call.  Each has the problem's number of queries, those of its last tokens.
    mask: of the call, or None: it may give tokens places.
    """

    def __init__(
        self,
        backend: Backend,
        problem: Problem,
        functions: list[ByDistance],
        ledgers: Ledgers,
        sequences: Sequence[int],
        mask: IntervalMask | None,
    ) -> None:
        self._mask = mask
        self._backend, self._problem, self._functions = backend, problem, functions
        self._ledgers, self._sequences, self._queries = ledgers, sequences, problem.seqlen

    def launches(self, block: BlockInputs, rank: int, rows: range) -> Iterator[Launch]:
        """Cut a launch over a rank's keys into parts whose biases are short enough, in order of rows and of keys.

        block: q of `rows`, intervals of all rows of the call, and a list of the tables of all sequences.
        """
        if not rows:
            return
        (first, last), all_tables, page_size = self._seen(block, rows), list(block.pages or ()), block.page_size or 1
        pages = first // page_size  # of each sequence, the first that a query sees
        widths = last - pages * page_size
        for some in self._groups(rows, widths):
            these = slice(max(rows.start, some.start * self._queries), min(rows.stop, some.stop * self._queries))
            q = block.q[these.start - rows.start : these.stop - rows.start]
            count = self._pages_at_a_time(len(q), page_size)
            launched = False
            for page in range(0, -(-widths[some].max(initial=0).item() // page_size), count):
                shift = (pages[some] + page) * page_size
                columns = min(count * page_size, (last[some] - shift).max().item())
                begin, end = (
                    (side[these] - self._of_rows(shift, some, these)).clip(0, columns).astype(np.int32)
                    for side in (block.begin, block.end)
                )
                if not (begin < end).any():
                    continue
                keys = np.maximum(first[some] - shift, 0), np.minimum(last[some] - shift, columns)
                bias = self._values(rank, some, these, shift, keys, columns)
                tables = [
                    all_tables[i][start : start + count]
                    for i, start in zip(range(some.start, some.stop), (shift // page_size).tolist())
                ]
                part = block._replace(q=q, begin=begin, end=end, pages=tables, bias=self._backend.contiguous(bias))
                yield Launch(these, part, launched)
                launched = True
            if not launched:
                yield Launch(these, None, False)

    def _seen(self, block: BlockInputs, rows: range) -> tuple[Integers, Integers]:
        """Of every sequence, the rank's first key that one of the rows sees and one past the last; 0, 0 for none."""
        begin, end = (side.reshape(-1, self._queries).astype(np.int64) for side in (block.begin, block.end))
        number = np.arange(begin.size).reshape(begin.shape)
        see = (begin < end) & (rows.start <= number) & (number < rows.stop)
        last = np.where(see, end, 0).max(axis=1)
        return np.where(see, begin, last[:, None]).min(axis=1), last

    def _groups(self, rows: range, widths: Integers) -> Iterator[slice]:
        """The sequences of each part: one or, where these are whole and have few keys, several.  rows: at least one."""
        first, last = rows.start // self._queries, -(-rows.stop // self._queries)
        whole = (rows.start, rows.stop) == (first * self._queries, last * self._queries)
        most = PIECE // (self._queries * self._problem.heads) if whole else 0
        start, widest = first, 0
        for number, width in enumerate(widths[first:last].tolist(), first):
            widest = max(widest, width)
            if number > start and (number - start + 1) * widest > most:
                yield slice(start, number)
                start, widest = number, width
        yield slice(start, last)

    def _pages_at_a_time(self, rows: int, page_size: int) -> int:
        return max(-(-LEAST // page_size), PIECE // (rows * self._problem.heads * page_size))

    def _of_rows(self, of_sequences: Integers, some: slice, rows: slice) -> Integers:
        """A number of each of some sequences, for the rows of these."""
        repeated: Integers = np.repeat(of_sequences, self._queries)
        start = some.start * self._queries
        return repeated[rows.start - start : rows.stop - start]

    def _values(
        self, rank: int, some: slice, rows: slice, shift: Integers, keys: tuple[Integers, Integers], columns: int
    ) -> NDArray[Any]:
        """The bias of a part: (rows, heads, columns), 0 for keys that no query sees.

        shift: number of the rank's key in column 0, of each sequence.  keys: the columns that queries see.
        """
        p, queries = self._problem, self._queries
        bias = np.zeros((rows.stop - rows.start, p.heads, columns), p.partial_dtype)
        for i, before, first, last in zip(range(some.start, some.stop), shift.tolist(), *map(np.ndarray.tolist, keys)):
            if first >= last:
                continue
            sequence = self._sequences[i]
            start, stop = max(rows.start, i * queries), min(rows.stop, (i + 1) * queries)
            ledger = self._ledgers[sequence]
            at = ledger.seqlen - queries + np.arange(start, stop) - i * queries
            of_keys = ledger.numbered(rank, before + first, before + last)
            places = None if self._mask is None else self._mask.places(ledger.seqlen)
            if places is not None:
                at, of_keys = places.of(at), places.of(of_keys)
            distances = of_keys[None] - at[:, None]
            with np.errstate(all="ignore"):  # a table may hold -inf
                function, *others = self._functions
                values = function.of_distances(distances)
                for other in others:
                    values = values + other.of_distances(distances)
                bias[start - rows.start : stop - rows.start, :, first:last] = values.swapaxes(0, 1)
        return bias


def checked_functions(
    alibi_slopes: Array | None, relative_bias: Array | None, problem: Problem, backend: Backend, same: dict[str, Any]
) -> list[ByDistance]:
    """The biases of a call as functions of the distance; none where neither argument is given.

    same: gets what must be the same on every rank.  Raises ArgumentError.
    """
    given = BiasArguments(alibi_slopes=alibi_slopes, relative_bias=relative_bias)
    if given.none:
        return []
    if "bias" not in backend.takes:
        raise ArgumentError(f"{given.given[0]} is given; the back end {backend.name} computes without biases")
    functions = given.functions(problem, slice(None))
    same |= given.compared()
    return functions
