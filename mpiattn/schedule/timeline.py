"""When what happens in a pass: predicted for every rank by `model.simulate`, measured on one by the executor."""

from typing import NamedTuple


class StepTimes(NamedTuple):
    """Of one step, in seconds since the pass began; arrays over ranks, or numbers of one rank.

    posted: it begins, and transfers that had to wait for it may be posted.  computed: its blocks are done.  ended: its
    transfers are complete and merged.  ended - computed is waiting (predicted: and merging).
    """

    posted: float
    computed: float
    ended: float


class Moved(NamedTuple):
    """One transfer: a kind of `mpiattn.schedule.kinds`, its hop (0: all of a collective), and the step that needs it.

    begun, arrived: seconds since the pass began, nan where nothing moves; arrays over ranks, or numbers of one rank.
    """

    kind: str
    hop: int
    step: int
    begun: float
    arrived: float


class Timeline(NamedTuple):
    """A pass: the times of its steps and transfers, and the seconds of its slowest rank."""

    direction: str
    steps: tuple
    moves: tuple
    seconds: float

    @property
    def waiting(self):
        """Seconds between the blocks' and the transfers' end, summed over steps; of every rank, or of one."""
        return sum(step.ended - step.computed for step in self.steps)
