"""The forward and the backward pass that the executor runs: their arrays, and the computation of a block.

In all shapes the batch is folded into the heads (see `mpiattn.backends.base`).
"""

from ..schedule import kinds


class _Pass:
    def __init__(self, problem, backend):
        self.problem, self.backend = problem, backend

    def _keys_and_values(self, arrays):
        """(k, v) of the arrays of a KV chunk, or (dk, dv); None for what is a part of the first."""
        return (*arrays, None) if self.problem.shared_kv else arrays

    def shapes(self):
        """{arena: [(shape of a token, dtype) of each array]}; arena "+X" holds partials in their dtype on the wire."""
        return kinds.shapes(self.problem, self.direction)


class Forward(_Pass):
    """The forward pass: Q and KV are gathered, partials O = (out, lse) are reduced by merging."""

    direction = "forward"

    def clear(self, kind, arrays):
        """Clear an accumulator; returns the event."""
        return self.backend.clear(*arrays)

    def launch(self, q, kv, interval, reduced, after, meanwhile=None):
        """Add a block to the accumulators; returns the event.  meanwhile: as in `mpiattn.backends.base`."""
        p = self.problem
        return self.backend.attend(
            *q,
            *self._keys_and_values(kv),
            *interval,
            *reduced["O"],
            p.scale,
            p.softcap,
            after=after,
            meanwhile=meanwhile,
        )

    def merge(self, kind, arrays, received, after):
        """Merge a received partial into an accumulator; returns the event."""
        return self.backend.merge(*arrays, *received, after=after)


class Backward(_Pass):
    """The backward pass: Q = (q, dout, lse, delta) and KV are gathered, dQ and dKV = (dk, dv) reduced by adding."""

    direction = "backward"

    def clear(self, kind, arrays):
        """Zero an accumulator; returns the event."""
        return self.backend.zero(arrays)

    def launch(self, q, kv, interval, reduced, after, meanwhile=None):
        """Add a block to the accumulators; returns the event.  meanwhile: as in `mpiattn.backends.base`."""
        p = self.problem
        return self.backend.attend_backward(
            *q,
            *self._keys_and_values(kv),
            *interval,
            *reduced["dQ"],
            *self._keys_and_values(reduced["dKV"]),
            p.scale,
            p.softcap,
            after=after,
            meanwhile=meanwhile,
        )

    def merge(self, kind, arrays, received, after):
        """Add a received partial to an accumulator; returns the event."""
        return self.backend.add(arrays, received, after=after)
