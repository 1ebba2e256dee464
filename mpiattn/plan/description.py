"""The read-only properties of a plan: `Described`, a base class of `MeshAttention`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..arguments.documents import DocumentArguments
from ..arguments.keywords import unknown
from ..model.search import times_as_long
from ..system.choices import one_of

if TYPE_CHECKING:
    from ..backends.base import Backend
    from ..comm.exchange import Exchange
    from ..comm.mesh import Home
    from ..comm.peers import Peers
    from ..model.machine import Machine
    from ..problem.documents import PerDocument
    from ..problem.layout import Layout
    from ..problem.problem import Problem
    from ..schedule.needed import Activity
    from ..schedule.steps import Schedule
    from ..schedule.tile import Tile
    from ..schedule.timeline import Timeline
    from .decision import Decision
    from .piece_passes import PiecePasses
    from .rank_passes import RankPasses


class Described:
    """The choices made for a plan, and its counters so far."""

    problem: Problem
    schedule: Schedule
    q_layout: Layout
    k_layout: Layout
    _decision: Decision
    _passes: RankPasses | PiecePasses
    _backend: Backend
    _exchange: Exchange
    _home: Home | None
    _peers: Peers

    def __repr__(self) -> str:
        if "_arguments" not in self.__dict__:
            return "MeshAttention(not made)"
        kinds = " and ".join(dict.fromkeys(layout.kind for layout in (self.q_layout, self.k_layout)))
        return (
            f"MeshAttention({self.problem}; tile {self.tile}, {kinds} layout, "
            f"{self.schedule.name} schedule, {self.route} route, {self.backend}; "
            f"{'closed' if self._home is None else 'open'})"
        )

    @property
    def tile(self) -> Tile:
        """The `Tile`: tile.h planes, tile.a query chunks x tile.b KV chunks a rank.  str(tile) is "AxB" or "HxAxB".

        With pieces in place of chunks `tile.divided` is True, and str(tile) is "bands".
        """
        return self._decision.choice.tile

    @property
    def mesh_layout(self) -> str:
        """Kind of the layout in which the mesh computes, of queries; that of `q_layout` unless tokens are regrouped."""
        return self._decision.choice.mesh_layouts[0].kind

    @property
    def route(self) -> str:
        """The route of chunks between ranks: "direct" or "ring"."""
        return self._decision.choice.route

    @property
    def machine(self) -> Machine:
        """The `Machine` whose predicted times "auto" used."""
        return self._decision.machine

    @property
    def balance(self) -> float:
        """Load imbalance: the maximum over the mean of the ranks' (query, key) pairs, under the plan's own masks."""
        return self._decision.choice.balance

    @property
    def predicted_seconds(self) -> float:
        """Predicted seconds of the passes of `direction` on `machine`."""
        return self._decision.choice.seconds

    @property
    def memory_cost(self) -> float:
        """Predicted slowdown due to max_memory: `predicted_seconds` over the time without the limit."""
        return times_as_long(self._decision.choice.seconds, self._decision.fastest_seconds)

    @property
    def backend(self) -> str:
        """Name of the back end."""
        return self._backend.name

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this rank needs: its q, k, v, out and lse, the plan's buffers, and scratch.

        With batch > 1 a second q, k and v are included, because `forward` folds the batch into the heads; "cpu" folds
        only those that other ranks need too.  With batch = 1 these copies count from the first call with arrays that
        are not contiguous.  `backward` uses the buffers of `forward`; what it needs more counts from its first call,
        and what documents need that see more than the plan's masks from theirs.  With "cuda", the pinned memory
        allocated so far is included.
        """
        return self._passes.nbytes + self._backend.staged_bytes

    @property
    def sent(self) -> tuple[int, int]:
        """Totals that this plan's transfers have sent from this rank so far: (bytes, messages)."""
        return self._exchange.sent_bytes, self._exchange.sent_messages

    @property
    def timeout(self) -> float:
        """Seconds that this rank waits for others before it raises PeerFailure."""
        return self._peers.timeout

    @property
    def wait_seconds(self) -> float:
        """Seconds that this rank has waited for transfers so far."""
        return self._exchange.wait_seconds

    def formula(self, direction: str = "forward", activity: Activity | None = None) -> int:
        """Bytes that this rank sends in a pass, by the formula of `mpiattn.schedule.travels`; not collective.

        Parameters
        ----------
        direction : str, default "forward"
            "forward" or "backward".
        activity : mpiattn.schedule.needed.Activity, default that of a call without documents
            From `activity_of`.

        Returns
        -------
        int

        Raises
        ------
        ArgumentError
            On this rank only: direction is another one.
        """
        one_of("direction", direction, ("forward", "backward"))
        return self._decision.sent_bytes(self._passes.mesh.rank, direction, activity or self._decision.activity)

    def pairs(self, activity: Activity | None = None) -> float:
        """Attended (query, key) pairs of this rank's blocks, as a mean over all heads of the problem; not collective.

        Parameters
        ----------
        activity : mpiattn.schedule.needed.Activity, default that of a call without documents
            From `activity_of`.

        Returns
        -------
        float
            One of h planes computes 1/h of batch and heads, so its pairs count 1/h; an int if that is whole.  Where
            sequences have documents of their own, their pairs are added up.
        """
        if self.tile.divided:
            return self._decision.pairs_of_pieces(self._passes.mesh.rank, activity or self._decision.activity)
        mesh, whole, planes = self._passes.mesh, activity or self._decision.activity, self.tile.h
        own = self._decision.plane_activity(whole, mesh.rank)
        if self._decision.regrouping and own is not whole:
            planes = self._decision.regrouping.split[1]
        pairs = own.pairs(mesh.chunk)
        return pairs / planes if pairs % planes else pairs // planes

    def trace(self, direction: str = "forward") -> Timeline | None:
        """Start and end times of the steps and transfers of the last forward or backward pass on this rank.

        Parameters
        ----------
        direction : str, default "forward"
            "forward" or "backward".

        Returns
        -------
        Timeline or None
            Times in seconds since the pass began; None before the first such pass, and once the plan is closed.

        Raises
        ------
        ArgumentError
            On this rank only: direction is another one.
        """
        one_of("direction", direction, ("forward", "backward"))
        executor = self._passes.executors.get(direction)
        return None if executor is None else executor.trace()

    def predicted_trace(self, direction: str = "forward") -> Timeline:
        """The predicted start and end times of the steps and transfers of a pass, of every rank; not collective.

        Parameters
        ----------
        direction : str, default "forward"
            "forward" or "backward".

        Returns
        -------
        Timeline
            Times in seconds since the pass began, as arrays (ranks,) in the order of the mesh.

        Raises
        ------
        ArgumentError
            On this rank only: direction is another one.
        """
        one_of("direction", direction, ("forward", "backward"))
        return self._decision.predicted(direction)

    @property
    def activity(self) -> Activity:
        """The blocks and transfers that the plan's own masks need (`mpiattn.schedule.needed.Activity`)."""
        return self._decision.activity

    def activity_of(self, *, padding: bool = False, **of_documents: PerDocument) -> Activity:
        """The blocks and transfers that a call needs; kept for calls with the same documents.  Not collective.

        Parameters
        ----------
        padding : bool, default False
            As in `forward`.
        **of_documents
            cu_seqlens, cu_seqlens_k, lengths, lengths_k, prefixes and causal_documents, as in `forward`.

        Returns
        -------
        mpiattn.schedule.needed.Activity

        Raises
        ------
        ArgumentError
            On this rank only: the documents are invalid.
        """
        wrong = unknown("activity_of", of_documents, DocumentArguments._fields)
        if wrong:
            raise wrong
        return self._activity_of(DocumentArguments(**of_documents, padding=padding))

    def prepare(self, *, padding: bool = False, **of_documents: PerDocument) -> None:
        """Decide how ranks divide the work of calls with some documents, ahead of these calls; not collective.

        A call does it itself where it was not done: with the tile "dealt" it takes some milliseconds.  All ranks come
        to the same division.

        Parameters
        ----------
        padding : bool, default False
            As in `forward`.
        **of_documents
            As in `activity_of`.

        Raises
        ------
        ArgumentError
            On this rank only: the documents are invalid.
        """
        self._passes.make_steps(self.activity_of(padding=padding, **of_documents))

    def _activity_of(self, documents: DocumentArguments) -> Activity:
        """As `activity_of`."""
        if documents.none:
            return self._decision.activity
        return self._passes.call_cache.activity(documents.as_bytes(), lambda: documents.groups(self.problem))
