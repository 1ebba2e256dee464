"""Routes: who sends, who receives and who needs the chunk or partial of a hop.

"direct": the owner of a chunk sends it to every rank that needs it, and partials go straight to their owner.  MPI's
collectives take this route too.
"ring": chunks pass from neighbour to neighbour.  So do partials, which are merged with the neighbour's at every hop.
Both routes move the same bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from .kinds import GATHERED

if TYPE_CHECKING:
    from .ranges import Ranges

ROUTES = ("direct", "ring")
FEW_RANGES = 2  # of a chunk, which travel from where they lie: two in zigzag


class Leg(NamedTuple):
    """The part of every rank of a row or column in the transfer of one hop of a kind.

    ahead: the rank sends to the rank `ahead` positions ahead and receives from the rank as many back.
    leaves: hop of the chunk or accumulator that it sends.
    lands: hop of the chunk that it receives, or of the accumulator that the received partial is merged into.
    users: distances ahead of the owner.  The chunk moves if the tile of any rank at these distances has work on it.
    """

    ahead: int
    leaves: int
    lands: int
    users: range


@lru_cache(1024)  # a plan asks for the same ones many times
def leg_of(kind: str, hop: int, extent: int, route: str = "direct", collective: bool = False) -> Leg:
    """The `Leg` of a hop, 1 or more, in rows or columns of `extent` ranks.

    collective: True for MPI's collectives on the direct route, which give a chunk to all of the group or to none.
    """
    if kind in GATHERED:
        if passed_on(route):
            return Leg(1, hop - 1, hop, range(hop, extent))
        return Leg(hop, 0, hop, range(1, extent) if collective else range(hop, hop + 1))
    if passed_on(route):
        return Leg(1, hop, (hop + 1) % extent, range(1, hop + 1))
    return Leg(-hop, hop, 0, range(hop, hop + 1))


def as_one(tokens: Ranges, route: str) -> bool:
    """Whether the ranges of a message's tokens travel as one, packed by the sender: they are many.

    They then arrive next to each other.  On the ring route they may not, because a rank may hold more for others.
    """
    return len(tokens) > FEW_RANGES and not passed_on(route)


def passed_on(route: str) -> bool:
    """Whether chunks and partials pass from neighbour to neighbour, and so never by a collective."""
    return route == "ring"
