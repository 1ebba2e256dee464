"""A plan's two passes on this rank: their executors, the memory that they keep, and the run from arrays to results."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np

from ..engine.executor import Executor
from ..engine.folding import Folding, on_host
from ..engine.passes import Backward, Forward
from ..model import memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..backends.base import Array, Backend
    from ..comm.exchange import Exchange
    from ..comm.mesh import Mesh
    from ..schedule.needed import Activity
    from ..schedule.steps import Schedule
    from .settle import Decision


class RankPasses:
    """The forward and the backward pass of a plan on this rank.

    plan: the `settle.Decision`.  schedule: of its forward pass.
    executors: {direction: executor}; that of "backward" is made with the first backward pass.
    tokens: number of this rank's query tokens and of its key tokens.
    """

    def __init__(self, plan: Decision, schedule: Schedule, mesh: Mesh, backend: Backend, exchange: Exchange) -> None:
        p = plan.problem
        self._plan, self._mesh, self._backend, self._exchange = plan, mesh, backend, exchange
        self.tokens = tuple(layout.length(mesh.rank) for layout in plan.choice.layouts)
        self.executors = {"forward": self._executor(schedule, Forward(p, backend))}
        self._nbytes = (
            memory.chunk_bytes(p, *self.tokens)
            + self.executors["forward"].nbytes
            + backend.scratch_bytes(p.head_dim, p.value_dim, p.dtype)
        )
        self._folding = Folding(backend, p.batch)

    def _executor(self, schedule: Schedule, work: Forward | Backward) -> Executor:
        return Executor(self._mesh, schedule, work, self._exchange, *self._plan.choice.layouts)

    def backward_executor(self) -> Executor:
        """The executor of backward passes, made by the first call."""
        if "backward" not in self.executors:
            p = self._plan.problem
            executor = self._executor(self._plan.schedule("backward"), Backward(p, self._backend))
            self._nbytes += (
                executor.nbytes
                + memory.gradient_bytes(p, *self.tokens)
                + self._backend.scratch_bytes(p.head_dim, p.value_dim, p.dtype, backward=True)
            )
            self.executors["backward"] = executor
        return self.executors["backward"]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of a call, of the executors and of scratch."""
        return self._nbytes + self._folding.unplanned_bytes

    def fold(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Arguments {name: (batch, tokens, heads, ...)} as {name: (tokens, batch * heads, ...)}, copied if needed."""
        return {name: self._folding.fold(name, array) for name, array in arrays.items()}

    def forward(
        self,
        chunks: dict[str, Array],
        sinks: Array | None,
        activity: Activity,
        progress: Callable[[float], object] | None,
        out: Array,
        lse: Array,
    ) -> None:
        """Run the forward pass into out and lse.  chunks: q, k and v from `fold`.  sinks: a NumPy array or None."""
        executor = self.executors["forward"]
        self._backend.begin()
        partial_out, partial_lse = executor.run([chunks["q"]], [chunks["k"], chunks["v"]], activity, progress)["O"]
        if sinks is not None:
            self._backend.sink(partial_out, partial_lse, self._folded_sinks(sinks))
        self._folding.unfold(out, partial_out)
        self._backend.copy(lse, self._folding.by_batch(partial_lse).transpose(1, 2, 0))
        self._finish(executor)

    def fold_backward(self, arrays: dict[str, Array], rows: dict[str, Array]) -> dict[str, Array]:
        """As `fold`, also of rows {name: (batch, heads, tokens)}; makes all memory that the backward pass needs."""
        self.backward_executor()
        chunks = self.fold({**arrays, **{name: array.transpose(0, 2, 1) for name, array in rows.items()}})
        chunks["delta"] = self._folding.kept("delta", chunks["lse"].shape, self._plan.problem.partial_dtype)
        return chunks

    def backward(
        self,
        chunks: dict[str, Array],
        sinks: Array | None,
        activity: Activity,
        progress: Callable[[float], object] | None,
        grads: tuple[Array, ...],
    ) -> Array | None:
        """Run the backward pass into grads, (dq, dk, dv); returns this rank's part of dsinks, None without sinks.

        chunks: from `fold_backward`.
        """
        p, executor = self._plan.problem, self.backward_executor()
        q, dout, lse, delta = (chunks[name] for name in ("q", "dout", "lse", "delta"))
        self._backend.begin()
        ready = (self._backend.delta(delta, dout, chunks["out"], chunks.get("dlse")),)
        partials = executor.run([q, dout, lse, delta], [chunks["k"], chunks["v"]], activity, progress, ready)
        for grad, partial in zip(grads, (*partials["dQ"], *partials["dKV"])):
            self._folding.unfold(grad, partial)
        if sinks is not None:
            dsinks = self._backend.result((p.batch * p.heads,), p.partial_dtype)
            self._backend.sink_gradient(dsinks, self._folded_sinks(sinks), lse, delta)
        self._finish(executor)
        return None if sinks is None else on_host(dsinks).reshape(p.batch, p.heads).sum(axis=0)

    def _finish(self, executor: Executor) -> None:
        self._backend.finish()
        executor.forget()
        for array in self._folding.kept.arrays():
            self._backend.forget(array)

    def _folded_sinks(self, sinks: Array) -> Array:
        return self._backend.contiguous(np.tile(sinks, self._plan.problem.batch))

    def released(self) -> RankPasses:
        """A copy without executors and copies of arguments; `self` stays whole, as MPI may use it after a failure."""
        rest = copy.copy(self)
        rest.executors, rest._folding = {}, Folding(self._backend, self._plan.problem.batch)
        return rest
