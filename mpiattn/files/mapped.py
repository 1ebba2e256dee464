"""Datasets read and written where they lie in a file that is mapped into memory: a byte is copied once.

Touching a page that cannot be read, or is past the file's end, kills a process (SIGBUS).  So the system first brings
the pages of a part, which fails with an OSError.  They are given back when the part is copied, and count as no memory.
What lies in one piece, in the file and in memory, is not copied by way of the map: the system itself is faster.
"""

import errno
import math
import mmap
import os
import sys
import weakref

import h5py
import numpy as np

from ..problem.problem import ITEMSIZE, dtype_name
from .hdf5 import dtype_of, stored_type

POPULATE_READ, POPULATE_WRITE = 22, 23  # of Linux 5.14, which Python has no names for
SPAN = 2**22  # bytes of a file whose pages are brought at a time, or that are moved at a time


def mapped(path, write=False):
    """The file as a `MappedFile`, or None where the system cannot bring pages without touching them."""
    try:
        return MappedFile(path, write) if sys.platform.startswith("linux") and sys.byteorder == "little" else None
    except (OSError, ValueError):
        return None


class MappedFile:
    """The datasets of a file whose elements lie there one after another, as they would in memory.

    write: to write them; else they are read.
    """

    def __init__(self, path, write=False):
        self._path, self._file = path, open(path, "r+b" if write else "rb", buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._map = mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ | (mmap.PROT_WRITE if write else 0))
        self._populate = POPULATE_WRITE if write else POPULATE_READ
        self._bring(0, 1)

    def has(self, dataset):
        """Whether it can read a dataset."""
        name, how = dtype_of(dataset), dataset.id.get_create_plist()
        return (
            name in ITEMSIZE
            and dataset.id.get_type() == stored_type(np.dtype(dtype_name(name)))
            and how.get_layout() == h5py.h5d.CONTIGUOUS
            and not how.get_external_count()
            and dataset.id.get_storage_size() == dataset.size * ITEMSIZE[name] > 0
        )

    def read(self, dataset, part, into):
        """Copy the elements at the indices `part`, a tuple of slices, into an array of their shape and dtype."""
        self._copy(dataset.id.get_offset(), dataset.shape, into.dtype, part, into)

    def write(self, offset, shape, dtype, part, array):
        """Copy an array to the indices `part` of the dataset of that offset, shape and dtype."""
        self._copy(offset, shape, dtype, part, array)

    def _copy(self, offset, shape, dtype, part, array):
        whole = np.frombuffer(self._map, dtype, math.prod(shape), offset).reshape(shape)
        self._copy_part(whole[part], array, whole.ctypes.data - offset)

    def _copy_part(self, part, array, base):
        """Copy between an array and a part of the file, which begins at the address `base`."""
        if not part.size:
            return
        if part.flags.c_contiguous and array.flags.c_contiguous and part.dtype == array.dtype:
            self._move(part.ctypes.data - base, array)
            return
        span = sum((count - 1) * stride for count, stride in zip(part.shape, part.strides)) + part.itemsize
        if span > SPAN:
            axis = next(axis for axis, count in enumerate(part.shape) if count > 1)
            step = max(1, SPAN // part.strides[axis])
            for start in range(0, part.shape[axis], step):
                some = (*[slice(None)] * axis, slice(start, start + step))
                self._copy_part(part[some], array[some], base)
            return
        first = part.ctypes.data - base
        page = first - first % mmap.PAGESIZE
        self._bring(page, first + span - page)
        if self._populate == POPULATE_WRITE:
            part[...] = array
        else:
            array[...] = part
        self._map.madvise(mmap.MADV_DONTNEED, page, first + span - page)

    def _move(self, start, array):
        """Read an array from the bytes at `start`, or write it there."""
        move = os.pwritev if self._populate == POPULATE_WRITE else os.preadv
        left = memoryview(array.reshape(-1).view(np.uint8))
        while left:
            count = move(self._file.fileno(), [left[:SPAN]], start)
            if not count:
                raise OSError(errno.EIO, "it ends before its datasets do")
            left, start = left[count:], start + count

    def _bring(self, start, length):
        try:
            self._map.madvise(self._populate, start, length)
        except OSError as error:  # "Bad address", whatever is the reason
            if self._populate == POPULATE_WRITE:
                with open(self._path, "r+b") as file:
                    os.posix_fallocate(file.fileno(), start, length)  # fails with the reason if the disk is full
            raise OSError(error.errno, "the system cannot bring its pages") from None
