"""What the caller of `MeshAttention` asks for: the problem, and options of the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arguments.keywords import for_record
from ..comm.exchange import MAX_MESSAGE, message_limit
from ..comm.peers import check_timeout
from ..comm.transport import check_transport
from ..errors import ArgumentError
from ..model import cost, planes
from ..model.machine import DEFAULT
from ..model.piece_options import check_pieces
from ..model.space import DIRECTIONS, layouts, memory_limit, routes
from ..problem.documents import expected_cuts
from ..problem.layout import GRID, LAYOUTS, RANGES
from ..problem.problem import Problem
from ..schedule.tile import MESH, parse_tile
from ..system.choices import one_of

if TYPE_CHECKING:
    import os

    from ..model.machine import Machine
    from ..problem.layout import Layout


@dataclass(frozen=True)
class Options:
    """Options of `MeshAttention` other than the problem, as documented there."""

    tile: Any = "auto"
    layout: Any = "auto"
    mesh_layout: Any = "auto"
    schedule: str = "auto"
    route: str = "auto"
    direction: str = "forward"
    backend: str = "auto"
    transport: str = "auto"
    max_message: int | str = MAX_MESSAGE
    max_memory: int | str | None = None
    machine: Machine | str | os.PathLike[str] | None = None
    overlap: bool = True
    timeout: float | None = None
    expected_cu_seqlens: Any = None

    def checked(self, problem: Problem, ranks: int) -> CheckedOptions:
        """The same as values; raises ArgumentError."""
        check_timeout(self.timeout)
        one_of("direction", self.direction, tuple(DIRECTIONS))
        one_of("schedule", self.schedule, (*cost.SCHEDULES, "auto"))
        one_of("overlap", self.overlap, (True, False))
        check_transport(self.backend, self.transport)
        routes(self.route, problem, DEFAULT)
        one_of("mesh_layout", self.mesh_layout, (*LAYOUTS, GRID, RANGES, "auto"))
        tile = parse_tile(self.tile, ranks)
        planes.check_heads(tile, problem)
        check_pieces(tile, schedule=self.schedule, route=self.route, mesh_layout=self.mesh_layout)
        if self.transport == "ipc" and tile is not None and tile.divided:
            raise ArgumentError(
                f"transport is 'ipc'; with tile {tile}, whose ranks receive in another order than others send, it must "
                "be auto, staged or device"
            )
        cuts = expected_cuts(problem, self.expected_cu_seqlens)
        pairs = layouts(self.layout, problem, ranks)
        planes.check_mesh_layout(self.mesh_layout, pairs, tile)
        return replace(
            self.unchecked(),
            tile=tile,
            meshes=isinstance(self.tile, str) and self.tile.strip() == MESH,
            expected_cu_seqlens=cuts,
            layout=pairs,
            fixed=not isinstance(self.layout, str),
            max_message=message_limit(self.max_message),
            max_memory=memory_limit(self.max_memory),
        )

    def unchecked(self) -> CheckedOptions:
        """The same values, not checked: for a caller that puts checked ones in their place."""
        return CheckedOptions(**vars(self))


@dataclass(frozen=True)
class CheckedOptions(Options):
    """Options with values in place of what callers may write: a `Tile`, numbers of bytes, cuts of documents.

    layout: pairs of `Layout` to choose from.  fixed: whether the caller says which rank holds which chunk.
    meshes: whether only meshes are wanted, whatever their tile.
    """

    meshes: bool = False
    fixed: bool = False


class Asked(NamedTuple):
    """The caller's arguments of `MeshAttention`, not checked.  problem: keywords of `Problem`."""

    problem: dict[str, Any]
    options: Options

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Asked:
        """From the arguments of `MeshAttention` by name, which have the defaults of both records."""
        return cls(for_record(Problem, arguments), Options(**for_record(Options, arguments)))

    def changed(self, changes: dict[str, Any]) -> Asked:
        """The same with other arguments of the problem."""
        return self._replace(problem={**self.problem, **changes})

    def of_other_lengths(self, layouts: tuple[Layout, ...]) -> Asked:
        """The same without what it says of tokens of the old lengths alone.  layouts: those of the new lengths."""
        kept = self.options
        layout = kept.layout if isinstance(kept.layout, str) else layouts
        return self._replace(options=replace(kept, layout=layout, expected_cu_seqlens=None))
