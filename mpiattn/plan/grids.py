"""Contradictions in what a caller says of a grid: by the mask, the layout and the communicator.

Each of these makes a plan that computes something, but not what the program holds.  So plans refuse them.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ..errors import ArgumentError
from ..masks.grid import Neighborhood
from ..problem.layout import GRID, Layout
from ..system.choices import ORDERS

if TYPE_CHECKING:
    from ..masks.interval_mask import IntervalMask


def check_grids(comm: MPI.Intracomm, mask: IntervalMask | None, layout: Any) -> None:
    """Raise ArgumentError if what is said of a grid contradicts itself.

    layout: as the caller gives it.
    """
    on_grids = list(_neighborhoods(mask))
    for given in layout if isinstance(layout, tuple) else (layout,):
        if isinstance(given, Layout) and given.kind == GRID:
            _check_processes(comm, given)
            for each in on_grids:
                _check_shape(each, given)
                _check_periods(each, given)
    if layout == "auto" and on_grids:
        _check_forgotten(comm, on_grids[0])


def _neighborhoods(mask: Any) -> Any:
    """The neighbourhoods that a mask is made of."""
    if isinstance(mask, Neighborhood):
        yield mask
    for part in ("a", "b"):  # of `Both` and `Either`
        if hasattr(mask, part):
            yield from _neighborhoods(getattr(mask, part))


def _check_processes(comm: MPI.Intracomm, layout: Layout) -> None:
    """A layout of the same processes has them in the same order."""
    if layout.cart is None:
        return
    group = comm.Get_group()
    numbers: list[int] = []
    if MPI.Group.Compare(layout.cart.group, group) == MPI.SIMILAR:
        numbers = MPI.Group.Translate_ranks(layout.cart.group, list(range(comm.size)), group)
    group.Free()
    if not numbers:
        return
    rank = next(rank for rank, number in enumerate(numbers) if rank != number)
    raise ArgumentError(
        f"layout is of a Cartesian communicator that numbers the ranks in another order than comm: its rank {rank} is "
        f"rank {numbers[rank]} of comm; make the plan on the Cartesian communicator"
    )


def _check_shape(mask: Neighborhood, layout: Layout) -> None:
    """The grids are the same, but that one may have some axes of the other as one."""
    of_layout = tuple(map(sum, layout.sizes or ()))
    of_mask = _strides(mask.shape)
    if of_mask <= _strides(of_layout) or of_mask >= _strides(of_layout):
        return
    text = f"mask is {str(mask)!r}, and layout is of a grid of {_by(mask.named(of_layout))}"
    if mask.order != ORDERS[0]:
        text = f"{text}, in Fortran's order too"
    if sorted(mask.shape) == sorted(of_layout):
        text = f"{text}; the axes must be in the same order: the last is consecutive, with order='fortran' the first"
    raise ArgumentError(f"{text}; they must be the same grid")


def _strides(shape: tuple[int, ...]) -> set[int]:
    """The numbers of points that lie between neighbours along each axis, and that of all points."""
    return {1, *accumulate(reversed(shape), mul)}


def _check_periods(mask: Neighborhood, layout: Layout) -> None:
    """An axis on which the communicator is periodic has no edge in the mask.

    The other way round is no contradiction: many communicators are made without periods, for their dims alone.
    """
    if layout.cart is None or len(mask.shape) != len(layout.sizes or ()):
        return
    periods = layout.cart.periods
    if any(period and edge for period, edge in zip(periods, mask.edges)):
        raise ArgumentError(
            f"mask is {str(mask)!r} and the Cartesian communicator has the periods {mask.named(periods)}; an axis that "
            "goes on with its first point after its last must be cyclic in the mask too, or have no period in the "
            "communicator"
        )


def _check_forgotten(comm: MPI.Intracomm, mask: Neighborhood) -> None:
    """Ranks that stand in a Cartesian communicator hold blocks, of which a layout that is left out knows nothing."""
    if comm.Get_topology() != MPI.CART:
        return
    dims = MPI.Cartcomm(comm).Get_topo()[0]
    if len(dims) > len(mask.shape):
        return
    in_c_order = mask.named((*dims, *[1] * (len(mask.shape) - len(dims))))
    if prod(in_c_order[1:]) == 1 or len(dims) == 1:
        return  # blocks of whole rows, or ranks in a line, are consecutive tokens
    order = ""
    if mask.order != ORDERS[0]:
        order = f", order={mask.order!r}"
    raise ArgumentError(
        f"layout is left out, mask is {str(mask)!r}, and comm is Cartesian with the dims {tuple(dims)}; for ranks that "
        f"hold blocks of the grid it must be Layout.grid({mask.named(mask.shape)}, comm{order}), in C and Fortran the "
        "option grid; otherwise 'contiguous' or another layout"
    )


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
