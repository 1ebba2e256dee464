"""What was decided for a plan, and what follows from it: schedules, layouts, predicted times and bytes.  No MPI."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..model import cost, planes
from ..model.divided import PIECES, PassLoad, buffer_bytes, divide, group_bytes, portions_for
from ..model.machine import Machine
from ..model.prediction import Choice
from ..model.simulate import simulate
from ..model.workload import Load, Work
from ..problem.mask import Mask
from ..problem.problem import Problem
from ..schedule import travels
from ..schedule.division import RankPieces, needs_of
from ..schedule.kinds import GATHERED, IN_COLUMNS, Q
from ..schedule.needed import Activity
from ..schedule.piece_steps import PieceSteps
from ..schedule.ranges import overlap, total
from ..schedule.rank_steps import RankSteps
from ..schedule.regroup import Regrouping, plane_problem
from ..schedule.remembered import Remembered
from ..schedule.steps import with_slots
from ..schedule.timeline import StepTimes, Timeline
from .share import Share

if TYPE_CHECKING:
    from ..problem.layout import Layout
    from ..schedule.bands import Division
    from ..schedule.division import Need
    from ..schedule.steps import Schedule


@dataclass(frozen=True)
class Decision:
    """What was chosen for a plan (a `MeshAttention`) and what follows from it; the same on every rank.

    order: ranks of the caller's communicator, those of a node together; None for their own order.
    nodes: node of every rank in that order.
    fastest_seconds: predicted, of the best choice without a memory limit, or of this choice if that is shorter.
    mask: what queries were expected to see.
    longest_seconds: predicted, of a call without documents, or of one with those expected if that is longer.
    max_memory: bytes that a rank may need, or None.
    """

    problem: Problem
    choice: Choice
    machine: Machine
    order: tuple[int, ...] | None
    nodes: list[int]
    fastest_seconds: float
    overlap: bool
    mask: Mask
    longest_seconds: float
    max_memory: int | None = None

    @functools.cached_property
    def plane(self) -> Decision:
        """The decision for one plane, as if its ranks were a plan of their own; itself if there is no regrouping."""
        if self.regrouping is None:
            return self
        tile = self.choice.tile
        choice = self.choice._replace(tile=tile.plane, layouts=self.choice.mesh_layouts)
        return replace(
            self,
            problem=plane_problem(self.problem, tile.h),
            choice=choice,
            machine=planes.plane_machine(self.machine, self.nodes, tile.h),
            nodes=self.nodes[:: tile.h],
        )

    @functools.cached_property
    def regrouping(self) -> Regrouping | None:
        """How heads and tokens change ranks; None if the mesh computes with the caller's chunks."""
        c = self.choice
        if c.tile.h == 1 and c.layouts == c.mesh_layouts:
            return None
        return Regrouping(self.problem, c.tile, self.layouts, c.mesh_layouts)

    @property
    def mesh_order(self) -> tuple[int, ...] | None:
        """Ranks of the caller's communicator in mesh order; None for their own order."""
        if self.choice.tile.h == 1:
            return self.order
        by_node = planes.node_places(self.choice.tile)
        return tuple(by_node if self.order is None else [self.order[place] for place in by_node])

    @functools.cached_property
    def layouts(self) -> tuple[Layout, Layout]:
        """The caller's layouts of queries and of keys, indexed by rank of the mesh."""
        c = self.choice
        return c.layouts if c.tile.h == 1 else planes.reordered(c.layouts, planes.node_places(c.tile))

    def layouts_by_rank(self) -> tuple[Layout, Layout]:
        """The caller's layouts of queries and of keys, indexed by rank in the caller's communicator."""
        if self.order is None:
            return self.choice.layouts
        by_rank = [self.order.index(rank) for rank in range(len(self.order))]
        return planes.reordered(self.choice.layouts, by_rank)

    def plane_activity(self, activity: Activity, rank: int) -> Activity:
        """The activity of a call in the plane of a rank, which may have some sequences of the batch only."""
        return activity.of_sequences(self.sequences(rank))

    def sequences(self, rank: int) -> slice:
        """The sequences of the batch that the plane of a rank computes."""
        return self.regrouping.sequences(rank) if self.regrouping else slice(0, self.problem.batch)

    def share(self, rank: int) -> Share:
        """What a rank of the mesh computes of all scores."""
        c, p, plane = self.choice, self.problem, self.choice.tile.plane
        if plane.divided:
            everything = slice(0, p.batch), slice(0, p.heads)
            return Share(c.mesh_layouts, ([], []), *everything, (p.batch, p.heads))
        chunk = rank % c.tile.chunks
        heads = self.regrouping.heads(Q, rank) if self.regrouping else slice(0, p.heads)
        chunks = sorted(plane.row(chunk)), sorted(plane.column(chunk))
        return Share(c.mesh_layouts, chunks, self.sequences(rank), heads, (p.batch, p.heads))

    def rank_in_mesh(self, rank: int) -> int:
        """The rank in the mesh of a rank of the caller's communicator."""
        return rank if self.mesh_order is None else self.mesh_order.index(rank)

    @functools.cached_property
    def piece_problem(self) -> Problem:
        """The problem of one piece of a divided plan: a sequence, a KV head and its query heads."""
        p = self.problem
        return replace(p, batch=1, heads=p.heads // p.kv_heads, kv_heads=1)

    @functools.cached_property
    def _needs(self) -> Remembered:
        """needs(direction): what the ranks of a divided plan need in calls without documents, made once."""
        return Remembered(lambda direction: self._needs_of(direction, self.activity))

    def division(self, direction: str) -> Division:
        """The pieces of every rank of a divided plan, in calls with the documents that were expected."""
        parts = self.choice.tile, self.problem, self.mask, self.layouts, direction
        return PassLoad(*parts, self.machine).division

    def _needs_of(self, direction: str, activity: Activity) -> tuple[tuple[Need, ...], ...]:
        parts = self.choice.tile, self.problem, self.mask, self.layouts, direction
        documents, kv_heads = activity.documents, self.problem.kv_heads
        needs = needs_of(divide(*parts, documents, self.machine), activity.mask, kv_heads, documents)
        if documents is None or self.max_memory is None:
            return needs
        nbytes = buffer_bytes(self.problem, needs, self.layouts, direction)
        # What was foreseen for the plan has room for the division of calls without documents
        if nbytes.max() > self.max_memory:
            needs = needs_of(divide(*parts), activity.mask, kv_heads, documents)
        return needs

    def rank_pieces(self, direction: str, rank: int, activity: Activity) -> RankPieces:
        """The `RankPieces` of a rank of a divided plan in the passes of a direction of a call."""
        needs = self._needs(direction) if activity is self.activity else self._needs_of(direction, activity)
        return RankPieces(needs, self.layouts, rank)

    def piece_steps(self, direction: str, rank: int, activity: Activity) -> PieceSteps:
        """The steps of a rank of a divided plan."""
        pieces = self.rank_pieces(direction, rank, activity)
        rows, keys = (sum(total(need.of(column)) for need in pieces.needs) for column in (False, True))
        most = int(portions_for(self.problem, self.machine, direction, rows, keys))
        each = group_bytes(self.problem, direction)
        return PieceSteps(pieces, direction, each.row, each.key, most, self.overlap)

    def schedule(self, direction: str = "forward") -> Schedule:
        """The schedule of a pass on a plane, made once."""
        return self._schedules(direction)

    @functools.cached_property
    def _schedules(self) -> Remembered:
        return Remembered(self.plane._schedule)

    @functools.cached_property
    def activity(self) -> Activity:
        """The activity of calls without documents."""
        return Activity(self.problem.whole_mask, *self.choice.mesh_layouts, self.choice.tile.plane)

    @functools.cached_property
    def rank_steps(self) -> Remembered:
        """rank_steps(direction, chunk): the `RankSteps` of such calls on the rank of a chunk, made once."""
        return Remembered(lambda direction, chunk: RankSteps(self.schedule(direction), chunk, self.activity))

    def _schedule(self, direction: str) -> Schedule:
        c = self.choice
        if c.tile.divided:
            return with_slots(PIECES, direction, c.tile, c.route, ())
        ahead = c.ahead if self.overlap else None
        return cost.build(c.schedule, c.tile, c.route, self.problem, self.machine, direction, self.nodes, ahead)

    def predicted(self, direction: str = "forward") -> Timeline:
        """The predicted `mpiattn.schedule.timeline.Timeline` of a pass on the mesh, for all of its ranks.

        What comes before and after it, regrouping, is not part of it.
        """
        plane, count = self.plane, self.choice.tile.h
        if plane.choice.tile.divided:
            return self._predicted_of_pieces(direction)
        load = Load(Work(plane.mask, *plane.choice.layouts), plane.choice.tile)
        timeline = simulate(self.schedule(direction), plane.problem, load, plane.machine, plane.nodes)
        return timeline if count == 1 else timeline.repeated(lambda times: np.tile(times, count))

    def sent_bytes(self, rank: int, direction: str, activity: Activity) -> int:
        """Bytes that a rank of the mesh sends in a call, by the formula of `schedule.travels`."""
        if self.choice.tile.divided:
            return self._sent_of_pieces(rank, direction, activity)
        plane, activity = self.plane, self.plane_activity(activity, rank)
        of_pass = travels.sent(
            plane.problem,
            (activity.q_layout.lengths, activity.k_layout.lengths),
            plane.choice.tile,
            rank % plane.choice.tile.ranks,
            plane.choice.route,
            direction,
            activity,
            self.schedule(direction).collective,
        ).total
        return of_pass + (self.regrouping.sent(rank, direction) if self.regrouping else 0)

    def _sent_of_pieces(self, rank: int, direction: str, activity: Activity) -> int:
        """Bytes that a rank of a divided plan sends: its tokens to the pieces that need them, and partials back."""
        pieces, groups = self.rank_pieces(direction, rank, activity), self.problem.batch * self.problem.kv_heads
        total = 0
        for kind, nbytes in travels.token_bytes(self.problem, direction).items():
            tokens = pieces.sent(kind in IN_COLUMNS) if kind in GATHERED else pieces.received(kind in IN_COLUMNS)
            total += tokens * nbytes // groups
        return total

    def _predicted_of_pieces(self, direction: str) -> Timeline:
        """As `predicted`, of a divided plan: one step."""
        tile = self.choice.tile
        load = PassLoad(tile, self.problem, self.mask, self.layouts, direction, self.machine)
        seconds, waiting = load.seconds(self.machine, self.nodes, self.overlap)
        step = StepTimes(np.zeros_like(seconds), seconds - waiting, seconds)
        return Timeline(direction, (step,), (), float(seconds.max(initial=0)))

    def pairs_of_pieces(self, rank: int, activity: Activity) -> float:
        """As `MeshAttention.pairs`, of a rank of a divided plan."""
        pairs = 0
        for need in self.rank_pieces("forward", rank, activity).needs:
            of_sequence = activity.of_sequences(slice(need.sequence, need.sequence + 1))
            for rows, keys in need.pieces:
                queries = np.concatenate([np.arange(*part) for part in (*overlap(need.queries, (rows,)), (0, 0))])
                columns = [range(*part) for part in overlap(need.keys, (keys,))]
                begin, end = of_sequence.columns_at(queries, columns)
                pairs += int((end - begin).sum(dtype=np.int64))
        alike = len(activity.documents or (None,)) == 1
        matrices = self.problem.kv_heads * (self.problem.batch if alike else 1)
        return pairs / matrices if pairs % matrices else pairs // matrices
