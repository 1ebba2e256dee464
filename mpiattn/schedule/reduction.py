"""Reduction trees over one partial of every rank, as plain data: the messages of each rank, round by round.

(Tree Attention, arXiv 2408.04093, section 5.)  Merging partials is associative, so any tree gives attention over
all keys.  The partial of the lower ranks is always the left operand.  Two ranks that exchange partials therefore
compute the same result from the same operands, and all ranks end with the same bits.

    butterfly of 5 ranks          reduction of 5 ranks to rank 0
    0 <- 1                        0 <- 1    2 <- 3
    0 <> 2   3 <> 4               0 <- 2
    0 <> 3   2 <> 4               0 <- 4
    0 -> 1
"""

from bisect import bisect
from math import log
from typing import NamedTuple

ALGORITHMS = ("allreduce", "butterfly", "levels")


class Move(NamedTuple):
    """One round of one rank: a message to `peer`, a message from it, or both.

    The received partial is merged into this rank's or, if `final`, replaces it.
    """

    peer: int
    sends: bool
    receives: bool
    final: bool = False


def _to(peer, final=False):
    return Move(peer, True, False, final)


def _from(peer, final=False):
    return Move(peer, False, True, final)


def butterfly(members, rank):
    """Moves of a rank in an allreduce over `members`, increasing ranks, by recursive doubling.

    If their number is not a power of two, the first members form pairs.  One rank of each pair hands over its partial
    and waits for the result.
    """
    members = list(members)
    power = 1 << (len(members).bit_length() - 1)
    extra = len(members) - power
    paired, rest = members[: 2 * extra], members[2 * extra :]
    at = members.index(rank)
    if at < 2 * extra and at % 2:
        return [_to(members[at - 1]), _from(members[at - 1], final=True)]
    active = paired[::2] + rest
    place, moves, distance = active.index(rank), [], 1
    while distance < power:
        moves.append(Move(active[place ^ distance], True, True))
        distance *= 2
    if at < 2 * extra:
        return [_from(members[at + 1]), *moves, _to(members[at + 1], final=True)]
    return moves


def reduction(members, rank, root):
    """Moves of a rank in a reduction over `members` to `root`, one of them, by a binomial tree."""
    members = list(members)
    top = members.index(root)
    members = members[top:] + members[:top]
    at, moves, distance = members.index(rank), [], 1
    while distance < len(members):
        if at & distance:
            return [*moves, _to(members[at - distance])]
        if at + distance < len(members):
            moves.append(_from(members[at + distance]))
        distance *= 2
    return moves


def spreading(members, rank, root):
    """Moves of a rank in a broadcast from `root` to `members`: the reduction in reverse."""
    return [Move(move.peer, move.receives, move.sends, final=True) for move in reversed(reduction(members, rank, root))]


def levels(nodes, rank, root=None):
    """Moves of a rank in two levels: each node reduces to its leader, the leaders combine, each leader broadcasts.

    nodes: the node of every rank.
    root: the rank that gets the result, None for all.  With a root there is no broadcast.
    """
    members = {node: [r for r, of in enumerate(nodes) if of == node] for node in nodes}
    leaders = sorted(root if root is not None and nodes[root] == node else of[0] for node, of in members.items())
    on_node = members[nodes[rank]]
    leader = next(r for r in leaders if r in on_node)
    moves = reduction(on_node, rank, leader)
    if rank == leader:
        moves += butterfly(leaders, rank) if root is None else reduction(leaders, rank, root)
    return moves + (spreading(on_node, rank, leader) if root is None else [])


def moves(algorithm, nodes, rank, root=None):
    """Moves of a rank by an algorithm, "butterfly" or "levels".

    nodes: the node of every rank.
    root: the rank that gets the result, None for all.
    """
    if algorithm == "levels":
        return levels(nodes, rank, root)
    everyone = range(len(nodes))
    return butterfly(everyone, rank) if root is None else reduction(everyone, rank, root)


