"""Numbers in words, for messages and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


def number(count: Any, noun: str) -> str:
    """A number of things: "1 row", "2 rows"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def span(values: Collection[Any], show: Callable[[Any], str] = str) -> str:
    """The range of some values: "2" or "2 to 5"."""
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"
