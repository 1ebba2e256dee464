"""Attributes of input files that decide how their datasets are read.

Other programs write a text as bytes, and a single value as an array of one element.
"""

import numpy as np

from ..errors import FileError

UNKNOWN = "of a type that NumPy does not have"


def has(group, name):
    """Whether a group, or else its file, has an attribute."""
    return name in group.attrs or name in group.file.attrs


def _value(group, name):
    """A value of a group, or else of its file, a single one if it is in an array of one; None where neither has it."""
    try:
        value = (group if name in group.attrs else group.file).attrs.get(name)
    except (TypeError, NotImplementedError):
        return UNKNOWN
    return value.reshape(-1)[0] if isinstance(value, np.ndarray) and value.size == 1 else value


def text_of(group, name):
    """The text of an attribute; None if it is none."""
    value = _value(group, name)
    if isinstance(value, bytes):
        value = value.decode(errors="replace").rstrip("\0 ")
    return value if isinstance(value, str) else None


def dim_of(group, name, argument, path, most):
    """An attribute that is a number of elements, at most `most`; FileError, naming the argument, if it is none."""
    value = _value(group, name)
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
    if whole and 1 <= value <= most:
        return int(value)
    value = value.item() if isinstance(value, np.number) else value
    raise FileError(
        f"{argument} is {str(path)!r}; its attribute {name} is {value!r}, it must be a "
        f"whole number from 1 to head_dim, which is {most}"
    )
