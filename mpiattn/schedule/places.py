"""Which tokens of each chunk a rank holds in a call, and where they lie in its buffers.  No MPI, no NumPy."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from .kinds import GATHERED, IN_COLUMNS, REDUCED, arena_of
from .ranges import places, total, whole
from .route import as_one

if TYPE_CHECKING:
    from ..problem.layout import Layout
    from .bound import BoundTransfer
    from .needed import Activity
    from .ranges import Ranges
    from .steps import Schedule


class Gathering(NamedTuple):
    """What one allgather of a kind carries.

    sent: the tokens of this rank's own chunk that travel, None if none do.
    counts, starts: how many tokens of each chunk travel, and the row of the arena from which on they land.
    unsent: the other ranks' chunks of which none travel.
    """

    sent: Ranges | None
    counts: list[int]
    starts: list[int]
    unsent: list[int]


class Places:
    """The tokens of each chunk and accumulator that a rank holds in a call, and where they lie in its arenas.

    The tokens of a chunk lie one after another.  In a packed arena, which a fused launch needs, all chunks of the row
    or column follow each other by number, each with the tokens that any rank of the group needs.  Else an arena
    consists of slots of equal size, each in memory of its own, without the rank's own chunk and accumulator.

    tokens: by kind and number of the chunk, what is held of it, as `Ranges` of the whole chunk.
    rows: by arena, the number of tokens of each of its buffers: of the whole arena if it is packed, else of a slot.
    outbox: by gathered kind, the number of tokens that are copied to lie together before they are sent.
    """

    def __init__(self, schedule: Schedule, rank: int, activity: Activity) -> None:
        self.rank = rank
        self.packed = schedule.packed
        self.tokens: dict[str, dict[int, Ranges]] = {}
        self.rows: dict[str, int] = {}
        self.outbox = dict.fromkeys(GATHERED, 0)
        self._slot_rows: dict[str, int] = {}
        self._starts: dict[str, dict[int, int]] = {}
        self._slots: dict[str, dict[int, int]] = {}
        self._layouts: dict[str, Layout] = {}
        self._gatherings: dict[str, Gathering] = {}
        for kind in (*GATHERED, *REDUCED[schedule.direction]):
            layout = self._layouts[kind] = activity.k_layout if kind in IN_COLUMNS else activity.q_layout
            held, moved = {rank: whole(layout.length(rank))}, 0
            for hop in range(1, schedule.tile.extent(kind)):
                leaving = activity.travelling(kind, rank, hop, schedule.route, schedule.collective)
                landing = activity.landing(kind, rank, hop, schedule.route, schedule.collective)
                moved = max(moved, total(leaving), total(landing))
                if kind in GATHERED and not schedule.collective and as_one(leaving, schedule.route):
                    self.outbox[kind] += total(leaving)
                chunk = schedule.tile.in_group(kind, rank, hop)
                held[chunk] = landing if kind in GATHERED else leaving
                if self.packed:  # what its owner sends for all
                    of_tokens = "KV" if kind in IN_COLUMNS else "Q"
                    held[chunk] = activity.travelling(of_tokens, chunk, 1, schedule.route, schedule.collective)
            self.tokens[kind] = {chunk: held[chunk] for chunk in sorted(held)}
            if kind not in GATHERED:
                arena = arena_of(kind)
                self._slot_rows[arena], self.rows[arena] = moved, moved * (schedule.slots[arena] if self.packed else 1)
            self._set_places(schedule, kind)

    def longest(self, kind: str) -> int:
        """The number of tokens of the longest whole chunk in the group that a kind moves in."""
        return max(map(self._layouts[kind].length, self.tokens[kind]))

    def gathering(self, transfer: BoundTransfer) -> Gathering:
        """The `Gathering` of the transfer of a kind by one allgather, made once."""
        kind = transfer.kind
        if kind not in self._gatherings:
            held = self.tokens[kind]
            messages = [message for hop in transfer.hops for message in (hop.send, hop.receive) if message]
            sent = {message.chunk: message.tokens for message in messages}
            starts = {chunk: self.start(kind, chunk) for chunk in held}
            starts[self.rank] += sum(part.start for part in places(held[self.rank], sent.get(self.rank, ())))
            self._gatherings[kind] = Gathering(
                sent.get(self.rank),
                [total(sent.get(chunk, ())) for chunk in held],
                list(starts.values()),
                [chunk for chunk in held if chunk not in sent and chunk != self.rank],
            )
        return self._gatherings[kind]

    def _set_places(self, schedule: Schedule, kind: str) -> None:
        """Set the size of a kind's arena and the place of each chunk in it."""
        tokens, reduced, slots = self.tokens[kind], kind not in GATHERED, schedule.slots[kind]
        if self.packed:
            self.rows[kind] = sum(map(total, tokens.values())) if reduced or slots else 0
            self._starts[kind] = dict(zip(tokens, accumulate(map(total, tokens.values()), initial=0)))
            return
        self.rows[kind] = max((total(held) for chunk, held in tokens.items() if chunk != self.rank), default=0)
        self._slots[kind] = {
            schedule.tile.in_group(kind, self.rank, hop): slot
            for hop, slot in enumerate(schedule.accumulators[kind] if reduced else (), 1)
        }

    def start(self, kind: str, chunk: int) -> int:
        """First row of a chunk in a packed arena."""
        return self._starts[kind][chunk]

    def slot_start(self, arena: str, slot: int) -> int:
        """First row of a slot of received partials in a packed arena."""
        return slot * self._slot_rows[arena]

    def slot(self, kind: str, chunk: int) -> int:
        """The slot of an accumulator of another rank's chunk, in an arena that is not packed."""
        return self._slots[kind][chunk]
