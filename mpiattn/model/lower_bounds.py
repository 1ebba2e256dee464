"""The least time and bytes that a tile can take under any schedule, from a few of its ranks.  Pure arithmetic.

The search looks only at choices whose least may be the best.  Nothing here may exceed what `model.simulate` predicts.
Few ranks are looked at, and each has only a few sums, so Python's own numbers are faster here than arrays.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..schedule.kinds import GATHERED, KINDS
from ..schedule.remembered import Remembered
from ..schedule.route import passed_on
from ..schedule.travels import token_bytes
from .launches import ROUNDING
from .simulate import nodes_of
from .workload import chunks_of


class _Received(NamedTuple):
    """What a rank receives from its row or column in all hops: from its own node, and from other nodes."""

    tokens: list
    messages: list


class _Transfers(NamedTuple):
    """The least seconds of a rank's transfers in a pass.

    busy: of its busier link.  begun: until the last transfer begins.  unhidden: of those beside no block.
    merging: of partials.  collectives: of all transfers, if they are collectives.
    """

    busy: float
    begun: float
    unhidden: float
    merging: float
    collectives: float


class LowerBounds:
    """Those for a tile and a pair of layouts.

    work: the `Work` of the layouts.
    nodes: the node of every rank; None as in `model.simulate`.
    launches: the `Launches` of this tile and others.
    """

    def __init__(self, problem, work, tile, machine, nodes, launches):
        self.problem, self.machine, self._work, self._tile = problem, machine, work, tile
        self._launches = launches
        self._some = self._launches.ranks
        self._nodes = nodes_of(tile.ranks, machine) if nodes is None else np.asarray(nodes)
        self._moved, self._transfers = Remembered(self._moved_in), Remembered(self._transfers_of)
        self._received, self._tokens = Remembered(self._received_in), Remembered(self._tokens_of)

    @cached_property
    def _chunks(self):
        """The chunks of queries and of keys of the ranks' tiles, each (hops, ranks)."""
        return tuple(chunks_of(self._tile, column, self._some) for column in (False, True))

    def _moved_in(self, column):
        """Tokens that all ranks send along columns, or rows."""
        return self._work.moved(column, self._tile)

    def _tokens_of(self, column, gathered):
        """Tokens that ranks need of others of their column or row or, not gathered, others of theirs: (hops, ranks)."""
        group, others = self._chunks[column], self._chunks[not column]
        if gathered:
            return self._work.tokens(column, group, others)[1:]
        users = group[1:]
        own = np.broadcast_to(self._some, users.shape)
        others = chunks_of(self._tile, not column, users.ravel())
        return self._work.tokens(column, own.reshape(1, -1), others).reshape(own.shape)

    def _received_in(self, column, gathered, ring):
        """The `_Received` of every rank, of a kind that moves in columns or rows, and is gathered or not."""
        group, hops = self._chunks[column], slice(1, None)
        if ring:  # all comes from a neighbour
            hops = slice(1, 2) if gathered else slice(-1, None)
        crossing = self._nodes[group[hops]] != self._nodes[self._some]
        tokens = self._tokens(column, gathered or ring)
        by_link = np.stack([np.where(crossing, 0, tokens), np.where(crossing, tokens, 0)])
        return list(map(_Received, by_link.sum(axis=1).T.tolist(), (by_link > 0).sum(axis=1).T.tolist()))

    def sent(self, direction):
        """{kind: bytes that a rank sends, mean over ranks}: exact on the direct route without collectives."""
        return {
            kind: self._moved(KINDS[direction][kind].column) * nbytes / self._tile.ranks
            for kind, nbytes in token_bytes(self.problem, direction).items()
        }

    def _transfers_of(self, ring, direction):
        """The `_Transfers` of every rank in a pass."""
        kinds = []
        for name, nbytes in token_bytes(self.problem, direction).items():
            kind, gathered = KINDS[direction][name], name in GATHERED
            if self._tile.extent(name) > 1:
                arrays = len(kind.arrays_of(self.problem))
                kinds.append((gathered, arrays, nbytes, self._received(kind.column, gathered, ring)))
        return [
            self._transfers_of_rank(ring, [(*kind, of_ranks[i]) for *kind, of_ranks in kinds])
            for i in range(len(self._some))
        ]

    def _transfers_of_rank(self, ring, kinds):
        """kinds: (whether it is gathered, its arrays, bytes of a token, the `_Received`) of each."""
        machine, links = self.machine, (self.machine.inside, self.machine.between)
        busy, unhidden, merging, collectives, received, pauses = [0.0, 0.0], 0.0, 0.0, 0.0, 0, []
        for gathered, arrays, nbytes, (tokens, messages) in kinds:
            lasting = [count * nbytes / link.bandwidth for count, link in zip(tokens, links)]
            if gathered or not ring:
                busy = [before + more for before, more in zip(busy, lasting)]
            unhidden += sum((1 - link.overlap) * seconds for link, seconds in zip(links, lasting))
            if not gathered and not ring:
                merging += sum(tokens) * nbytes / machine.merging
            if gathered:
                received += sum(messages)
                pauses.append(arrays * min(link.latency for link in links))
            waits = sum(count * link.latency for count, link in zip(messages, links))
            collectives += machine.collective * (max(lasting) + waits)
        # of three transfers in a row, the last begins after another one ended
        return _Transfers(max(busy), received // 2 * min(pauses, default=0.0), unhidden, merging, collectives)

    def seconds(self, kind, route, direction, overlap=True):
        """Seconds of a pass.

        kind: of schedule.  overlap: as in `model.cost.build`.
        """
        ring = passed_on(route)

        def of_rank(computing, transfers):
            busy, begun, unhidden, merging, collectives = transfers
            if kind == "collective":
                return computing + merging + (busy if ring else collectives)
            return max((0.0 if overlap else computing) + busy, begun, computing + unhidden + merging)

        computing = self._launches.seconds(self._tile, kind == "collective", direction)
        return max(map(of_rank, computing, self._transfers(ring, direction))) * ROUNDING
