"""What the executor runs: a forward and a backward pass differ in their arrays and in what a block computes.

Shapes have the batch folded into the heads (see `mpiattn.backends.base`).
"""

from ..schedule import kinds


class _Pass:
    def __init__(self, problem, backend):
        self.problem, self.backend = problem, backend

    def shapes(self):
        """By arena, shape of a token and dtype of every array; "+X" is of partials as they travel."""
        return kinds.shapes(self.problem, self.direction)


class Forward(_Pass):
    """Q and KV are gathered, the partial O = (out, lse) is reduced by merging."""

    direction = "forward"

    def clear(self, kind, arrays):
        """Make an accumulator empty; returns the event."""
        return self.backend.clear(*arrays)

    def launch(self, q, kv, interval, reduced, after, meanwhile=None):
        """Add a block to the accumulators; returns the event.  meanwhile: as of `mpiattn.backends.base`."""
        p = self.problem
        return self.backend.attend(*q, *kv, *interval, *reduced["O"], p.scale, p.softcap, after=after,
                                   meanwhile=meanwhile)

    def merge(self, kind, arrays, received, after):
        """Merge a partial that was received; returns the event."""
        return self.backend.merge(*arrays, *received, after=after)


class Backward(_Pass):
    """Q = (q, dout, lse, delta) and KV are gathered, dQ and dKV = (dk, dv) are reduced by adding."""

    direction = "backward"

    def clear(self, kind, arrays):
        """Make an accumulator zero; returns the event."""
        return self.backend.zero(arrays)

    def launch(self, q, kv, interval, reduced, after, meanwhile=None):
        """Add a block to the accumulators; returns the event.  meanwhile: as of `mpiattn.backends.base`."""
        p = self.problem
        return self.backend.attend_backward(*q, *kv, *interval, *reduced["dQ"], *reduced["dKV"], p.scale, p.softcap,
                                            after=after, meanwhile=meanwhile)

    def merge(self, kind, arrays, received, after):
        """Add a partial that was received; returns the event."""
        return self.backend.add(arrays, received, after=after)
