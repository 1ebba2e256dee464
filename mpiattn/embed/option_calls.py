"""The functions of mpiattn.h about options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ArgumentError
from . import arrays, options
from .options import OPTIONS
from .plans import PLANS

if TYPE_CHECKING:
    from .arrays import Described

CALLS = (
    "options_create",
    "options_set",
    "options_set_text",
    "options_set_integers",
    "options_set_array",
    "options_set_layout",
    "options_unset",
    "options_free",
)


def options_create(text: str | None, handle: memoryview | None) -> None:
    """New options, from a text."""
    word = arrays.numbers("options", handle)
    word[0] = OPTIONS.add(options.of_text(text))


def options_set(number: int, name: str | None, value: float) -> None:
    """Set a number."""
    OPTIONS[number][_name(name)] = options.of_value(_name(name), value)


def options_set_text(number: int, name: str | None, value: str | None) -> None:
    """Set what a text means."""
    if value is None:
        raise ArgumentError(f"value of {_name(name)} is NULL; it must be text")
    OPTIONS[number][_name(name)] = options.of_word(_name(name), value.strip())


def options_set_integers(number: int, name: str | None, memory: memoryview | None) -> None:
    """Set a list of numbers, a copy."""
    values = arrays.numbers("values", memory).tolist()
    OPTIONS[number][_name(name)] = options.of_integers(_name(name), values)


def options_set_array(number: int, name: str | None, described: Described | None) -> None:
    """Set an array, whose memory stays the program's."""
    options.set_array(OPTIONS[number], _name(name), described)


def options_set_layout(number: int, name: str | None, plan: int, keys: int) -> None:
    """Set the layout of a plan's queries or keys."""
    of_plan = PLANS[plan]
    OPTIONS[number][_name(name)] = of_plan.k_layout if keys else of_plan.q_layout


def options_unset(number: int, name: str | None) -> None:
    """Forget an option, if it is set."""
    OPTIONS[number].pop(_name(name), None)


def options_free(number: int) -> None:
    """Forget the options."""
    OPTIONS.pop(number)


def _name(name: str | None) -> str:
    if name is None or not name.isidentifier():
        raise ArgumentError(f"name is {'NULL' if name is None else repr(name)}; it must be that of an argument")
    return name
