"""The boundaries of packed documents, read from the dataset or file that --documents names."""

import re

import h5py
import numpy as np

from ..comm.agreement import agreement
from ..errors import FileError


def read_documents(peers, file, specs):
    """Read documents on rank 0 and return them as arguments of `MeshAttention.forward`; collective.

    file: the open input file.  specs: argument of `MeshAttention.forward` -> (option, SPEC or None).  The plan checks
    the values.
    """
    arguments = {}
    with agreement(peers, only=0):
        if peers.rank == 0:
            arguments = {name: _read(file, option, spec) for name, (option, spec) in specs.items() if spec is not None}
    return peers.allgather(arguments)[0]


def _read(file, option, spec):
    try:
        if isinstance(file.get(spec), h5py.Dataset):
            return _checked(file[spec])
        with open(spec, "rb") as stream:
            is_array = stream.read(6) == b"\x93NUMPY"
        return _checked(np.load(spec)) if is_array else _of_text(spec)
    except FileNotFoundError:
        raise FileError(f"{option} is {spec!r}; it must be a dataset of IN or a file, and there is neither") from None
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        raise FileError(f"{option} is {spec!r}; it cannot be read: {why}") from None


def _checked(array):
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise ValueError(
            f"it holds {array.dtype} of shape {array.shape}, it must hold whole numbers in one or two dimensions"
        )
    return array[...].astype(np.int64)


def _of_text(path):
    """Numbers of a text file: a line per batch entry; for a single entry also one number per line."""
    with open(path) as file:
        lines = [[int(word) for word in re.split(r"[,\s]+", line.strip())] for line in file if line.strip()]
    if all(len(line) == 1 for line in lines):
        return [number for line in lines for number in line]
    return lines[0] if len(lines) == 1 else lines
