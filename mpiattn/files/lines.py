"""Chunks by lines: tokens that lie one after another in a file."""

from math import prod
from typing import NamedTuple

import numpy as np

from ..problem.layout import Layout


class Lines(NamedTuple):
    """A rank's chunk of a dataset by lines: tokens of a batch entry, or of a head of it, as they lie in the file.

    row_bytes: of a token in a line.  each: of every line the byte at which token 0 of the layout begins, and this
    rank's rows (tokens, ...).
    """

    layout: Layout
    dtype: np.dtype
    row_bytes: int
    each: list

    @classmethod
    def of(cls, chunk, layout, axis, first, place, entry=None):
        """Of a chunk with its dimensions in the order of the file, and tokens along `axis`.

        first: token of the dataset at which the layout begins.  place: (offset, shape, dtype) of the dataset.  entry:
        the chunk's only one of the batch, by default it has all.
        """
        offset, shape, dtype = place
        row_bytes = dtype.itemsize * prod(shape[axis + 1 :])
        line_bytes, lines = shape[axis] * row_bytes, prod(shape[1:axis])
        start = (offset or 0) + first * row_bytes + (entry or 0) * lines * line_bytes  # no offset without elements
        indices = enumerate(np.ndindex(chunk.shape[:axis]))
        return cls(layout, dtype, row_bytes, [(start + number * line_bytes, chunk[index]) for number, index in indices])
