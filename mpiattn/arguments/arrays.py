"""The arrays that callers give: what each must be, and the same array of a back end."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ArgumentError
from ..problem.tensors import as_array, is_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from ..backends.base import Array, Backend


MOST_HEADS = 256  # more are rather tokens


def heads_first(q: tuple[int, ...] | None, k: tuple[int, ...]) -> str:
    """Which of q and k looks like (batch, heads, tokens, head_dim); "" if neither does.

    q, k: shapes, as (batch, tokens, heads, head_dim); q may be None.  They look so if they have more heads than tokens
    and the other order is possible, in which the heads of k divide those of q.  Few tokens of grouped heads, as many of
    k as of q, are none of the other order, of which q and k seldom have other numbers of tokens.
    """
    shapes = {"q": q, "k": k} if q else {"k": k}
    if q and q[1] == k[1] and q[2] != k[2] and q[2] <= MOST_HEADS:
        return ""
    possible = all(shape[1] for shape in shapes.values()) and not (q and q[1] % k[1])
    more = (name for name, (_, tokens, heads, _) in shapes.items() if heads > tokens)
    return next(more, "") if possible else ""


def on_host(array: Any) -> Any:
    """An array of any back end as a NumPy array: itself if on the host, else a copy from the device.

    A tensor as a tensor in host memory.
    """
    if is_tensor(array):
        return array.cpu()
    return array.get() if hasattr(array, "__cuda_array_interface__") and hasattr(array, "get") else array


class Axes(NamedTuple):
    """What the axes of an argument are, for errors.

    names: of the axes.  tokens: which property of the plan has the positions of its tokens, "" without a plan.
    """

    names: tuple[str, ...]
    tokens: str = ""


class Required(NamedTuple):
    """What an argument must be.

    shape: with None for an axis of any length, and a tuple of lengths for one that may have any of these.
    dtype: or a tuple of those that it may have.
    """

    shape: tuple[int | tuple[int, ...] | None, ...]
    dtype: np.dtype[Any] | str | tuple[np.dtype[Any], ...]
    axes: Axes | None = None


def checked_array(backend: Backend, name: str, argument: Any, wanted: Required, writable: bool = False) -> Array:
    """An argument, array or tensor, as an array of a back end.  Raises ArgumentError if shape or dtype differ.

    writable: True if a result will be written into it.
    """
    array = (backend.writable if writable else backend.array)(name, as_array(name, argument))
    check_form(name, array, wanted)
    return array


def check_form(name: str, array: Any, wanted: Required) -> None:
    """Raise ArgumentError unless something with a shape and a dtype has those that are wanted."""
    shape, dtype, _ = wanted
    if array.shape != shape and (len(array.shape) != len(shape) or not all(map(_fits, array.shape, shape))):
        raise ArgumentError(f"{name} has shape {array.shape}; {_in_words(wanted, array.shape)}")
    if array.dtype != dtype and not (isinstance(dtype, tuple) and array.dtype in dtype):
        may_be = " or ".join(map(str, dtype)) if isinstance(dtype, tuple) else dtype
        raise ArgumentError(f"{name} has dtype {array.dtype}; it must be {may_be}")  # another byte order is another one


def _fits(length: int, wanted: int | tuple[int, ...] | None) -> bool:
    return wanted is None or (length in wanted if isinstance(wanted, tuple) else length == wanted)


def _length_in_words(wanted: int | tuple[int, ...] | None) -> str:
    if wanted is None:
        return "any"
    return " or ".join(map(str, dict.fromkeys(wanted))) if isinstance(wanted, tuple) else str(wanted)


def _in_words(wanted: Required, given: tuple[int, ...]) -> str:
    """The shape that an argument must have; if the given one has its tokens and heads in turn, that too."""
    shape, _, axes = wanted
    sizes = _in_brackets(map(_length_in_words, shape))
    where, names = "it" if None in shape else "on this rank it", axes and _in_brackets(axes.names)
    text = f"{where} must be {f'{names} = {sizes}' if names else sizes}"
    if axes and axes.tokens:
        text += f", with the tokens of plan.{axes.tokens}"
    if len(given) == len(shape) > 2:
        swapped = given[0], given[2], given[1], *given[3:]
        if all(map(_fits, swapped, shape)):
            text += "; axes 1 and 2 are swapped"
    if axes and axes.tokens:
        text += _of_field(given, shape)
    return text


def _of_field(given: tuple[int, ...], wanted: tuple[int | tuple[int, ...] | None, ...]) -> str:
    """Which axes are those of a field's grid, if one axis of their product in their place is what is wanted."""
    for first in range(2):  # with an axis of the batch or without
        for after in range(first + 2, len(given)):
            of_grid = given[first:after]
            flat = *given[:first], prod(of_grid), *given[after:]
            whole = (1,) * (len(wanted) - len(flat)) + flat
            if len(whole) == len(wanted) and all(map(_fits, whole, wanted)) and min(of_grid) > 1:
                return f"; the points of a grid are one axis, tokens = {' * '.join(map(str, of_grid))}"
    return ""


def _in_brackets(words: Iterable[str]) -> str:
    """Words as a tuple is written."""
    first, *others = words
    return f"({', '.join([first, *others])})" if others else f"({first},)"


def check_values(shared_kv: bool, v: Any, name: str = "v") -> None:
    """Raise ArgumentError unless v is given where it is an array of its own, and None where keys hold the values.

    name: "v", or "dv", which may be None in either case.
    """
    if shared_kv and v is not None:
        given = f"of shape {tuple(v.shape)}" if hasattr(v, "shape") else f"a {type(v).__name__}"
        raise ArgumentError(
            f"{name} is {given}; with shared_kv it is the first columns of {name.replace('v', 'k')}, and must be None"
        )
    if not shared_kv and v is None and name == "v":
        raise ArgumentError(
            "v is None; it must be an array.  Only with shared_kv=True are values the first columns of the keys, "
            "and v None"
        )
