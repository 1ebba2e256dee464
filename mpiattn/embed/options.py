"""Named arguments that a C program sets: their text, and what Python's functions take in their place."""

from __future__ import annotations

import re
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any

from ..arguments.keywords import names_of_arguments, unknown
from ..decode.cache import KVCache
from ..decode.tree import tree_decode
from ..errors import ArgumentError
from ..masks.text import parse
from ..plan.mesh_attention import MeshAttention
from ..problem.layout import Layout
from ..system.choices import ORDERS, one_of
from .arrays import array_of
from .handles import Handles

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpi4py import MPI

    from .arrays import Described

FUNCTIONS = (MeshAttention.__init__, MeshAttention.forward, MeshAttention.backward, KVCache.append, tree_decode)
TRUTHS = {
    name
    for function in FUNCTIONS
    for name, parameter in signature(function).parameters.items()
    if isinstance(parameter.default, bool)
}
TRUTH_LISTS = {"relative_cyclic"}
NAME_LISTS = {"bias_gradients", "bias_shared"}
SIDES = {"window"}  # lists in which an empty element is one
WORDS = {"none": None, "true": True, "false": False, ".true.": True, ".false.": False}
LOGICALS = {"t": "1", "f": "0", ".t.": "1", ".f.": "0"}  # as Fortran writes them, where an argument is a truth
OF_GRIDS = "grid", "dims", "sizes"  # what a plan has here in place of a layout of blocks
LENGTHS = {*OF_GRIDS, "tile", "mask"}  # options with lists of numbers that Fortran may pad with blanks
SEPARATOR = re.compile(r"\s*,\s*(?=\w+\s*=)")
EXPONENT = re.compile(r"(?<!\w)([+-]?(?:\d+\.?\d*|\.\d+))[dD]([+-]?\d+)")  # of double precision in Fortran


class GivenArray:
    """An array that is made when a call gets it, since the call knows whether it may be on a GPU."""

    def __init__(self, described: Described) -> None:
        self.described = described


OPTIONS = Handles("options")


def of_text(text: str | None) -> dict[str, Any]:
    """Options of "name=value, name=value".  Raises ArgumentError."""
    values: dict[str, Any] = {}
    for item in SEPARATOR.split(text.strip()) if text and text.strip() else ():
        name, equals, value = item.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ArgumentError(f"options is {text!r}; {item!r} in it is not name=value")
        if name.strip() in values:
            raise ArgumentError(f"options is {text!r}; {name.strip()} is in it twice")
        values[name.strip()] = of_word(name.strip(), value.strip())
    return values


def of_word(name: str, value: str) -> Any:
    """The value that a text means: a number, True, False, None, a tuple of numbers, or the text itself."""
    value = _of_fortran(name, value)
    if name in NAME_LISTS and value.lower() not in ("0", "1", *WORDS):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if name == "sizes":
        return tuple(_sizes(value, axis) for axis in value.split("x"))
    if name in ("grid", "dims") and re.fullmatch(r"\d+(x\d+)*", value):
        return tuple(map(int, value.split("x")))
    numbers = re.fullmatch(r"[\s\d,+-]*|\(([\s\d,+-]*)\)|\[([\s\d,+-]*)\]", value)
    if "," in value and numbers:
        parts = [part.strip() for part in (numbers[1] or numbers[2] or value).split(",")]
        if name not in SIDES and not parts[-1]:
            parts.pop()  # a list of one number ends with a comma
        try:
            return of_integers(name, [int(part) if part else None for part in parts])
        except ValueError:
            return value
    return of_value(name, _number(value) if value.lower() not in WORDS else WORDS[value.lower()])


def _of_fortran(name: str, value: str) -> str:
    """A text whose logicals, exponents and padded numbers are written as in Python, where Fortran wrote it."""
    if name in TRUTHS | TRUTH_LISTS:
        parts = [part.strip() for part in value.split(",")]
        return ",".join(LOGICALS.get(part.lower(), part) for part in parts)
    if name in LENGTHS:
        value = re.sub(r"(?<=\d)\s*([x,:])\s*(?=-?\d)", r"\1", value)  # grid=  41x   3
        value = re.sub(r"\s*=\s*(?=-?\d)", "=", value)  # of a mask, cyclic=   1
    if name == "mask" or EXPONENT.fullmatch(value):
        value = EXPONENT.sub(r"\1E\2", value)
    return value


def _sizes(value: str, axis: str) -> tuple[int, ...] | None:
    """The lengths of the blocks along an axis; None for the even split.  Raises ArgumentError."""
    try:
        return None if axis.strip() == "even" else tuple(map(int, axis.split(",")))
    except ValueError:
        raise ArgumentError(
            f"sizes is {value!r}; it must be the lengths of blocks along each axis, or even, such as 12,8xeven"
        ) from None


def _number(value: str) -> int | float | str:
    try:
        number = int(value)
    except ValueError:
        try:
            return float(value)
        except ValueError:
            return value
    if abs(number) >= 2**64:  # a seed of dropout may be less
        raise ArgumentError(f"{value} is in the options; numbers must have 64 bits at most")
    return number


