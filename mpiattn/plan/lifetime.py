"""How a plan gets its parts, is made anew for other lengths or masks, and ends: a base class of `MeshAttention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ..comm.agreement import agreement
from ..comm.exchange import Exchange
from ..comm.peers import time_limit
from ..comm.refusal import of_call, refusing
from ..comm.room import is_small
from ..comm.transport import another
from ..errors import ArgumentError
from ..system.logs import INFO, LOGGER, note
from ..system.values import UNCHANGED, Unchanged, Words
from .arguments import arguments_of
from .foresight import check_memory, own_bytes
from .piece_passes import PiecePasses
from .rank_passes import RankPasses
from .returned import Returned
from .settle import asked_like, checked_for_layouts, for_transport, resized, searched_anew
from .traced import Traced
from .verified import Verified

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..comm.mesh import Home
    from ..comm.peers import Peers
    from ..masks.interval_mask import IntervalMask
    from .decision import Decision
    from .options import Asked

CHOSEN = "tile", "layout", "mesh_layout", "schedule", "route"  # options that "auto" chooses
FOR_MASKS = tuple(name for name in CHOSEN if name != "layout")  # and chooses anew in `like`
MASKS = "causal", "prefix", "causal_block", "window", "mask"  # arguments of `like` for which it searches
OF_LIKE = ("seqlen", "seqlen_k", *MASKS, "softcap", "scale")  # arguments of the problem that `like` may change

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
        parts = self._decision, self._mesh, self._backend, self._exchange
        self._passes = PiecePasses(*parts) if self._decision.choice.tile.divided else RankPasses(*parts)
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

    def _begin(self, home: Home, why: Callable[[], str]) -> None:
        """Take calls from now on.  why(): what the choices were made by, in words."""
        self._join(home, self._exchange.peers)
        if LOGGER.isEnabledFor(INFO):
            note(INFO, self.rank, "%s is %r: %s", self._name, self, why())

    def _why(self, options: Sequence[str] = CHOSEN) -> str:
        """The choices that "auto" made, and by which time, in words.  options: those that could be chosen."""
        asked = self._asked.options
        chosen = [name for name in options if isinstance(getattr(asked, name), str) and getattr(asked, name) == "auto"]
        seconds = f"{self.predicted_seconds:.3g} s for direction {asked.direction} on machine {self.machine.name}"
        if not chosen:
            return f"all as asked for; predicted: {seconds}"
        return f"{', '.join(chosen)} chosen by the shortest predicted time, {seconds}"

    @refusing("like", of_call("like"))
    def like(
        self: Plan,
        *,
        seqlen: int | None = None,
        seqlen_k: int | None = None,
        causal: bool | Unchanged = UNCHANGED,
        prefix: int | Unchanged = UNCHANGED,
        causal_block: int | Unchanged | None = UNCHANGED,
        window: tuple[int | None, int | None] | Unchanged | None = UNCHANGED,
        mask: IntervalMask | Unchanged | None = UNCHANGED,
        softcap: float | Unchanged | None = UNCHANGED,
        scale: float | Unchanged | None = UNCHANGED,
    ) -> Plan:
        """A plan for another mask with this plan's positions, or for other lengths; collective.

        For the layers of a model: all their plans hold the same tokens on a rank (`positions`, `positions_k`), in
        whatever layout, so that what one returns can be given to another.

        If a mask is given (causal, prefix, causal_block, window or mask), tile, mesh_layout, schedule and route are
        searched anew where this plan was made with "auto".  Otherwise they are this plan's: that takes a few
        milliseconds and one small allreduce; large plans take two and an allgather.

        For other lengths, with a mask or without, the layouts are of this plan's kinds.  Where lengths differ much,
        another choice may be faster.

        All other options are this plan's, but `expected_cu_seqlens` only for the same lengths.  Either plan may be
        closed first.

        Parameters
        ----------
        seqlen, seqlen_k : int, default this plan's; seqlen_k follows seqlen if the two are equal in this plan
            Tokens of the queries and of the keys.
        causal, prefix, causal_block, window, mask, softcap, scale : default this plan's
            As in `MeshAttention`.  None takes away what this plan has, as do prefix=0 and causal=False; scale=None is
            the default scale.  A plan that is causal by its prefix or causal_block stays causal without it.

        Returns
        -------
        MeshAttention

        Raises
        ------
        ArgumentError, CallError, PeerFailure, MpiattnError
            As in `MeshAttention`.  Also where the sizes, grid or ranges of the layout are not of that length, it
            exceeds max_memory, or causal is False and a prefix or causal_block is left.

        Examples
        --------
        >>> import numpy as np
        >>> from mpi4py import MPI
        >>> import mpiattn
        >>> shape = {"seqlen": 100, "heads": 4, "head_dim": 16}
        >>> with (
        ...     mpiattn.MeshAttention(MPI.COMM_WORLD, **shape, causal=True) as full,
        ...     full.like(window=(15, 0)) as sliding,
        ... ):
        ...     out, _ = full.forward(*np.ones((3, 1, len(full.positions), 4, 16), np.float32))
        ...     out, _ = sliding.forward(out, out, out)
        >>> out.shape, bool((sliding.positions == full.positions).all())
        ((1, 100, 4, 16), True)
        """
        arguments = locals()  # which are the arguments alone, at this point
        given = {name: arguments[name] for name in OF_LIKE[2:] if arguments[name] is not UNCHANGED}
        home, p, other = self._check_open(), self.problem, object.__new__(type(self))
        seqlen = p.seqlen if seqlen is None else seqlen
        if seqlen_k is None:
            seqlen_k = seqlen if p.seqlen_k == p.seqlen else p.seqlen_k
        changes = {"seqlen": seqlen, "seqlen_k": seqlen_k, "causal": p.causal, **given}
        searching, ready = any(name in MASKS for name in given), False
        with self.call("like") as call:
            with call.agreement() as same:
                other._asked, problem = asked_like(self._decision, self._asked, changes)
                _check_causal(causal, **other._asked.problem)
                same |= {name: getattr(problem, name) for name in OF_LIKE}
                same["a mask"] = Words("given") if searching else None  # by which ranks go the same way from here
                other._backend = another(self._backend, self._peers.rank, home.nodes)
                if searching:
                    checked = checked_for_layouts(self._decision, other._asked, problem, self._peers.comm)
                    checked = for_transport(checked, other._backend)
                else:
                    other._decision, other._mesh = resized(self._decision, other._asked, problem), self._mesh
                    same["schedule"] = other._decision.schedule()  # built separately on every rank
                    ready = is_small(home, own_bytes(other._decision))
                if ready:
                    other._prepare(home)
            if searching:
                other._decision = searched_anew(self._peers, self._decision, problem, checked)
            if not ready:  # what needs little, and no search, is prepared in the first agreement
                other._check_memory(home, self._peers)
                tile, order = other._decision.choice.tile, other._decision.mesh_order
                other._mesh = home.unused_mesh(self._peers, tile, order)
                with agreement(self._peers):
                    other._prepare(home)
            home.share(other._mesh)
        model = self._name
        if searching:
            other._begin(home, lambda: f"the positions of {model}; {other._why(FOR_MASKS)}")
        else:
            other._begin(home, lambda: f"as {model}")
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


def _check_causal(asked: Any, *, prefix: int, causal_block: int | None, **others: Any) -> None:
    """Raise ArgumentError if a plan is to be causal no more, and its prefix or causal_block makes it so.

    asked: the argument causal of `like`.  prefix, causal_block, others: of the other plan's problem.
    """
    if asked is UNCHANGED or asked:
        return
    for name, value, without in ("prefix", prefix, 0), ("causal_block", causal_block, None):
        if value:
            raise ArgumentError(
                f"causal is {asked!r} and {name} {value}, which makes queries causal; {name} must be {without} then"
            )
