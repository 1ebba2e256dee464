"""Arguments that are one of several words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ArgumentError
from .closest import of_choices

if TYPE_CHECKING:
    from collections.abc import Collection

ORDERS = "c", "fortran"  # of the axes of a grid: the last one is consecutive in memory, or the first


def one_of(name: str, value: object, choices: Collection[object]) -> None:
    """Raise ArgumentError unless a value is among the choices."""
    try:
        known = value in choices
    except (TypeError, ValueError):  # what has no hash, and arrays, whose comparison has no truth value
        known = False
    if not known:
        raise ArgumentError(
            f"{name} is {value!r}; it may be {', '.join(map(str, choices))}{of_choices(str(value), choices)}"
        )
