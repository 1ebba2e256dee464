"""The collective schedule: gather, one large local attention, exchange of partials.

This is the baseline for the greedy schedule (Attention2D, arXiv 2503.15758).  It overlaps nothing.  In return, MPI's
collectives are tuned to the network, and one large launch is faster than many small ones.  On the ring route the same
data pass from neighbour to neighbour, for an MPI whose collectives are slow or cannot take GPU buffers.
"""

from .kinds import GATHERED, REDUCED
from .route import passed_on
from .steps import Block, Step, Transfer, with_slots


def collective(tile, route="direct", direction="forward"):
    """Allgatherv of Q in rows and KV in columns, one fused launch of all blocks of a tile, Alltoallv of partials."""

    def moves(kinds):
        extents = {kind: tile.extent(kind) for kind in kinds}
        if passed_on(route):
            return [
                Step(tuple(Transfer(kind, (hop,), ()) for kind, extent in extents.items() if hop < extent))
                for hop in range(1, max(extents.values()))
            ]
        transfers = tuple(
            Transfer(kind, tuple(range(1, extent)), (), collective=True)
            for kind, extent in extents.items()
            if extent > 1
        )
        return [Step(transfers)] if transfers else []

    everything = Step((), tuple(Block(u, w) for u in range(tile.a) for w in range(tile.b)), fused=True)
    steps = [*moves(GATHERED), everything, *moves(REDUCED[direction])]
    return with_slots("collective", direction, tile, route, steps)
