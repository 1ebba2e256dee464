"""What a rank computes of all scores: its tile of the queries and the keys, of some sequences and heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..problem.layout import Layout

AXES = ("batch", "heads")  # of a tile, along which the planes of a mesh may have the same


class Share(NamedTuple):
    """The tile of a rank.

    layouts: of the queries and of the keys on the mesh.  chunks: the numbers of the chunks of its row, and of those of
    its column.  sequences, heads: of all, as slices.  of_all: numbers of all sequences and heads.
    """

    layouts: tuple[Layout, Layout]
    chunks: tuple[list[int], list[int]]
    sequences: slice
    heads: slice
    of_all: tuple[int, int]

    @property
    def tokens(self) -> tuple[int, int]:
        """Number of queries and of keys."""
        q_tokens, k_tokens = (sum(map(of.length, numbers)) for of, numbers in zip(self.layouts, self.chunks))
        return q_tokens, k_tokens

    def positions(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions in the sequence of the queries and of the keys, chunk after chunk: int64."""
        rows, columns = (
            np.concatenate([np.zeros(0, np.int64), *map(layout.positions, numbers)])
            for layout, numbers in zip(self.layouts, self.chunks)
        )
        return rows, columns

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of a tile of all of its sequences and heads."""
        sequences, heads = (len(range(*of.indices(count))) for of, count in zip(self[2:4], self.of_all))
        return (sequences, heads, *self.tokens)

    def leading(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Where the tile lies in a whole bias of a shape along its first two axes, which may have the length 1."""
        return tuple(slice(0, 1) if length == 1 else own for length, own in zip(shape, (self.sequences, self.heads)))

    def shared_axes(self, shape: tuple[int, ...], shared: Sequence[str] | None) -> tuple[int, ...]:
        """Which of the first two axes of a tile of a shape have one bias for all of the problem.

        shared: what the caller says of it: names of `AXES` or, where the shape says it, None.
        Raises ArgumentError.
        """
        if shared is not None and (isinstance(shared, str) or not set(shared) <= set(AXES)):
            raise ArgumentError(f"bias_shared is {shared!r}; it must be names of {' and '.join(AXES)}, or None")
        axes = []
        for axis, (name, length, own, count) in enumerate(zip(AXES, shape, self.shape, self.of_all)):
            if length > 1 and name in (shared or ()):
                raise ArgumentError(f"bias_shared has {name!r}, but bias has {length} along that axis")
            if length == own == 1 < count and shared is None:
                raise ArgumentError(
                    f"bias_shared is None, and a plane has 1 of {count} along {name}; it must say whether all of them "
                    f"have this bias: names of {' and '.join(AXES)}, or ()"
                )
            if length == 1 and (own > 1 or name in (shared or ())):
                axes.append(axis)
        return tuple(axes)


def whole_shape(share: Share, shape: tuple[int, ...], shared: Sequence[str] | None, tokens: Any) -> tuple[int, ...]:
    """The shape of a whole bias of which a rank has a tile of a shape.  tokens: of queries and keys."""
    axes = share.shared_axes(shape, shared)
    return (*(1 if axis in axes else count for axis, count in enumerate(share.of_all)), *tokens)
