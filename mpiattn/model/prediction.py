"""The choices of one plane of a mesh: their predicted time, bytes and memory.  Pure arithmetic."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..problem.layout import Layout
from ..schedule.regroup import plane_problem
from ..schedule.remembered import Remembered
from ..schedule.tile import Tile
from ..schedule.travels import token_bytes
from . import cost, memory
from .lower_bounds import LowerBounds
from .planes import plane_machine
from .simulate import simulate
from .workload import Load, Work

LOADS = 4  # kept at a time, because they take memory


class Choice(NamedTuple):
    """A tile, a schedule kind, a route and layouts, with their predicted costs.

    layouts: of queries and of keys, as the caller's ranks hold them.
    mesh_layouts: those with which a plane of the mesh computes; the same unless heads or tokens are regrouped.
    ahead: how many steps ahead transfers may be posted.
    balance: pairs of the busiest rank / mean pairs.
    seconds: predicted time of all passes of the direction.
    waiting: share of that time that a rank waits, mean over ranks.
    sent: {direction: {kind: bytes that a rank sends, mean over ranks}}.
    nbytes: bytes of memory on the rank that needs the most.
    own: bytes besides the caller's arrays, at least, by chunk of a plane; one number if all are equal.
    """

    tile: Tile
    schedule: str
    route: str
    layouts: tuple[Layout, Layout]
    mesh_layouts: tuple[Layout, Layout]
    ahead: int
    balance: float
    seconds: float
    waiting: float
    sent: dict
    nbytes: int
    own: tuple

    @property
    def sent_bytes(self):
        """Bytes that a rank sends in all passes, mean over ranks."""
        return sent_bytes(self.sent)


def sent_bytes(sent):
    """Bytes of all passes and kinds; choices and bounds are summed in the same order, so that equal ones stay equal."""
    return sum(sum(kinds.values()) for kinds in sent.values())


def _loads(mask):
    """Functions that make, and keep, the `Work` of a pair of layouts and the `Load` of a pair and a tile."""
    work = Remembered(lambda pair: Work(mask, *pair))
    return work, lru_cache(LOADS)(lambda pair, tile: Load(work(pair), tile))


class Predictions:
    """Predicts choices of one plane.  What they have in common is made once.

    space: a completed `SearchSpace`.  planes: their number.
    regrouped: whether sequences, heads or tokens change ranks; if not, the one plane computes the problem as it is.
    """

    def __init__(self, space, planes, regrouped):
        self._problem = plane_problem(space.problem, planes) if regrouped else space.problem
        self._machine, self._nodes = plane_machine(space.machine, space.nodes, planes), space.nodes[::planes]
        self._passes, self._overlap, self._regrouped = space.passes, space.overlap, regrouped
        tiles = tuple(tile.plane for tile in space.tiles if tile.h == planes)
        work, self._load = _loads(space.mask)
        # memory goes by calls without documents: a plan makes it for these
        without = space.problem.whole_mask
        self._load_without_documents = self._load if space.mask == without else _loads(without)[1]
        self.bounds = Remembered(
            lambda pair: LowerBounds(self._problem, work(pair), tiles, self._machine, self._nodes, self._passes)
        )
        self._schedules = Remembered(self._build)
        self.choice = Remembered(self._choice)

    def _build(self, tile, kind, route, ahead):
        return [
            cost.build(kind, tile, route, self._problem, self._machine, direction, self._nodes, ahead)
            for direction in self._passes
        ]

    def _choice(self, pair, tile, kind, route, max_memory):
        """The `Choice` of a tile of the plane; arguments that are equal have the same."""
        load, in_memory = self._load(pair, tile), self._load_without_documents(pair, tile)
        built = self._schedules(tile, kind, route, cost.AHEAD if self._overlap else None)
        ahead, nbytes = built[0].ahead, self._nbytes(built, in_memory)
        while ahead and max_memory is not None and nbytes > max_memory:
            ahead -= 1
            built = self._schedules(tile, kind, route, ahead)
            nbytes = self._nbytes(built, in_memory)
        runs = [simulate(schedule, self._problem, load, self._machine, self._nodes) for schedule in built]
        seconds = sum(run.seconds for run in runs)
        waiting = sum(float(run.waiting.mean()) for run in runs) / seconds if seconds else 0.0
        sent = {schedule.direction: self._sent(schedule, load) for schedule in built}
        return Choice(
            tile, kind, route, pair, pair, ahead, load.balance, seconds, waiting, sent, nbytes, self._own(built, load)
        )

    def _sent(self, schedule, load):
        """{kind: bytes that a rank sends, mean over ranks}."""
        return {
            kind: load.moved(kind, schedule.route, schedule.collective).sum().item() * nbytes / schedule.tile.ranks
            for kind, nbytes in token_bytes(self._problem, schedule.direction).items()
        }

    def _nbytes(self, schedules, load):
        """`nbytes` of a `Choice`."""
        nbytes = memory.chunk_bytes(self._problem, *load.lengths) + self._buffers(schedules, load)
        for schedule in schedules:
            if schedule.direction == "backward":
                nbytes = nbytes + memory.gradient_bytes(self._problem, *load.lengths)
        return int(nbytes.max())

    def _buffers(self, schedules, load):
        """Bytes of the buffers, which the passes share, of every rank."""
        return np.max([memory.buffer_bytes(schedule, self._problem, load) for schedule in schedules], axis=0)

    def _own(self, schedules, load):
        """`own` of a `Choice`: of documents that calls are expected to have, what they touch."""
        backward = "backward" in self._passes
        own = memory.own_bytes(self._problem, load.lengths, backward, self._regrouped)
        own = own + self._buffers(schedules, load)
        least = int(own.min())
        return (least,) if least == own.max() else tuple(own.tolist())
