"""A halo exchange written by hand for a neighbourhood on a grid of two axes, in blocks on a Cartesian communicator.

A rank gets the points around its block from up to eight neighbours, faces and corners.  All messages are under way
together, the keys and values of a neighbour in one, so that a rank waits once, after its own block.
"""

from itertools import product
from typing import NamedTuple

import numpy as np

from ..errors import ArgumentError
from .halo_exchange import HaloExchange

OFFSETS = [offset for offset in product((-1, 0, 1), repeat=2) if any(offset)]  # to the eight neighbours, by axis


class Message(NamedTuple):
    """A message to or from a neighbour, and its place: slices of both axes, of the block or of the extended block."""

    neighbour: int
    tag: int
    place: tuple
    buffer: np.ndarray  # keys and values


class GridExchange(HaloExchange):
    """Each point sees the points around it; windows are cut off at the edges of axes that are not cyclic.

    The extended block is the block with its halo around it, in C order.  Queries see nothing of its middle: they have
    seen their own block before.

    cart: periodic along the cyclic axes.
    blocks: by axis, the lengths of the blocks along it.
    kernel: by axis, the points of the window, kernel // 2 of them before the query's own; at most those of any block.
    """

    def __init__(self, peers, cart, backend, problem, blocks, kernel):
        for axis, (points, lengths) in enumerate(zip(kernel, blocks)):
            if points > min(lengths):
                raise ArgumentError(
                    f"--kernel has {points} points along axis {axis}; by hand it may have at most the {min(lengths)} "
                    "of the shortest block"
                )
        self.dims, self.periods, self.place = cart.Get_topo()
        self.block = [lengths[at] for lengths, at in zip(blocks, self.place)]
        super().__init__(peers, cart, backend, problem, self.block[0] * self.block[1])
        self.before = [points // 2 for points in kernel]
        self.after = [points - 1 - points // 2 for points in kernel]
        below = [lines * self._exists(axis, -1) for axis, lines in enumerate(self.before)]
        above = [lines * self._exists(axis, 1) for axis, lines in enumerate(self.after)]
        self.first = below  # coordinates of the block in the extended block
        size = [sum(lines) for lines in zip(below, self.block, above)]
        # Keys and values, which have the same head_dim here.  Kernels may multiply the middle by 0, so no NaN is there.
        self.extended = np.zeros((2, *size, problem.kv_heads, problem.head_dim), problem.dtype)
        neighbours = {offset: self._neighbour(offset) for offset in OFFSETS}
        there = [offset for offset in OFFSETS if neighbours[offset] is not None]
        # Around a cyclic axis of one block, points are here already or come from a neighbour along the other axis.
        around = [offset for offset in there if any(step and parts == 1 for step, parts in zip(offset, self.dims))]
        self.copies = [(self._halo_at(offset), self._before_wrapping(offset)) for offset in around]
        others = [offset for offset in there if offset not in around]
        self.sends = [self._message(neighbours[offset], offset, self._part_for(offset)) for offset in others]
        self.receives = [self._message(neighbours[offset], _back(offset), self._halo_at(offset)) for offset in others]
        self.sent = sum(message.buffer.nbytes for message in self.sends)
        self.sides = below[1], above[1]
        self.own, self.beside = self._own_lists(), self._lists_beside()
        self.above_and_below = self._lists_above_and_below()

    def _exists(self, axis, step):
        """Whether there is a block after this one (step 1) or before it (-1) along an axis."""
        return bool(self.periods[axis]) or 0 <= self.place[axis] + step < self.dims[axis]

    def _neighbour(self, offset):
        """The rank of the neighbour that lies so, None if there is none."""
        if not all(self._exists(axis, step) for axis, step in enumerate(offset)):
            return None
        return self.cart.Get_cart_rank([(at + step) % parts for at, step, parts in zip(self.place, offset, self.dims)])

    def _message(self, neighbour, offset, place):
        shape = [at.stop - at.start for at in place]
        buffer = np.empty((2, *shape, *self.extended.shape[3:]), self.extended.dtype)
        return Message(neighbour, OFFSETS.index(offset), place, buffer)

    def _part_for(self, offset):
        """The points of this block that the neighbour that lies so has to see."""
        sides = zip(offset, self.block, self.before, self.after)
        return tuple(
            {-1: slice(0, after), 0: slice(0, length), 1: slice(length - before, length)}[step]
            for step, length, before, after in sides
        )

    def _halo_at(self, offset):
        """The points of the extended block that come from the neighbour that lies so."""
        sides = zip(offset, self.first, self.block, self.extended.shape[1:])
        return tuple(
            {-1: slice(0, first), 0: slice(first, first + length), 1: slice(first + length, size)}[step]
            for step, first, length, size in sides
        )

    def _before_wrapping(self, offset):
        """Where the points of a halo are in the extended block, which wraps around the axes of one block."""
        sides = zip(self.dims, self._halo_at(offset), self._part_for(_back(offset)), self.first)
        return tuple(
            slice(part.start + first, part.stop + first) if parts == 1 and step else at
            for step, (parts, at, part, first) in zip(offset, sides)
        )

    def _own_lists(self):
        """A list for each line of the window: the keys of the block itself, by their numbers in it."""
        (rows, columns), (before, after) = self.block, (self.before, self.after)
        y, x = (axis.ravel() for axis in np.indices((rows, columns)))
        seen = y + np.arange(-before[0], after[0] + 1)[:, None]
        begin = seen * columns + np.maximum(x - before[1], 0)
        end = seen * columns + np.minimum(x + after[1] + 1, columns)
        return self.launches(begin, np.where((seen >= 0) & (seen < rows), end, begin))

    def _lists_above_and_below(self):
        """The same of the halo above and below the block, by the numbers of its keys in the extended block."""
        (rows, columns), (above, left) = self.block, self.first
        height, width = self.extended.shape[1:3]
        y, x = (axis.ravel() for axis in np.indices((rows, columns)))
        seen = y + above + np.arange(-self.before[0], self.after[0] + 1)[:, None]
        begin = seen * width + np.maximum(x + left - self.before[1], 0)
        end = seen * width + np.minimum(x + left + self.after[1] + 1, width)
        some = (seen >= 0) & (seen < height) & ((seen < above) | (seen >= above + rows))
        return self.launches(begin, np.where(some, end, begin))

    def _lists_beside(self):
        """The same of the queries at the sides, of the keys of the halo beside the block.

        Of both there are as many columns in a row: first those on the left, then those on the right.  No query sees
        both sides, since no window is wider than a block.
        """
        left, right = self.sides
        y, x = (axis.ravel() for axis in np.indices((self.block[0], left + right)))
        seen = y + np.arange(-self.before[0], self.after[0] + 1)[:, None]
        begin = seen * (left + right) + np.where(x < left, x, left)
        end = seen * (left + right) + np.where(x < left, left, x + 1)
        return self.launches(begin, np.where((seen >= 0) & (seen < self.block[0]), end, begin))

    def post(self, k, v):
        """As of `HaloExchange`."""
        requests = [self._begin(self.cart.Irecv, message) for message in self.receives]
        both = [array.reshape(*self.block, *array.shape[1:]) for array in (k, v)]
        for message in self.sends:
            for packed, array in zip(message.buffer, both):
                packed[...] = array[message.place]
            requests.append(self._begin(self.cart.Isend, message))
        if self.copies:
            for extended, array in zip(self.extended, both):
                extended[self._halo_at((0, 0))] = array
        return requests

    @staticmethod
    def _begin(call, message):
        return call(message.buffer.view(np.uint8), message.neighbour, message.tag)

    def add_halo(self, q):
        """As of `HaloExchange`.

        The queries at the sides are few in each row: kernels take them faster from an array of their own.
        """
        for message in self.receives:
            self.extended[(slice(None), *message.place)] = message.buffer
        for to, of in self.copies:
            self.extended[(slice(None), *to)] = self.extended[(slice(None), *of)]
        keys, values = self.extended
        both = (array.reshape(-1, *array.shape[2:]) for array in (keys, values))
        self.launch(self.above_and_below, self.partial, q, *both)
        if self.beside:
            (rows, columns), (left, right) = self.block, self.sides
            beside = self._halo_at((0, 0))[0]
            wholes = [array.reshape(rows, columns, *array.shape[1:]) for array in (q, *self.partial)]
            queries, *partial = map(self._at_sides, wholes)
            self.launch(self.beside, partial, queries, *map(self._at_sides, (keys[beside], values[beside])))
            for whole, part in zip(wholes[1:], partial):
                part = part.reshape(rows, left + right, *part.shape[1:])
                whole[:, :left], whole[:, columns - right :] = part[:, :left], part[:, left:]

    def _at_sides(self, array):
        """The points at both sides of an array (rows, columns, ...) as a new one (points, ...)."""
        left, right = self.sides
        both = np.concatenate([array[:, :left], array[:, array.shape[1] - right :]], axis=1)
        return both.reshape(-1, *array.shape[2:])


def _back(offset):
    """The opposite offset."""
    return tuple(-step for step in offset)
