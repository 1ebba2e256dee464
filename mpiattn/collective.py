"""The collective schedule: gather, one large local attention, exchange of partials.

Nothing is overlapped, but MPI's collectives know the network and one large launch is better than many
small ones (Attention2D, arXiv 2503.15758): the baseline that the greedy schedule has to beat.
"""

from .schedule import Block, Step, Transfer, with_slots


def collective(a, b, route="direct"):
    """Allgatherv of Q in the rows and of KV in the columns, a x b blocks as one, Alltoallv of partials.

    The route is recorded and changes nothing: the MPI library routes its collectives.
    """
    gathers = []
    if a > 1:
        gathers.append(Transfer("Q", tuple(range(1, a)), (), collective=True))
    if b > 1:
        gathers.append(Transfer("KV", tuple(range(1, b)), (), collective=True))
    steps = [Step(tuple(gathers))] if gathers else []
    steps.append(Step((), tuple(Block(u, w) for u in range(a) for w in range(b)), fused=True))
    if a > 1:
        steps.append(Step((Transfer("O", tuple(range(1, a)), (), collective=True),)))
    return with_slots("collective", a, b, route, steps)
