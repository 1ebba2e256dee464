"""A file that is mapped into memory, of which rows that lie apart are copied: no other bytes move.

Touching a page that cannot be read, or is past the file's end, kills a process (SIGBUS).  So the system first brings
the pages, which fails with an OSError.  They are given back once they are copied, and count as no memory.
"""

import errno
import mmap
import sys

import numpy as np

POPULATE_READ = 22  # of Linux 5.14, which Python has no name for
SPAN = 2**22  # bytes of a file whose pages are brought at a time


def mapped(file):
    """An open file as a `MappedFile`, or None where the system cannot bring pages without touching them."""
    try:
        return MappedFile(file) if sys.platform.startswith("linux") else None
    except (OSError, ValueError):
        return None


class MappedFile:
    """The bytes of an open file, to read."""

    def __init__(self, file):
        self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._bring(0, 1)

    def close(self):
        """Give back the addresses."""
        self._map.close()

    def copy(self, start, stride, rows):
        """Copy rows that lie `stride` bytes apart, the first at byte `start`, to an array (rows, ...)."""
        count = max(1, SPAN // stride)
        for first in range(0, len(rows), count):
            self._copy_some(start + first * stride, stride, rows[first : first + count])

    def _copy_some(self, start, stride, rows):
        like_row = np.empty((1, *rows.shape[1:]), rows.dtype)
        stop, page = start + (len(rows) - 1) * stride + like_row.nbytes, start - start % mmap.PAGESIZE
        if stop > len(self._map):
            raise OSError(errno.EIO, "it ends before its datasets do")
        self._bring(page, stop - page)
        rows[...] = np.ndarray(rows.shape, rows.dtype, self._map, start, (stride, *like_row.strides[1:]))
        self._map.madvise(mmap.MADV_DONTNEED, page, stop - page)

    def _bring(self, start, length):
        try:
            self._map.madvise(POPULATE_READ, start, length)
        except OSError as error:  # "Bad address", whatever is the reason
            raise OSError(error.errno, "its pages cannot be read") from None
