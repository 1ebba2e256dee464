"""The arguments of a plan's calls: the shape and dtype that each must have, and what ranks must agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.folding import Axes, check_values, checked, on_host
from ..engine.results import Results

if TYPE_CHECKING:
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


class Arguments:
    """Checks what callers pass to a plan against its problem.

    tokens: number of this rank's query tokens and of its key tokens.
    """

    def __init__(self, problem: Problem, tokens: tuple[int, int], backend: Backend) -> None:
        p, (q_tokens, k_tokens), self._backend = problem, tokens, backend
        rows, dims = (p.batch, q_tokens, p.heads), {"q": p.head_dim, "out": p.value_dim, "dout": p.value_dim}
        shapes = {
            **{name: (*rows, dim) for name, dim in dims.items()},
            "k": (p.batch, k_tokens, p.kv_heads, p.head_dim),
            "v": (p.batch, k_tokens, p.kv_heads, p.value_dim),
        }
        shapes |= {f"d{name}": shapes[name] for name in "qkv"}
        dtype, of_rows = np.dtype(p.dtype), np.dtype(p.partial_dtype)  # compared in less time than their names
        self._types: dict[str, tuple[tuple[int, ...], np.dtype, Axes]] = {
            name: (shape, dtype, _AXES[name]) for name, shape in shapes.items()
        }
        by_head = {"lse": (p.batch, p.heads, q_tokens), "dlse": (p.batch, p.heads, q_tokens), "sinks": (p.heads,)}
        by_head["dsinks"] = by_head["sinks"]
        self._types |= {name: (shape, of_rows, _AXES[name]) for name, shape in by_head.items()}
        self._shared_kv = p.shared_kv

    def checked(self, **arrays: Array | None) -> dict[str, Array]:
        """Arguments by name as arrays of the back end, without v if keys hold it.

        Raises ArgumentError if shape or dtype differ.
        """
        return {
            name: checked(self._backend, name, array, *self._types[name]) for name, array in self._own(arrays).items()
        }

    def _own(self, arrays: dict[str, Array | None]) -> dict[str, Array | None]:
        """Arrays without v and dv if keys and dk hold them.  Raises ArgumentError if such a plan is given one."""
        for name in ("v", "dv"):
            if name in arrays:
                check_values(self._shared_kv, arrays[name], name)
        return {name: arrays[name] for name in arrays if name not in ("v", "dv")} if self._shared_kv else arrays

    def sinks(self, sinks: Array | None) -> Array | None:
        """The sinks as a NumPy array, since all ranks compare them; None if there are none.  Raises ArgumentError."""
        return None if sinks is None else on_host(self.checked(sinks=on_host(sinks))["sinks"])

    def results(self, memory: dict[str, Array | None], inputs: dict[str, Array | None]) -> Results:
        """The `Results` of a call, without dv if dk takes it too.  Raises ArgumentError.

        memory: {name: the caller's array or None}.  inputs: as of `Results`.
        """
        asked = {name: (array, *self._types[name]) for name, array in self._own(memory).items()}
        return Results(self._backend, asked, inputs)


def compared(activity: Activity, sinks: Array | None, dlse: bool = False) -> dict[str, Any]:
    """What must be the same on every rank: each end of a transfer decides from the documents whether it happens.

    dlse: whether dlse is given, if that must be the same.
    """
    return {
        "documents (cu_seqlens, lengths, prefixes or causal_documents)": activity.as_lists,
        "sinks": None if sinks is None else sinks.tolist(),
        "whether dlse is given": dlse,
    }
