"""Exact bytes on the wire, and the volumes of other methods for comparison.  Pure arithmetic.

`mpiattn.schedule.kinds` lists the arrays that move.  Forward, the bytes of a token and hop are those of Mesh-Attention
(arXiv 2512.20968, section 3.8): heads * (w D) for Q and heads * (p Dv + lse) for a partial in a row, and
kv_heads * w (D + Dv) in a column.  w is the itemsize of the inputs, p that of partials.
"""

from functools import lru_cache
from math import prod

import numpy as np

from ..problem.layout import Layout
from ..problem.problem import ITEMSIZE
from .kinds import IN_COLUMNS, KINDS, OUT, Q, matrices, present
from .ranges import total
from .route import leg_of
from .table import Table

SAMPLE = 64  # queries that stand for all in `_sees_around`


class Sent(tuple):
    """Bytes that one rank sends in a pass: one number per kind, in the order of `KINDS`."""

    @property
    def total(self):
        """Bytes of all kinds together."""
        return sum(self)


def token_bytes(problem, direction="forward"):
    """Bytes of one token on the wire, by kind."""
    return _token_bytes(problem.without_tokens, direction)


@lru_cache(64)
def _token_bytes(problem, direction):
    return {
        name: size_of(array.travelling(problem) for array in kind.arrays_of(problem))
        for name, kind in KINDS[direction].items()
    }


def size_of(arrays):
    """Bytes of one token of some arrays, given as pairs (shape of a token, dtype)."""
    return sum(prod(shape) * ITEMSIZE[dtype] for shape, dtype in arrays)


def held_bytes(problem, *arrays):
    """Bytes of one token in memory of some arrays of `mpiattn.schedule.kinds`, those that the problem has."""
    return _held_bytes(problem.without_tokens, arrays)


@lru_cache(256)
def _held_bytes(problem, arrays):
    return size_of(array.held(problem) for array in present(problem, arrays))


def sent(problem, lengths, tile, rank, route="direct", direction="forward", activity=None, collective=False):
    """Bytes that `rank` sends in a pass.

    lengths: tokens of every rank's chunk, of queries and of keys.
    route: decides who sends which chunk; the sum over all ranks is the same for both routes.
    activity: the `Activity` of the call, which leaves out the tokens that the mask makes needless; None to count all.
    collective: True if MPI's collectives gather the chunks, the same tokens for all of the group.
    """

    def tokens(kind):
        of_ranks, extent = lengths[kind in IN_COLUMNS], tile.extent(kind)
        if activity is not None:
            return sum(total(activity.travelling(kind, rank, hop, route, collective)) for hop in range(1, extent))
        return sum(
            of_ranks[tile.in_group(kind, rank, leg_of(kind, hop, extent, route, collective).leaves)]
            for hop in range(1, extent)
        )

    return Sent(tokens(kind) * nbytes for kind, nbytes in token_bytes(problem, direction).items())


def mean_sent(problem, tile, direction="forward"):
    """Mean bytes sent per rank if no mask saves transfers; exact for even chunks."""
    q_tokens, k_tokens = problem.seqlen / tile.ranks, problem.seqlen_k / tile.ranks
    return sum(
        (tile.extent(kind) - 1) * (k_tokens if kind in IN_COLUMNS else q_tokens) * nbytes
        for kind, nbytes in token_bytes(problem, direction).items()
    )


# Number of arrays (of chunk size) that one hop moves in a row and in a column.
ELEMENTS = {direction: tuple(len(matrices(direction, column)) for column in (False, True)) for direction in KINDS}
ELEMENTS["both"] = tuple(map(sum, zip(*ELEMENTS.values())))
# The same of what is regrouped, with the heads of queries (q and out, backward q, dout and dq) and of keys.
REGROUPED = {"forward": (2, 2), "backward": (3, 4), "both": (5, 6)}


def volume(tile, kv_share=1.0, direction="forward"):
    """The paper's volume: elements per rank in units of seqlen * hidden, with kv_share from `kv_share_of`.

    With planes, the elements that are regrouped before and after the passes too.
    """
    row, column = ELEMENTS[direction]
    of_mesh = row * (tile.a - 1) + column * kv_share * (tile.b - 1)
    queries, keys = REGROUPED[direction]
    return (of_mesh + (queries + keys * kv_share) * (1 - 1 / tile.h)) / tile.ranks


def kv_share_of(problem, parts=1):
    """KV heads over heads; several of the parts into which planes split a sequence's heads may each have the same."""
    return max(problem.kv_heads, parts) / problem.heads


