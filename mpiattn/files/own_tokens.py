"""A rank's own tokens, read where they lie in a file.

Tokens that follow one another are read together.  Others, between those of other ranks, are copied out of the mapped
file.  If the system cannot map it, or the tokens are small, a rank reads what lies between them too and ignores that,
since a call of the system for each takes longer.
"""

import errno
import os
from itertools import groupby

import numpy as np

from ..comm.redistribute import pieces
from ..comm.rounds import as_bytes
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
            parts, lines = pieces(layout, rank, row_bytes), len(each)
            report = progress and (lambda tokens, lines=lines: progress(tokens / lines))
            for start, rows in each:
                done = 0
                for together, group in groupby(parts, lambda part: part.step == 1):
                    some, read = list(group), self._read_runs if together else self._read_stripes
                    end = done + sum(map(len, some))
                    read(start, some, row_bytes, rows[done:end], report)
                    done = end

    def _read_runs(self, start, runs, row_bytes, rows, report=None):
        """Read ranges of step 1 into rows (tokens, ...), one after another.

        start: the byte of token 0.  report: called with the number of tokens that were just read.
        """
        contiguous, buffer = rows.flags.c_contiguous, rows
        if not contiguous:
            buffer = np.empty((min(len(rows), max(1, SPAN // row_bytes)), *rows.shape[1:]), rows.dtype)
        memory, filled, stored = memoryview(as_bytes(buffer)), 0, 0
        for run in runs:
            while run:
                piece = run[: len(buffer) - filled]
                run = run[len(piece) :]
                end = filled + len(piece)
                self._read(start + piece.start * row_bytes, memory[filled * row_bytes : end * row_bytes])
                filled = end
                if report:
                    report(len(piece))
                if filled == len(buffer) and not contiguous:
                    rows[stored : stored + filled] = buffer
                    stored, filled = stored + filled, 0
        if not contiguous:
            rows[stored:] = buffer[:filled]

    def _read_stripes(self, start, parts, row_bytes, rows, report=None):
        """As `_read_runs`, of ranges of a larger step."""
        done = 0
        for part in parts:
            end = done + len(part)
            self._read_stripe(start, part, row_bytes, rows[done:end])
            done = end
            if report:
                report(len(part))

    def _read_stripe(self, start, part, row_bytes, rows):
        """As `_read_stripes`, of one range."""
        if row_bytes >= MAPPED and self._mapped is not None:
            with self._errors():
                self._mapped.copy(start + part.start * row_bytes, part.step * row_bytes, rows)
            return
        alone = part.step * row_bytes >= APART  # whether each token is read by itself
        step = 1 if alone else part.step
        count = max(1, SPAN // (step * row_bytes))
        scratch = np.empty((min(count, len(part)) * step, *rows.shape[1:]), rows.dtype)
        memory = memoryview(as_bytes(scratch))
        for first in range(0, len(part), count):
            some = part[first : first + count]
            if alone:
                for number, token in enumerate(some):
                    self._read(start + token * row_bytes, memory[number * row_bytes : (number + 1) * row_bytes])
            else:
                self._read(start + some[0] * row_bytes, memory[: (some[-1] + 1 - some[0]) * row_bytes])
            rows[first : first + count] = scratch[: len(some) * step : step]

    def _read(self, start, memory):
        try:
            self.read(start, memory)
        except OSError:  # a context for every read takes longer
            with self._errors():
                raise

    def read(self, start, memory):
        """Read the bytes from `start` on into a memoryview of bytes."""
        while memory:
            count = os.preadv(self._file.fileno(), [memory], start)
            if not count:
                raise OSError(errno.EIO, "it ends before its datasets do")
            memory, start = memory[count:], start + count
