"""What masks check and say of their arguments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from hashlib import sha256
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..errors import ArgumentError, KeywordError
from ..system.closest import of_choices
from ..system.values import UNLIMITED, truth, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable


# What NATTEN calls an argument.
ELSEWHERE = {"window_size": "kernel_size", "is_causal": "causal", "spatial_shape": "shape"}
# Arguments of others that have no counterpart, and why.
WITHOUT = {
    "stride": "there is no stride here: every point has a window of its own, as with NATTEN's stride=1",
    "mask_mod": "no mask is a function of pairs here: masks.function takes one from positions of queries to the "
    "intervals of keys that they see",
}
Maker = TypeVar("Maker", bound="Callable[..., Any]")


def explained(maker: Maker) -> Maker:
    """A maker of masks whose error about a keyword that it does not have says what is meant, as those of plans do."""
    allowed = tuple(signature(maker).parameters)

    @functools.wraps(maker)
    def checked(*args: Any, **how: Any) -> Any:
        for name in how:
            if name not in allowed:
                raise KeywordError(f"{name} is not an argument of masks.{maker.__name__}{_meant(name, allowed)}")
        return maker(*args, **how)

    return checked  # type: ignore[return-value]


def _meant(name: str, allowed: tuple[str, ...]) -> str:
    current = ELSEWHERE.get(name)
    if current in allowed:
        return f"; it is called {current} here"
    if name in WITHOUT:
        return f": {WITHOUT[name]}"
    return of_choices(name, allowed) or f", which has {', '.join(allowed) or 'none'}"


def digest(*arrays: Any) -> str:
    """A few letters that stand for whole numbers or arrays of them: equal ones have equal letters."""
    total = sha256()
    for array in arrays:
        values = np.ascontiguousarray(array)
        total.update(f"{values.shape}{values.dtype}".encode())
        total.update(values.tobytes())
    return total.hexdigest()[:24]


def whole_numbers(name: str, values: Any, least: int, example: str) -> tuple[int, ...]:
    """A list of whole numbers, each at least `least`, as a tuple.  example: one that is right, for the error."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ArgumentError(f"{name} is {values!r}; it must be a list of whole numbers, as {example}")
    return tuple(whole_number(f"{name}[{i}]", value, least) for i, value in enumerate(values))


def by_axis(name: str, value: Any, axes: int, check: Callable[[str, Any], Any]) -> tuple[Any, ...]:
    """A value for each axis, of one for all axes or a list."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return (check(name, value),) * axes
    if len(value) != axes:
        raise ArgumentError(f"{name} is {value!r}; it must be one value, or one for each of the {axes} axes of shape")
    return tuple(check(f"{name}[{i}]", item) for i, item in enumerate(value))


def from_one(name: str, value: Any) -> int:
    """A whole number from 1 on, for `by_axis`: one that is larger than its axis is cut to it where it is used."""
    return whole_number(name, value, 1, most=UNLIMITED)


def truths(name: str, value: Any, axes: int) -> tuple[bool, ...]:
    """True or False for each axis."""
    return by_axis(name, value, axes, truth)


def fits(mask: object, what: str, tokens: int, seqlen: int, seqlen_k: int) -> None:
    """Raise ArgumentError unless there are so many queries, and as many keys.  what: of the mask, holds the tokens."""
    if (seqlen, seqlen_k) != (tokens, tokens):
        raise ArgumentError(
            f"mask is {mask}, whose {what} {tokens} tokens; it must have as many as there are queries and keys, "
            f"seqlen {seqlen} and seqlen_k {seqlen_k}"
        )
