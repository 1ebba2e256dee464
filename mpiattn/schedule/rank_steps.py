"""What one rank does in the calls with one activity: its steps, where chunks lie, and which launches a block takes."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from .bound import bind
from .kinds import IN_COLUMNS
from .places import Places
from .remembered import Remembered

if TYPE_CHECKING:
    from .needed import Activity
    from .ranges import Ranges
    from .steps import Schedule


class RankSteps:
    """A schedule for one rank and the calls with one activity.

    steps: as of `bind`.
    transfers: those of all steps in turn, each after the number of its step.
    places: the `Places` of chunks in the rank's buffers.
    launches: launches[i, j] is a tuple of (queries, keys), each as `Ranges`: one pair for each launch that the block of
        query chunk i and KV chunk j takes.  It is empty if no query sees any key.
    """

    def __init__(self, schedule: Schedule, rank: int, activity: Activity) -> None:
        self.schedule, self._rank, self._activity = schedule, rank, activity
        self.steps = bind(schedule, rank, activity)
        self.transfers = [(number, transfer) for number, step in enumerate(self.steps) for transfer in step.transfers]
        self.places = Places(schedule, rank, activity)
        self.launches = Remembered(self._launches)
        activity.trim()

    def _launches(self, i: int, j: int) -> tuple[tuple[Ranges, Ranges], ...]:
        if not self._activity.has_work(i, j):
            return ()
        return tuple(product(self._by_launch("Q", i), self._by_launch("KV", j)))

    def _by_launch(self, kind: str, chunk: int) -> list[Ranges]:
        """The tokens of a gathered chunk that this rank needs, one `Ranges` a launch.

        One launch takes all if the arrays of the chunk and of its accumulators hold the same tokens.  On the ring route
        either may hold more, for other ranks: then each range is a launch.
        """
        in_columns, tokens = kind in IN_COLUMNS, self.places.tokens
        if all(tokens[other][chunk] == tokens[kind][chunk] for other in tokens if (other in IN_COLUMNS) == in_columns):
            return [tokens[kind][chunk]]
        return [(part,) for part in self._activity.needed(in_columns, chunk, self._rank)]