def _seconds(plans, nbytes, nodes, inside, between):
    """Seconds until the last rank has finished its moves.

    plans: the moves of every rank.
    Ranks of a node that send to other nodes in the same round share the node's link.
    """
    clock, done, pending = [0.0] * len(plans), [0] * len(plans), set(range(len(plans)))
    crossing = {}
    for rank, plan in enumerate(plans):
        for turn, move in enumerate(plan):
            if move.sends and nodes[move.peer] != nodes[rank]:
                crossing[nodes[rank], turn] = crossing.get((nodes[rank], turn), 0) + 1
    while pending:
        for rank in sorted(pending):
            if done[rank] == len(plans[rank]):
                pending.discard(rank)
                continue
            peer = plans[rank][done[rank]].peer
            if done[peer] < len(plans[peer]) and plans[peer][done[peer]].peer == rank:
                across = nodes[rank] != nodes[peer]
                link, sharing = inside, 1
                if across:
                    link, sharing = between, max(crossing.get((nodes[r], done[r]), 1) for r in (rank, peer))
                after = max(clock[rank], clock[peer]) + link.latency + sharing * nbytes / link.bandwidth
                for r in (rank, peer):
                    clock[r] = after
                    done[r] += 1
    return max(clock)


def predicted_seconds(algorithm, nbytes, lse_bytes, nodes, inside, between, root=None):
    """Predicted seconds of an algorithm, one of ALGORITHMS.

    nbytes: bytes of a partial, lse included.
    lse_bytes: bytes of its lse.
    nodes: the node of every rank.
    inside, between: links of two ranks on one node and on two; anything with `latency` in seconds and `bandwidth` in
        bytes a second.
    MPI's Allreduce is assumed to take the rounds of a butterfly and to move at most 2 (p-1)/p times the bytes.
    """
    ranks = len(nodes)
    if algorithm != "allreduce":
        return _seconds([moves(algorithm, nodes, rank, root) for rank in range(ranks)], nbytes, nodes, inside, between)
    plans = [butterfly(range(ranks), rank) for rank in range(ranks)]
    latency = _seconds(plans, 0, nodes, inside, between)
    slowest = between if len(set(nodes)) > 1 else inside
    ring = 2 * (ranks - 1) / ranks / slowest.bandwidth * max(nodes.count(node) for node in nodes)
    return sum(
        min(_seconds(plans, size, nodes, inside, between), latency + ring * size) for size in (lse_bytes, nbytes)
    )


def algorithms(nodes):
    """The algorithms that differ on these ranks: "levels" only with several nodes, one of which has several ranks."""
    return [algorithm for algorithm in ALGORITHMS if algorithm != "levels" or 1 < len(set(nodes)) < len(nodes)]


def _factor(points, nbytes):
    """The factor for a partial of `nbytes`, interpolated in log(bytes); 1 without any points.

    points: pairs (bytes, factor), bytes increasing.
    """
    if not points:
        return 1.0
    at = bisect([size for size, _ in points], nbytes)
    if at in (0, len(points)):
        return points[min(at, len(points) - 1)][1]
    (low, before), (high, after) = points[at - 1 : at + 1]
    return before + (after - before) * log(nbytes / low) / log(high / low)


def choose(nbytes, lse_bytes, nodes, inside, between, root=None, factors=None):
    """The algorithm with the shortest predicted time; arguments as in `predicted_seconds`.

    factors: {algorithm: [(bytes of a partial, measured seconds / predicted seconds), ...]}, to correct predictions.
    """

    def seconds(algorithm):
        predicted = predicted_seconds(algorithm, nbytes, lse_bytes, nodes, inside, between, root)
        return predicted * _factor((factors or {}).get(algorithm), nbytes)

    return min(sorted(algorithms(nodes), key=lambda name: name != "butterfly"), key=seconds)  # equals: butterfly
