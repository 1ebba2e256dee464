"""The boundaries of packed documents, read from the dataset or file that --documents names."""

import io
import re

import numpy as np

from ..errors import FileError
from ..files.numbers import Numbers


def read_documents(group, specs, files=None):
    """Documents as arguments of `MeshAttention.forward`, which checks their values; raises FileError.

    group: the open input file, or a group of it.  specs: argument of `MeshAttention.forward` -> (option, SPEC or None).
    files: a dict that keeps what other files hold, which may be pipes, for more groups.
    """
    files = {} if files is None else files
    return {name: _read(group, option, spec, files) for name, (option, spec) in specs.items() if spec is not None}


def read_file(option, path):
    """Documents from a .npy or text file; raises FileError.  option: what is named where that fails."""
    return _read(None, option, path, {})


def _read(group, option, spec, files):
    try:
        dataset = None if group is None else Numbers.of(group, spec)
        if dataset is not None:
            _check_kind(dataset.dtype, dataset.shape)
            return _checked(dataset.whole())
        if spec not in files:
            with open(spec, "rb") as stream:
                data = stream.read()  # once, because it may be a pipe
            files[spec] = _checked(_of_npy(data)) if data.startswith(b"\x93NUMPY") else _of_text(data.decode())
        return files[spec]
    except FileNotFoundError:
        may_be = "a file" if group is None else "a dataset of IN or a file"
        raise FileError(f"{option} is {spec!r}; it must be {may_be}, and there is none of that name") from None
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        raise FileError(f"{option} is {spec!r}; it cannot be read: {why}") from None


def _of_npy(data):
    try:
        return np.load(io.BytesIO(data))
    except Exception as error:  # Python's parser reads the header, and raises whatever it does
        raise ValueError(f"it is no whole .npy file of numbers: {error}") from error


def _check_kind(dtype, shape):
    """Raise ValueError unless documents may be numbers of this dtype, by its name, in this shape."""
    if not dtype.startswith(("int", "uint")) or len(shape) not in (1, 2):
        raise ValueError(f"it holds {dtype} of shape {shape}, it must hold whole numbers in one or two dimensions")


def _checked(values):
    _check_kind(values.dtype.name, values.shape)
    largest = np.iinfo(np.int64).max
    if values.size and values.max() > largest:
        raise ValueError(f"it holds {values.max()}, it must hold numbers up to {largest}")
    return values.astype(np.int64)


def _of_text(text):
    """Numbers of a text file: a line per batch entry; for a single entry also one number per line."""
    lines = [list(map(_number, re.split(r"[,\s]+", line.strip()))) for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError("it holds no numbers")
    if all(len(line) == 1 for line in lines):
        return [number for line in lines for number in line]
    return lines[0] if len(lines) == 1 else lines


def _number(word):
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"it holds {word!r}, it must hold whole numbers, between them blanks or commas") from None
