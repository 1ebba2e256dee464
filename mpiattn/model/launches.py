"""The least time that tiles compute for, from a few of their ranks: of all tiles together.  Pure arithmetic."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..schedule.remembered import Remembered
from ..schedule.tile import Tile
from .workload import edges

ROUNDING = 1 - 1e-9  # of lower bounds whose terms are summed in another order than those of a choice


class _Blocks(NamedTuple):
    """The blocks of some ranks under several tiles of as many chunks, those of a row together.

    ranks: (some,).  q, k: the chunks of every block: (tiles, blocks, some).
    rows: where the blocks of each row begin, counted from the first of the first tile.
    tiles: where the rows of each tile begin.
    """

    ranks: np.ndarray
    q: np.ndarray
    k: np.ndarray
    rows: np.ndarray
    tiles: np.ndarray


@lru_cache(8)  # other lengths of sequences have the same blocks
def blocks_of(tiles):
    """The `_Blocks` of tiles of one plane, of the first, the middle and the last rank: one is often the busiest."""
    chunks, a = tiles[0].chunks, np.array([tile.a for tile in tiles])
    ranks, numbers = np.unique([0, chunks // 2, chunks - 1]), np.arange(chunks)[:, None]
    every = Tile(1, a[:, None, None], chunks // a[:, None, None])
    q, k = every.in_row(ranks, numbers // every.b), every.in_column(ranks, numbers % every.b)
    rows = np.concatenate([np.arange(0, chunks, tile.b) + i * chunks for i, tile in enumerate(tiles)])
    return _Blocks(ranks, q, k, rows, np.cumsum(a) - a)


class Launches:
    """What these ranks launch in a pass, and how long they compute at least.

    work: the `Work` of two layouts.  tiles: of one plane, a tuple.
    """

    def __init__(self, problem, work, tiles, machine):
        blocks, edge = blocks_of(tiles), machine.edge_keys(problem.dtype)
        queries, keys = (lengths[chunks] for lengths, chunks in zip(work.lengths, (blocks.q, blocks.k)))
        pairs = work.counts.at(blocks.q, blocks.k)
        of_blocks, total, launched = edges(pairs, queries, keys, work.seen), pairs.sum(axis=1), (pairs > 0).sum(axis=1)
        of_rows = np.maximum.reduceat(of_blocks.reshape(-1, len(blocks.ranks)), blocks.rows)
        # blocks that are launched one by one, and all in one launch: (2, tiles, some)
        timed = np.stack([of_blocks.sum(axis=1), np.add.reduceat(of_rows, blocks.tiles)]) * edge + total
        self._operations, self._launched = problem.flops_per_pair * timed, np.stack([launched, launched > 0])
        self._tiles, self._machine, self._dtype = tiles, machine, problem.dtype
        self.ranks, self._seconds = blocks.ranks, Remembered(self._seconds_of)

    def _seconds_of(self, direction):
        return self._machine.compute(self._operations, self._dtype, direction) + self._machine.launch * self._launched

    def seconds(self, tile, fused, direction):
        """Seconds that every one of these ranks computes in a pass.  fused: whether all blocks are one launch."""
        return self._seconds(direction)[int(fused), self._tiles.index(tile)].tolist()

    def least_seconds(self, directions):
        """Seconds of some passes if transfers take no time: {(tile, fused): seconds}."""
        seconds = sum(self._seconds(direction).max(axis=2) * ROUNDING for direction in directions)
        return {
            (tile, bool(fused)): of_tile
            for fused, of in enumerate(seconds.tolist())
            for tile, of_tile in zip(self._tiles, of)
        }
