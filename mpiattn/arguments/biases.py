"""The arguments of a call that are added to its scores, and its dropout: one record, from the call to what uses it."""

from __future__ import annotations

import hashlib
import math
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..problem.distances import GridTable, Slopes, Table
from ..problem.tensors import as_array, detached
from ..system.values import AsGiven, Words, whole_number
from .arrays import on_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..backends.base import Array
    from ..problem.distances import ByDistance
    from ..problem.problem import Problem

WORDS = 2**32  # that a random word may be
# The arguments whose gradients a backward pass returns, in this order.
WITH_GRADIENTS = ("bias", "key_bias", "alibi_slopes", "relative_bias")
PARAMETERS = WITH_GRADIENTS[2:]  # the same on every rank


class BiasArguments(NamedTuple):
    """As `MeshAttention.forward` documents them, and as the caller gives them."""

    bias: Array | None = None
    key_bias: Array | None = None
    alibi_slopes: Array | None = None
    relative_bias: Array | None = None
    relative_grid: Sequence[int] | None = None
    relative_cyclic: Sequence[bool] | None = None
    dropout: float = 0.0
    seed: int | None = None

    @property
    def none(self) -> bool:
        """Whether the call has no bias and no dropout."""
        if any(argument is not None for argument in (*self[:6], self.seed)):  # comparing arrays has no truth value
            return False
        return not isinstance(self.dropout, np.ndarray) and self.dropout == 0

    @property
    def given(self) -> list[str]:
        """Those that have gradients, by name."""
        return [name for name in WITH_GRADIENTS if getattr(self, name) is not None]

    def threshold(self) -> int:
        """The random word below which a weight is dropped; 0 without dropout.  Raises ArgumentError."""
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, Real) or not 0 <= self.dropout < 1:
            raise ArgumentError(f"dropout is {self.dropout!r}; it must be a number from 0, without 1: a probability")
        if not self.dropout:
            return 0
        if self.seed is None:
            raise ArgumentError(
                "seed is None; with dropout it must be a whole number, another one for every layer and step"
            )
        whole_number("seed", self.seed, 0, most=2**64 - 1)
        return min(max(round(self.dropout * WORDS), 1), WORDS - 1)

    def functions(self, problem: Problem, own: slice) -> list[ByDistance]:
        """The biases that are functions of distances, of the heads `own`.  Raises ArgumentError."""
        made: list[ByDistance] = []
        shift = problem.seqlen_k - problem.seqlen
        if self.alibi_slopes is not None:
            slopes = _parameters("alibi_slopes", self.alibi_slopes, problem, 1)
            if len(slopes) != problem.heads:
                raise ArgumentError(f"alibi_slopes has shape {slopes.shape}; it must be (heads,) = ({problem.heads},)")
            made.append(Slopes("alibi_slopes", slopes, shift, own, problem.places))
        if self.relative_bias is None:
            for name in ("relative_grid", "relative_cyclic"):
                if getattr(self, name) is not None:
                    raise ArgumentError(f"{name} is given without relative_bias, which alone depends on it")
            return made
        grid, cyclic = self._grid(problem)
        if grid is not None and problem.places is not None:
            raise ArgumentError(
                f"relative_grid is given with mask {problem.mask}, whose tokens are at places of a line; give "
                "relative_bias without relative_grid, of the distances on it"
            )
        table = _parameters("relative_bias", self.relative_bias, problem, 1 + len(grid or (0,)))
        if any(count % 2 == 0 for count in table.shape[1:]):
            raise ArgumentError(
                f"relative_bias has shape {table.shape}; its lengths after the heads must be odd: 2 R + 1, of the "
                "distances from -R to R"
            )
        if grid is None:
            made.append(Table("relative_bias", table, shift, own, problem.places))
        else:
            made.append(GridTable("relative_bias", table, own, grid, cyclic))
        return made

    def _grid(self, problem: Problem) -> tuple[tuple[int, ...] | None, tuple[bool, ...]]:
        """The points of the grid along its axes, or None, and which of these are cyclic."""
        if self.relative_grid is None:
            if self.relative_cyclic is not None:
                raise ArgumentError("relative_cyclic is given without relative_grid, whose axes it is about")
            return None, ()
        try:
            axes = enumerate(self.relative_grid)
            grid = tuple(whole_number(f"relative_grid[{axis}]", points, 1) for axis, points in axes)
        except TypeError:
            grid = ()
        if math.prod(grid) != problem.seqlen or problem.seqlen != problem.seqlen_k or not grid:
            raise ArgumentError(
                f"relative_grid is {self.relative_grid!r}; it must be the points of the grid along its axes, whose "
                f"product is seqlen and seqlen_k, which are {problem.seqlen} and {problem.seqlen_k}"
            )
        try:
            cyclic = (False,) * len(grid) if self.relative_cyclic is None else tuple(map(bool, self.relative_cyclic))
        except TypeError:
            cyclic = ()
        if len(cyclic) != len(grid):
            raise ArgumentError(
                f"relative_cyclic is {self.relative_cyclic!r}; it must be True or False for each of the "
                f"{len(grid)} axes of relative_grid"
            )
        return grid, cyclic

    def compared(self) -> dict[str, Any]:
        """The values that ranks compare, by name, after `functions` and `threshold` have accepted them.

        Without what is left out, since a rank that gives no bias at all compares nothing of them.
        """
        values: dict[str, Any] = {}
        for name in self.given:
            if name in PARAMETERS:
                array = np.asarray(on_host(as_array(name, detached(getattr(self, name)))))
                values[name] = AsGiven((array.shape, hashlib.sha256(array.tobytes()).hexdigest()), array)
            else:  # each rank has another part of it
                values[name] = AsGiven(True, Words("given"))
        if self.relative_grid is not None:
            values["relative_grid"] = tuple(map(int, self.relative_grid))
        if self.relative_cyclic is not None and any(self.relative_cyclic):  # else as if it was left out
            values["relative_cyclic"] = tuple(map(bool, self.relative_cyclic))
        if self.dropout:
            values |= {"dropout": float(self.dropout), "seed": self.seed}
        return values


def _parameters(name: str, argument: Any, problem: Problem, axes: int) -> np.ndarray[Any, Any]:
    """An argument that is the same on every rank, (heads or 1, ...).  Raises ArgumentError."""
    array = on_host(as_array(name, detached(argument)))
    array = np.asarray(array)
    if array.dtype != problem.partial_dtype:
        raise ArgumentError(f"{name} has dtype {array.dtype}; it must be {problem.partial_dtype}, that of lse")
    if array.ndim != axes or len(array) not in (1, problem.heads):
        form = ["(heads,)", "(1 or heads, 2 R + 1)"][axes - 1] if axes < 3 else "(1 or heads, 2 R + 1 of each axis)"
        raise ArgumentError(f"{name} has shape {array.shape}; it must be {form}, and heads is {problem.heads}")
    return array
