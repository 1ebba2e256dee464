"""What callers ask of a cache: the options of `KVCache`, and the arguments of a decoding call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..comm.exchange import MAX_MESSAGE, message_limit
from ..comm.peers import check_timeout
from ..comm.transport import check_transport
from ..problem.problem import check_shared_kv, dtype_name
from ..problem.values import whole_number

if TYPE_CHECKING:
    import os

    from numpy.typing import ArrayLike

    from ..backends.base import Array
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


class DecodeArguments(NamedTuple):
    """Arguments of `mpiattn.tree_decode` besides q and the cache; None for those that another algorithm lacks."""

    sequences: ArrayLike | None = None
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: Array | None = None
    out: Array | None = None
    lse: Array | None = None
    check: bool = True
    algorithm: str | None = None
    root: int | None = None
