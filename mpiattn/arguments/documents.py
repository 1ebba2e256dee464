"""The arguments of a call that say where its documents and padding are: one record, from the call to what uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..problem.documents import documents

if TYPE_CHECKING:
    from ..problem.documents import PerDocument
    from ..problem.group import Group
    from ..problem.problem import Problem


class DocumentArguments(NamedTuple):
    """As `MeshAttention.forward` documents them, and as the caller gives them."""

    cu_seqlens: PerDocument = None
    cu_seqlens_k: PerDocument = None
    lengths: PerDocument = None
    lengths_k: PerDocument = None
    prefixes: PerDocument = None
    causal_documents: PerDocument = None
    padding: bool = False

    @property
    def none(self) -> bool:
        """Whether the call names no documents and no padding."""
        return self.padding is False and all(argument is None for argument in self[:-1])

    def groups(self, problem: Problem) -> tuple[Group, ...] | None:
        """As `mpiattn.problem.documents.documents`, which checks them.  Raises ArgumentError."""
        return documents(problem, *self)

    def as_bytes(self) -> tuple[Any, ...]:
        """What tells them from those of an earlier call; () if they are not plain numbers.

        To make groups of them and compare these takes long where each sequence has its own.
        """
        arrays = []
        for name, argument in zip(self._fields, self):
            if argument is not None:
                try:
                    array = np.asarray(argument)
                except (ValueError, TypeError, RuntimeError):  # rows of different lengths, or a tensor
                    return ()
                if array.dtype.kind not in "biu":
                    return ()
                arrays.append((name, array.dtype, array.shape, array.tobytes()))
        return tuple(arrays)

    def for_reference(self) -> dict[str, Any]:
        """In the form of `mpiattn.verify.reference.attention`, after `groups` has accepted them."""
        packed = self.cu_seqlens is not None
        given: dict[str, Any] = {}
        for name, value in self._asdict().items():
            if value is None or name == "padding":
                continue
            rows: Any = [np.asarray(row) for row in value]
            if name.startswith("lengths"):
                given["cu_seqlens" + name.removeprefix("lengths")] = [[0, int(end)] for end in rows]
            else:
                given[name] = rows if packed else [[row] for row in rows]
        return given
