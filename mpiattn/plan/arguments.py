"""The arguments of a plan's calls: the shape and dtype that each must have, and what ranks must agree on."""

from ..engine.folding import checked, on_host
from ..engine.results import Results


class Arguments:
    """Checks what callers pass to a plan against its problem.

    tokens: number of this rank's query tokens and of its key tokens.
    """

    def __init__(self, problem, tokens, backend):
        p, (tokens, tokens_k), self._backend = problem, tokens, backend
        rows, dims = (p.batch, tokens, p.heads), {"q": p.head_dim, "out": p.value_dim, "dout": p.value_dim}
        shapes = {**{name: (*rows, dim) for name, dim in dims.items()},
                  "k": (p.batch, tokens_k, p.kv_heads, p.head_dim), "v": (p.batch, tokens_k, p.kv_heads, p.value_dim)}
        shapes |= {f"d{name}": shapes[name] for name in "qkv"}
        self._types = {name: (shape, p.dtype) for name, shape in shapes.items()}
        by_head = {"lse": (p.batch, p.heads, tokens), "dlse": (p.batch, p.heads, tokens), "sinks": (p.heads,)}
        self._types |= {name: (shape, p.partial_dtype) for name, shape in by_head.items()}

    def checked(self, **arrays):
        """Arguments by name as arrays of the back end.  Raises ArgumentError if shape or dtype differ."""
        return {name: checked(self._backend, name, array, *self._types[name]) for name, array in arrays.items()}

    def sinks(self, sinks):
        """The sinks as a NumPy array, since all ranks compare them; None if there are none.  Raises ArgumentError."""
        return None if sinks is None else on_host(self.checked(sinks=sinks)["sinks"])

    def results(self, memory, inputs):
        """The `Results` of a call.  memory: {name: the caller's array or None}.  inputs: as of `Results`."""
        return Results(self._backend, {name: (array, *self._types[name]) for name, array in memory.items()}, inputs)


def compared(activity, sinks):
    """What must be the same on every rank: each end of a transfer decides from the documents whether it happens."""
    groups = activity.documents
    return {"documents (cu_seqlens, lengths, prefixes or causal_documents)":
            groups and tuple(group.as_lists() for group in groups),
            "sinks": None if sinks is None else sinks.tolist()}
