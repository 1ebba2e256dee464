"""The greedy schedule of Mesh-Attention (arXiv 2512.20968, Algorithm 2), forward.

Its three ideas: take the transfer that unlocks most blocks per cost; start only as many blocks as hide
it; leave row 0 to the end, since O#0 is never sent.  greedy(1, n) is Ring-Attention.
"""

from heapq import heappop, heappush

from .errors import ArgumentError
from .schedule import Block, Costs, Step, Transfer, blocks_to_hide, with_slots


class _Runnable:
    """Blocks that can run, row by row with row 0 last, and how many each row still lacks."""

    def __init__(self, a, b):
        self.heap, self.a = [], a
        self.missing = [b] * a

    def add(self, u, w):
        heappush(self.heap, (u or self.a, w, u))

    def take(self, count):
        blocks = []
        while self.heap and len(blocks) < count:
            _, w, u = heappop(self.heap)
            self.missing[u] -= 1
            blocks.append(Block(u, w))
        return tuple(blocks)


def greedy(a, b, costs=(1, 1, 1), route="direct"):
    """Schedule of a tile of a query chunks x b KV chunks, each transfer overlapped with blocks.

    costs: c_Q, c_KV and c_O, how many blocks hide one transfer of Q, KV and O; positive numbers.
    """
    if min(costs) <= 0:
        raise ArgumentError(f"costs are {tuple(costs)}; each must be positive")
    costs = Costs(*costs)
    runnable, steps = _Runnable(a, b), []
    runnable.add(0, 0)
    q = kv = 0                                           # hops that have arrived
    while q < a - 1 or kv < b - 1:
        unlocked_by_q = kv + 1 if q < a - 1 else 0
        unlocked_by_kv = q + 1 if kv < b - 1 else 0
        take_q = unlocked_by_q / costs.q > unlocked_by_kv / costs.kv
        hidden_by = runnable.take(blocks_to_hide(costs.q if take_q else costs.kv))
        if take_q:
            q += 1
            steps.append(Step((Transfer("Q", (q,), ()),), hidden_by))
            for w in range(kv + 1):
                runnable.add(q, w)
        else:
            kv += 1
            steps.append(Step((Transfer("KV", (kv,), ()),), hidden_by))
            for u in range(q + 1):
                runnable.add(u, kv)
    for u in range(1, a):
        while runnable.missing[u]:
            steps.append(Step((), runnable.take(1)))
        steps.append(Step((Transfer("O", (u,), ()),), runnable.take(blocks_to_hide(costs.o))))
    rest = runnable.take(a * b)
    if rest:
        steps.append(Step((), rest))
    return with_slots("greedy", a, b, route, steps)
