"""HDF5 files without MPI: what an input must hold, how an output is laid out and gets its name, clear errors."""

import contextlib
import os
import re

import h5py
import numpy as np

from .errors import FileError
from .problem import ITEMSIZE

INPUTS = ("q", "k", "v")


def _reason(error):
    """The operating system's words in HDF5's long messages."""
    match = re.search(r"error message = '([^']*)'", str(error))
    return match[1] if match else getattr(error, "strerror", None) or str(error)


@contextlib.contextmanager
def file_errors(name, path, doing):
    """Turn errors of HDF5 and the system into one that names the argument, the file and the reason."""
    try:
        yield
    except FileError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise FileError(f"{name} is {str(path)!r}; it cannot be {doing}: {_reason(error)}") from error


def read_shapes(path):
    """The keyword arguments of `Problem` that an input file fixes; FileError where it does not fit."""
    if not os.path.isfile(path):
        raise FileError(f"IN is {str(path)!r}; there is no such file")
    with file_errors("IN", path, "read"), h5py.File(path, "r") as file:
        for name in INPUTS:
            if not isinstance(file.get(name), h5py.Dataset):
                raise FileError(f"IN is {str(path)!r}; it has no dataset {name!r}, it must have q, k and v")
        q, k, v = (file[name] for name in INPUTS)
        shapes = ", ".join(f"{name} {file[name].shape}" for name in INPUTS)
        if not (q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
                and k.shape[:3] == v.shape[:3]):
            raise FileError(f"IN is {str(path)!r}; its shapes do not fit: {shapes}; they must be "
                            "q (batch, seqlen, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim), "
                            "v (batch, seqlen_k, kv_heads, value_dim)")
        names = {data.dtype.name for data in (q, k, v)}
        if len(names) > 1 or not names <= set(ITEMSIZE):
            found = ", ".join(data.dtype.name for data in (q, k, v))
            raise FileError(f"IN is {str(path)!r}; its q, k, v have dtypes {found}; they must have one and the same of "
                            f"{', '.join(ITEMSIZE)}")
        return {"batch": q.shape[0], "seqlen": q.shape[1], "heads": q.shape[2], "head_dim": q.shape[3],
                "seqlen_k": k.shape[1], "kv_heads": k.shape[2], "value_dim": v.shape[3], "dtype": names.pop()}


def reserve(path):
    """Claim a file's disk blocks, so that a full disk is told at once and not hours later."""
    with open(path, "r+b") as file, contextlib.suppress(AttributeError):
        length = os.fstat(file.fileno()).st_size
        if length:
            os.posix_fallocate(file.fileno(), 0, length)


def create_datasets(file, shapes):
    """Empty contiguous datasets, their place in the file fixed at once; shapes: name -> (shape, dtype)."""
    for name, (shape, dtype) in shapes.items():
        how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        how.set_obj_track_times(False)               # the same contents are the same bytes
        kind = h5py.h5t.py_create(np.dtype(dtype), logical=True)
        h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), how)
