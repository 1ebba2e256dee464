"""Files of traces: `Traced`, a base class of `MeshAttention`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..comm.agreement import agreement
from ..comm.clocks import clocks
from ..comm.refusal import of_call, refusing
from ..errors import ArgumentError
from ..files.trace_file import RankTrace, Trace, write
from ..system.values import path_text
from .description import Described
from .distribution import Distributed

if TYPE_CHECKING:
    import os

    from ..comm.collective_calls import Call
    from ..engine.record import Pass
    from .piece_passes import PiecePasses
    from .rank_passes import RankPasses


class Traced(Described, Distributed):
    """A plan whose last passes can be written to a file."""

    _passes: RankPasses | PiecePasses

    @refusing("save_trace", of_call("save_trace"))
    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what all ranks did in the last forward and the last backward pass, as a trace for Perfetto; collective.

        The file is in Chrome's trace-event format (JSON), which https://ui.perfetto.dev opens: blocks, waits,
        transfers, their bytes and their peers.  The clocks of the ranks are compared in this
        call, so make it soon after the passes.  A plan that saves none pays for none.

        Parameters
        ----------
        path : str or path
            The file to make, on rank 0; the same on every rank.  It appears whole or not at all, and may replace only
            a file of JSON.

        Raises
        ------
        FileError
            The same on every rank: the file cannot be written.
        ArgumentError
            The same on every rank: path is no path, or differs; the plan has made no pass.
        CallError, PeerFailure, MpiattnError
            As in `MeshAttention`.
        """
        with self.call("save_trace") as call:
            with call.agreement() as same:
                same["path"] = path_text("path", path)
                passes = self._recorded()
            trace = self._together(call, passes)
            with agreement(call.peers, only=0):
                if trace is not None:
                    write("path", path, trace)

    def whole_trace(self) -> Trace | None:
        """What `save_trace` writes, on rank 0; None on others; collective; for the modules of this package."""
        with self.call("whole_trace") as call:
            with call.agreement():
                passes = self._recorded()
            return self._together(call, passes)

    def _recorded(self) -> list[Pass]:
        passes = self._passes.recorded()
        if not passes:
            raise ArgumentError("the plan has made no pass yet; call forward or backward before its trace is saved")
        return passes

    def _together(self, call: Call, passes: list[Pass]) -> Trace | None:
        """The passes of all ranks, on rank 0."""
        home = self._check_open()
        of_ranks, by_rank = clocks(call.peers, home.nodes), call.peers.gather(passes)
        if of_ranks is None or by_rank is None:
            return None
        chosen = {
            "problem": str(self.problem),
            "tile": str(self.tile),
            "layout": self.q_layout.kind,
            "mesh_layout": self.mesh_layout,
            "schedule": self.schedule.name,
            "route": self.route,
            "backend": self.backend,
            "transport": self.transport,
        }
        ranks = [RankTrace(rank, *each) for rank, each in enumerate(zip(home.hosts, of_ranks, by_rank))]
        return Trace(chosen, ranks)
