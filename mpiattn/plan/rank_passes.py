"""A plan's two passes on this rank: their executors, the memory that they keep, and the run from arrays to results."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments.arrays import on_host
from ..engine.executor import Executor
from ..engine.folding import Folding, stays
from ..engine.passes import Backward, Forward
from ..engine.pool import Pool
from ..model import memory
from ..schedule.kinds import GATHERED, OUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..backends.base import Array, Backend
    from ..comm.exchange import Exchange
    from ..comm.mesh import Mesh
    from ..engine.coming import Coming
    from ..schedule.needed import Activity
    from ..schedule.steps import Schedule
    from .decision import Decision

# Arguments that launches may take where the caller has them, and the kind of chunks whose tokens they have.
STRIDED = {"q": "Q", "dout": "Q", "k": "KV", "v": "KV"}


class RankPasses:
    """The forward and the backward pass of a plan on this rank.

    plan: the `decision.Decision`.  schedule: of its forward pass.  activity: that of calls without documents.
    mesh: the `Mesh`; its plane runs the passes.
    executors: {direction: executor}; that of "backward" is made with the first backward pass.
    pool: the memory of the buffers of both.
    tokens: number of this rank's query tokens and of its key tokens.
    """

    def __init__(
        self, plan: Decision, schedule: Schedule, mesh: Mesh, backend: Backend, exchange: Exchange, activity: Activity
    ) -> None:
        p = plan.problem
        self._plan, self.mesh, self._backend, self._exchange = plan, mesh, backend, exchange
        self._activity = activity
        q_layout, k_layout = plan.choice.layouts
        self.tokens = q_layout.length(mesh.chunk), k_layout.length(mesh.chunk)
        self.pool = Pool(backend)
        self.executors = {"forward": self._executor(schedule, Forward(p, backend))}
        self._folding = Folding(backend, p.batch)
        self._staying = tuple(kind for kind in GATHERED if stays(backend, mesh.tile, kind))
        # kinds of whose results partials have shape and dtype
        self._accumulating = tuple(kind for kind in GATHERED if OUT.in_place(p, kind in self._staying))
        self._nbytes = memory.chunk_bytes(p, *self.tokens, self._staying) + self._scratch_bytes()

    def _scratch_bytes(self, backward: bool = False) -> int:
        p = self._plan.problem
        return self._backend.scratch_bytes(p.head_dim, p.value_dim, p.dtype, backward, p.shared_kv)

    def _gradient_bytes(self) -> int:
        return memory.gradient_bytes(self._plan.problem, *self.tokens, self._staying, self._backend.strided)

    def _executor(self, schedule: Schedule, work: Forward | Backward) -> Executor:
        rank_steps, of_pass = self._plan.rank_steps, (schedule.direction, self.mesh.chunk)
        executor = Executor(
            self.mesh, schedule, work, self._exchange, self._activity, self.pool, rank_steps.get(of_pass)
        )
        rank_steps[of_pass] = executor.rank_steps
        return executor

    def backward_executor(self) -> Executor:
        """The executor of backward passes, made by the first call."""
        if "backward" not in self.executors:
            p = self._plan.problem
            executor = self._executor(self._plan.schedule("backward"), Backward(p, self._backend))
            self._nbytes += self._gradient_bytes() + self._scratch_bytes(backward=True)
            self.executors["backward"] = executor
        return self.executors["backward"]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of a call, of the buffers and of scratch."""
        kept = max((executor.kept_bytes for executor in self.executors.values()), default=0)
        return self._nbytes + self.pool.nbytes + kept + self._folding.unplanned_bytes

    def fold(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Arguments {name: (batch, tokens, heads, ...)} as launches take them, copied if needed."""
        folded = {}
        for name, array in arrays.items():
            stays = name == "out" or STRIDED.get(name) in self._staying  # out never travels
            view = self._folding.view(array) if stays else None
            folded[name] = self._folding.fold(name, array) if view is None else view
        return folded

    def _in_place(self, result: Array, kind: str) -> Array | None:
        """A result (batch, tokens, heads, dim) as an accumulator; None if it must be copied from one.

        kind: of the chunks of the same tokens.
        """
        if kind not in self._accumulating or not self._backend.accumulates(result):
            return None
        return result[0] if len(result) == 1 else self._folding.view(result)

    def _of_forward(self, out: Array) -> dict[str, tuple[Array | None, ...]]:
        """The results of a forward pass as accumulators; lse, which has another layout, is none."""
        return {"O": (self._in_place(out, "Q"), None)}

    def _of_backward(self, dq: Array, *dkv: Array) -> dict[str, tuple[Array | None, ...]]:
        """The results of a backward pass as accumulators; dkv: dk, and dv where it is an array of its own."""
        return {"dQ": (self._in_place(dq, "Q"),), "dKV": tuple(self._in_place(array, "KV") for array in dkv)}

    def fold_forward(self, arrays: dict[str, Array], activity: Activity, out: Array) -> dict[str, Array]:
        """As `fold`; makes all memory that the forward pass needs.  out: where `forward` will write it."""
        self.executors["forward"].prepare(activity, self._of_forward(out))
        return self.fold(arrays)

    def forward(
        self,
        chunks: dict[str, Array],
        sinks: Array | None,
        progress: Callable[[float], object] | None,
        out: Array,
        lse: Array,
        coming: Coming | None = None,
    ) -> None:
        """Run the forward pass into out and lse.

        chunks: q, k and v from `fold`, without v if keys hold it.  sinks: a NumPy array or None.
        coming: as for `Executor.run`.
        """
        executor = self.executors["forward"]
        self._backend.begin()
        kv, results = _kv(chunks), self._of_forward(out)
        partial_out, partial_lse = executor.run([chunks["q"]], kv, results, progress, coming=coming)["O"]
        if sinks is not None:
            self._backend.sink(partial_out, partial_lse, self._folded_sinks(sinks))
        self._copy(out, partial_out, results["O"][0])
        self._backend.copy(lse, self._folding.by_batch(partial_lse).transpose(1, 2, 0))
        self._finish()

    def fold_backward(
        self, arrays: dict[str, Array], rows: dict[str, Array], activity: Activity, grads: tuple[Array, ...]
    ) -> dict[str, Array]:
        """As `fold`, also of rows {name: (batch, heads, tokens)}; makes all memory that the backward pass needs.

        grads: where `backward` will write dq, dk and dv, without dv if dk takes it too.
        """
        self.prepare_backward(activity, grads)
        chunks = self.fold({**arrays, **{name: array.transpose(0, 2, 1) for name, array in rows.items()}})
        chunks["delta"] = self._folding.kept("delta", chunks["lse"].shape, self._plan.problem.partial_dtype)
        return chunks

    def prepare_backward(self, activity: Activity, grads: tuple[Array, ...]) -> None:
        """Make the executor's memory for a backward pass into grads."""
        self.backward_executor().prepare(activity, self._of_backward(*grads))

    def backward(
        self,
        chunks: dict[str, Array],
        sinks: Array | None,
        progress: Callable[[float], object] | None,
        grads: tuple[Array, ...],
    ) -> Array | None:
        """Run the backward pass into grads; returns this rank's part of dsinks, None without sinks.

        chunks, grads: of `fold_backward`.
        """
        self._backend.begin()
        dout, out = chunks["dout"], chunks["out"]
        if dout.ndim < out.ndim:  # folded, beside an array that lies where the caller has it
            dout = self._folding.by_batch(dout)
        ready = (self._backend.delta(chunks["delta"], dout, out, chunks.get("dlse")),)
        return self.backward_with_delta(chunks, sinks, progress, grads, ready)

    def backward_with_delta(
        self,
        chunks: dict[str, Array],
        sinks: Array | None,
        progress: Callable[[float], object] | None,
        grads: tuple[Array, ...],
        ready: tuple[Any, ...] = (),
        coming: Coming | None = None,
    ) -> Array | None:
        """As `backward`, with delta computed already.  ready: events of its launches.  coming: as for `forward`."""
        p, executor = self._plan.problem, self.backward_executor()
        q, dout, lse, delta = (chunks[name] for name in ("q", "dout", "lse", "delta"))
        kv, results = _kv(chunks), self._of_backward(*grads)
        partials = executor.run([q, dout, lse, delta], kv, results, progress, ready, coming)
        accumulators = (*results["dQ"], *results["dKV"])
        for grad, partial, accumulator in zip(grads, (*partials["dQ"], *partials["dKV"]), accumulators):
            self._copy(grad, partial, accumulator)
        if sinks is not None:
            dsinks = self._backend.empty((p.batch * p.heads,), p.partial_dtype)
            self._backend.wait(self._backend.sink_gradient(dsinks, self._folded_sinks(sinks), lse, delta))
        self._finish()
        return None if sinks is None else on_host(dsinks).reshape(p.batch, p.heads).sum(axis=0)

    def _copy(self, result: Array, partial: Array, accumulator: Array | None) -> None:
        """Copy a partial into its result, unless it was accumulated there."""
        if partial is not accumulator:
            self._folding.unfold(result, partial)

    def _finish(self) -> None:
        self._backend.finish()
        self.pool.forget()
        for array in self._folding.kept.arrays():
            self._backend.forget(array)

    def _folded_sinks(self, sinks: Array) -> Array:
        return self._backend.contiguous(np.tile(sinks, self._plan.problem.batch))

    def released(self) -> RankPasses:
        """A copy without executors and copies of arguments; `self` stays whole, as MPI may use it after a failure."""
        rest = copy.copy(self)
        rest._nbytes = self.nbytes
        rest.executors, rest.pool = {}, Pool(self._backend)
        rest._folding = Folding(self._backend, self._plan.problem.batch)
        return rest


def _kv(chunks: dict[str, Array]) -> list[Array]:
    """Keys and values from `fold`; the keys alone if they hold the values."""
    return [chunks[name] for name in ("k", "v") if name in chunks]
