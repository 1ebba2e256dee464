"""What a rank gets of a gradient that several ranks compute whole: an equal share, so that their sum is the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .mesh_attention import MeshAttention

REPLICATED = "sinks", "alibi_slopes", "relative_bias"  # arguments that are the same on every rank


def divide(
    plan: MeshAttention, gradients: dict[str, Any], bias: Sequence[int] | None, shared: Sequence[str] | None
) -> None:
    """Make gradients by the names of their arguments, as `MeshAttention.backward` returns them, shares of a rank.

    bias: the shape of the bias, None without.  shared: bias_shared of `MeshAttention.backward`.
    """
    ranks = dict.fromkeys(REPLICATED, plan.q_layout.chunks)
    if "bias" in gradients and bias is not None:
        ranks["bias"] = _copies(plan, bias, shared)
    for name, number in ranks.items():
        if name in gradients and number > 1:
            gradients[name] = gradients[name] / number


def _copies(plan: MeshAttention, bias: Sequence[int], shared: Sequence[str] | None) -> int:
    """The number of planes that have the same tile of a bias, and the sum of all their gradients of it."""
    p, copies = plan.problem, 1
    axes = ("batch", p.batch, plan.bias_sequences), ("heads", p.heads, plan.bias_heads)
    for axis, (name, of_problem, own) in enumerate(axes):
        of_plane = len(range(of_problem)[own])
        if bias[axis] == 1 and (of_plane > 1 or name in (shared or ())):
            copies *= of_problem // of_plane
    return copies
