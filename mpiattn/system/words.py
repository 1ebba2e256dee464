"""Numbers in words, for messages and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


def reason(text: str) -> str:
    """The line of a failed program's output that says why: the first in a frame of dashes, as MPIs', else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    frame = next((place for place, line in enumerate(lines) if not line.strip("-")), len(lines))
    said = [line for line in lines[frame:] if line.strip("-")]
    return next(iter(said or lines[-1:]), "")


def number(count: Any, noun: str) -> str:
    """A number of things: "1 row", "2 rows", "2 queries", "1 to 2 rows"; count may be a `span`."""
    return f"{count} {noun if str(count) == '1' else plural(noun)}"


def plural(noun: str) -> str:
    """Several of a thing: "rows", "queries", "keys"."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def as_text(name: str) -> str:
    """The name of a file, with bytes escaped that are no text; HDF5 and UTF-8 refuse them."""
    return name.encode(errors="backslashreplace").decode()


def span(values: Collection[Any], show: Callable[[Any], str] = str) -> str:
    """The range of some values: "2" or "2 to 5"."""
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"


def size(nbytes: float) -> str:
    """Bytes in binary units with three digits: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"


def byte_option(nbytes: int) -> str:
    """Bytes as users give them in options, at least as many: "1.5G"."""
    for unit, factor in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if nbytes >= factor:
            return f"{-(-nbytes * 100 // factor) / 100:g}{unit}"
    return str(nbytes)
