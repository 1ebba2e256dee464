"""A divided plan's two passes on this rank: from the caller's arrays to pieces of the scores, and back to results."""

from __future__ import annotations

import copy
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arguments.arrays import on_host
from ..backends.kept import Kept
from ..engine.call_cache import CallCache
from ..engine.passes import PASSES
from ..engine.piece_executor import PieceExecutor, recorded
from ..engine.pool import Pool
from ..model import memory
from ..schedule.kinds import KINDS, REDUCED

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..backends.base import Array, Backend
    from ..comm.exchange import Exchange
    from ..comm.mesh import Mesh
    from ..engine.call_cache import AlikeCalls
    from ..engine.record import Pass
    from ..schedule.needed import Activity
    from ..schedule.piece_steps import PieceSteps
    from .call_biases import CallBiases
    from .decision import Decision


class PreparedPieces(NamedTuple):
    """A pass for which all memory is there.

    sources: {name: the caller's array, or a contiguous copy}.
    results: (out, lse) or (dq, dk, dv), the latter without dv if dk takes it too, and with dkey_bias if there is one.
    biases: of the call, or None.
    """

    executor: PieceExecutor
    sources: dict[str, Array]
    results: tuple[Array, ...]
    biases: CallBiases | None


class PiecePasses:
    """The forward and the backward pass of a divided plan on this rank, with the methods of `RankPasses`."""

    def __init__(self, decision: Decision, mesh: Mesh, backend: Backend, exchange: Exchange) -> None:
        self._decision, self.mesh, self._backend, self._exchange = decision, mesh, backend, exchange
        self._problem = decision.problem
        q_layout, k_layout = decision.layouts
        self.tokens = q_layout.length(mesh.rank), k_layout.length(mesh.rank)
        self.call_cache = CallCache(backend, decision.activity, slice(0, decision.problem.batch))
        self.pool = Pool(backend)
        self.executors: dict[str, PieceExecutor] = {}
        self._copies = Kept(backend.empty)
        self._scratch_bytes = self._released_bytes = 0
        self.executor("forward")

    def executor(self, direction: str) -> PieceExecutor:
        """The executor of a direction, made by its first pass."""
        if direction not in self.executors:
            p = self._decision.piece_problem
            computation = PASSES[direction](p, self._backend)
            self._scratch_bytes += self._backend.scratch_bytes(
                p.head_dim, p.value_dim, p.dtype, direction == "backward", p.shared_kv, p.mask is not None
            )
            self.executors[direction] = PieceExecutor(
                self.mesh, self._problem, computation, self._exchange, self.pool, self.tokens
            )
        return self.executors[direction]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of a call, of the buffers and of scratch; once released, those before."""
        if self._released_bytes:
            return self._released_bytes
        nbytes = memory.outer_bytes(self._problem, self.tokens, "backward" in self.executors, strided=True)
        names = ("q", "k", "v", "dout", "out")
        return nbytes + self._copies.nbytes(names) + self._scratch_bytes + self.pool.nbytes

    def prepare(
        self,
        direction: str,
        arrays: dict[str, Array],
        activity: Activity,
        results: tuple[Array, ...],
        biases: CallBiases | None = None,
    ) -> PreparedPieces:
        """Make all memory that a pass needs.

        arrays: the arguments by name, without v if keys hold it.  results: where the pass will write.
        """
        executor, p = self.executor(direction), self._problem
        sources = {
            name: self._backend.contiguous(array, array.itemsize, partial(self._copies, name))
            for name, array in arrays.items()
        }
        if direction == "backward":
            delta = self._copies("delta", (p.batch, self.tokens[0], p.heads), p.partial_dtype)
            sources["delta"] = delta.transpose(0, 2, 1)
        calls = self.call_cache.alike(activity)
        executor.prepare(calls, self._steps(direction, calls), sources)
        return PreparedPieces(executor, sources, results, biases)

    def make_steps(self, activity: Activity) -> None:
        """Make the steps of calls with an activity, of all passes so far."""
        calls = self.call_cache.alike(activity)
        for direction in self.executors:
            self._steps(direction, calls)

    def _steps(self, direction: str, calls: AlikeCalls) -> PieceSteps:
        """The steps of a pass, made once."""
        chunk = self.mesh.chunk
        return calls.piece_steps(direction, lambda: self._decision.piece_steps(direction, chunk, calls.activity))

    def run(self, prepared: Any, sinks: Array | None, progress: Callable[[float], object] | None) -> Array | None:
        """Run a pass into its results; returns this rank's part of dsinks if it is a backward pass with sinks.

        prepared: a `PreparedPieces`.  sinks: a NumPy array of all heads, or None.
        """
        executor, sources, results, biases = prepared
        backend, backward = self._backend, executor.direction == "backward"
        backend.begin()
        if backward:
            self._make_delta(sources)
        of_need = None if biases is None else biases.of_needs()
        partials = executor.run(sources, of_need, progress)
        if sinks is not None and not backward:
            for (_, head), (out, lse) in partials["O"].items():
                backend.sink(out, lse, backend.contiguous(sinks[self._heads(head, executor.sharing)]))
        self._give(executor, partials, results)
        if biases is not None and backward:
            biases.collect(_nothing)
        dsinks = self._sink_gradient(sinks, sources) if sinks is not None and backward else None
        backend.finish()
        self.pool.forget()
        for array in self._copies.arrays():
            backend.forget(array)
        return dsinks

    @staticmethod
    def _heads(head: int, width: int) -> slice:
        return slice(head * width, (head + 1) * width)

    def _make_delta(self, sources: dict[str, Array]) -> None:
        """Compute delta of every sequence, which travels with its queries."""
        for entry in range(self._problem.batch):
            dlse = None
            if "dlse" in sources:
                dlse = self._backend.contiguous(sources["dlse"][entry].transpose(1, 0))
            delta = sources["delta"][entry].transpose(1, 0)
            self._backend.delta(delta, sources["dout"][entry], sources["out"][entry], dlse)

    def _give(
        self, executor: PieceExecutor, partials: dict[str, dict[Any, tuple[Array, ...]]], results: tuple[Array, ...]
    ) -> None:
        """Copy the partials of this rank's own tokens into its results."""
        arrays = chain.from_iterable(
            [(kind, i, array) for i, array in enumerate(KINDS[executor.direction][kind].arrays_of(self._problem))]
            for kind in REDUCED[executor.direction]
        )
        for result, (kind, i, array) in zip(results, arrays):
            width = executor.sharing if array.heads == "heads" else 1
            for (entry, head), of_group in partials[kind].items():
                some = self._heads(head, width)
                if result.ndim == 4:
                    self._backend.copy(result[entry][:, some], of_group[i])
                else:
                    self._backend.copy(result[entry, some].transpose(1, 0), of_group[i])

    def _sink_gradient(self, sinks: Array, sources: dict[str, Array]) -> Array:
        """This rank's part of dsinks, of all heads."""
        p, total = self._problem, 0
        given = self._backend.contiguous(sinks)
        for entry in range(p.batch):
            dsinks = self._backend.empty((p.heads,), p.partial_dtype)
            lse = self._backend.contiguous(sources["lse"][entry].transpose(1, 0))
            delta = sources["delta"][entry].transpose(1, 0)
            self._backend.wait(self._backend.sink_gradient(dsinks, given, lse, delta))
            with np.errstate(all="ignore"):  # of infinite ones
                total = total + on_host(dsinks)
        return total

    def recorded(self) -> list[Pass]:
        """The last pass of each direction on this rank, with the ranks of the caller's communicator."""
        passes = (recorded(executor, self._caller_of) for executor in self.executors.values())
        return [each for each in passes if each is not None]

    def _caller_of(self, rank: int) -> int:
        order = self._decision.mesh_order
        return rank if order is None else order[rank]

    def released(self) -> PiecePasses:
        """A copy without memory; `self` stays whole, as MPI may use it after a failure."""
        rest: Any = copy.copy(self)
        rest._released_bytes, rest.call_cache = self.nbytes, self.call_cache.released()
        rest.executors, rest.pool, rest._copies = {}, None, None
        return rest


def _nothing(gradient: Array, axes: tuple[int, ...]) -> None:
    """In place of a sum over planes, of which a divided plan has none."""
