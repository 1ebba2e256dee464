"""An HDF5 filter of this process that changes nothing and counts how often a chunk goes through it to be read."""

import ctypes
from functools import cache
from pathlib import Path

import h5py

NUMBER = 300  # one of those that the HDF Group leaves for tests
READING = 0x100  # of the flags
counts = {"read": 0}

_FILTER = ctypes.CFUNCTYPE(
    ctypes.c_size_t, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p
)


class _Class(ctypes.Structure):
    """H5Z_class2_t."""

    _fields_ = [
        ("version", ctypes.c_int),
        ("id", ctypes.c_int),
        ("encoder_present", ctypes.c_uint),
        ("decoder_present", ctypes.c_uint),
        ("name", ctypes.c_char_p),
        ("can_apply", ctypes.c_void_p),
        ("set_local", ctypes.c_void_p),
        ("filter", _FILTER),
    ]


@_FILTER
def _pass_on(flags, count, values, nbytes, size, buffer):
    counts["read"] += bool(flags & READING)
    return nbytes


_of_hdf5 = _Class(1, NUMBER, 1, 1, b"counted", None, None, _pass_on)


@cache
def register():
    """Hand the filter to the HDF5 library that h5py has loaded."""
    h5py.h5z.filter_avail(1)
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libhdf5" in line}
    (path,) = [path for path in paths if "_hl" not in Path(path).name]
    assert ctypes.CDLL(path).H5Zregister(ctypes.byref(_of_hdf5)) >= 0


def dataset(group, name, array, chunks):
    """A dataset whose chunks go through the filter."""
    register()
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_chunk(chunks)
    how.set_filter(NUMBER)
    space, kind = h5py.h5s.create_simple(array.shape), h5py.h5t.py_create(array.dtype)
    h5py.h5d.create(group.id, name.encode(), kind, space, how)
    group[name][...] = array
