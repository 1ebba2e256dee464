"""The collective schedule: gather, one large local attention, exchange of partials.

Nothing is overlapped, but MPI's collectives know the network and one large launch is better than many
small ones (Attention2D, arXiv 2503.15758): the baseline that the greedy schedule has to beat.  On the ring route
the same data go from neighbour to neighbour, for an MPI whose collectives are slow or cannot take GPU buffers.
"""

from .schedule import Block, Step, Transfer, with_slots


def collective(a, b, route="direct"):
    """Allgatherv of Q in the rows and of KV in the columns, a x b blocks as one, Alltoallv of partials."""
    everything = Step((), tuple(Block(u, w) for u in range(a) for w in range(b)), fused=True)
    if route == "ring":
        gathers = [Step(tuple(Transfer(kind, (hop,), ()) for kind, hops in (("Q", a), ("KV", b)) if hop < hops))
                   for hop in range(1, max(a, b))]
        sends = [Step((Transfer("O", (hop,), ()),)) for hop in range(1, a)]
    else:
        transfers = tuple(Transfer(kind, tuple(range(1, hops)), (), collective=True)
                          for kind, hops in (("Q", a), ("KV", b)) if hops > 1)
        gathers = [Step(transfers)] if transfers else []
        sends = [Step((Transfer("O", tuple(range(1, a)), (), collective=True),))] if a > 1 else []
    return with_slots("collective", a, b, route, [*gathers, everything, *sends])
