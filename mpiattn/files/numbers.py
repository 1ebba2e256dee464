"""The numbers of a dataset of an open file, by whatever attributes they are packed; every reader of numbers uses it."""

import numpy as np

from ..errors import FileError
from . import hdf5
from .packing import packing_of

MISSING = ("error", "nan")  # what becomes of a missing number


def missing_error(argument, path, texts):
    """The error for missing numbers of a file.  texts: what `Numbers.missing_text` says of its datasets."""
    return FileError(
        f"{argument} is {str(path)!r}; numbers are missing, by its attributes _FillValue, missing_value or "
        f"valid_range: {'; '.join(texts)}; `--missing nan`, of `mpiattn run`, `decode` and `convert`, reads them as NaN"
    )


class Numbers:
    """A dataset of an open file, read as the numbers that it stands for.

    shape, dtype: of the numbers; dtype is its name.  data: the h5py dataset.  may_miss: whether numbers may be missing;
    those that are become NaN, and are counted.  unpacked: how they are made of the dataset's elements, in words; "" if
    they are these.

    Raises ValueError where attributes do not say which numbers these are.
    """

    def __init__(self, data):
        stored = hdf5.dtype_of(data)
        self.data, self.shape, self._packing = data, data.shape, packing_of(data, stored)
        self.dtype = self._packing.dtype if self._packing else stored
        self.unpacked = str(self._packing or "")
        self.may_miss = bool(self._packing and self._packing.may_miss)
        self._missing, self._first = 0, 0

    @classmethod
    def of(cls, group, name, axis=None):
        """The numbers of that name in an open file or group, None if there are none; errors of `hdf5.dataset_of`.

        axis: as of `hdf5.dataset_for_pieces`.
        """
        data = hdf5.dataset_for_pieces(group, name, axis)
        return None if data is None else cls(data)

    def chunk_length(self, axis):
        """The length of chunks along an axis, of which none should be read by two ranks; 1 if nothing is against it."""
        return self.data.chunks[axis] if hdf5.is_compressed(self.data) else 1

    def place(self, file):
        """Where the numbers lie in the bytes of a file, as `hdf5.place_of`; None if they do not lie there as such."""
        return None if self._packing else hdf5.place_of(self.data, file)

    def read(self, starts, shape, how=None, into=None, axis=0, steps=None):
        """Some of the numbers; arguments as of `hdf5.read`."""
        if self._packing is None:
            return hdf5.read(self.data, starts, shape, how, into, axis, steps)
        stored = hdf5.read(self.data, starts, shape, how, None, axis, steps)
        return self._unpacked(stored, np.empty(shape, self.dtype) if into is None else into, starts, axis, steps)

    def _unpacked(self, stored, into, starts, axis=0, steps=None):
        missing = self._packing.unpack(stored, into)
        if missing is not None:
            self._count(missing, starts, axis, steps)
        return into

    def whole(self):
        """All numbers of a small dataset, of which none may be missing: ValueError."""
        stored = np.asarray(self.data[()])
        if self._packing is None:
            return stored
        stored = stored.astype(stored.dtype.newbyteorder("="))
        numbers = self._unpacked(stored, np.empty(self.shape, self.dtype), (0,) * stored.ndim)
        wrong = self.missing_text(self.data.name, *self.take_missing())
        if wrong:
            raise ValueError(f"numbers are missing by its attributes: {wrong}")
        return numbers

    def _count(self, missing, starts, axis, steps):
        """Count missing numbers of a part of the dataset."""
        steps, inside = steps or (1,) * missing.ndim, np.unravel_index(int(missing.argmax()), missing.shape)
        place = [int(start + step * index) for start, step, index in zip(starts, steps, inside)]
        points = self.shape[axis : axis + len(self.shape) - missing.ndim + 1]  # a grid, or all tokens
        if len(points) > 1:
            place[axis : axis + 1] = np.unravel_index(place[axis], points)
        first = int(np.ravel_multi_index(place, self.shape))
        self._first = min(self._first, first) if self._missing else first
        self._missing += int(missing.sum())

    def take_missing(self):
        """(how many numbers were missing since the last call, the first of them), which counts elements in C order."""
        missing, self._missing = (self._missing, self._first), 0
        return missing

    def missing_text(self, name, count, first):
        """What `take_missing` says, in words; "" if no number was missing."""
        if not count:
            return ""
        place = ", ".join(map(str, np.unravel_index(first, self.shape)))
        return f"{count} of {name}, the first is {name}[{place}]"
