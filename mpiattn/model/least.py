"""The least time and bytes that a tile can take under any schedule, from a few of its ranks.  Pure arithmetic.

The search looks only at choices whose least may be the best.  Nothing here may exceed what `model.simulate` predicts.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..schedule.kinds import GATHERED, KINDS
from ..schedule.route import passed_on
from ..schedule.travels import token_bytes
from .simulate import nodes_of
from .workload import Load, chunks_of

ROUNDING = 1 - 1e-9  # times are summed in another order than in the simulation


class _Column(NamedTuple):
    """What the ranks of a row or of a column exchange, by hop and rank; there are several.

    crossing: whether a rank of the group is on another node.  gathered: tokens that a rank needs of that rank's chunk.
    returned: tokens of its own chunk that the other needs, whose partials come back.
    next_crossing: of each direction, whether the neighbour is on another node.
    """

    crossing: np.ndarray
    gathered: np.ndarray
    returned: np.ndarray
    next_crossing: list


class Least:
    """Lower bounds for a tile and a pair of layouts.

    work: the `Work` of the layouts.
    nodes: the node of every rank; default as in `model.simulate`.
    """

    def __init__(self, problem, work, tile, machine, nodes=None):
        self.problem, self.machine, self._work, self._tile = problem, machine, work, tile
        self._some = np.unique([0, tile.ranks // 2, tile.ranks - 1])  # one of them is often the busiest
        self._nodes = nodes_of(tile.ranks, machine) if nodes is None else np.asarray(nodes)
        load = Load(work, tile, self._some)
        self._timed = load.timed_pairs(machine.edge_keys(problem.dtype))
        self._chunks, self._working = load.chunks, load.pairs > 0

    @cached_property
    def _moved(self):
        """Tokens that all ranks send along rows, and along columns."""
        return [self._work.moved(column, self._tile) for column in (False, True)]

    @cached_property
    def _columns(self):
        """The `_Column` of rows and of columns; None where there is but one rank."""
        work, tile, some, columns = self._work, self._tile, self._some, []
        for column, extent in ((False, tile.a), (True, tile.b)):
            if extent == 1:
                columns.append(None)
                continue
            group = self._chunks[column]
            own, users = np.broadcast_to(some, group[1:].shape), group[1:]
            others = chunks_of(tile, not column, users.ravel())
            ends = [tile.in_column(some, hop) if column else tile.in_row(some, hop) for hop in (1, -1)]
            columns.append(
                _Column(
                    self._nodes[users] != self._nodes[some],
                    work.tokens(column, group, self._chunks[not column])[1:],
                    work.tokens(column, own.reshape(1, -1), others).reshape(own.shape),
                    [self._nodes[end] != self._nodes[some] for end in ends],
                )
            )
        return columns

    def sent(self, direction):
        """{kind: bytes that a rank sends, mean over ranks}: exact on the direct route without collectives."""
        return {
            kind: self._moved[KINDS[direction][kind].column] * nbytes / self._tile.ranks
            for kind, nbytes in token_bytes(self.problem, direction).items()
        }

    def _computing(self, kind, direction):
        """Seconds that ranks compute in a pass."""
        operations = self.problem.flops_per_pair * self._timed
        blocks = self.machine.compute(operations, self.problem.dtype, direction).sum(axis=(0, 1))
        launches = self.machine.launch * self._working
        return blocks + (launches.max(axis=(0, 1)) if kind == "collective" else launches.sum(axis=(0, 1)))

    def computing(self, kind, direction):
        """Seconds of a pass if transfers take no time: at most `seconds`, and computed sooner."""
        return float(self._computing(kind, direction).max()) * ROUNDING

    def seconds(self, kind, route, direction, overlap=True):
        """Seconds of a pass.

        kind: of schedule.  overlap: as in `model.cost.build`.
        """
        machine, problem, ring = self.machine, self.problem, passed_on(route)
        computing, none = self._computing(kind, direction), np.zeros(len(self._some))
        busy = [none, none]  # links inside and between
        latest = unhidden = merging = collectives = none
        received, pause = 0, np.inf
        for name, nbytes in token_bytes(problem, direction).items():
            moving = KINDS[direction][name]
            gathered, of = name in GATHERED, self._columns[moving.column]
            if of is None:
                continue
            crossing = of.crossing
            tokens = (of.gathered if gathered or ring else of.returned) * nbytes
            if ring:
                crossing = np.broadcast_to(of.next_crossing[0 if gathered else 1], crossing.shape)
            link = [np.where(crossing, *ends) for ends in zip(machine.between, machine.inside)]
            latency, rate, overlapping = link
            lasting = tokens / rate
            of_links = [np.where(crossing == between, lasting, 0).sum(axis=0) for between in (False, True)]
            if gathered or not ring:
                busy = [before + more for before, more in zip(busy, of_links)]
            unhidden = unhidden + ((1 - overlapping) * lasting).sum(axis=0)
            if not gathered and not ring:
                merging = merging + tokens.sum(axis=0) / machine.merging
            if gathered:
                received = received + (tokens > 0).sum(axis=0)
                pause = min(pause, len(moving.arrays) * min(machine.inside.latency, machine.between.latency))
                latest = received // 2 * pause  # of three transfers in a row, the last begins after another one ended
            waits = np.where(tokens > 0, latency, 0).sum(axis=0)
            collectives = collectives + machine.collective * (np.max(of_links, axis=0) + waits)
        if kind == "collective":
            least = computing + merging + (np.max(busy, axis=0) if ring else collectives)
        else:
            beside = computing if not overlap else 0.0
            least = np.max([beside + busy[0], beside + busy[1], latest, computing + unhidden + merging], axis=0)
        return float(least.max()) * ROUNDING
