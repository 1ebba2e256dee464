"""Where packed documents begin and end, from what --documents names."""

import re

import h5py
import numpy as np

from ..comm.agreement import agreement
from ..errors import FileError


def read_documents(peers, file, specs):
    """The arguments of a call that options mean, read by rank 0; collective.

    file: the open input file.  specs: argument of `MeshAttention.forward` -> (option, SPEC or None).  Their values
    are left for the plan to judge.
    """
    found = {}
    with agreement(peers, only=0):
        if peers.rank == 0:
            found = {name: _read(file, option, spec) for name, (option, spec) in specs.items() if spec is not None}
    return peers.allgather(found)[0]


def _read(file, option, spec):
    try:
        if isinstance(file.get(spec), h5py.Dataset):
            return _checked(file[spec])
        with open(spec, "rb") as stream:
            is_array = stream.read(6) == b"\x93NUMPY"
        return _checked(np.load(spec)) if is_array else _of_text(spec)
    except FileNotFoundError:
        raise FileError(f"{option} is {spec!r}; neither has IN a dataset of that name, nor is there such a "
                        "file") from None
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        raise FileError(f"{option} is {spec!r}; it cannot be read: {why}") from None


def _checked(array):
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise ValueError(f"it holds {array.dtype} of shape {array.shape}, it must hold whole numbers in one or two "
                         "dimensions")
    return array[...].astype(np.int64)


def _of_text(path):
    """Numbers of a text file: a line for each batch entry, or all of them on one line or one a line."""
    with open(path) as file:
        lines = [[int(word) for word in re.split(r"[,\s]+", line.strip())] for line in file if line.strip()]
    if all(len(line) == 1 for line in lines):
        return [number for line in lines for number in line]
    return lines[0] if len(lines) == 1 else lines
