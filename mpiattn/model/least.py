"""The least time and bytes that a tile can take under any schedule, from a few of its ranks.  Pure arithmetic.

The search looks only at choices whose least may be the best.  Nothing here may exceed what `model.simulate` predicts.
"""

import numpy as np

from ..schedule.kinds import GATHERED, KINDS
from ..schedule.route import passed_on
from ..schedule.travels import token_bytes
from .simulate import nodes_of
from .workload import Load, chunks_of

ROUNDING = 1 - 1e-9  # times are summed in another order than in the simulation


class Least:
    """Lower bounds for a tile and a pair of layouts.

    work: the `Work` of the layouts.
    nodes: the node of every rank; default as in `model.simulate`.
    """

    def __init__(self, problem, work, tile, machine, nodes=None):
        self.problem, self.machine, self.ranks = problem, machine, tile.ranks
        some = np.unique([0, tile.ranks // 2, tile.ranks - 1])  # one of them is often the busiest
        nodes = nodes_of(tile.ranks, machine) if nodes is None else np.asarray(nodes)
        self.moved = {column: work.moved(column, tile) for column in (False, True)}
        load = Load(work, tile, some)
        self.timed, self.working = load.timed_pairs(machine.edge), load.pairs > 0
        # By column.  crossing: whether a rank of the group is on another node.  gathered: tokens that a rank needs of
        # that rank's chunk.  returned: tokens of its own chunk that the other needs, whose partials come back.
        self.crossing, self.gathered, self.returned, self.next_crossing = {}, {}, {}, {}
        for column in (False, True):
            group = load.chunks[column]
            self.crossing[column] = nodes[group[1:]] != nodes[some]
            self.gathered[column] = work.tokens(column, group, load.chunks[not column])[1:]
            own, users = np.broadcast_to(some, group[1:].shape), group[1:]
            others = chunks_of(tile, not column, users.ravel())
            self.returned[column] = work.tokens(column, own.reshape(1, -1), others).reshape(own.shape)
            ends = [tile.in_column(some, hop) if column else tile.in_row(some, hop) for hop in (1, -1)]
            self.next_crossing[column] = [nodes[end] != nodes[some] for end in ends]

    def sent(self, direction):
        """{kind: bytes that a rank sends, mean over ranks}: exact on the direct route without collectives."""
        return {
            kind: self.moved[KINDS[direction][kind].column] * nbytes / self.ranks
            for kind, nbytes in token_bytes(self.problem, direction).items()
        }

    def seconds(self, kind, route, direction, overlap=True):
        """Seconds of a pass.

        kind: of schedule.  overlap: as in `model.cost.build`.
        """
        machine, problem, ring = self.machine, self.problem, passed_on(route)
        blocks = machine.compute(problem.flops_per_pair * self.timed, problem.dtype, direction).sum(axis=(0, 1))
        busy = [0.0, 0.0]  # links inside and between
        received, pause = 0, np.inf
        unhidden = merging = collectives = 0.0
        for name, nbytes in token_bytes(problem, direction).items():
            moving = KINDS[direction][name]
            gathered = name in GATHERED
            column = moving.column
            crossing = self.crossing[column]
            tokens = (self.gathered if gathered or ring else self.returned)[column] * nbytes
            if ring:
                crossing = np.broadcast_to(self.next_crossing[column][0 if gathered else 1], crossing.shape)
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
            waits = np.where(tokens > 0, latency, 0).sum(axis=0)
            collectives = collectives + machine.collective * (np.max(of_links, axis=0) + waits)
        launches = machine.launch * self.working
        if kind == "collective":
            computing = blocks + launches.max(axis=(0, 1))
            least = computing + merging + (np.max(busy, axis=0) if ring else collectives)
        else:
            computing = blocks + launches.sum(axis=(0, 1))
            beside = computing if not overlap else 0.0
            latest = received // 2 * pause  # of three transfers in a row, the last begins after another one ended
            least = np.max([beside + busy[0], beside + busy[1], latest, computing + unhidden + merging], axis=0)
        return float(least.max()) * ROUNDING
