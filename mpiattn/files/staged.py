"""Datasets that all ranks of a host write where they lie in a file.

A rank writes tokens that follow one another, or are large, straight from its memory.  Others lie between tokens of
other ranks.  These meet in shared memory, of which every rank writes some stretches: the system takes a long stretch
much faster than the parts of its pages that each rank has.
"""

import os
import sys

import numpy as np

from ..comm.agreement import agreement
from ..comm.redistribute import pieces, shared_tokens
from ..comm.shared_memory import shared_memory

ROUND_BYTES = 2**20  # that meet in memory between two agreements
STRETCH_BYTES = 2**18  # of a stretch, or a rank's share of a round if that is more
LARGE = 2**16  # bytes of a token that is worth a write of its own
ALIGNED = 64  # bytes at a multiple of which a stretch begins in memory


def staged(peers, path, errors):
    """A file to write as a `StagedFile`, None on every rank where some rank cannot have it; collective.

    The ranks must be on one host.  errors: makes the context of every write, which says what file it is.
    """
    try:
        file = open(path, "r+b", buffering=0) if sys.byteorder == "little" else None  # noqa: SIM115
    except OSError:
        file = None
    all_have = all(peers.allgather(file is not None))
    memory = shared_memory(peers, 2 * ROUND_BYTES) if all_have else None
    if memory is not None:
        return StagedFile(peers, file, memory, errors)
    if file is not None:
        file.close()
    return None


class StagedFile:
    """A file that all ranks write together; made by `staged`, used collectively."""

    def __init__(self, peers, file, memory, errors):
        self._peers, self._file, self._errors = peers, file, errors
        self._halves = np.split(memory, 2)

    def close(self):
        """Close the file and give back the memory, on this rank."""
        self._file.close()
        self._halves = None

    def write_each(self, chunks, progress=None):
        """Write `Lines`, which may be made one by one: what that raises is raised on every rank.

        progress: called with the number of tokens that have just been written.
        """
        rounds, stretches = self._rounds(chunks, progress or (lambda tokens: None)), []
        while stretches is not None:
            with agreement(self._peers):  # at its end all have filled a half, and what the other one had is written
                for start, memory in stretches[self._peers.rank :: self._peers.size]:
                    self._write(start, memory)
                stretches = next(rounds, None)

    def _rounds(self, chunks, progress):
        """Fill the halves of the memory in turn; yields what each has then: (byte of the file, memory) of stretches."""
        half, used, stretches = 0, 0, []
        for lines in chunks:
            if self._is_straight(lines):
                self._write_own(lines, progress)
                continue
            layout, dtype, row_bytes, each = lines
            step = max(STRETCH_BYTES, ROUND_BYTES // self._peers.size) // row_bytes
            for start, rows in each:
                for first in range(0, layout.seqlen, step):
                    tokens = range(first, min(first + step, layout.seqlen))
                    nbytes = len(tokens) * row_bytes
                    if used + nbytes > ROUND_BYTES:
                        yield stretches
                        half, used, stretches = 1 - half, 0, []
                    memory = self._halves[half][used : used + nbytes]
                    place = memory.view(dtype).reshape(len(tokens), *rows.shape[1:])
                    for of_rows, of_place in shared_tokens(layout, self._peers.rank, tokens):
                        place[of_place] = rows[of_rows]
                    stretches.append((start + first * row_bytes, memory))
                    used += -(-nbytes // ALIGNED) * ALIGNED
                    progress(len(tokens) / len(each))
        yield stretches

    def _is_straight(self, lines):
        """Whether every rank writes its own tokens."""
        of_ranks = (part for rank in range(self._peers.size) for part in lines.layout.ranges(rank))
        return lines.row_bytes >= LARGE or all(part.step == 1 for part in of_ranks)

    def _write_own(self, lines, progress):
        """Write this rank's tokens."""
        layout, dtype, row_bytes, each = lines
        for start, rows in each:
            done = 0
            for piece in pieces(layout, self._peers.rank, row_bytes):
                some = np.ascontiguousarray(rows[done : done + len(piece)], dtype)
                done += len(piece)
                for token, part in [(piece.start, some)] if piece.step == 1 else zip(piece, some):
                    self._write(start + token * row_bytes, part)
                progress(len(piece) * self._peers.size / len(each))

    def _write(self, start, array):
        with self._errors():
            self.write(start, array)

    def write(self, start, array):
        """Write a contiguous array to the bytes from `start` on."""
        left = memoryview(array.reshape(-1).view(np.uint8))
        while left:
            count = os.pwrite(self._file.fileno(), left, start)
            left, start = left[count:], start + count
