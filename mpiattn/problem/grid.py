"""Grids divided into blocks: the lengths of the blocks along every axis, and the ranks that hold them.  No MPI."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ArgumentError
from ..system.choices import ORDERS, one_of
from ..system.values import is_list, is_whole

MOST_RANKS = 2**24  # of any machine; of every one there is a length

if TYPE_CHECKING:
    Blocks = tuple[tuple[int, ...], ...]  # by axis, the lengths of the blocks along it


class Cart(NamedTuple):
    """The Cartesian communicator that a layout was made of, as far as plans compare it with theirs.

    group: its `mpi4py.MPI.Group`.  periods: by axis of the grid in C order.
    """

    group: Any
    periods: tuple[bool, ...]


def _whole_numbers(name: str, value: Any, least: int, meaning: str) -> tuple[int, ...]:
    """A tuple of ints.  Raises ArgumentError unless the value is whole numbers, `least` or more, one or more of them.

    meaning: what the numbers are.
    """
    numbers = tuple(value) if is_list(value) else ()
    if not numbers or not all(is_whole(n, least) for n in numbers):
        raise ArgumentError(
            f"{name} is {value!r}; it must be whole numbers, at least {least} and below 2^63: {meaning}"
        )
    return tuple(map(int, numbers))


def _dims_of(cart: Any) -> tuple[int, ...]:
    """The dims of a Cartesian communicator, or those that stand in its place."""
    if not hasattr(cart, "Get_topo"):
        meaning = "the numbers of ranks along the axes, or a Cartesian communicator"
        dims = _whole_numbers("cart", cart, 1, meaning)
        if math.prod(dims) > MOST_RANKS:
            raise ArgumentError(
                f"cart is {dims}; the product of its dims must be a number of ranks, at most {MOST_RANKS}"
            )
        return dims
    if not cart:
        raise ArgumentError("cart is MPI.COMM_NULL; it must be a communicator of all ranks, and its dims are too small")
    dims = tuple(cart.Get_topo()[0])
    if not dims:
        raise ArgumentError("cart is a communicator of no dims; it must have one or more")
    return dims


def _block_numbers(cart: Any, dims: tuple[int, ...], step: int) -> tuple[int, ...] | None:
    """By rank of a communicator, the number of its block in C order; None if that is the rank.

    step: -1 where the axes of the communicator are those of the grid in reverse; else 1.
    """
    if not hasattr(cart, "Get_coords"):
        return None
    numbers = tuple(_number(cart.Get_coords(rank)[::step], dims[::step]) for rank in range(cart.Get_size()))
    return None if numbers == tuple(range(len(numbers))) else numbers


def _remembered(cart: Any, axes: int, step: int) -> Cart | None:
    """The `Cart` of a layout; None where no communicator was given."""
    if not hasattr(cart, "Get_group"):
        return None
    periods = [bool(period) for period in cart.Get_topo()[1]]
    undivided = [False] * (axes - len(periods))
    return Cart(cart.Get_group(), tuple([*periods, *undivided][::step]))


def _number(place: Sequence[int], dims: tuple[int, ...]) -> int:
    """The number of a place of a grid in C order."""
    number = 0
    for i, parts in zip(place, dims):
        number = number * parts + i
    return number


def of_grid(shape: Any, cart: Any, sizes: Any, order: str) -> tuple[Blocks, tuple[int, ...] | None, Cart | None]:
    """The lengths of the blocks of a grid, by rank the numbers of the blocks or None, and its `Cart`.

    The arguments are those of `Layout.grid`.  Raises ArgumentError.
    """
    one_of("order", order, ORDERS)
    step = -1 if order == "fortran" else 1
    shape = _whole_numbers("shape", shape, 0, "the points along every axis")
    dims = _dims_of(cart)
    if len(dims) > len(shape):
        raise ArgumentError(f"cart has {len(dims)} dims, {dims}; it may have at most those of shape, which is {shape}")
    numbers = _block_numbers(cart, dims, step)
    dims += (1,) * (len(shape) - len(dims))
    if sizes is None:
        sizes = (None,) * len(shape)
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or len(sizes) != len(shape):
        raise ArgumentError(f"sizes is {sizes!r}; it must have the lengths of blocks, or None, of {len(shape)} axes")
    blocks = []
    for axis, (points, parts, of_axis) in enumerate(zip(shape, dims, sizes)):
        if of_axis is None:
            size, extra = divmod(points, parts)
            blocks.append((size + 1,) * extra + (size,) * (parts - extra))
            continue
        name = f"sizes[{axis}]"
        lengths = _whole_numbers(name, of_axis, 0, "the lengths of the blocks along the axis")
        if len(lengths) != parts or sum(lengths) != points:
            raise ArgumentError(
                f"{name} is {lengths}, {len(lengths)} numbers whose sum is {sum(lengths)}; it must be {parts} numbers, "
                f"one a block along axis {axis}, whose sum is {points}{_other_way_round(shape, dims, sizes)}"
            )
        blocks.append(lengths)
    return tuple(blocks[::step]), numbers, _remembered(cart, len(shape), step)


def _other_way_round(shape: tuple[int, ...], dims: tuple[int, ...], sizes: Sequence[Any]) -> str:
    """Which of the arguments of a grid is in the other order of axes, if the sizes fit one that is."""

    def fit(points: tuple[int, ...], parts: tuple[int, ...]) -> bool:
        lengths = zip(points, parts, sizes)
        return all(each is None or (sum(each), len(each)) == (total, blocks) for total, blocks, each in lengths)

    turned = {"cart": (shape, dims[::-1]), "shape": (shape[::-1], dims), "sizes": (shape[::-1], dims[::-1])}
    values = {"cart": f"the dims {dims}", "shape": f"the axes {shape}", "sizes": "these lengths"}
    for name, (points, parts) in turned.items():
        if fit(points, parts):
            return f"; {name} has {values[name]} the other way round"
    return ""


def even_dims(ranks: int, axes: int) -> tuple[int, ...]:
    """Numbers of ranks along some axes, none smaller than the next and as equal as they can be, as MPI_Dims_create."""
    if axes == 1:
        return (ranks,)
    factors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    every = [(n, *even_dims(ranks // n, axes - 1)) for n in factors]
    return min(dims for dims in every if list(dims) == sorted(dims, reverse=True))


def checked_blocks(sizes: Any, seqlen: int, chunks: int) -> Blocks:
    """The lengths of blocks along every axis as tuples.  Raises ArgumentError."""
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        raise ArgumentError(f"sizes is {sizes!r}; of a grid it must have the lengths of blocks along every axis")
    meaning = "the lengths of the blocks along the axis"
    blocks = tuple(_whole_numbers(f"sizes[{axis}]", of_axis, 0, meaning) for axis, of_axis in enumerate(sizes))
    points, parts = math.prod(map(sum, blocks)), math.prod(map(len, blocks))
    if (points, parts) != (seqlen, chunks):
        raise ArgumentError(
            f"layout is a grid of {' x '.join(str(sum(of_axis)) for of_axis in blocks)} points in {parts} blocks; it "
            f"must have {seqlen} points in {chunks}"
        )
    return blocks
