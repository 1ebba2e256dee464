"""Divisions of the scores: which rank computes which part of the score matrices of a problem.  No MPI.

A problem has one score matrix of queries and keys for each KV head of each sequence: a group.  A division gives each
rank some pieces: a group, a range of rows and a range of keys.  Each pair of a query and a key is in one piece of one
rank, whether the mask shows it or not: so a division holds for whatever the mask leaves of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..problem.mask import Mask


class Piece(NamedTuple):
    """A rectangle of the score matrix of a group.

    group: number of the group, sequence * kv_heads + KV head.
    first_row, last_row: its queries [first_row, last_row), as positions in the sequence.
    first_key, last_key: its keys [first_key, last_key).
    """

    group: int
    first_row: int
    last_row: int
    first_key: int
    last_key: int

    @property
    def area(self) -> int:
        """The number of pairs, hidden ones included."""
        return (self.last_row - self.first_row) * (self.last_key - self.first_key)


Division: TypeAlias = "tuple[tuple[Piece, ...], ...]"  # the pieces of each rank


def is_exact(division: Division, groups: int, seqlen: int, seqlen_k: int) -> bool:
    """Whether each pair of a query and a key of each group is in exactly one piece."""
    pieces = [piece for of_rank in division for piece in of_rank]
    if any(piece.first_row < 0 or piece.last_row > seqlen for piece in pieces):
        return False
    if any(piece.first_key < 0 or piece.last_key > seqlen_k for piece in pieces):
        return False
    if sum(piece.area for piece in pieces) != groups * seqlen * seqlen_k:
        return False
    return all(_is_apart([piece for piece in pieces if piece.group == group]) for group in range(groups))


def _is_apart(pieces: Sequence[Piece]) -> bool:
    """Whether no two pieces of a group share a pair."""
    if not pieces:
        return True
    _, first_row, last_row, first_key, last_key = np.array(pieces, np.int64).T
    rows = (first_row[:, None] < last_row) & (first_row < last_row[:, None])
    keys = (first_key[:, None] < last_key) & (first_key < last_key[:, None])
    shared = rows & keys
    np.fill_diagonal(shared, False)
    return not shared.any()


def trimmed(piece: Piece, mask: Mask) -> Piece | None:
    """The smallest piece with the same visible pairs under a mask without intervals of the caller; None without any.

    From query to query neither end of the keys that it sees moves back, so the outermost rows and keys tell.
    """
    first, stop = mask.queries_seeing(np.array([piece.first_key]), np.array([piece.last_key]))
    first_row, last_row = max(piece.first_row, int(first[0])), min(piece.last_row, int(stop[0]))
    if first_row >= last_row:
        return None
    low, high = mask.keys_seen_by(np.array([first_row, last_row - 1]))
    first_key, last_key = max(piece.first_key, int(low[0])), min(piece.last_key, int(high[1]))
    if first_key >= last_key:
        return None
    return Piece(piece.group, first_row, last_row, first_key, last_key)
