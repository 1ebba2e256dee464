"""Neighbourhoods on a sphere: rows of latitude with any numbers of points."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import pi
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError
from .interval_mask import IntervalMask
from .pieces import in_pieces, needed_cuts
from .rows import of_cyclic_rows
from .values import digest, explained, fits, whole_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .interval_mask import Intervals

    IntArray = NDArray[np.int64]
    FloatArray = NDArray[np.float64]

ROUNDING = 1e-9  # radians by which a key may be further than the radius: 6 mm on the Earth
WIDEST = 1.01 * pi  # of a radius: a cutoff of pi may have been made a little larger; what is more was meant as degrees


@dataclass(frozen=True)
class Sphere(IntervalMask):
    """See `sphere`; latitudes and radius in radians."""

    rows: int
    tokens: int
    radius: float
    digest: str
    row_lengths: tuple[int, ...] = field(repr=False, compare=False)
    latitudes: tuple[float, ...] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"sphere {self.radius:.10g}, {self.rows} rows, {self.tokens} points"

    def check(self, seqlen: int, seqlen_k: int) -> None:
        fits(self, "rows hold", self.tokens, seqlen, seqlen_k)

    @cached_property
    def _first(self) -> IntArray:
        """Where rows begin, and the last ends."""
        return np.concatenate([[0], np.cumsum(self.row_lengths)]).astype(np.int64)

    @cached_property
    def _reach(self) -> tuple[IntArray, FloatArray]:
        """Of every row, how far seen rows are in numbers of rows, and the half width seen there: (lists, rows) each.

        Half widths are parts of the row, negative where nothing is seen and 1/2 or more where all of it is.
        """
        latitude, rows = np.array(self.latitudes), np.arange(self.rows)
        near = np.abs(latitude[:, None] - latitude) <= self.radius + 2 * ROUNDING
        apart = (rows - rows[:, None])[near]
        steps = np.arange(apart.min(), apart.max() + 1)
        other = rows + steps[:, None]
        inside = (other >= 0) & (other < self.rows)
        other = other.clip(0, self.rows - 1)
        # haversines: of the radius, less that of the step in latitude, is left for the step in longitude
        left = np.sin(min((self.radius + ROUNDING) / 2, pi / 2)) ** 2 - np.sin((latitude[other] - latitude) / 2) ** 2
        with np.errstate(divide="ignore"):
            part = left / (np.cos(latitude[other]) * np.cos(latitude)).clip(1e-30)
        half = np.arcsin(np.sqrt(part.clip(0, 1))) / pi
        half = np.where((part >= 1) | (self.radius + ROUNDING >= pi), 1.0, half)
        return steps, np.where(inside & (left >= 0), half, -1.0)

    def intervals(self, queries: IntArray, seqlen: int, seqlen_k: int) -> Intervals:
        steps, half = self._reach
        first, lengths = self._first, np.array(self.row_lengths, np.int64)
        row = np.searchsorted(first, queries, "right") - 1
        present = np.zeros(self.rows, bool)
        present[row] = True
        needed = (half[:, present] >= 0).any(axis=1)
        steps, half = steps[needed], half[needed]

        def lists(some: slice) -> Intervals:
            own = row[some]
            other = (own + steps[:, None]).clip(0, self.rows - 1)
            length, width = lengths[other], half[:, own]
            begin, end = _columns((queries[some] - first[own]) / lengths[own], width, length)
            return of_cyclic_rows(first[other], np.where(width >= 0, length, 0), begin, end)

        return in_pieces(lists, len(queries))

    def cuts(self, seqlen: int, seqlen_k: int) -> IntArray:
        """Rows begin pieces, and columns at which a seen row's part comes to begin or ends to wrap."""
        (steps, half), own = self._reach, np.array(self.row_lengths, np.int64)
        rows = np.arange(self.rows)
        other = own[(rows + steps[:, None]).clip(0, self.rows - 1)]
        partly = (half >= 0) & (half < 1)
        # of another row's length, where few points are seen or nearly all, any and all change from column to column
        odd = partly & (own != other) & ((2 * half * other < 2 + other / own) | (2 * half * other > other - 2))
        first, ratio = self._first[:-1], own / other
        columns = [  # from which on: begin > 0, begin >= 0, end > length, end >= length
            np.floor(half * own) + 1,
            np.floor(half * own - ratio) + 1,
            np.ceil(own - half * own),
            np.ceil(own - half * own - ratio),
        ]
        places = [first, *((first + column.astype(np.int64).clip(0, own))[partly] for column in columns)]
        for step in np.flatnonzero(odd.any(axis=1)):
            row = np.repeat(rows, np.where(odd[step], own, 0))
            query = np.flatnonzero(np.repeat(odd[step], own))
            length = other[step, row]
            begin, end = _columns((query - first[row]) / own[row], half[step, row], length)
            states = [begin < end, end - begin >= length, begin < 0, begin > 0, begin >= length]
            states += [end > length, end >= length, end <= 0]
            change = np.any([state[1:] != state[:-1] for state in states], axis=0)
            places.append(query[1:][change | (begin[1:] > end[:-1])])
        return needed_cuts(self, np.concatenate(places), seqlen, seqlen_k)