def of_value(name: str, value: Any) -> Any:
    """A number as the argument takes it: 0 and 1 are False and True where the argument is one of these."""
    return bool(value) if name in TRUTHS and value in (0, 1) and not isinstance(value, float) else value


def of_integers(name: str, values: list[Any]) -> tuple[Any, ...]:
    """A list of numbers as the argument takes it."""
    return tuple(map(bool, values)) if name in TRUTH_LISTS and set(values) <= {0, 1} else tuple(values)


def set_array(options: dict[str, Any], name: str, described: Described | None) -> None:
    """Set an array, whose memory stays the caller's.  Raises ArgumentError if it is none."""
    if described is None:
        raise ArgumentError(f"{name} is NULL; it must be an array")
    array_of(name, described)
    options[name] = GivenArray(described)


def given(number: int) -> dict[str, Any]:
    """The options of a handle as they were set; none of the handle 0."""
    return OPTIONS[number] if number else {}


def check(number: int) -> bool:
    """Whether ranks compare the call with these options, as far as that can be told."""
    return number not in OPTIONS or OPTIONS[number].get("check", True) is not False


def refuse_twice(others: Iterable[str], options: dict[str, Any]) -> None:
    """Raise ArgumentError if an argument of a function is among its options too."""
    twice = next((name for name in others if name in options), None)
    if twice:
        raise ArgumentError(f"{twice} is an argument of the function; it must not be among its options too")


def of_call(number: int, on_gpu: bool, others: Iterable[str] = ()) -> dict[str, Any]:
    """A call's options by name; none of the handle 0.  Raises ArgumentError.

    others: names of what the function gets besides.
    """
    options = {
        name: array_of(name, value.described, on_gpu) if isinstance(value, GivenArray) else value
        for name, value in given(number).items()
    }
    refuse_twice(others, options)
    return options


def of_making(
    asked: dict[str, Any], comm: MPI.Intracomm, needed: tuple[str, ...] = (), called: str | None = None
) -> dict[str, Any]:
    """The arguments of a new plan or cache: masks and layouts in place of their texts.  Raises ArgumentError.

    needed: names of arguments that have no default.  called: the class, of which all options must be arguments.
    """
    options = dict(asked)
    array = next((name for name, value in options.items() if isinstance(value, GivenArray)), None)
    if array:
        raise ArgumentError(f"{array} is an array; plans and caches are made without arrays")
    refuse_twice(("comm",), options)
    grid, dims, sizes, order = (options.pop(name, None) for name in ("grid", "dims", "sizes", "order"))
    if order is not None:
        one_of("order", order, ORDERS)
    if order is not None and grid is None and "mask" not in options:
        raise ArgumentError(f"order is {order!r}, given without grid or mask, whose axes it would order")
    for name, value in ("dims", dims), ("sizes", sizes):
        if grid is None and value is not None:
            raise ArgumentError(f"{name} is {value!r}, given without grid, whose blocks it would describe")
    if grid is not None:
        options["layout"] = _of_grid(grid, dims, sizes, order or ORDERS[0], comm, options)
        options.setdefault("seqlen", prod(grid))
    if isinstance(options.get("mask"), str):
        options["mask"] = parse(options["mask"], grid, order or ORDERS[0])
    misspelt = unknown(called, options, (*names_of_arguments(called), *OF_GRIDS, "order")) if called else None
    if misspelt:  # said before what is missing, which a misspelt name may be
        raise misspelt
    missing = [name for name in needed if name not in options]
    if missing:
        also = ", or grid" if "seqlen" in missing else ""
        for name, value in options.items():
            if isinstance(value, str) and re.search(rf"\b{missing[0]}\s*=", value):
                also = f", in which {name} is {value!r}; commas separate options"
        raise ArgumentError(f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} missing in the options{also}")
    return options


def _of_grid(grid: Any, dims: Any, sizes: Any, order: str, comm: MPI.Intracomm, options: dict[str, Any]) -> Layout:
    """The layout of blocks of a grid."""
    for name, value in ("grid", grid), ("dims", dims):
        if value is not None and not (isinstance(value, tuple) and all(isinstance(n, int) for n in value)):
            raise ArgumentError(f"{name} is {value!r}; it must be lengths, such as 64x128")
    if "layout" in options:
        raise ArgumentError(f"layout is {options['layout']!r}; with grid ranks hold the blocks of the grid")
    if dims is None and not hasattr(comm, "Get_topo"):
        raise ArgumentError(
            "dims is missing: grid is given, and the communicator is not Cartesian; it must be the number of ranks "
            "along each axis, such as 2x3"
        )
    if dims is not None and prod(dims) != comm.size:
        raise ArgumentError(f"dims is {'x'.join(map(str, dims))}, {prod(dims)} ranks; there are {comm.size}")
    try:
        return Layout.grid(grid, comm if dims is None else dims, sizes, order)
    except ArgumentError as error:
        raise ArgumentError(f"grid is {'x'.join(map(str, grid))}: {error}") from error
