"""A rank's own tokens, read where they lie in a file.

Tokens between those of other ranks are copied out of the mapped file.  If the system cannot map it, or the tokens are
small, a rank reads what lies between them too and ignores that, since a call of the system for each takes longer.
"""

import errno
import os

import numpy as np

from ..comm.redistribute import pieces
from .mapped import mapped

SPAN = 2**19  # bytes that are read at a time to copy tokens out of, which they are while a core's cache has them
MAPPED = 2**9  # bytes from which on a token is copied out of the mapped file
APART = 2**15  # bytes from a token to the next from which on each is read by itself


class OwnTokens:
    """An open file of which this rank reads its tokens.

    errors: makes the context of every read, which says what file it is.

    Raises OSError where the file ends too early.
    """

    def __init__(self, file, errors):
        self._file, self._errors = os.fdopen(os.dup(file.fileno()), "rb", buffering=0), errors
        self._mapped = mapped(self._file)

    def close(self):
        """Close the file."""
        if self._mapped is not None:
            self._mapped.close()
        self._file.close()

    def read_each(self, chunks, rank, progress=None):
        """Read `Lines` of a rank into their rows.  progress: called with the number of tokens that were just read."""
        for layout, _, row_bytes, each in chunks:
            for start, rows in each:
                done = 0
                for piece in pieces(layout, rank, row_bytes):
                    self._read_piece(start, piece, row_bytes, rows[done : done + len(piece)])
                    done += len(piece)
                    if progress:
                        progress(len(piece) / len(each))

    def _read_piece(self, start, piece, row_bytes, rows):
        """Read the tokens of a range; its rows are of `row_bytes`, the first possible token is at byte `start`."""
        if piece.step > 1 and row_bytes >= MAPPED and self._mapped is not None:
            with self._errors():
                self._mapped.copy(start + piece.start * row_bytes, piece.step * row_bytes, rows)
            return
        alone = piece.step * row_bytes >= APART  # whether each token is read by itself
        straight = rows.flags.c_contiguous  # whether tokens that follow one another can be read into their rows
        step = 1 if alone else piece.step
        count = len(piece) if straight and step == 1 else max(1, SPAN // (step * row_bytes))
        for first in range(0, len(piece), count):
            some, place = piece[first : first + count], rows[first : first + count]
            there = place if straight and step == 1 else np.empty((count * step, *rows.shape[1:]), rows.dtype)
            left = memoryview(there.reshape(-1).view(np.uint8))
            with self._errors():
                if alone and piece.step > 1:
                    for number, token in enumerate(some):
                        self.read(start + token * row_bytes, left[number * row_bytes : (number + 1) * row_bytes])
                else:
                    self.read(start + some[0] * row_bytes, left[: (some[-1] + 1 - some[0]) * row_bytes])
            if there is not place:
                place[...] = there[: len(some) * step : step]

    def read(self, start, memory):
        """Read the bytes from `start` on into a memoryview of bytes."""
        while memory:
            count = os.preadv(self._file.fileno(), [memory], start)
            if not count:
                raise OSError(errno.EIO, "it ends before its datasets do")
            memory, start = memory[count:], start + count
