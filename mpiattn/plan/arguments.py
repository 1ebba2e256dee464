"""The arguments of a plan's calls: the plan itself, the arrays' shapes and dtypes, and what ranks must agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments.arguments import Arguments
from ..arguments.arrays import Axes, Required
from ..comm.collective_calls import Collective
from ..comm.refusal import of_call
from ..errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..backends.base import Array, Backend
    from ..problem.problem import Problem
    from ..schedule.needed import Activity


_QUERIES = Axes(("batch", "tokens", "heads", "head_dim"), "positions")
_RESULTS = Axes(("batch", "tokens", "heads", "value_dim"), "positions")
_KEYS = Axes(("batch", "tokens_k", "kv_heads", "head_dim"), "positions_k")
_VALUES = Axes(("batch", "tokens_k", "kv_heads", "value_dim"), "positions_k")
_ROWS = Axes(("batch", "heads", "tokens"), "positions")
_AXES = {
    **dict.fromkeys(("q", "dq"), _QUERIES),
    **dict.fromkeys(("out", "dout"), _RESULTS),
    **dict.fromkeys(("k", "dk"), _KEYS),
    **dict.fromkeys(("v", "dv"), _VALUES),
    **dict.fromkeys(("lse", "dlse"), _ROWS),
    **dict.fromkeys(("sinks", "dsinks"), Axes(("heads",))),
}


# Names of what ranks compare: of documents, which have several ways to say them, and of what a backward pass alone has.
DOCUMENTS = "documents (cu_seqlens, lengths, prefixes or causal_documents)"
DLSE = "whether dlse is given"
OF_BACKWARD = (DLSE, "bias_gradients", "bias_shared")


def _is_plan(plan: object) -> bool:
    return isinstance(plan, Collective) and plan.KIND == "plan"


def checked_plan(plan: Any) -> Any:
    """The plan of a call that is no method of it.  Raises ArgumentError, on this rank alone, if it is none."""
    if not _is_plan(plan):
        raise ArgumentError(
            f"plan is a {type(plan).__name__}; it must be a MeshAttention: the plan comes first, then q, k and v"
        )
    return plan


def refused(method: str) -> Callable[..., None]:
    """What such a call does with a keyword that it does not have, for `mpiattn.comm.refusal.refusing`."""
    return of_call(method, lambda plan=None, *args, **how: plan if _is_plan(plan) else None)


def arguments_of(problem: Problem, tokens: tuple[int, int], backend: Backend) -> Arguments:
    """The `Arguments` of a plan's calls.  tokens: as of `forms`."""
    return Arguments(backend, forms(problem, tokens), problem.shared_kv)


def forms(problem: Problem, tokens: tuple[int, int] | tuple[None, None] = (None, None)) -> dict[str, Required]:
    """What the arrays of a plan's calls must be, by name.

    tokens: number of this rank's query tokens and of its key tokens; without them any number is right.
    """
    p, (q_tokens, k_tokens) = problem, tokens
    rows, keys, by_head = (p.batch, q_tokens, p.heads), (p.batch, k_tokens, p.kv_heads), (p.batch, p.heads, q_tokens)
    q, k, v, out = (*rows, p.head_dim), (*keys, p.head_dim), (*keys, p.value_dim), (*rows, p.value_dim)
    shapes = {"q": q, "k": k, "v": v, "out": out, "dout": out, "dq": q, "dk": k, "dv": v}
    of_partials = {"lse": by_head, "dlse": by_head, "sinks": (p.heads,), "dsinks": (p.heads,)}
    dtype, of_rows = np.dtype(p.dtype), np.dtype(p.partial_dtype)  # compared in less time than their names
    wanted = {name: Required(shape, dtype, _AXES[name]) for name, shape in shapes.items()}
    return wanted | {name: Required(shape, of_rows, _AXES[name]) for name, shape in of_partials.items()}


def compared(activity: Activity, sinks: Array | None, dlse: bool = False) -> dict[str, Any]:
    """What must be the same on every rank: each end of a transfer decides from the documents whether it happens.

    dlse: whether dlse is given, if that must be the same.
    """
    return {DOCUMENTS: activity.as_lists, "sinks": None if sinks is None else sinks.tolist(), DLSE: dlse}