def _columns(turn: FloatArray, half: FloatArray, length: IntArray) -> tuple[IntArray, IntArray]:
    """The columns [begin, end) of rows that are at most half a width from a longitude, in turns; before they wrap."""
    middle = turn * length
    begin = np.ceil(middle - half * length).astype(np.int64)
    end = np.floor(middle + half * length).astype(np.int64) + 1
    whole = end - begin >= length
    return np.where(whole, 0, begin), np.where(whole, length, end)


@explained
def sphere(row_lengths: Sequence[int], radius: float, latitudes: Sequence[float] | None = None) -> Sphere:
    """Every point of a grid on a sphere sees the points within an angle: rows near the poles are seen further along.

    The tokens are the points row by row.  A row has one latitude and any number of points, at longitudes 0,
    1/n, 2/n, ... of a turn.  So are reduced Gaussian grids (row_lengths is ECMWF's `pl`), and grids of latitudes and
    longitudes, whose rows are equally long.  A point is seen if the great circle to it is at most `radius`, over the
    poles too: torch-harmonics' neighbourhood is this one of radius 1.001 * theta_cutoff.

    Parameters
    ----------
    row_lengths : sequence of int
        Points in each row, at least 1.
    radius : float
        Radians, above 0 and at most 1.01 pi; a rounding error of 1e-9 counts as within.
    latitudes : sequence of float, optional
        Latitude of each row in radians, between pi/2 at one pole and -pi/2 at the other, increasing or decreasing.  By
        default rows are equally wide and have the latitude of their middle, from north to south:
        pi/2 - (row + 1/2) pi / rows.  Of colatitudes, as torch-harmonics has them, give pi/2 - colatitude.

    Returns
    -------
    IntervalMask
        A query sees an interval of keys for each row within the radius, and at most one more at either end of the rows.

    Raises
    ------
    ArgumentError
        If a row has no point, or radius or latitudes are not as described.

    Examples
    --------
    Half a degree of latitude and longitude, 3 degrees around each point:

    >>> import numpy as np
    >>> from mpiattn import masks
    >>> print(masks.sphere([720] * 360, radius=np.radians(3)))
    sphere 0.05235987756, 360 rows, 259200 points
    """
    lengths = whole_numbers("row_lengths", row_lengths, 1, "[20, 24, 28]")
    if not lengths:
        raise ArgumentError("row_lengths is empty; it must have a length for each row, at least one")
    angle = _number("radius", radius)
    if not 0 < angle <= WIDEST:
        degrees = f"; {angle:.6g} degrees are {np.radians(angle):.6g}" if WIDEST < angle <= 360 else ""
        raise ArgumentError(
            f"radius is {radius!r}; it must be a number of radians above 0 and at most 1.01 pi{degrees}"
        )
    if latitudes is None:
        angles = tuple((pi / 2 - (np.arange(len(lengths)) + 0.5) * pi / len(lengths)).tolist())
    else:
        try:
            angles = tuple(_number("latitudes", value) for value in latitudes)
        except TypeError:
            raise ArgumentError(f"latitudes is {latitudes!r}; it must have a latitude for each row") from None
        if len(angles) != len(lengths):
            raise ArgumentError(f"latitudes has {len(angles)} values; it must have one for each row, {len(lengths)}")
        steps = np.diff(angles)
        if not ((steps > 0).all() or (steps < 0).all()) or not max(map(abs, angles)) <= pi / 2 + ROUNDING:
            raise ArgumentError(
                "latitudes must increase from row to row, or decrease, and be radians from -pi/2 to pi/2; they are "
                f"{angles[0]:.6g} to {angles[-1]:.6g}"
            )
    numbers = digest(np.array(lengths, np.int64), np.array([angle, *angles]))
    return Sphere(len(lengths), sum(lengths), angle, numbers, lengths, angles)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # the last of an int of more than 308 digits
        raise ArgumentError(f"{name} has {value!r}; it must be a number of radians") from None
