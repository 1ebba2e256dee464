"""Single values: rules of whole numbers, truth values, functions, paths; values that ranks compare."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from ..errors import ArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGEST = 2**63 - 1  # counts and positions are int64 in arrays, messages and files
UNLIMITED = math.inf  # of an argument that sees no more once it is larger than a sequence, and is cut to that


def is_whole(value: Any, least: float, most: float = LARGEST) -> bool:
    """Whether a value is a whole number from `least` to `most`; True is none: a mask would be taken for 0 and 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most


def is_list(value: Any) -> TypeGuard[Iterable[Any]]:
    """Whether a value has elements; text is one word, and an array without axes has none."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) > 0


def whole_number(name: str, value: Any, least: int, also: str = "", most: float = LARGEST) -> int:
    """The value as an int.  Raises ArgumentError unless it is a whole number from `least` to `most`.

    also: what else the error says it may be.  most: a power of two less 1, or UNLIMITED.
    """
    if is_whole(value, least, most):
        return int(value)
    bounds = f", at least {least}"
    if isinstance(value, Integral) and int(value) > most:
        bounds = f" from {least} to 2^{int(most).bit_length()} - 1"
    raise ArgumentError(f"{name} is {value!r}; it must be a whole number{bounds}{also}")


def as_int64(array: NDArray[Any]) -> NDArray[np.int64]:
    """Whole numbers as int64; larger ones become the largest, where a cast would make them negative."""
    if array.dtype.kind == "u":
        array = np.minimum(array, np.uint64(LARGEST))
    return array.astype(np.int64)


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


class Unchanged(Enum):
    """The default of arguments that keep an earlier value where they are left out, and of which None is a value."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return self.value


UNCHANGED = Unchanged.UNCHANGED


class Words(str):
    """What stands for a value that a caller gave, in an error as it is."""

    __repr__ = str.__str__
