"""What a plan tells of itself: `Described`, the part of `MeshAttention` that runs nothing."""

import numpy as np

from ..model.search import times_as_long
from ..problem.documents import documents
from ..schedule.needed import Activity
from .settle import one_of


class Described:
    """What was chosen for a plan, and what it has done so far."""

    def __repr__(self):
        if "_folding" not in self.__dict__:
            return f"{type(self).__name__}(not made)"
        (a, b), kinds = self.tile, " and ".join(dict.fromkeys(layout.kind for layout in (self.q_layout, self.k_layout)))
        return (f"{type(self).__name__}({self.problem}; tile {a}x{b}, {kinds} layout, {self.schedule.name} schedule, "
                f"{self.route} route, {self.backend}; {'closed' if self._home is None else 'open'})")

    @property
    def tile(self):
        """The tile (a, b): a query chunks x b KV chunks on every rank, a mesh of b rows x a columns."""
        return self.schedule.a, self.schedule.b

    @property
    def route(self):
        """How chunks travel."""
        return self._plan.choice.route

    @property
    def machine(self):
        """The machine whose predicted times "auto" went by."""
        return self._plan.machine

    @property
    def balance(self):
        """The most pairs (query, key) that a rank attends to over their mean, under the plan's own masks."""
        return self._plan.choice.balance

    @property
    def predicted_seconds(self):
        """Of the passes of `direction`, on that machine."""
        return self._plan.choice.seconds

    @property
    def memory_cost(self):
        """How many times as long they are predicted to take as they would without max_memory."""
        return times_as_long(self._plan.choice.seconds, self._plan.fastest)

    @property
    def chunk(self):
        """Which chunk this rank holds, its rank in the mesh: not its own rank where that is not node by node."""
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
        """The rank that holds each of some positions in the sequence: an int, or int64 of the shape of an array.

        keys: the positions are those of keys and values.  Raises ArgumentError.
        """
        ranks = (self.k_layout if keys else self.q_layout).owner(positions)
        return ranks if ranks.ndim else int(ranks)

    @property
    def nbytes(self):
        """Bytes of memory that this rank needs: its q, k, v, out and lse, the plan's buffers, and scratch.

        Where batch > 1 that includes a second q, k and v: `forward` folds the batch into the heads.  Once
        `backward` has been called it includes what that needs, and with "cuda" the pinned memory taken so far.
        Copies of a batch of one count once arrays have come that were not contiguous.
        """
        return self._nbytes + self._backend.staged_bytes + self._folding.unplanned_bytes

    @property
    def sent(self):
        """What this plan's transfers have sent from this rank so far: (bytes, messages)."""
        return self._exchange.sent_bytes, self._exchange.sent_messages

    @property
    def timeout(self):
        """Seconds that this rank waits for others."""
        return self._peers.timeout

    @property
    def wait_seconds(self):
        """Seconds that this rank has so far waited for transfers."""
        return self._exchange.wait_seconds

    def trace(self, direction="forward"):
        """When steps and transfers of the last such pass began and ended on this rank: a `schedule.timeline.Timeline`.

        None where there has been none.
        """
        one_of("direction", direction, ("forward", "backward"))
        executor = self._executor if direction == "forward" else self._backward
        return executor and executor.trace()

    def predicted_trace(self, direction="forward"):
        """The predicted `Timeline` of such a pass, its times as arrays over the ranks of the mesh."""
        one_of("direction", direction, ("forward", "backward"))
        return self._plan.predicted(direction)

    @property
    def activity(self):
        """Which blocks and transfers the plan's own masks leave (`mpiattn.schedule.needed.Activity`)."""
        return self._activity

    def activity_of(self, **of_documents):
        """The activity of a call with some arguments of `problem.documents`; made once for calls in turn with the same.
        """
        groups = documents(self.problem, **of_documents)
        if groups is None:
            return self._activity
        if not _same_cuts(self._latest.documents, groups):
            self._latest = Activity(self.problem.mask, *self._layouts, *self.tile, groups)
        return self._latest


def _same_cuts(groups, others):
    """Whether two results of `mpiattn.problem.documents.documents` are the same."""
    return groups is not None and len(groups) == len(others) and all(
        np.array_equal(cuts, of) for group, other in zip(groups, others) for cuts, of in zip(group, other))
