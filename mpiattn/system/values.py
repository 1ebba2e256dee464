"""Single values: rules of whole numbers, truth values, functions, paths; values that ranks compare."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np

from ..errors import ArgumentError


def whole_number(name: str, value: Any, least: int, also: str = "") -> int:
    """The value as an int.  Raises ArgumentError unless it is a whole number, at least `least`; True is none.

    also: what else the error says it may be.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ArgumentError(f"{name} is {value!r}; it must be a whole number, at least {least}{also}")
    return int(value)


def check_function(name: str, value: Any) -> None:
    """Raise ArgumentError unless the value can be called or is None."""
    if value is not None and not callable(value):
        raise ArgumentError(f"{name} is {value!r}; it must be a function, or None")


def truth(name: str, value: Any) -> bool:
    """The value as a bool.  Raises ArgumentError unless it is True or False, or NumPy's."""
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(f"{name} is {value!r}; it must be True or False")
    return bool(value)


def path_text(name: str, value: Any) -> str:
    """The path as text.  Raises ArgumentError unless it is a str or a path."""
    if not isinstance(value, str | os.PathLike):
        raise ArgumentError(f"{name} is {value!r}; it must be a str or a path")
    return os.fspath(value)


@dataclass(frozen=True)
class AsGiven:
    """An argument that ranks compare by a value made of it, and name as the caller gave it."""

    value: Any
    given: Any = field(compare=False)

    def __repr__(self):
        return repr(self.value)


class Words(str):
    """What stands for a value that a caller gave, in an error as it is."""

    __repr__ = str.__str__
