"""Numbers in place of objects, since C cannot hold these: a number that was freed is never used again."""

from __future__ import annotations

from itertools import count
from typing import Any

from .errors import HandleError

_numbers = count(1)  # of all kinds, so that a number of another kind is recognized
_kinds: dict[int, str] = {}  # of every number that was given out


class Handles:
    """Objects of a kind by number.

    kind: in words, such as "plan".  on_gpu: numbers of those that compute on a GPU.
    """

    def __init__(self, kind: str) -> None:
        self.kind, self._objects, self.on_gpu = kind, dict[int, Any](), set[int]()

    def add(self, made: Any, on_gpu: bool = False) -> int:
        """The number of a new object."""
        number = next(_numbers)
        self._objects[number], _kinds[number] = made, self.kind
        if on_gpu:
            self.on_gpu.add(number)
        return number

    def __getitem__(self, number: int) -> Any:
        try:
            return self._objects[number]
        except KeyError:
            raise HandleError(f"{self.kind} has the handle {number}, which is {self._not(number)}") from None

    def pop(self, number: int) -> Any:
        """Forget an object, and return it."""
        made = self[number]
        del self._objects[number]
        return made

    def _not(self, number: int) -> str:
        kind = _kinds.get(number)
        if number == 0:
            return f"that of no {self.kind}: none was made, or it was freed"
        if kind is None:
            return "not a handle that mpiattn has given"
        return f"that of a {self.kind} that was freed" if kind == self.kind else f"a {kind}"
