"""What callers ask of a cache: its options, tokens to append, and the arguments of a decoding call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arguments.arrays import Axes, Required, check_values, checked_array
from ..comm.exchange import MAX_MESSAGE, message_limit
from ..comm.peers import check_timeout
from ..comm.transport import check_transport
from ..errors import ArgumentError
from ..problem.layout import Layout
from ..problem.problem import check_shared_kv, dtype_name
from ..system.values import whole_number

if TYPE_CHECKING:
    import os

    from numpy.typing import ArrayLike

    from ..backends.base import Array
    from ..masks.interval_mask import IntervalMask
    from ..model.machine import Machine


@dataclass(frozen=True)
class CacheOptions:
    """Options of `KVCache`, as documented there."""

    capacity: int
    kv_heads: int
    head_dim: int
    value_dim: Any = None
    shared_kv: bool = False
    sequences: int = 1
    dtype: Any = "float32"
    page_size: int = 64
    backend: str = "auto"
    transport: str = "auto"
    machine: Machine | str | os.PathLike[str] | None = None
    max_message: int | str = MAX_MESSAGE
    timeout: float | None = None

    def checked(self) -> CacheOptions:
        """The same as values; raises ArgumentError."""
        check_timeout(self.timeout)
        filled = replace(self, value_dim=self.head_dim if self.value_dim is None else self.value_dim)

        def counts(*names: str) -> dict[str, Any]:
            return {name: whole_number(name, getattr(filled, name), 1) for name in names}

        row = counts("kv_heads", "head_dim", "value_dim")
        dtype = dtype_name(self.dtype)
        shared_kv = check_shared_kv(self.shared_kv, row["head_dim"], row["value_dim"])
        sizes = counts("capacity", "sequences", "page_size")
        max_message = message_limit(self.max_message)
        check_transport(self.backend, self.transport)
        return replace(filled, **row, **sizes, dtype=dtype, shared_kv=shared_kv, max_message=max_message)


def checked_tokens(cache: Any, k: Array, v: Array | None, count: int, layout: Any) -> tuple[tuple[Array, ...], int]:
    """k and v of `count` sequences as arrays of the back end, one for each pool, and their tokens over all ranks.

    cache: the `KVCache`.  layout: None, or where they are.  Raises ArgumentError.
    """
    if layout is not None and not (isinstance(layout, Layout) and layout.chunks == cache.ranks):
        raise ArgumentError(f"layout is {layout!r}; it must be a Layout of {cache.ranks} chunks, or their sizes")

    def wanted(tokens: int | None, dim: str) -> Required:
        shape = count, tokens, cache.kv_heads, getattr(cache, dim)
        return Required(shape, cache.dtype, Axes(("sequences", "tokens", "kv_heads", dim)))

    backend, tokens = cache.combiner.backend, None if layout is None else layout.length(cache.rank)
    k = checked_array(backend, "k", k, wanted(tokens, "head_dim"))
    everywhere = k.shape[1] if layout is None else layout.seqlen
    check_values(cache.shared_kv, v)
    if cache.shared_kv:
        return (k,), everywhere
    return (k, checked_array(backend, "v", v, wanted(k.shape[1], "value_dim"))), everywhere


def tokens_name(layout: Layout | None) -> str:
    """What the number of tokens over all ranks is called where ranks give different ones."""
    return "the number of tokens of k, which is given without layout," if layout is None else "tokens"


class DecodeArguments(NamedTuple):
    """Arguments of `mpiattn.tree_decode` besides q and the cache; None for those that another algorithm lacks."""

    sequences: ArrayLike | None = None
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: Array | None = None
    alibi_slopes: Array | None = None
    relative_bias: Array | None = None
    out: Array | None = None
    lse: Array | None = None
    check: bool = True
    mask: IntervalMask | None = None
    algorithm: str | None = None
    root: int | None = None
