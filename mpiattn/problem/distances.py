"""Biases that are functions of how far a key is from a query: slopes of ALiBi, and tables of relative positions.

A distance is the key's position minus that of the query's diagonal, which is its own position where there are as many
keys as queries.
"""

import numpy as np


class _ByDistance:
    """What all have.

    name: of the argument.  parameters: float64, an array (heads or 1, ...).  shift: from a query's position to its
    diagonal.  own: the heads that this rank computes, a slice.
    The attribute `gradient` has the shape of `parameters`.
    """

    of_line = True  # whether values depend on the distance alone

    def __init__(self, name, parameters, shift, own):
        self.name, self.parameters, self._shift = name, np.asarray(parameters, np.float64), shift
        self.gradient = np.zeros(self.parameters.shape)
        self._own = own if len(self.parameters) > 1 else slice(None)

    def distance(self, query, key):
        """That of two positions, or of arrays that broadcast."""
        return key - query - self._shift

    def _of_pairs(self, queries, keys):
        return self.distance(queries[:, None], keys[None])

    def of_pairs(self, queries, keys):
        """Values (own heads or 1, queries, keys) of all pairs of some positions."""
        return self.of_distances(self._of_pairs(queries, keys))

    def add_gradient(self, queries, keys, gradient):
        """Add the gradient of such values, (own heads, queries, keys)."""
        self.add_gradient_of_distances(self._of_pairs(queries, keys), gradient)


class Slopes(_ByDistance):
    """ALiBi (arXiv 2108.12409): -slope * |distance|, a slope a head."""

    def of_distances(self, distances):
        """Values (own heads or 1, ...) of distances of any shape."""
        return np.multiply.outer(-self.parameters[self._own], np.abs(distances))

    def add_gradient_of_distances(self, distances, gradient):
        """Add the gradient of such values, (own heads, ...)."""
        sums = -(gradient.reshape(len(gradient), -1).astype(np.float64) @ np.abs(distances).ravel().astype(np.float64))
        self.gradient[self._own] += sums if len(self.parameters) > 1 else sums.sum()


class Table(_ByDistance):
    """A number for each distance from -R to R, of shape (heads or 1, 2 R + 1); farther ones have that of R or -R."""

    def _index(self, distances):
        reach = self.parameters.shape[1] // 2
        return np.clip(distances, -reach, reach) + reach

    def of_distances(self, distances):
        """As of `Slopes`."""
        return self.parameters[self._own][:, self._index(distances)]

    def add_gradient_of_distances(self, distances, gradient):
        """As of `Slopes`."""
        _add_by_index(self.gradient[self._own], self._index(distances), gradient)


class GridTable(_ByDistance):
    """A number for each offset on a grid of points in C order: (heads or 1, 2 R + 1 of each axis), clipped as `Table`.

    shape: of the grid.  cyclic: by axis, whether it has no ends: then the shorter way round counts.
    """

    of_line = False

    def __init__(self, name, parameters, own, shape, cyclic):
        super().__init__(name, parameters, 0, own)
        self._shape, self._cyclic = shape, cyclic

    def _index(self, queries, keys):
        """Index of every pair in the numbers of a head: (queries, keys)."""
        index = 0
        places = zip(np.unravel_index(queries, self._shape), np.unravel_index(keys, self._shape))
        for (of_q, of_k), points, cyclic, count in zip(places, self._shape, self._cyclic, self.parameters.shape[1:]):
            offset, reach = of_k[None, :] - of_q[:, None], count // 2
            if cyclic:
                offset = (offset + points // 2) % points - points // 2
            index = index * count + np.clip(offset, -reach, reach) + reach
        return index

    def of_pairs(self, queries, keys):
        own = self.parameters[self._own]
        return own.reshape(len(own), -1)[:, self._index(queries, keys)]

    def add_gradient(self, queries, keys, gradient):
        own = self.gradient[self._own]
        _add_by_index(own.reshape(len(own), -1), self._index(queries, keys), gradient)


def _add_by_index(sums, index, gradient):
    """sums[h, index] += gradient[h], of all heads where sums have but one; index of any shape."""
    for head, of_head in enumerate(gradient):
        row = sums[min(head, len(sums) - 1)]
        row += np.bincount(index.ravel(), of_head.ravel(), len(row))
