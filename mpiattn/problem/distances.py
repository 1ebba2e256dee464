"""Biases that are functions of how far a key is from a query: slopes of ALiBi, and tables of relative positions.

A distance is the key's position minus that of the query's diagonal, which is the query's own position where there are
as many keys as queries; beside a mask that gives keys other places (`mpiattn.masks.places`), it is between these.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from ..masks.places import Places

    Positions = NDArray[np.int64]


def usual_slopes(heads: int) -> NDArray[np.float64]:
    """The slopes of ALiBi: 2^(-8 h / heads) of head h, from 1 on; (heads,).

    For heads that are no power of two as in ALiBi's own code: those of the next smaller power of two, and then every
    second one of twice as many.
    """
    power = 1 << (heads.bit_length() - 1)
    of_power, of_twice = np.arange(1, power + 1) / power, np.arange(1, 2 * power, 2) / (2 * power)
    slopes: NDArray[np.float64] = np.exp2(-8 * np.concatenate([of_power, of_twice[: heads - power]]))
    return slopes


class ByDistance:
    """A bias of all pairs at the same distance.

    name: of the argument.  parameters: (heads or 1, ...).  shift: from a query's position to its diagonal.
    own: the heads that this rank computes, a slice.  places: of the keys, or None.
    The attribute `gradient`, float64, has the shape of `parameters`.
    """

    of_line = True  # whether values depend on the distance alone

    def __init__(self, name: str, parameters: ArrayLike, shift: int, own: slice, places: Places | None = None) -> None:
        self.name, self.parameters, self._shift = name, np.asarray(parameters, np.float64), shift
        self._places = places
        self.gradient = np.zeros(self.parameters.shape)
        self._own = own if len(self.parameters) > 1 else slice(None)

    def of_heads(self, own: slice) -> ByDistance:
        """The same function of some heads; it adds to the same gradient."""
        of_heads = copy.copy(self)
        of_heads._own = own if len(self.parameters) > 1 else slice(None)
        return of_heads

    def of_queries(self, positions: Positions) -> Positions:
        """Where queries at some positions are, for their distances."""
        return self.of_keys(positions + self._shift)

    def of_keys(self, positions: Positions) -> Positions:
        """Where keys at some positions are."""
        places: Positions = positions if self._places is None else self._places.of(positions)
        return places

    def of_distances(self, distances: Positions) -> NDArray[np.float64]:
        """Values (own heads or 1, ...) of distances of any shape."""
        raise NotImplementedError

    def add_gradient_of_distances(self, distances: Positions, gradient: NDArray[Any]) -> None:
        """Add the gradient of such values, (own heads, ...)."""
        raise NotImplementedError

    def of_pairs(self, queries: Positions, keys: Positions) -> NDArray[np.float64]:
        """Values (own heads or 1, queries, keys) of all pairs of some positions."""
        return self.of_distances(self._distances(queries, keys))

    def add_gradient(self, queries: Positions, keys: Positions, gradient: NDArray[Any]) -> None:
        """Add the gradient of such values, (own heads, queries, keys)."""
        self.add_gradient_of_distances(self._distances(queries, keys), gradient)

    def _distances(self, queries: Positions, keys: Positions) -> Positions:
        return self.of_keys(keys)[None] - self.of_queries(queries)[:, None]


class Slopes(ByDistance):
    """ALiBi (arXiv 2108.12409): -slope * |distance|, a slope a head."""

    def of_distances(self, distances: Positions) -> NDArray[np.float64]:
        """As of `ByDistance`."""
        return np.multiply.outer(-self.parameters[self._own], np.abs(distances))

    def add_gradient_of_distances(self, distances: Positions, gradient: NDArray[Any]) -> None:
        """As of `ByDistance`."""
        sums = -(gradient.reshape(len(gradient), distances.size).astype(np.float64) @ np.abs(distances).ravel())
        self.gradient[self._own] += sums if len(self.parameters) > 1 else sums.sum()


class Table(ByDistance):
    """A number for each distance from -R to R, of shape (heads or 1, 2 R + 1); farther ones have that of R or -R."""

    def _index(self, distances: Positions) -> Positions:
        reach = self.parameters.shape[1] // 2
        index: Positions = np.clip(distances, -reach, reach) + reach
        return index

    def of_distances(self, distances: Positions) -> NDArray[np.float64]:
        """As of `ByDistance`."""
        return self.parameters[self._own][:, self._index(distances)]

    def add_gradient_of_distances(self, distances: Positions, gradient: NDArray[Any]) -> None:
        """As of `ByDistance`."""
        _add_by_index(self.gradient[self._own], self._index(distances), gradient)


class GridTable(ByDistance):
    """A number for each offset on a grid of points in C order: (heads or 1, 2 R + 1 of each axis), clipped as `Table`.

    shape: of the grid.  cyclic: by axis, whether it has no ends: then the shorter way round counts.
    """

    of_line = False

    def __init__(
        self, name: str, parameters: ArrayLike, own: slice, shape: tuple[int, ...], cyclic: tuple[bool, ...]
    ) -> None:
        super().__init__(name, parameters, 0, own)
        self._shape, self._cyclic = shape, cyclic

    def _index(self, queries: Positions, keys: Positions) -> Positions:
        """Index of every pair in the numbers of a head: (queries, keys)."""
        index = np.zeros((len(queries), len(keys)), np.int64)
        places = zip(np.unravel_index(queries, self._shape), np.unravel_index(keys, self._shape))
        for (of_q, of_k), points, cyclic, count in zip(places, self._shape, self._cyclic, self.parameters.shape[1:]):
            offset, reach = of_k[None, :] - of_q[:, None], count // 2
            if cyclic:
                offset = (offset + points // 2) % points - points // 2
            index = index * count + np.clip(offset, -reach, reach) + reach
        return index

    def of_pairs(self, queries: Positions, keys: Positions) -> NDArray[np.float64]:
        """As of `ByDistance`."""
        own = self.parameters[self._own]
        return own.reshape(len(own), -1)[:, self._index(queries, keys)]

    def add_gradient(self, queries: Positions, keys: Positions, gradient: NDArray[Any]) -> None:
        """As of `ByDistance`."""
        own = self.gradient[self._own]
        _add_by_index(own.reshape(len(own), -1), self._index(queries, keys), gradient)


def _add_by_index(sums: NDArray[np.float64], index: Positions, gradient: NDArray[Any]) -> None:
    """sums[h, index] += gradient[h], of all heads where sums have but one; index of any shape."""
    for head, of_head in enumerate(gradient):
        row = sums[min(head, len(sums) - 1)]
        row += np.bincount(index.ravel(), of_head.ravel(), len(row))
