"""The forward and the backward pass that the executor runs: their arrays, and the computation of a block.

In all shapes the batch is folded into the heads (see `mpiattn.backends.base`).
"""

from ..backends.block import BackwardInputs, BlockInputs, Gradients
from ..schedule import kinds


class _Pass:
    """What both passes have.

    inputs: by gathered kind, the names of its arrays among the arguments of the pass.
    """

    def __init__(self, problem, backend):
        self.problem, self.backend = problem, backend
        gathered = [kinds.KINDS[self.direction][kind] for kind in kinds.GATHERED]
        self.inputs = tuple(tuple(array.argument for array in kind.arrays_of(problem)) for kind in gathered)

    def _of_values(self, arrays):
        """A launch's keys and values, or their gradients, without the numbers of a key's bias that come last."""
        return arrays[:-1] if self.problem.key_bias else arrays

    def shapes(self):
        """{arena: [(shape of a token, dtype) of each array]}; arena "+X" holds partials in their dtype on the wire."""
        return kinds.shapes(self.problem, self.direction)


class Forward(_Pass):
    """The forward pass: Q and KV are gathered, partials O = (out, lse) are reduced by merging."""

    direction = "forward"

    def clear(self, kind, arrays):
        """Clear an accumulator; returns the event."""
        return self.backend.clear(*arrays)

    def launch(self, q, kv, fields, reduced, after, meanwhile=None, dbias=None):
        """Add a block to the accumulators; returns the event.

        fields: what it has besides chunks, as fields of `BlockInputs`.  meanwhile: as in `mpiattn.backends.base`.
        dbias: as in `Gradients`.
        """
        block = BlockInputs.of(self.problem, *q, self._of_values(kv), **fields)
        return self.backend.attend(block, *reduced["O"], after=after, meanwhile=meanwhile)

    def merge(self, kind, arrays, received, after):
        """Merge a received partial into an accumulator; returns the event."""
        return self.backend.merge(*arrays, *received, after=after)


class Backward(_Pass):
    """The backward pass: Q = (q, dout, lse, delta) and KV are gathered, dQ and dKV = (dk, dv) reduced by adding."""

    direction = "backward"

    def clear(self, kind, arrays):
        """Zero an accumulator; returns the event."""
        return self.backend.zero(arrays)

    def launch(self, q, kv, fields, reduced, after, meanwhile=None, dbias=None):
        """As of `Forward`."""
        block = BlockInputs.of(self.problem, q[0], self._of_values(kv), **fields)
        grads = Gradients(*reduced["dQ"], *self._of_values(reduced["dKV"]), dbias=dbias)
        return self.backend.attend_backward(block, BackwardInputs(*q[1:]), grads, after=after, meanwhile=meanwhile)

    def merge(self, kind, arrays, received, after):
        """Add a received partial to an accumulator; returns the event."""
        return self.backend.add(arrays, received, after=after)


PASSES = {computation.direction: computation for computation in (Forward, Backward)}
