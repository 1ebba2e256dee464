"""The biases of a call in its verification: what the pairs on a rank have of tiles that are spread over all ranks.

A rank computes pairs of queries and keys whose number in a dense bias another rank may hold, as it holds their gradient
in its tile.  The ranks therefore put together the bias of a turn's pairs, each what its tile has of it, and what these
pairs give to its gradient.  A turn is few pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mpi4py import MPI

from .compare import STATE_BYTES, steps
from .reference_biases import Block, BlockSums, KeySums, Numbers, PairRules, SlopeSums, TableSums
from .reference_masks import place_of

if TYPE_CHECKING:
    from typing import Any

    from ..arguments.biases import BiasArguments

    Array = np.ndarray[Any, Any]

BY_PAIR = 4  # numbers of a pair of a turn in memory: its bias or its gradient, and `Sums`


class GivenBiases(NamedTuple):
    """What a rank gives of a call's biases, as NumPy arrays, and what it got of their gradients.

    given: the arguments.  tile: (batch or 1, heads or 1, rows, columns) or None.  keys: (batch or 1, heads or 1,
    tokens_k), the whole problem's, or None.
    sequences, heads: of this rank's tile, as slices.  positions: of the tile's rows and columns.
    grads: by name, of those of dbias, dkey_bias (as keys), dalibi_slopes and drelative_bias that are compared.
    shared: the axes of a tile, 0 and 1, along which dbias is the sum over the whole problem.
    """

    given: BiasArguments
    tile: Array | None
    keys: Array | None
    sequences: slice
    heads: slice
    positions: tuple[Array, Array]
    grads: dict[str, Array]
    shared: tuple[int, ...]


def rules_of(problem, given: BiasArguments, dense, of_keys):
    """`PairRules` of the arguments of a call, which were checked; dense and of_keys as there."""
    slopes, table = (
        None if each is None else np.asarray(each, np.float64) for each in (given.alibi_slopes, given.relative_bias)
    )
    grid = None if given.relative_grid is None else tuple(given.relative_grid)
    cyclic = None if given.relative_cyclic is None else tuple(map(bool, given.relative_cyclic))
    lengths = problem.seqlen, problem.seqlen_k
    place = None if problem.mask is None else place_of(problem.mask, *lengths)
    tables = slopes, table, grid, cyclic
    return PairRules(problem.heads, lengths, dense, of_keys, *tables, given.dropout, given.seed, place)


class SpreadBiases:
    """The biases of a verification.  own_keys: positions of this rank's keys.  Its making is collective."""

    def __init__(self, peers, problem, biases: GivenBiases, own_keys):
        self._peers, self._problem, self._biases = peers, problem, biases
        self.grads, self.keys, of = biases.grads, biases.keys, biases.given
        self.floors = {name: np.zeros(2) for name in self.grads}  # the largest sums of magnitudes and of weights
        self._dtype = np.float64 if problem.partial_dtype == "float64" else np.float32
        self._whole = problem.batch, problem.heads
        self._own_keys = None if biases.keys is None else Numbers(own_keys, biases.keys)
        self.rules = rules_of(problem, of, None, self._own_keys)
        self.dense = biases.tile is not None
        self.hides = any(each is not None for each in (of.bias, of.key_bias, of.relative_bias))
        if biases.tile is not None:
            # Ranks may give the same bias with other axes, and where planes split an axis each says what it has.
            longest = peers.largest(biases.tile.shape[:2])
            of_plane = biases.sequences, biases.heads
            self._axes = tuple(
                1 if length == 1 and of.stop - of.start == whole else whole
                for length, of, whole in zip(longest.tolist(), of_plane, self._whole)
            )
            self._gradient_axes = tuple(1 if axis in biases.shared else n for axis, n in enumerate(self._whole))

    def turns(self, others, length):
        """Slices of `length` of this rank's tokens, as many on every rank; each is of few pairs with `others` tokens.

        With a dense bias alone; else None.
        """
        if not self.dense:
            return None
        (most,) = self._peers.largest([length]).tolist()
        pairs = max(1, others) * int(np.prod(self._whole))
        turns = steps(most, 8 * BY_PAIR * pairs * self._peers.size, STATE_BYTES)
        return [slice(min(turn.start, length), min(turn.stop, length)) for turn in turns]

    def of_queries(self, positions, keys):
        """`PairRules` of queries that are the same on every rank, with some of this rank's keys; collective."""
        if not self.dense:
            return self.rules
        everywhere, own = self._of_all(keys)
        return self.rules._replace(dense=Block(positions, keys, self._values(positions, everywhere)[..., own]))

    def of_keys(self, positions, keys, numbers):
        """`PairRules` of some of this rank's queries with keys that are the same on every rank; collective.

        numbers: of these keys, as `GivenBiases.keys`, or None.
        """
        rules = self.rules._replace(of_keys=None if numbers is None else Numbers(keys, numbers))
        if not self.dense:
            return rules
        everywhere, own = self._of_all(positions)
        return rules._replace(dense=Block(positions, keys, self._values(everywhere, keys)[:, :, own]))

    def _of_all(self, positions):
        """The positions of all ranks, one rank's after another's, and the slice of this rank's."""
        of_ranks = self._peers.allgather(positions)
        start = sum(map(len, of_ranks[: self._peers.rank]))
        return np.concatenate(of_ranks), slice(start, start + len(positions))

    def _values(self, rows, columns):
        """A dense bias of some queries and keys that are the same on every rank: (batch or 1, heads or 1, ...)."""
        values = np.zeros((*self._axes, len(rows), len(columns)), self._dtype)
        (i, j), (r, c) = self._shared_with_tile(rows, columns)
        self._of_plane(values)[:, :, i[:, None], j] = self._biases.tile[:, :, r[:, None], c]
        self._add_up(values)
        return values

    def _shared_with_tile(self, rows, columns):
        """Where the queries and keys of this rank's tile are among some of them, and where those are in the tile."""
        both = [
            np.intersect1d(some, own, assume_unique=True, return_indices=True)[1:]
            for some, own in zip((rows, columns), self._biases.positions)
        ]
        return tuple(zip(*both))

    def _of_plane(self, block):
        """What this rank's plane has of (batch or 1, heads or 1, ...)."""
        of_plane = self._biases.sequences, self._biases.heads
        return block[tuple(of if length > 1 else slice(None) for length, of in zip(block.shape, of_plane))]

    def _add_up(self, array):
        if array.size:
            self._peers.reduce(array, MPI.SUM)

    def tile_sums(self, positions, keys):
        """What adds up dbias of pairs, a list of `Sums`: empty where it is not compared."""
        return [BlockSums(self._gradient_axes, positions, keys)] if "dbias" in self.grads else []

    def compare_tile(self, error, sums):
        """Compare dbias of pairs of which each rank has some; collective.

        error: with what of `spread.compare`.  sums: from `tile_sums`, the same queries on every rank.
        """
        for of_pairs in sums:
            self._see("dbias", of_pairs.largest)
            rows, (columns, own) = of_pairs.positions, self._of_all(of_pairs.keys)
            block = np.zeros((*self._gradient_axes, len(rows), len(columns)))
            block[..., own] = of_pairs.values[0]
            self._add_up(block)
            (i, j), (r, c) = self._shared_with_tile(rows, columns)
            got, right = self.grads["dbias"][:, :, r[:, None], c], self._of_plane(block)[:, :, i[:, None], j]
            error.compare(rows[i], got.swapaxes(1, 2), right.swapaxes(1, 2))

    def key_sums(self, keys):
        """What adds up dkey_bias of some keys, a list of `Sums`: empty where it is not compared."""
        return [KeySums(self.grads["dkey_bias"].shape[:2], keys)] if "dkey_bias" in self.grads else []

    def compare_keys(self, error, sums, own, turn_own):
        """Compare dkey_bias of some of this rank's keys, the numbers `own`; collective.

        turn_own: which of the keys of `sums`, the same on every rank, these are.
        """
        for of_keys in sums:
            self._add_up(of_keys.values)
            self._see("dkey_bias", of_keys.largest)
            got, right = self.grads["dkey_bias"][..., own], of_keys.values[0][..., turn_own]
            error.compare(of_keys.keys[turn_own], got.swapaxes(1, 2), right.swapaxes(1, 2))

    def parameter_sums(self):
        """What adds up the gradients of slopes and tables, as far as they are compared: `Sums` by name."""
        made = {"dalibi_slopes": SlopeSums, "drelative_bias": TableSums}
        return {name: made[name](self.rules) for name in self.grads if name in made}

    def compare_parameters(self, errors, sums):
        """Compare gradients of slopes and tables, of which every rank has all; collective."""
        for name, of_all in sums.items():
            self._add_up(of_all.values)
            self._see(name, of_all.largest)
            errors[name].compare(np.arange(len(self.grads[name])), self.grads[name][None], of_all.values[:1])

    def _see(self, name, largest):
        self.floors[name] = np.maximum(self.floors[name], largest)
