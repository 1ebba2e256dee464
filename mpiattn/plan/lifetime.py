"""How a plan gets its parts, is made anew for other lengths, and ends: `Lifetime`, a base class of `MeshAttention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ..comm.agreement import agreement
from ..comm.exchange import Exchange
from ..comm.peers import time_limit
from ..comm.refusal import of_call, refusing
from ..comm.room import is_small
from ..comm.transport import another
from ..system.logs import INFO, LOGGER, note
from .arguments import arguments_of
from .foresight import check_memory, own_bytes
from .rank_passes import RankPasses
from .returned import Returned
from .settle import resized
from .traced import Traced
from .verified import Verified

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..comm.mesh import Home
    from ..comm.peers import Peers
    from .decision import Decision
    from .options import Asked

CHOSEN = "tile", "layout", "mesh_layout", "schedule", "route"  # options that "auto" chooses

Plan = TypeVar("Plan", bound="Lifetime")


class Lifetime(Verified, Traced):
    """A plan from its decision to its end."""

    _asked: Asked

    def _prepare(self, home: Home) -> None:
        options = self._asked.options
        self.problem, self.schedule = self._decision.problem, self._decision.schedule()
        self.q_layout, self.k_layout = self._decision.layouts_by_rank()
        peers = home.peers(time_limit(options.timeout, self._decision.longest_seconds))
        peers.idle = self._backend.idle
        self._exchange = Exchange(peers, options.max_message)
        self._passes = RankPasses(self._decision, self._mesh, self._backend, self._exchange)
        self._share = self._decision.share(self._mesh.rank)
        self._returned = Returned(self.problem, self._decision.layouts, self._mesh.rank)
        self._arguments = arguments_of(self.problem, self._passes.tokens, self._backend)

    def _check_memory(self, home: Home, peers: Peers) -> None:
        """Raise MemoryShortage on every rank if the plan cannot have the memory that it will need; collective."""
        check_memory(home, peers, self._backend, self._asked, self._decision, self._beside, self._in_words())

    def _beside(self, decision: Decision) -> NDArray[np.int64] | int:
        """Bytes that are allocated together with those of a plan, of every rank."""
        return 0  # a caller may have its arrays already

    def _in_words(self) -> tuple[str, str]:
        """What needs the memory, and how a caller gives max_memory."""
        return "the plan, besides the caller's arrays,", "max_memory={!r}"

    def _begin(self, home: Home, model: str = "") -> None:
        """Take calls from now on.  model: the plan that it has its choices from, in words."""
        self._join(home, self._exchange.peers)
        if LOGGER.isEnabledFor(INFO):
            note(INFO, self.rank, "%s is %r: %s", self._name, self, f"as {model}" if model else self._why())

    def _why(self) -> str:
        """What was chosen, by what, in words."""
        asked = self._asked.options
        chosen = [name for name in CHOSEN if isinstance(getattr(asked, name), str) and getattr(asked, name) == "auto"]
        seconds = f"{self.predicted_seconds:.3g} s for direction {asked.direction} on machine {self.machine.name}"
        if not chosen:
            return f"all as asked for; predicted: {seconds}"
        return f"{', '.join(chosen)} chosen by the shortest predicted time, {seconds}"

    @refusing("like", of_call("like"))
    def like(self: Plan, *, seqlen: int | None = None, seqlen_k: int | None = None) -> Plan:
        """A plan for other lengths with this plan's tile, schedule, route and kind of layout; collective.

        All other options are this plan's, without `expected_cu_seqlens`; either may be closed first.  No search:
        a few milliseconds and one small allreduce; large plans take two and an allgather.  Where lengths differ much,
        another choice may be faster.

        Parameters
        ----------
        seqlen, seqlen_k : int, default this plan's; seqlen_k follows seqlen if the two are equal in this plan
            Tokens of the queries and of the keys.

        Returns
        -------
        MeshAttention

        Raises
        ------
        ArgumentError, CallError, PeerFailure, MpiattnError
            As in `MeshAttention`.  Also where the sizes, grid or ranges of the layout are not of that length, or
            it exceeds max_memory.
        """
        home, p, other = self._check_open(), self.problem, object.__new__(type(self))
        seqlen = p.seqlen if seqlen is None else seqlen
        if seqlen_k is None:
            seqlen_k = seqlen if p.seqlen_k == p.seqlen else p.seqlen_k
        with self.call("like") as call:
            with call.agreement() as same:
                same |= {"seqlen": seqlen, "seqlen_k": seqlen_k}
                other._asked = self._asked.of_lengths(seqlen, seqlen_k)
                other._decision, other._mesh = resized(self._decision, other._asked), self._mesh
                same["schedule"] = other._decision.schedule()  # built separately on every rank
                other._backend = another(self._backend, self._peers.rank, home.nodes)
                small = is_small(home, own_bytes(other._decision))
                if small:
                    other._prepare(home)
            if not small:
                other._check_memory(home, self._peers)
                with agreement(self._peers):
                    other._prepare(home)
        home.share(self._mesh)
        other._begin(home, self._name)
        return other

    def close(self) -> None:
        """Free the buffers and, with the communicator's last plan, mpiattn's state for it; collective.

        Closing again does nothing.  The end of a `with` block closes; after an exception, without comparing calls.
        It raises CallError, PeerFailure and MpiattnError, but none because a call before this one failed.
        """
        if self._home is not None:
            with self._leaving(self._home, self._mesh):
                self._backend.close()
                self._exchange.close()
            self._passes = self._passes.released()

    def drop(self) -> None:
        """Free this rank's memory without the other ranks, unlike `close`; for mpiattn itself."""
        self._backend.close()
        self._exchange.close()
        super().drop()
