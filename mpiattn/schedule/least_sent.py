"""The fewest bytes that ranks can send in a pass, whatever the schedule: what a plan's bytes are compared with.

A rank that attends x pairs of a KV head's queries and keys needs m rows of queries and n of keys with m n >= x (the
inequality of Loomis and Whitney).  Rows of queries are tokens of the query heads that share the KV head: q comes in and
out leaves, backward q, dout, lse and delta come in and dq leaves.  Of all these a rank has its own tokens.  So it sends
least if it attends as many pairs as it can of few KV heads; or of all alike, where its own queries weigh more than all
keys, as they do on few ranks with few KV heads.

What is assumed: ranks hold equal shares of the tokens and attend equal shares of the pairs, each pair whole on one
rank.  A schedule need not exist that sends no more: pairs of a rank's own tokens count as free for all heads, and a
mask is taken for its number of pairs, whatever its shape.
"""

from math import sqrt

from .kinds import KINDS
from .travels import size_of


def least_sent(problem, ranks, pairs, direction="forward"):
    """Bytes that a rank sends at least, mean over ranks; "both": the sum of both directions.

    pairs: attended (query, key) pairs of a sequence and query head, as `Mask.pairs` counts them.
    """
    if direction == "both":
        return sum(least_sent(problem, ranks, pairs, name) for name in KINDS)
    p = problem
    groups, sharing = p.batch * p.kv_heads, p.heads // p.kv_heads
    whole_q, whole_k = sharing * p.seqlen, p.seqlen_k
    own_q, own_k = sharing * -(-p.seqlen // ranks), -(-p.seqlen_k // ranks)
    of_query, of_key = _row_bytes(p, direction, False), _row_bytes(p, direction, True)
    free, most, mean = own_q * own_k, sharing * pairs, sharing * pairs / ranks  # pairs of a group
    if mean <= free:
        return 0.0

    def of_group(attended):
        """Bytes for so many pairs of a group, more than `free`."""
        fewest, all_that_help = max(own_q, attended / whole_k), min(whole_q, attended / own_k)
        rows = min(max(sqrt(of_key / of_query * attended), fewest), all_that_help)
        return of_query * (rows - own_q) + of_key * (attended / rows - own_k)

    if of_key * whole_k <= of_query * own_q or of_query * whole_q <= of_key * own_k:  # convex
        return groups * of_group(mean)
    full, rest = divmod(groups * (mean - free), most - free)  # concave beyond `free`
    return full * of_group(most) + of_group(free + rest)


def _row_bytes(problem, direction, column):
    """Bytes of a token and head of queries or of keys, in all kinds of a pass: a result as a partial or complete."""
    total = 0
    for kind in KINDS[direction].values():
        for array in kind.arrays_of(problem) if kind.column == column else ():
            shape, dtype = array.travelling(problem)
            complete = array._replace(wire="dtype") if array.wire == "wire_dtype" else array
            total += min(size_of([(shape, dtype)]), size_of([complete.travelling(problem)]))
    return total / (problem.batch * (problem.kv_heads if column else problem.heads))
