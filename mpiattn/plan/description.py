"""The read-only properties of a plan: `Described`, a base class of `MeshAttention`."""

import numpy as np

from ..model.search import times_as_long
from ..problem.documents import documents
from ..schedule.needed import Activity
from .settle import one_of


class Described:
    """The choices made for a plan, and its counters so far."""

    def __repr__(self):
        if "_arguments" not in self.__dict__:
            return f"{type(self).__name__}(not made)"
        (a, b), kinds = self.tile, " and ".join(dict.fromkeys(layout.kind for layout in (self.q_layout, self.k_layout)))
        return (f"{type(self).__name__}({self.problem}; tile {a}x{b}, {kinds} layout, {self.schedule.name} schedule, "
                f"{self.route} route, {self.backend}; {'closed' if self._home is None else 'open'})")

    @property
    def tile(self):
        """The tile (a, b): a query chunks x b KV chunks per rank.  The mesh has b rows x a columns."""
        return self.schedule.a, self.schedule.b

    @property
    def route(self):
        """The route of chunks between ranks: "direct" or "ring"."""
        return self._plan.choice.route

    @property
    def machine(self):
        """The `Machine` whose predicted times "auto" used."""
        return self._plan.machine

    @property
    def balance(self):
        """Load imbalance: the maximum over the mean of the ranks' (query, key) pairs, under the plan's own masks."""
        return self._plan.choice.balance

    @property
    def predicted_seconds(self):
        """Predicted seconds of the passes of `direction` on `machine`."""
        return self._plan.choice.seconds

    @property
    def memory_cost(self):
        """Predicted slowdown due to max_memory: `predicted_seconds` over the time without the limit."""
        return times_as_long(self._plan.choice.seconds, self._plan.fastest)

    @property
    def chunk(self):
        """Number of this rank's chunk, which is its rank in the mesh.

        It differs from the rank in the caller's communicator where that does not number ranks node by node.
        """
        return self._mesh.rank

    @property
    def backend(self):
        """Name of the back end."""
        return self._backend.name

    @property
    def positions(self):
        """Positions in the sequence of this rank's query tokens: int64, increasing."""
        return self._layouts[0].positions(self.chunk)

    @property
    def positions_k(self):
        """Positions in the sequence of this rank's key and value tokens: int64, increasing."""
        return self._layouts[1].positions(self.chunk)

    def owner(self, positions, *, keys=False):
        """The rank that holds each of the given positions in the sequence; not collective.

        Parameters
        ----------
        positions : int or array of int
        keys : bool, default False
            Whether the positions are those of keys and values.

        Returns
        -------
        int or int64 array of the shape of positions

        Raises
        ------
        ArgumentError
            On this rank only.
        """
        ranks = (self.k_layout if keys else self.q_layout).owner(positions)
        return ranks if ranks.ndim else int(ranks)

    @property
    def nbytes(self):
        """Bytes of memory that this rank needs: its q, k, v, out and lse, the plan's buffers, and scratch.

        With batch > 1 a second q, k and v are included, because `forward` folds the batch into the heads.  With batch
        = 1 these copies count from the first call with arrays that are not contiguous.  The memory of `backward` counts
        from its first call.  With "cuda", the pinned memory allocated so far is included.
        """
        return self._passes.nbytes + self._backend.staged_bytes

    @property
    def sent(self):
        """Totals that this plan's transfers have sent from this rank so far: (bytes, messages)."""
        return self._exchange.sent_bytes, self._exchange.sent_messages

    @property
    def timeout(self):
        """Seconds that this rank waits for others before it raises PeerFailure."""
        return self._peers.timeout

    @property
    def wait_seconds(self):
        """Seconds that this rank has waited for transfers so far."""
        return self._exchange.wait_seconds

    def trace(self, direction="forward"):
        """Start and end times of the steps and transfers of the last forward or backward pass on this rank.

        Returns a `schedule.timeline.Timeline`, or None before the first such pass.  Raises ArgumentError.
        """
        one_of("direction", direction, ("forward", "backward"))
        executor = self._passes.executors.get(direction)
        return executor and executor.trace()

    def predicted_trace(self, direction="forward"):
        """The predicted `Timeline` of a forward or backward pass, with times as arrays over the ranks of the mesh."""
        one_of("direction", direction, ("forward", "backward"))
        return self._plan.predicted(direction)

    @property
    def activity(self):
        """The blocks and transfers that the plan's own masks need (`mpiattn.schedule.needed.Activity`)."""
        return self._activity

    def activity_of(self, **of_documents):
        """The activity of a call, with arguments as of `problem.documents`; reused while calls have the same ones."""
        groups = documents(self.problem, **of_documents)
        if groups is None:
            return self._activity
        if not _same_cuts(self._latest.documents, groups):
            self._latest = Activity(self.problem.mask, *self._layouts, *self.tile, groups)
        return self._latest


def _same_cuts(groups, others):
    """Whether two results of `mpiattn.problem.documents.documents` are equal."""
    return groups is not None and len(groups) == len(others) and all(
        np.array_equal(cuts, of) for group, other in zip(groups, others) for cuts, of in zip(group, other))
