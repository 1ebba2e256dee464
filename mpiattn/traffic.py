"""Bytes on the wire, exactly, and the volumes of other methods for comparison.  Pure arithmetic.

Per token of the chunk that moves and hop (Mesh-Attention, arXiv 2512.20968, section 3.8, in bytes):
a row carries heads * (w D) for Q and heads * (p Dv + lse) for a partial, a column kv_heads * w (D + Dv),
with w bytes an input element and p a partial's.  lse has 4 bytes, 8 where partials are float64.
"""

from typing import NamedTuple


class Sent(NamedTuple):
    """Bytes that one rank sends in a forward pass, by kind."""

    q: int
    kv: int
    o: int

    @property
    def total(self):
        """All of them."""
        return self.q + self.kv + self.o


def place(rank, a):
    """Row r and column c of a rank in a mesh of a columns."""
    return divmod(rank, a)


def in_row(rank, a, hop):
    """The rank `hop` hops back in the row of `rank`."""
    r, c = place(rank, a)
    return r * a + (c - hop) % a


def in_column(rank, a, b, hop):
    """The rank `hop` hops back in the column of `rank`."""
    r, c = place(rank, a)
    return (r - hop) % b * a + c


def sent(problem, q_lengths, k_lengths, a, b, rank, route="direct"):
    """Bytes that `rank` sends in a forward pass on a tile of a x b.

    q_lengths, k_lengths: tokens of every rank's chunk.  The routes differ only in who sends which chunk:
    straight from the owner, or each chunk passed on by neighbours; over all ranks they agree.
    """
    if route == "direct":
        q_tokens = (a - 1) * q_lengths[rank]
        k_tokens = (b - 1) * k_lengths[rank]
    else:
        q_tokens = sum(q_lengths[in_row(rank, a, u)] for u in range(a - 1))
        k_tokens = sum(k_lengths[in_column(rank, a, b, w)] for w in range(b - 1))
    o_tokens = sum(q_lengths[in_row(rank, a, u)] for u in range(1, a))
    return Sent(q_tokens * problem.q_bytes, k_tokens * problem.kv_bytes, o_tokens * problem.partial_bytes)


def mean_sent(problem, ranks, a, b):
    """Mean bytes sent per rank on a tile of a x b; exact for even chunks."""
    q_tokens, k_tokens = problem.seqlen / ranks, problem.seqlen_k / ranks
    return ((a - 1) * q_tokens * (problem.q_bytes + problem.partial_bytes)
            + (b - 1) * k_tokens * problem.kv_bytes)


def volume(ranks, a, b, kv_share=1.0):
    """The paper's figure: elements per rank in units of seqlen * hidden, kv_share = kv_heads / heads."""
    return (2 * (a - 1) + 2 * kv_share * (b - 1)) / ranks


def usp_volume(ranks, group, kv_share=1.0):
    """The like for USP, a head all-to-all in groups of `group` and Ring over the rest; Ulysses is group = ranks."""
    return ((2 + 2 * kv_share) * (1 - 1 / group) + 2 * kv_share * (ranks // group - 1)) / ranks


def ulysses(problem, ranks):
    """Mean bytes sent per rank by DeepSpeed-Ulysses (arXiv 2309.14509); None where the heads do not allow it."""
    return usp(problem, ranks, ranks) if problem.kv_heads % ranks == 0 else None


def usp(problem, ranks, group):
    """Mean bytes sent per rank by USP (arXiv 2405.07719): all-to-all in groups of `group`, Ring over the rest."""
    q_tokens, k_tokens = problem.seqlen / ranks, problem.seqlen_k / ranks
    result = problem.batch * problem.heads * problem.value_dim * problem.itemsize
    exchanged = q_tokens * (problem.q_bytes + result) + k_tokens * problem.kv_bytes
    return exchanged * (1 - 1 / group) + (ranks // group - 1) * k_tokens * problem.kv_bytes


def best_usp(problem, ranks):
    """USP's group with the least traffic and its bytes: (group, bytes); group 1, plain Ring, only if there is none."""
    groups = [g for g in range(2, ranks + 1) if ranks % g == 0 and problem.kv_heads % g == 0] or [1]
    return min(((group, usp(problem, ranks, group)) for group in groups), key=lambda found: found[1])
