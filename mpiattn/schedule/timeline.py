"""The timeline of a pass: predicted for every rank by `model.simulate`, measured on one rank by the executor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

Seconds: TypeAlias = Any  # a float if measured, a float64 array (ranks,) if predicted


class StepTimes(NamedTuple):
    """Times of one step in seconds since the pass began: arrays (ranks,) if predicted, numbers if measured.

    posted: the step begins, and transfers that had to wait for it may be posted.
    computed: its blocks are done.
    ended: its transfers are complete and merged.
    ended - computed is the time spent waiting (and merging, if predicted).
    """

    posted: Seconds
    computed: Seconds
    ended: Seconds


class Moved(NamedTuple):
    """One transfer.

    kind: of `mpiattn.schedule.kinds`.
    hop: its hop; 0 for a collective, which moves all of them.
    step: number of the step that needs it.
    begun, arrived: seconds since the pass began, nan if nothing moves; arrays (ranks,) if predicted, numbers if
        measured.
    """

    kind: str
    hop: int
    step: int
    begun: Seconds
    arrived: Seconds


class Timeline(NamedTuple):
    """The times of a pass: its steps and transfers.  `MeshAttention` measures one on this rank and predicts one.

    Parameters
    ----------
    direction : str
        "forward" or "backward".
    steps : tuple
        For every step its times (posted, computed, ended) in seconds since the pass began: the step begins, its blocks
        are done, its transfers are complete and merged.  float64 arrays (ranks,) if predicted, float if measured.
    moves : tuple
        For every transfer (kind, hop, step, begun, arrived).  kind: "Q", "KV", "O", "dQ" or "dKV".  hop: 0 for a
        collective, which moves all hops.  step: number of the step that needs it.  begun, arrived: seconds since the
        pass began, nan if nothing moves; arrays (ranks,) if predicted, float if measured.
    seconds : float
        Seconds of the pass: of the slowest rank if predicted, of this rank if measured.
    """

    direction: str
    steps: tuple[StepTimes, ...]
    moves: tuple[Moved, ...]
    seconds: float

    @property
    def waiting(self) -> Seconds:
        """Seconds from the end of the blocks to the end of the transfers, summed over steps.

        Returns
        -------
        ndarray (ranks,) if predicted, float if measured
        """
        return sum(step.ended - step.computed for step in self.steps)

    def repeated(self, repeat: Callable[[Seconds], Seconds]) -> Timeline:
        """The timeline with `repeat` applied to the times of every step and transfer: those of more ranks."""
        return self._replace(
            steps=tuple(StepTimes(*map(repeat, step)) for step in self.steps),
            moves=tuple(move._replace(begun=repeat(move.begun), arrived=repeat(move.arrived)) for move in self.moves),
        )
