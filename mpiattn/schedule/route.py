"""What a route means: over which hop a chunk or a partial goes, who sends it, who receives it, who needs it.

"direct": a chunk goes straight from its owner and a partial straight to its owner, also by MPI's collectives.
"ring": a chunk goes from neighbour to neighbour; a partial too, merged with the neighbour's on its way.
The bytes are the same.
"""

from typing import NamedTuple

from .kinds import GATHERED

ROUTES = ("direct", "ring")


class Leg(NamedTuple):
    """What every rank of a row or column does in the transfer of one hop of a kind.

    ahead: it sends to the rank that many ahead of it, and receives from the one that many back.  leaves: the hop of the
    chunk or accumulator that it sends.  lands: the hop of the chunk that it receives, or of the accumulator that a
    partial is merged into.  users: the chunk moves if the tile of any rank so many ahead of its owner has work on it.
    """

    ahead: int
    leaves: int
    lands: int
    users: range


def leg_of(kind, hop, extent, route="direct", collective=False):
    """The `Leg` of a hop, 1 or more, in rows or columns of `extent` ranks.

    collective: whether MPI's collectives take the direct route: they give a chunk to all of the group or to none.
    """
    if kind in GATHERED:
        if passed_on(route):
            return Leg(1, hop - 1, hop, range(hop, extent))
        return Leg(hop, 0, hop, range(1, extent) if collective else range(hop, hop + 1))
    if passed_on(route):
        return Leg(1, hop, (hop + 1) % extent, range(1, hop + 1))
    return Leg(-hop, hop, 0, range(hop, hop + 1))


def passed_on(route):
    """Whether chunks and partials go from neighbour to neighbour, never by a collective."""
    return route == "ring"
