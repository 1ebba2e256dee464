"""The way from the caller's arrays to the mesh and back where every rank computes with its own tokens and heads.

No token changes ranks: an array is folded to (tokens, batch * heads, ...), and copied only if launches cannot take it
where it lies.  `mpiattn.engine.regroup` is the way where sequences, heads or tokens change ranks.
"""

from itertools import chain

from ..model import memory
from ..schedule.kinds import GATHERED, KINDS, OUT
from .folding import Folding, stays

# Arguments that launches may take where the caller has them, and the kind of chunks whose tokens they have.
STRIDED = {
    array.argument: name for kinds in KINDS.values() for name in GATHERED for array in kinds[name].arrays if array.dim
}


class Identity:
    """The way of a plan without regrouping.

    problem: the plan's.  tokens: number of this rank's query tokens and of its key tokens.
    heads, sequences: the query heads that this rank computes, a slice, and the number of sequences.
    """

    def __init__(self, problem, tokens, mesh, backend):
        self.problem, self.tokens, self.backend = problem, tokens, backend
        self.heads, self.sequences = slice(0, problem.heads), problem.batch
        self._folding = Folding(backend, problem.batch)
        self._staying = tuple(kind for kind in GATHERED if stays(backend, mesh.tile, kind))
        # the kinds of the tokens of those results that may be accumulators: partials have their shape and dtype
        self._accumulating = tuple(kind for kind in GATHERED if OUT.in_result(problem, kind in self._staying))

    def nbytes(self, backward):
        """Bytes of the arrays of a call and of their copies.  backward: whether a backward pass has been made."""
        nbytes = memory.chunk_bytes(self.problem, *self.tokens, self._staying) + self._folding.unplanned_bytes
        if backward:
            nbytes += memory.gradient_bytes(self.problem, *self.tokens, self._staying, self.backend.strided)
        return nbytes

    def work_arrays(self):
        """The memory of copies; what is in it is needed during a call only."""
        return self._folding.copies.arrays()

    def prepare(self, direction, arrays):
        """The arguments of a pass as launches take them, copied if needed; `take` then needs no memory.

        arrays: {name: (batch, tokens, heads, dim) or, of rows, (batch, heads, tokens)}.
        """
        chunks = {}
        for name, array in arrays.items():
            if array.ndim == 3:
                array = array.transpose(0, 2, 1)
            stays = name == "out" or STRIDED.get(name) in self._staying  # out never travels
            view = self._folding.view(array) if stays else None
            chunks[name] = self._folding.fold(name, array) if view is None else view
        if direction == "backward":
            chunks["delta"] = self._folding.copies("delta", chunks["lse"].shape, self.problem.partial_dtype)
        return chunks

    def accumulators(self, direction, results):
        """The results of a pass as accumulators by reduced kind, None for those that are copied from one.

        results: (out, lse) or (dq, dk, dv), the latter without dv if dk takes it too; lse is (batch, heads, tokens).
        """
        if direction == "forward":
            return {"O": (self._accumulator(results[0], "Q"), None)}  # lse has another layout
        dq, *dkv = results
        return {"dQ": (self._accumulator(dq, "Q"),), "dKV": tuple([self._accumulator(array, "KV") for array in dkv])}

    def _accumulator(self, result, kind):
        """A result (batch, tokens, heads, dim) as an accumulator, or None.  kind: of the chunks of the same tokens."""
        if result.ndim == 3 or kind not in self._accumulating or not self.backend.accumulates(result):
            return None
        return result[0] if len(result) == 1 else self._folding.view(result)

    def take(self, schedule, chunks):
        """The chunks that launches of a pass take, the events that complete those of queries, and None: all are here.

        chunks: of `prepare`.
        """
        if schedule.direction == "forward":
            return chunks, (), None
        dout, out = chunks["dout"], chunks["out"]
        if dout.ndim < out.ndim:  # folded, beside an array that lies where the caller has it
            dout = self._folding.by_batch(dout)
        return chunks, (self.backend.delta(chunks["delta"], dout, out, chunks.get("dlse")),), None

    def give(self, direction, partials, accumulators, results):
        """Copy the partials of this rank's own chunk into its results, unless they were accumulated there.

        partials: {reduced kind: arrays}.  accumulators, results: as of `accumulators`.
        """
        for result, partial, accumulator in zip(
            results, chain.from_iterable(partials.values()), chain.from_iterable(accumulators.values())
        ):
            if result.ndim == 3:
                self.backend.copy(result, self._folding.by_batch(partial).transpose(1, 2, 0))
            elif partial is not accumulator:
                self._folding.unfold(result, partial)
