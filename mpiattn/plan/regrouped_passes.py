"""The passes of a plan whose mesh has several planes or another layout than its caller."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.folding import Folding
from ..engine.regroup import Regroup
from ..model import memory
from ..schedule.kinds import DELTA, DOUT, GATHERED, LSE, OUT, K, Q, V
from .rank_passes import RankPasses

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..backends.base import Array, Backend
    from ..comm.exchange import Exchange
    from ..comm.mesh import Mesh
    from ..engine.call_cache import CallCache
    from ..engine.executor import Executor
    from ..engine.pool import Pool
    from ..schedule.needed import Activity
    from ..schedule.remembered import Remembered
    from .decision import Decision

# Arguments of the passes, and what travels in their place.
NAMES = {"q": Q, "k": K, "v": V, "dout": DOUT, "lse": LSE, "delta": DELTA}


def _by_argument(arrays: dict[str, Array]) -> dict[str, Array]:
    """{argument: array} of arrays by their name in `mpiattn.schedule.kinds`."""
    return {name: arrays[array.name] for name, array in NAMES.items() if array.name in arrays}


def _by_name(arrays: dict[str, Array]) -> dict[str, Array]:
    """{name in `mpiattn.schedule.kinds`: array} of arrays by their argument; those that do not travel are left out."""
    return {array.name: arrays[name] for name, array in NAMES.items() if name in arrays}


class RegroupedPasses:
    """As `RankPasses`: takes the caller's arrays to the mesh, runs its passes there, and takes their results back.

    plan: the `decision.Decision`.  tokens: number of the caller's query tokens on this rank, and of its key tokens.
    """

    def __init__(
        self, plan: Decision, steps: Remembered, mesh: Mesh, backend: Backend, exchange: Exchange, calls: CallCache
    ) -> None:
        self._plan, self._problem, self.mesh, self._backend = plan, plan.problem, mesh, backend
        q_layout, k_layout = plan.layouts
        self.tokens = q_layout.length(mesh.rank), k_layout.length(mesh.rank)
        self._passes = RankPasses(plan.of_mesh, steps, mesh, backend, exchange, calls)
        self._regroup = Regroup(plan.regrouping, mesh, backend, exchange)
        self._folding = Folding(backend, plan.problem.batch)
        self._released_bytes = 0  # `nbytes` when `released` dropped the memory
        self._prepare("forward")

    @property
    def executors(self) -> dict[str, Executor]:
        """{direction: executor} of the passes on the mesh."""
        return self._passes.executors

    @property
    def calls(self) -> CallCache:
        """What is kept for calls."""
        return self._passes.calls

    @property
    def pool(self) -> Pool:
        """The memory of the buffers of the passes."""
        return self._passes.pool

    def backward_executor(self) -> Executor:
        """The executor of backward passes, made by the first call."""
        return self._passes.backward_executor()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of a call, here and on the mesh, of the exchange between them, and of the passes."""
        if self._released_bytes:
            return self._released_bytes
        outer = memory.outer_bytes(self._problem, self.tokens, "backward" in self.executors, strided=True)
        outer += self._folding.kept.nbytes(("dout", "out")) + self._regroup.widened_bytes
        return outer + self._regroup.packed_bytes + self._passes.nbytes

    def _prepare(self, direction: str) -> tuple[Array, ...]:
        """Make the memory of the exchange of a pass; returns the results of the mesh."""
        self._regroup.prepare(direction)
        self._of_mesh(direction, given=False)
        return tuple(self._of_mesh(direction, given=True).values())

    def _of_mesh(self, direction: str, given: bool) -> dict[str, Array]:
        """This rank's chunks of the mesh of what a pass takes, or gives, by name."""
        regroup = self._regroup
        return {array.name: regroup.chunk(array, given) for array in regroup.arrays(direction, given)}

    def fold_forward(self, arrays: dict[str, Array], activity: Activity, out: Array) -> dict[str, Array]:
        """Make all memory that the forward pass needs.  Returns the arrays."""
        inner_out, _ = self._prepare("forward")
        self._passes.fold_forward({}, activity, inner_out[np.newaxis])
        return arrays

    def forward(
        self,
        chunks: dict[str, Array],
        sinks: Array | None,
        progress: Callable[[float], object] | None,
        out: Array,
        lse: Array,
    ) -> None:
        """Run the forward pass into out and lse.  chunks: q, k and v from `fold_forward`."""
        inner, results = self._of_mesh("forward", given=False), self._of_mesh("forward", given=True)
        self._backend.begin()
        coming = self._regroup.take("forward", _by_name(chunks), inner, self._last("forward"))
        inner_out, inner_lse = (array[np.newaxis] for array in results.values())
        self._passes.forward(
            _by_argument(inner), self._of_plane(sinks), progress, inner_out, inner_lse.transpose(0, 2, 1), coming
        )
        coming.finish()
        self._backend.begin()
        self._regroup.give("forward", results, {OUT.name: out, LSE.name: lse.transpose(0, 2, 1)})
        self._finish()

    def fold_backward(
        self, arrays: dict[str, Array], rows: dict[str, Array], activity: Activity, grads: tuple[Array, ...]
    ) -> dict[str, Array]:
        """Make all memory that the backward pass needs, and fold what delta is made of.

        Returns the arrays and rows, and the folded ones by ("folded", name).
        """
        results = self._prepare("backward")
        self._passes.prepare_backward(activity, tuple(array[np.newaxis] for array in results))
        folded = {name: self._folding.view(arrays[name]) for name in ("dout", "out")}
        if any(view is None for view in folded.values()):
            folded = {name: self._folding.fold(name, arrays[name]) for name in folded}
        if "dlse" in rows:
            folded["dlse"] = self._folding.fold("dlse", rows["dlse"].transpose(0, 2, 1))
        p = self._problem
        folded["delta"] = self._folding.kept("delta", (self.tokens[0], p.batch * p.heads), p.partial_dtype)
        return {**arrays, **rows, "folded": folded}

    def backward(
        self,
        chunks: dict[str, Array],
        sinks: Array | None,
        progress: Callable[[float], object] | None,
        grads: tuple[Array, ...],
    ) -> Array | None:
        """Run the backward pass into grads, (dq, dk, dv); returns this rank's part of dsinks, None without sinks.

        chunks: from `fold_backward`.
        """
        p, folded = self._problem, chunks["folded"]
        self._backend.begin()
        self._backend.delta(folded["delta"], folded["dout"], folded["out"], folded.get("dlse"))
        delta = folded["delta"].reshape(-1, p.batch, p.heads).swapaxes(0, 1)
        outer = _by_name({**chunks, "lse": chunks["lse"].transpose(0, 2, 1), "delta": delta})
        inner, results = self._of_mesh("backward", given=False), self._of_mesh("backward", given=True)
        coming = self._regroup.take("backward", outer, inner, self._last("backward"))
        partials = tuple(array[np.newaxis] for array in results.values())
        dsinks = self._passes.backward_with_delta(
            _by_argument(inner), self._of_plane(sinks), progress, partials, coming=coming
        )
        coming.finish()
        self._backend.begin()
        self._regroup.give("backward", results, dict(zip(results, grads)))
        self._finish()
        if dsinks is None:
            return None
        whole = np.zeros(p.heads, dsinks.dtype)
        whole[self._heads()] = dsinks.reshape(self._sequences(), -1).sum(axis=0)
        return whole

    def _last(self, direction: str) -> str:
        """The kind of chunk that may come to this rank last: not that of the first transfer."""
        steps = self._passes.executors[direction].schedule.steps
        first = next((t.kind for step in steps for t in step.transfers if t.kind in GATHERED), "Q")
        return "Q" if first == "KV" else "KV"

    def _heads(self) -> slice:
        """The query heads of this rank's plane."""
        return self._regroup.regrouping.heads(Q, self.mesh.rank)

    def _sequences(self) -> int:
        """Number of the sequences of this rank's plane."""
        return self._problem.batch // self._regroup.regrouping.split[0]

    def _of_plane(self, sinks: Array | None) -> Array | None:
        """The sinks of this rank's plane, for each of its sequences."""
        return None if sinks is None else np.tile(sinks[self._heads()], self._sequences())

    def _finish(self) -> None:
        self._backend.finish()
        for kept in (self._folding.kept, self._regroup.kept, self._regroup.packed):
            for array in kept.arrays():
                self._backend.forget(array)

    def released(self) -> RegroupedPasses:
        """A copy without memory; `self` stays whole, as MPI may use it after a failure."""
        rest: Any = copy.copy(self)
        rest._released_bytes = self.nbytes
        rest._passes, rest._folding = self._passes.released(), Folding(self._backend, self._problem.batch)
        rest._regroup = self._regroup.released()
        return rest
