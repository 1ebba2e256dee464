"""Lower bounds on the time and the bytes of tiles, from a few of their ranks.  Pure arithmetic.

The search predicts only what may be the best by these bounds.  None may exceed what `model.simulate` predicts.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..schedule.kinds import GATHERED, KINDS
from ..schedule.remembered import Remembered
from ..schedule.route import passed_on
from ..schedule.tile import Tile
from ..schedule.travels import token_bytes
from .workload import chunks_of, edges

ROUNDING = 1 - 1e-9  # of bounds whose terms are summed in another order than those of a choice


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


class LowerBounds:
    """Those of the tiles of a plane, with a pair of layouts.

    work: the `Work` of the layouts.  tiles: a tuple.  nodes: the node of every rank.  passes: those that are summed.
    """

    def __init__(self, problem, work, tiles, machine, nodes, passes):
        self._problem, self._work, self._machine, self._nodes, self._passes = problem, work, machine, nodes, passes
        self._blocks, self._numbers = blocks_of(tiles), {tile: i for i, tile in enumerate(tiles)}
        self._computing = {direction: seconds for direction, seconds in zip(passes, self._launches())}
        self._shortest = sum(seconds.max(axis=2) * ROUNDING for seconds in self._computing.values()).tolist()
        self._transfers, self._received = Remembered(self._transfers_of), Remembered(self._received_in)
        self.sent = Remembered(self._sent)

    def _launches(self):
        """Seconds of computing, of each pass: blocks launched one by one, and all in one launch: (2, tiles, some)."""
        problem, work, machine, blocks = self._problem, self._work, self._machine, self._blocks
        queries, keys = (lengths[chunks] for lengths, chunks in zip(work.lengths, (blocks.q, blocks.k)))
        pairs = work.counts.at(blocks.q, blocks.k)
        of_blocks, launched = edges(pairs, queries, keys, work), (pairs > 0).sum(axis=1)
        of_rows = np.maximum.reduceat(of_blocks.reshape(-1, len(blocks.ranks)), blocks.rows)
        extra = np.stack([of_blocks.sum(axis=1), np.add.reduceat(of_rows, blocks.tiles)])
        timed = pairs.sum(axis=1) + machine.edge_keys(problem.dtype) * extra
        launching = machine.launch * work.lists * np.stack([launched, launched > 0])
        for direction in self._passes:
            yield machine.compute(problem.flops_per_pair * timed, problem.dtype, direction) + launching

    def computing(self, tile, fused):
        """Seconds of all passes if transfers took no time.  fused: whether all blocks are one launch."""
        return self._shortest[fused][self._numbers[tile]]

    def _sent(self, tile):
        """{pass: {kind: bytes that a rank sends, mean over ranks}}: exact on the direct route without collectives."""
        return {
            direction: {
                kind: self._work.lines(KINDS[direction][kind].column, tile).total * nbytes / tile.ranks
                for kind, nbytes in token_bytes(self._problem, direction).items()
            }
            for direction in self._passes
        }

    def seconds(self, tile, schedule, route, overlap):
        """Seconds of all passes.  schedule: its name.  overlap: whether transfers may run beside blocks."""
        total, fused, ring = 0.0, schedule == "collective", passed_on(route)
        for direction in self._passes:
            computing = self._computing[direction][int(fused), self._numbers[tile]]
            busy, unhidden, merging = self._transfers(tile, ring, direction)
            if fused:
                least = computing + merging + (1.0 if ring else self._machine.collective) * busy
            else:
                least = np.maximum(computing * (not overlap) + busy, computing + unhidden + merging)
            total += least.max() * ROUNDING
        return total

    def _transfers_of(self, tile, ring, direction):
        """Seconds of these ranks' busier links, of transfers beside no block, and of merging: each (some,)."""
        links = self._machine.inside, self._machine.between
        rates, apart = (np.array(of_links)[:, None] for of_links in zip(*((x.bandwidth, 1 - x.overlap) for x in links)))
        busy, unhidden, merging = np.zeros((2, len(self._blocks.ranks))), 0.0, 0.0
        for name, nbytes in token_bytes(self._problem, direction).items():
            if tile.extent(name) == 1:
                continue
            gathered = name in GATHERED
            received = self._received(tile, KINDS[direction][name].column, gathered, ring) * nbytes
            lasting = received / rates
            unhidden = unhidden + (apart * lasting).sum(axis=0)
            if gathered or not ring:
                busy += lasting
            if not gathered and not ring:
                merging = merging + received.sum(axis=0) / self._machine.merging
        return busy.max(axis=0), unhidden, merging

    def _received_in(self, tile, column, gathered, ring):
        """Tokens that each rank receives, from its own node and from others: (2, some).

        column: whether they move in columns.  gathered: whether they are chunks, else partials.
        """
        ranks, hops = self._blocks.ranks, slice(1, None)
        group, lines = chunks_of(tile, column, ranks), self._work.lines(column, tile)
        if ring:  # all comes from a neighbour
            hops = slice(1, 2) if gathered else slice(-1, None)
        ahead = np.arange(1, len(group))[:, None]
        if gathered or ring:  # what it needs of the group's chunks
            tokens = lines.tokens(lines.needs(groups=lines.place[ranks]))[ahead, group[1:]]
        else:  # what the group needs of its chunk
            tokens = lines.tokens(lines.needs(owners=ranks))[-ahead, ranks]
        crossing = self._nodes[group[hops]] != self._nodes[ranks]
        return np.stack([np.where(crossing, 0, tokens).sum(axis=0), np.where(crossing, tokens, 0).sum(axis=0)])
