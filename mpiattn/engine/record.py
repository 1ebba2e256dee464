"""What the last pass of a direction did on this rank, as plain data that can be sent: for `mpiattn.files.trace_file`.

All of it is read off after the pass, from what the executor keeps anyway.  Times are seconds by this rank's clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..schedule.ranges import total
from ..schedule.travels import token_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..schedule.bound import BoundTransfer, Message
    from .executor import Executor

Messages = list[tuple[int, int]]  # (rank, bytes) of each


class Step(NamedTuple):
    """A step: it begins, its blocks are launched, its transfers are complete.

    blocks: (query chunk, KV chunk) of those that have work.
    """

    posted: float
    computed: float
    ended: float
    blocks: list[tuple[int, int]]


class Transfer(NamedTuple):
    """A transfer, from its posting until it was seen to be complete.

    hop: 0 of a collective.  step: number of the step that needs it.  sent, received: to and from which ranks.
    """

    kind: str
    hop: int
    step: int
    begun: float
    arrived: float
    sent: Messages
    received: Messages


class Regrouped(NamedTuple):
    """The exchange before a pass or, given, after it; what it receives is what others send."""

    given: bool
    begun: float
    ended: float
    sent: Messages


class Pass(NamedTuple):
    """A pass of a direction."""

    direction: str
    began: float
    steps: list[Step]
    transfers: list[Transfer]
    regrouped: list[Regrouped]

    @property
    def ended(self) -> float:
        """When its last step ended."""
        return self.steps[-1].ended


def record(executor: Executor, rank_of: Callable[[int], int], regrouped: list[Regrouped]) -> Pass | None:
    """The last pass of an executor; None before the first.

    rank_of: the rank of the caller's communicator that a rank of the executor's plane is.  regrouped: of this pass.
    """
    if not executor.times:
        return None
    direction = executor.schedule.direction
    nbytes = token_bytes(executor.computation.problem, direction)

    def messages(transfer: BoundTransfer, some: list[Message | None]) -> Messages:
        row = nbytes[transfer.kind]
        return [(rank_of(message.peer), total(message.tokens) * row) for message in some if message]

    steps = [
        Step(posted, computed, ended, [(i, j) for i, j in step.blocks if executor.done.launches[i, j]])
        for (posted, computed, ended), step in zip(executor.times, executor.done.steps)
    ]
    transfers = [
        Transfer(
            transfer.kind,
            transfer.hop,
            step,
            begun,
            arrived,
            messages(transfer, [hop.send for hop in transfer.hops]),
            messages(transfer, [hop.receive for hop in transfer.hops]),
        )
        for transfer, step, begun, arrived in executor.moves
    ]
    return Pass(direction, executor.began, steps, transfers, regrouped)
