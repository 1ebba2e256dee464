"""A plan's two passes on this rank: from the caller's arrays to the mesh, through an executor, and back to results."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arguments.arrays import on_host
from ..engine.call_cache import CallCache
from ..engine.executor import Executor
from ..engine.identity import Identity
from ..engine.passes import PASSES
from ..engine.plane_sums import sum_over
from ..engine.pool import Pool
from ..engine.record import Pass, Regrouped, record
from ..engine.regroup import Regroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..backends.base import Array, Backend
    from ..comm.exchange import Exchange
    from ..comm.mesh import Mesh
    from ..schedule.needed import Activity
    from .call_biases import CallBiases
    from .decision import Decision


class Prepared(NamedTuple):
    """A pass for which all memory is there.

    arrays: what `take` of the way to the mesh needs.
    accumulators: {reduced kind: results that are accumulated in place, or None}.
    results: (out, lse) or (dq, dk, dv), the latter without dv if dk takes it too, and with dkey_bias if there is one.
    biases: of the call, or None.
    """

    executor: Executor
    arrays: Any
    accumulators: dict[str, tuple[Array | None, ...]]
    results: tuple[Array, ...]
    biases: CallBiases | None = None


class RankPasses:
    """The forward and the backward pass of a plan on this rank.

    mesh: the `Mesh`; its plane runs the passes.
    executors: {direction: executor}; that of "backward" is made with the first backward pass.
    pool: the memory of the buffers of both.  call_cache: the `CallCache` of this rank.
    tokens: number of the caller's query tokens on this rank, and of its key tokens.
    """

    def __init__(self, decision: Decision, mesh: Mesh, backend: Backend, exchange: Exchange) -> None:
        self._decision, self.mesh, self._backend, self._exchange = decision, mesh, backend, exchange
        self._plane_problem = decision.plane.problem
        q_layout, k_layout = decision.layouts
        self.tokens = q_layout.length(mesh.rank), k_layout.length(mesh.rank)
        self.call_cache = CallCache(backend, decision.activity, decision.sequences(mesh.rank))
        self.pool = Pool(backend)
        self.executors: dict[str, Executor] = {}
        self._scratch_bytes = self._released_bytes = 0
        self._way: Identity | Regroup  # from the caller's arrays to the mesh, and back to results
        if decision.regrouping is None:
            self._way = Identity(decision.problem, self.tokens, mesh, backend)
        else:
            self._way = Regroup(decision.regrouping, self.tokens, mesh, backend, exchange)
        self.executor("forward")

    def executor(self, direction: str) -> Executor:
        """The executor of a direction, made by its first pass."""
        if direction not in self.executors:
            p, steps = self._plane_problem, self._decision.rank_steps(direction, self.mesh.chunk)
            self.call_cache.without_documents.adopt(steps)
            computation = PASSES[direction](p, self._backend)
            executor = Executor(
                self.mesh, steps.schedule, computation, self._exchange, self.call_cache.without_documents, self.pool
            )
            backward = direction == "backward"
            self._scratch_bytes += self._backend.scratch_bytes(
                p.head_dim, p.value_dim, p.dtype, backward, p.shared_kv, p.mask is not None
            )
            self.executors[direction] = executor
        return self.executors[direction]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of a call, of the buffers and of scratch; once released, those before."""
        if self._released_bytes:
            return self._released_bytes
        rows = max(executor.calls.rows_bytes for executor in self.executors.values())
        return self._way.nbytes("backward" in self.executors) + self._scratch_bytes + self.pool.nbytes + rows

    def prepare(
        self,
        direction: str,
        arrays: dict[str, Array],
        activity: Activity,
        results: tuple[Array, ...],
        biases: CallBiases | None = None,
    ) -> Prepared:
        """Make all memory that a pass needs, and fold what is folded before it.

        arrays: the arguments by name, without v if keys hold it.  results: where the pass will write, as of `Prepared`.
        """
        executor, accumulators = self.executor(direction), self._way.accumulators(direction, results)
        executor.prepare(self.call_cache.alike(activity), accumulators, biases is not None)
        return Prepared(executor, self._way.prepare(direction, arrays), accumulators, results, biases)

    def make_steps(self, activity: Activity) -> None:
        """Make the steps of calls with an activity, of all passes so far."""
        calls = self.call_cache.alike(activity)
        for executor in self.executors.values():
            calls.steps(executor.schedule, self.mesh.chunk)

    def run(self, prepared: Any, sinks: Array | None, progress: Callable[[float], object] | None) -> Array | None:
        """Run a pass into its results; returns this rank's part of dsinks if it is a backward pass with sinks.

        prepared: a `Prepared`.  sinks: a NumPy array of all heads, or None.
        """
        executor, arrays, accumulators, results, biases = prepared
        direction = executor.schedule.direction
        self._backend.begin()
        chunks, q_ready, coming = self._way.take(executor.schedule, arrays)
        queries, keys = ([chunks[name] for name in names] for names in executor.computation.inputs)
        of_pass = None if biases is None else biases.of_pass()
        partials = executor.run(queries, keys, accumulators, progress, q_ready, coming, of_pass)
        if sinks is not None and direction == "forward":
            out, lse = partials["O"]
            self._backend.sink(out, lse, self._plane_sinks(sinks))
        self._way.give(direction, partials, accumulators, results)
        if biases is not None and direction == "backward":
            biases.collect(self._sum_over_planes)
        dsinks = self._sink_gradient(sinks, chunks) if sinks is not None and direction == "backward" else None
        self._backend.finish()
        self.pool.forget()
        for array in self._way.work_arrays():
            self._backend.forget(array)
        return dsinks

    def _sum_over_planes(self, gradient: Array, axes: tuple[int, ...]) -> None:
        """Replace the gradient of a tile by its sum over the planes that share it; collective.

        axes: 0 if it is the same for all batch entries, 1 if it is for all heads.  Planes split either.
        """
        if self._decision.regrouping is None:
            return
        of_batch, of_heads = self._decision.regrouping.split
        places = np.arange(of_batch * of_heads).reshape(of_batch, of_heads)
        plane = self.mesh.rank // self.mesh.tile.chunks
        for axis in (0, 1):
            if axis not in axes:
                places = places.take([np.argwhere(places == plane)[0, axis]], axis)
        if places.size > 1:
            sum_over(places.ravel().tolist(), gradient, self.mesh, self._backend, self._exchange)

    def _plane_sinks(self, sinks: Array) -> Array:
        """The sinks of the heads that this rank computes, for each of its sequences."""
        return self._backend.contiguous(np.tile(sinks[self._way.heads], self._way.sequences))

    def _sink_gradient(self, sinks: Array, chunks: dict[str, Array]) -> Array:
        """This rank's part of dsinks, of all heads."""
        p = self._plane_problem
        dsinks = self._backend.empty((p.batch * p.heads,), p.partial_dtype)
        event = self._backend.sink_gradient(dsinks, self._plane_sinks(sinks), chunks["lse"], chunks["delta"])
        self._backend.wait(event)
        with np.errstate(all="ignore"):  # of infinite ones
            of_heads = on_host(dsinks).reshape(self._way.sequences, -1).sum(axis=0)
        whole = np.zeros(self._decision.problem.heads, of_heads.dtype)
        whole[self._way.heads] = of_heads
        return whole

    def recorded(self) -> list[Pass]:
        """The last pass of each direction on this rank, with the ranks of the caller's communicator."""
        passes = (record(executor, self._caller_of, self._regrouped(name)) for name, executor in self.executors.items())
        return [each for each in passes if each is not None]

    def _caller_of(self, chunk: int) -> int:
        """The rank of the caller's communicator that has a chunk of this rank's plane."""
        return self._caller_of_mesh(self.mesh.rank - self.mesh.chunk + chunk)

    def _caller_of_mesh(self, rank: int) -> int:
        return rank if self._decision.mesh_order is None else self._decision.mesh_order[rank]

    def _regrouped(self, direction: str) -> list[Regrouped]:
        """The exchanges of this rank before and after the last pass of a direction."""
        regrouping = self._decision.regrouping
        if regrouping is None or not isinstance(self._way, Regroup) or direction not in self._way.times:
            return []
        took, came, gave, returned = self._way.times[direction]

        def exchange(given: bool, begun: float, ended: float) -> Regrouped:
            sent = regrouping.messages(self.mesh.rank, direction, (given,))
            return Regrouped(given, begun, ended, [(self._caller_of_mesh(peer), nbytes) for peer, nbytes in sent])

        return [exchange(False, took, came), exchange(True, gave, returned)]

    def released(self) -> RankPasses:
        """A copy without memory; `self` stays whole, as MPI may use it after a failure."""
        rest: Any = copy.copy(self)
        rest._released_bytes, rest.call_cache = self.nbytes, self.call_cache.released()
        rest.executors, rest.pool, rest._way = {}, None, None
        return rest