def usp_volume(ranks, group, kv_share=1.0, direction="forward"):
    """`volume` of USP: head all-to-all in groups of `group` ranks and Ring between them; group = ranks is Ulysses."""
    exchanged = (2 + 2 * kv_share) * (2 if direction == "both" else 1)  # q, k, v, out; dout, dq, dk, dv
    return (exchanged * (1 - 1 / group) + ELEMENTS[direction][1] * kv_share * (ranks // group - 1)) / ranks


def halo(problem, ranks, direction="forward", layout=None):
    """Mean bytes sent per rank by a halo exchange; None unless every query sees only keys around it.

    Each rank gets the keys and values of others that its queries see, each once, and returns their gradients in the
    backward pass.  layout: the caller's own, of queries and keys; None: ranks hold consecutive tokens.
    """
    mask = problem.whole_mask
    if problem.seqlen != problem.seqlen_k or not _sees_around(mask):
        return None
    if layout is None and mask.mask is None:  # a short cut: of all ranks at once
        cuts, _ = Layout("contiguous", problem.seqlen, ranks).owners
        first, end, piece = mask.reach(cuts, mask.pieces())
        tokens = int((cuts[piece] - first).clip(0).sum() + (end - cuts[piece + 1]).clip(0).sum())
    else:
        tokens = _from_others(mask, layout or Layout("contiguous", problem.seqlen, ranks))
    moved = [token_bytes(problem, one_way) for one_way in (KINDS if direction == "both" else (direction,))]
    return tokens / ranks * sum(of[kind] for of in moved for kind in of if kind in IN_COLUMNS)


def _from_others(mask, layout):
    """Keys of other chunks that the queries of each chunk see, summed over the chunks."""
    table, tokens = Table(mask, layout, layout), 0
    for chunk in range(layout.chunks):
        lo, hi = table.seen(chunk)
        tokens += int((hi - lo).sum() - (layout.below(chunk, hi) - layout.below(chunk, lo)).sum())
    return tokens


def _sees_around(mask):
    """Whether queries see themselves and keys around them, and no more, by some of the queries."""
    queries = np.unique(np.linspace(0, mask.seqlen - 1, SAMPLE).astype(np.int64))
    lo, hi = (side[:, 0] for side in mask.key_intervals(queries))
    if mask.mask is None:
        return lo[0, -1] > 0 and hi[0, 0] < mask.seqlen
    itself = ((lo <= queries) & (queries < hi)).any(axis=0)
    # How many queries see the keys from each place on at which an interval begins or ends
    places = np.concatenate([lo.ravel(), hi.ravel()])
    step = np.repeat([1, -1], lo.size)
    order = np.lexsort((step, places))
    seen_by = np.cumsum(step[order])
    return bool(itself.all() and ((hi - lo).sum(axis=0) < mask.seqlen).all() and seen_by.max() < len(queries))


def ulysses(problem, ranks, direction="forward"):
    """Mean bytes sent per rank by DeepSpeed-Ulysses (arXiv 2309.14509); None if ranks does not divide kv_heads."""
    return usp(problem, ranks, ranks, direction) if problem.kv_heads % ranks == 0 else None


def usp(problem, ranks, group, direction="forward"):
    """Mean bytes sent per rank by USP (arXiv 2405.07719): all-to-all in groups of `group` ranks, Ring between them.

    Backward, the all-to-all exchanges dout, dq, dk and dv, and Ring moves keys and values with their partial gradients.
    """
    if direction == "both":
        return usp(problem, ranks, group) + usp(problem, ranks, group, "backward")
    q_tokens, k_tokens = problem.seqlen / ranks, problem.seqlen_k / ranks
    moved = token_bytes(problem, direction)
    exchanged = q_tokens * held_bytes(problem, Q, OUT) + k_tokens * moved["KV"]
    ring = k_tokens * sum(nbytes for kind, nbytes in moved.items() if kind in IN_COLUMNS)
    return exchanged * (1 - 1 / group) + (ranks // group - 1) * ring


def best_usp(problem, ranks, direction="forward"):
    """(group, bytes) of USP with the least traffic; group 1, plain Ring, only if no larger group divides kv_heads."""
    groups = [g for g in range(2, ranks + 1) if ranks % g == 0 and problem.kv_heads % g == 0] or [1]
    return min(((group, usp(problem, ranks, group, direction)) for group in groups), key=lambda choice: choice[1])
