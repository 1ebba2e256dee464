"""Whole biases to and from the tiles of a mesh: `scatter` and `gather`.  Both ends know what a message holds."""

import math

import numpy as np

from . import rounds


def _pieces(tile, shape, itemsize, ranks):
    """The rows of a rank's tile in pieces of a few megabytes over all ranks: (in the tile, in the whole) of each.

    tile: (slices of the first two axes, positions of the rows and of the columns).  shape: of the whole.
    """
    leading, rows, columns = tile
    of_row = itemsize * len(columns) * math.prod(len(range(*s.indices(n))) for s, n in zip(leading, shape))
    step = max(1, rounds.PIECE_BYTES // ranks // max(of_row, 1))
    for first in range(0, len(rows) if len(columns) else 0, step):
        some = slice(first, min(first + step, len(rows)))
        yield (..., some, slice(None)), (*leading, rows[some, None], columns)


def _rounds(tiles, shape, itemsize, ranks, some):
    """For every round a list of (rank, in the tile, in the whole), of some of the ranks."""
    parts = {rank: _pieces(tiles(rank), shape, itemsize, ranks) for rank in some}
    while parts:
        of_round = [(rank, *piece) for rank, pieces in parts.items() if (piece := next(pieces, None))]
        parts = {rank: parts[rank] for rank, *_ in of_round}
        yield of_round


def scatter(peers, tiles, whole, tile, shape, root, max_message):
    """Fill this rank's tile, a NumPy array, from the whole on `root`, or on every rank if that is None.

    tiles: tiles(rank) as of `_pieces`.  shape: of the whole.
    """
    if root is None:
        leading, rows, columns = tiles(peers.rank)
        tile[...] = whole[(*leading, rows[:, None], columns)]
        return
    has = peers.rank == root
    with rounds.Rounds(peers, max_message) as messages:
        for of_round in _rounds(tiles, shape, tile.itemsize, peers.size, range(peers.size) if has else [peers.rank]):
            for rank, in_tile, in_whole in of_round:
                if not has:
                    messages.receive(root, tile[in_tile])
                elif rank == peers.rank:
                    tile[in_tile] = whole[in_whole]
                else:
                    messages.send(rank, whole[in_whole])
            messages.turn()
        messages.end()


def gather(peers, tiles, tile, shape, root, max_message, sending):
    """The whole array on `root`, and None on the others.  sending(rank): whether a rank's tile is needed."""
    gets = peers.rank == root
    whole = np.empty(shape, rounds.native(tile.dtype)) if gets else None
    some = [rank for rank in (range(peers.size) if gets else [peers.rank]) if sending(rank)]
    with rounds.Rounds(peers, max_message) as messages:
        for of_round in _rounds(tiles, shape, tile.itemsize, peers.size, some):
            for rank, in_tile, in_whole in of_round:
                if not gets:
                    messages.send(root, tile[in_tile])
                elif rank == peers.rank:
                    whole[in_whole] = tile[in_tile]
                else:
                    messages.receive(rank, whole, in_whole)
            messages.turn()
        messages.end()
    return whole
