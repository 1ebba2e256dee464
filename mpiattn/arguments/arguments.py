"""The arrays of one call by name, checked: what it reads, and what it writes its results into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arrays import Required, check_values, checked_array, on_host
from .results import Results

if TYPE_CHECKING:
    from ..backends.base import Array, Backend


class Arguments:
    """Checks the arrays of a call.

    wanted: {name: what it must be} of all that the call may have.
    shared_kv: whether keys hold the values, so that v and dv are not given.
    """

    def __init__(self, backend: Backend, wanted: dict[str, Required], shared_kv: bool = False) -> None:
        self._backend, self._wanted, self._shared_kv = backend, wanted, shared_kv

    def checked(self, **arrays: Array | None) -> dict[str, Array]:
        """Arguments by name as arrays of the back end, without v if keys hold it.

        Raises ArgumentError if shape or dtype differ.
        """
        return {
            name: checked_array(self._backend, name, array, self._wanted[name])
            for name, array in self._without_values(arrays).items()
        }

    def _without_values(self, arrays: dict[str, Array | None]) -> dict[str, Array | None]:
        """The arrays; with shared_kv without v and dv, and ArgumentError if one of these is given."""
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
        asked = {name: (array, self._wanted[name]) for name, array in self._without_values(memory).items()}
        return Results(self._backend, asked, inputs)
