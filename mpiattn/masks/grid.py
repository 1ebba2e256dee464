"""Neighbourhoods on a grid of one to three dimensions, stored in C order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError
from ..system.choices import ORDERS, one_of
from .interval_mask import IntervalMask
from .pieces import in_pieces, needed_cuts
from .rows import of_cyclic_rows
from .values import by_axis, explained, fits, from_one, truths, whole_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .interval_mask import Intervals

    IntArray = NDArray[np.int64]

EDGES = "shifted", "clipped"
AXES = 3  # at most


@dataclass(frozen=True)
class Axis:
    """The window along an axis of `size`: the coordinates start, start + dilation, ..., `kernel` of them."""

    size: int
    kernel: int
    dilation: int
    causal: bool
    cyclic: bool
    shifted: bool

    def start(self, x: IntArray) -> IntArray:
        """The first coordinate of the window of each x; it may be outside the axis, unless edges are shifted."""
        before = self.kernel - 1 if self.causal else self.kernel // 2
        if not self.shifted or self.causal or self.cyclic:
            return x - before * self.dilation
        # NATTEN's: coordinates with the same remainder are an axis of their own, and the window is moved inside it
        group, own = x % self.dilation, x // self.dilation
        size = (self.size - 1 - group) // self.dilation + 1
        return np.clip(own - before, 0, np.maximum(size - self.kernel, 0)) * self.dilation + group

    def offsets(self, x: IntArray) -> IntArray:
        """Of the points in the window, how far each is from the start: those that are on the axis for some x.

        Where the axis is cyclic, the points that wrap are others, so that a list of them never jumps.
        """
        offsets = self.dilation * np.arange(self.kernel)
        if self.cyclic:
            offsets = np.concatenate([offsets, offsets + self.size, offsets - self.size])
        present = np.zeros(self.size, bool)
        present[x] = True
        _, valid = self.keys(np.flatnonzero(present), offsets)
        return offsets[valid.any(axis=1)]

    def keys(self, x: IntArray, offsets: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
        """The coordinates at these offsets, and whether they are on the axis: (offsets, len(x)) each."""
        keys = self.start(x) + offsets[:, None]
        return keys, (keys >= 0) & (keys < self.size)

    @property
    def whole(self) -> bool:
        """Whether every coordinate sees the whole axis."""
        if self.size == 1 or (self.cyclic and self.kernel == self.size and self.dilation == 1):
            return True
        start = self.start(np.array([0, self.size - 1]))
        return self.dilation == 1 and bool((start <= 0).all() and (start + self.kernel >= self.size).all())

    @property
    def breaks(self) -> IntArray:
        """Coordinates at which a list may step back, or begin or end to hold keys: what a piece may not hold."""
        x = np.arange(self.size)
        if self.dilation == 1:
            start = self.start(x)
            sides = np.stack([start < 0, start + self.kernel > self.size, start >= self.size, start + self.kernel <= 0])
            return 1 + np.flatnonzero((sides[:, 1:] != sides[:, :-1]).any(axis=0) | (np.diff(start) < 0))
        keys, valid = self.keys(x, self.offsets(x))
        step = np.diff(keys, axis=1)
        return 1 + np.flatnonzero(((valid[:, 1:] != valid[:, :-1]) | (step < 0) | (step > 1)).any(axis=0))


@dataclass(frozen=True)
class Neighborhood(IntervalMask):
    """See `neighborhood`; each field has one value for each axis, in C order.

    order: in which the caller has named the axes.
    """

    shape: tuple[int, ...]
    kernel_size: tuple[int, ...]
    dilation: tuple[int, ...]
    causal: tuple[bool, ...]
    cyclic: tuple[bool, ...]
    edge: str
    order: str = ORDERS[0]

    def __str__(self) -> str:
        words = [f"neighborhood {_by(self.named(self.kernel_size))} grid={_by(self.named(self.shape))}"]
        if any(step > 1 for step in self.dilation):
            words.append(f"dilation={_by(self.named(self.dilation))}")
        for name, values in (("causal", self.causal), ("cyclic", self.cyclic)):
            if any(values):
                axes = enumerate(self.named(values))
                words.append(f"{name}={','.join(str(axis) for axis, value in axes if value)}")
        if self.order != ORDERS[0]:
            words.append(f"order={self.order}")
        if self.edge != EDGES[0]:
            words.append(f"edge={self.edge}")
        return " ".join(words)

    @property
    def edges(self) -> tuple[bool, ...]:
        """Whether an axis has an edge at which windows differ from those inside, of every axis."""
        return tuple(not (axis.causal or axis.cyclic or axis.whole or axis.kernel == 1) for axis in self._every_axis)

    def named(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Values by axis, in the caller's order."""
        return in_c_order(values, self.order)

    @property
    def _every_axis(self) -> list[Axis]:
        axes = []
        sides = zip(self.shape, self.kernel_size, self.dilation, self.causal, self.cyclic)
        for size, kernel, step, causal, cyclic in sides:
            # twice the axis reaches over both its ends, and a step as long as the axis leaves it: more would overflow
            reach, step = min(kernel, 2 * size + 1), min(step, size)
            axes.append(Axis(size, reach, step, causal, cyclic, self.edge == "shifted"))
        return axes

    @cached_property
    def _axes(self) -> tuple[list[Axis], int]:
        """The axes that matter, and the keys of a coordinate of the last: the axes after it are seen whole."""
        unit = 1
        axes = [Axis(axis.size, axis.size, 1, False, False, True) if axis.whole else axis for axis in self._every_axis]
        while len(axes) > 1 and axes[-1].whole:
            unit *= axes.pop().size
        return axes, unit

    def check(self, seqlen: int, seqlen_k: int) -> None:
        fits(self, "grid has", prod(self.shape), seqlen, seqlen_k)

    def intervals(self, queries: IntArray, seqlen: int, seqlen_k: int) -> Intervals:
        axes, unit = self._axes
        points = np.stack(np.unravel_index(queries // unit, [axis.size for axis in axes]))
        offsets = [axis.offsets(x) for axis, x in zip(axes, points)]
        begin, end = in_pieces(lambda some: self._lists(points[:, some], offsets), len(queries))
        return (begin * unit, end * unit) if unit > 1 else (begin, end)

    def _lists(self, points: IntArray, offsets: list[IntArray]) -> Intervals:
        """The intervals of some points (axes, queries), in coordinates of the last axis; some lists may be empty.

        offsets: for each axis, of the points in the window.
        """
        (*outer, inner), _ = self._axes
        rows, valid = np.zeros((1, points.shape[1]), np.int64), np.ones((1, points.shape[1]), bool)
        for axis, y, some in zip(outer, points, offsets):
            keys, inside = axis.keys(y, some)
            rows = _flat(rows[:, None] * axis.size + keys)
            valid = _flat(valid[:, None] & inside)
        first, x = rows * inner.size, points[-1]
        if inner.dilation > 1:
            keys, inside = inner.keys(x, offsets[-1])
            begin = _flat(first[:, None] + keys)
            return begin, begin + _flat(valid[:, None] & inside)
        start = inner.start(x)
        stop = start + inner.kernel
        if inner.cyclic:
            return of_cyclic_rows(first, np.where(valid, inner.size, 0), start, stop)
        begin = first + np.maximum(start, 0)
        return begin, np.where(valid, first + np.minimum(stop, inner.size), begin)

    def cuts(self, seqlen: int, seqlen_k: int) -> IntArray:
        (*_, inner), unit = self._axes
        candidates = np.arange(0, seqlen, inner.size * unit)[:, None] + np.append(inner.breaks * unit, 0)
        return needed_cuts(self, candidates.ravel(), seqlen, seqlen_k)


def _flat(lists: NDArray[Any]) -> NDArray[Any]:
    """(outer, inner, queries) as (lists, queries)."""
    return lists.reshape(lists.shape[0] * lists.shape[1], lists.shape[2])


def in_c_order(values: tuple[Any, ...], order: str) -> tuple[Any, ...]:
    """Values by axis of a grid, from this order to C's or back."""
    return values[::-1] if order == "fortran" else values


def _by(numbers: Sequence[int]) -> str:
    return "x".join(map(str, numbers))


@explained
def neighborhood(
    shape: Sequence[int],
    kernel_size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
    cyclic: bool | Sequence[bool] = False,
    edge: str = "shifted",
    order: str = "c",
) -> Neighborhood:
    """Every point of a grid sees the points around it, as in NATTEN.

    The tokens are the points of a grid of one to three dimensions, by default in C order: the last axis is consecutive.
    Along an axis, point x sees `kernel_size` points: kernel_size // 2 before it, itself and the rest after it, so that
    an even window has a point more before than after.  A point is seen if it is seen along every axis.  With
    kernel_size 3, in the middle of an axis and at its beginning (x the query, 1 what it sees)::

        ..1x1...      shifted    x11.....       clipped    x1......       cyclic    x1.....1

    Parameters
    ----------
    shape : sequence of int
        Points along each axis: 1 to 3 axes.
    kernel_size : int or sequence of int
        Points seen along an axis; here and below one value for all axes, or one for each.
    dilation : int or sequence of int, default 1
        Points seen lie so many apart.
    causal : bool or sequence of bool, default False
        Whether along an axis a point sees none after itself, but itself and the kernel_size - 1 before; fewer at the
        beginning of the axis, wherever `edge` would move the window.
    cyclic : bool or sequence of bool, default False
        Whether an axis goes on with its first point after its last, as longitude does.  It has no edge then, and
        is not causal.
    edge : {"shifted", "clipped"}, default "shifted"
        At an edge the window is moved inside, so that all points see as many, as in NATTEN; or it is cut off.
    order : {"c", "fortran"}, default "c"
        With "fortran" the first axis is consecutive, as in Fortran's f(nx, ny), whose shape is (nx, ny) then.

    Returns
    -------
    IntervalMask
        A query sees an interval of keys for each row (line of the last axis) of the window; with a dilation along the
        last axis, for each point.  Where a window spans the last axes wholly, rows become one interval.

    Raises
    ------
    ArgumentError
        If a value is none of these, an axis is causal and cyclic, or kernel_size * dilation exceeds an axis that is
        cyclic or whose edges are shifted.

    Examples
    --------
    A latitude-longitude grid, window 15 x 15, longitude cyclic, of 131,072 tokens:

    >>> import mpiattn
    >>> mask = mpiattn.masks.neighborhood((256, 512), 15, cyclic=(False, True))
    >>> print(mask)
    neighborhood 15x15 grid=256x512 cyclic=1
    """
    sides = whole_numbers("shape", shape, 1, "(256, 512)")
    if not 1 <= len(sides) <= AXES:
        raise ArgumentError(f"shape is {shape!r}; it must have 1 to {AXES} axes")
    kernels, steps = (
        by_axis(name, value, len(sides), from_one)
        for name, value in (("kernel_size", kernel_size), ("dilation", dilation))
    )
    causals, cyclics = truths("causal", causal, len(sides)), truths("cyclic", cyclic, len(sides))
    one_of("edge", edge, EDGES)
    one_of("order", order, ORDERS)
    for axis, (size, kernel, step) in enumerate(zip(sides, kernels, steps)):
        if causals[axis] and cyclics[axis]:
            raise ArgumentError(f"causal and cyclic are both True for axis {axis}; an axis may be one of the two")
        if (cyclics[axis] or (edge == EDGES[0] and not causals[axis])) and kernel * step > size:
            kind = "cyclic" if cyclics[axis] else "shifted at its edges"
            raise ArgumentError(
                f"kernel_size is {kernel} and dilation {step} for axis {axis}, which is {kind} and has {size} points; "
                f"kernel_size * dilation may be at most {size}"
            )
    sides, kernels, steps = (in_c_order(values, order) for values in (sides, kernels, steps))
    return Neighborhood(sides, kernels, steps, in_c_order(causals, order), in_c_order(cyclics, order), edge, order)
