"""A schedule bound to a rank for one call: chunks and peers by number, and only the messages that the call needs.

Schedules count hops, and are the same on every rank.  `bind` alone turns hops into numbers.  What runs a pass reads
numbers only, so the steps of a rank need not come from a schedule that all ranks share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .route import as_one, leg_of

if TYPE_CHECKING:
    from .needed import Activity
    from .ranges import Ranges
    from .steps import Schedule, Transfer


class BoundBlock(NamedTuple):
    """The product of a query chunk and a KV chunk, by number."""

    q: int
    kv: int


class Message(NamedTuple):
    """A chunk or partial that a rank sends or receives.

    peer: the rank of the mesh that it goes to or comes from.
    chunk: number of the chunk, or of the chunk whose partial it is.
    tokens: those that travel, of the whole chunk's.
    as_one: whether one message has all ranges of tokens, else each has its own.
    """

    peer: int
    chunk: int
    tokens: Ranges
    as_one: bool


class BoundHop(NamedTuple):
    """What one rank does in one hop of a transfer.

    hop: its number, for the timeline.
    slot: where what it receives is put, in the arena `arena_of(kind)`.
    send, receive: None if the call needs no such message.
    """

    hop: int
    slot: int
    send: Message | None
    receive: Message | None


class BoundTransfer(NamedTuple):
    """A `Transfer` of one rank: one hop, or with `collective` all hops of a row or column."""

    kind: str
    hops: tuple[BoundHop, ...]
    collective: bool
    earliest: int

    @property
    def hop(self) -> int:
        """The number of its hop; 0 of a collective."""
        return 0 if self.collective else self.hops[0].hop


class BoundStep(NamedTuple):
    """A `Step` of one rank."""

    transfers: tuple[BoundTransfer, ...]
    blocks: tuple[BoundBlock, ...]
    fused: bool


def bind(schedule: Schedule, rank: int, activity: Activity) -> tuple[BoundStep, ...]:
    """The steps of a rank.

    activity: the `Activity` of the call.
    """
    tile, route = schedule.tile, schedule.route

    def message(kind: str, peer: int, chunk: int, tokens: Ranges) -> Message | None:
        """The message with a peer, of a chunk; both are given in hops back from this rank.  None without tokens."""
        if not tokens:
            return None
        return Message(tile.in_group(kind, rank, peer), tile.in_group(kind, rank, chunk), tokens, as_one(tokens, route))

    def bound_hop(kind: str, hop: int, slot: int, collective: bool) -> BoundHop:
        leg = leg_of(kind, hop, tile.extent(kind), route, collective)
        leaving = activity.travelling(kind, rank, hop, route, collective)
        landing = activity.landing(kind, rank, hop, route, collective)
        return BoundHop(
            hop, slot, message(kind, -leg.ahead, leg.leaves, leaving), message(kind, leg.ahead, leg.lands, landing)
        )

    def bound_transfer(t: Transfer) -> BoundTransfer:
        hops = tuple(bound_hop(t.kind, hop, slot, t.collective) for hop, slot in zip(t.hops, t.slots))
        return BoundTransfer(t.kind, hops, t.collective, t.earliest)

    queries, keys = tile.row(rank), tile.column(rank)
    return tuple(
        BoundStep(
            tuple(map(bound_transfer, step.transfers)),
            tuple(BoundBlock(queries[u], keys[w]) for u, w in step.blocks),
            step.fused,
        )
        for step in schedule.steps
    )
