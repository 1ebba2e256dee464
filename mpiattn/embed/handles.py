"""Numbers in place of objects, since C cannot hold these: a number that was freed is never used again."""

from __future__ import annotations

from itertools import count
from typing import Any

from .errors import HandleError

_counts = count(1)
_kinds: list[str] = []  # a number is a count of all objects, times KINDS, plus the place of its kind here
KINDS = 8


class Handles:
    """Objects of a kind by number.

    kind: in words, such as "plan".  on_gpu: numbers of those that compute on a GPU.
    """

    def __init__(self, kind: str) -> None:
        self.kind, self._objects, self.on_gpu = kind, dict[int, Any](), set[int]()
        self._last, self._place = 0, len(_kinds)
        _kinds.append(kind)

    def add(self, made: Any, on_gpu: bool = False) -> int:
        """The number of a new object."""
        self._last = number = next(_counts) * KINDS + self._place
        self._objects[number] = made
        if on_gpu:
            self.on_gpu.add(number)
        return number

    def __contains__(self, number: int) -> bool:
        return number in self._objects

    def __getitem__(self, number: int) -> Any:
        try:
            return self._objects[number]
        except KeyError:
            raise HandleError(f"{self.kind} has the handle {number}, which is {self._not(number)}") from None

    def pop(self, number: int) -> Any:
        """Forget an object, and return it."""
        made = self[number]
        del self._objects[number]
        self.on_gpu.discard(number)
        return made

    def _not(self, number: int) -> str:
        if number == 0:
            return f"that of no {self.kind}: none was made, or it was freed"
        kind = _kinds[number % KINDS] if number > 0 and number % KINDS < len(_kinds) else ""
        if kind == self.kind and number <= self._last:
            return f"that of a {self.kind} that was freed"
        if kind and kind != self.kind:
            return f"that of another kind: {kind}"
        return "no handle that mpiattn has given"
