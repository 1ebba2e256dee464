"""Numbers of bytes, as users give them: an int, or text with a unit."""

from __future__ import annotations

import re
from typing import Any

from ..errors import ArgumentError
from ..system.values import LARGEST, is_whole


def byte_count(name: str, value: Any, most: int | None = None) -> int:
    """The number of an int of at least 1, or of text such as "512M" or "1.5 GiB", where 1G is 1024M.

    name: of the argument.  most: the largest number allowed.  Raises ArgumentError.
    """
    number = value
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([kKMGT]?)(?:i?B)?", value.strip())
        number = match and int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
    if not is_whole(number, 1, LARGEST if most is None else most):
        limit = f", at most {'2^63 - 1' if most is None else most}"
        raise ArgumentError(
            f"{name} is {value!r}; it must be a positive number of bytes{limit}, such as 800000000, '512M' or '1.5G' "
            "(1G is 1024M)"
        )
    return int(number)
