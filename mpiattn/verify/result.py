"""What a verification compared with float64 attention, and how far each array is off."""

from __future__ import annotations

from typing import NamedTuple

# What the positions of an array are; of others they are queries.
TOKENS = {"dk": "key", "dv": "key", "dkey_bias": "key"} | dict.fromkeys(
    ("dsinks", "dalibi_slopes", "drelative_bias"), "head"
)


class Compared(NamedTuple):
    """One array of a result: how much of it was compared, and how far it is off.

    name: "out", "lse", "dq", "dk", "dv", "dsinks", "dbias", "dkey_bias", "dalibi_slopes" or "drelative_bias".
    checked, of: tokens that were compared, of all; of dsinks, dalibi_slopes and drelative_bias heads.
    error: the largest difference as a share of the largest value, of lse at least of 1.  tolerance: what it may be.
    differing: elements that are finite on one side only.
    rank, position: where the error is largest, or an element differs so: the rank, and the token's position in the
    sequence (or the head); -1 where nothing differs.
    """

    name: str
    checked: int
    of: int
    error: float
    tolerance: float
    differing: int
    rank: int
    position: int

    @property
    def passed(self) -> bool:
        """Whether the error is within its tolerance."""
        return self.error <= self.tolerance and not self.differing

    @property
    def place(self) -> str:
        """Where the error is largest, in words."""
        return f"{TOKENS.get(self.name, 'query')} {self.position} of rank {self.rank}"

    @property
    def amount(self) -> str:
        """How much was compared, in words."""
        tokens = {"key": "keys", "head": "heads"}.get(TOKENS.get(self.name, ""), "queries")
        return f"{'all' if self.checked == self.of else f'{self.checked} of'} {self.of} {tokens}"

    def __str__(self) -> str:
        text = f"{self.name} off by {self.error:.1e} (may be {self.tolerance:.0e})"
        if self.differing:
            text += f", {self.differing} elements finite on one side only"
        return text if self.passed else f"{text}, worst at {self.place}"


class Verification(NamedTuple):
    """The arrays of a call that were compared with float64 attention; the same on every rank.

    faint: queries, over the batch, whose keys are all hidden by biases such as -1e9 in place of -inf.
    """

    arrays: tuple[Compared, ...]
    faint: int = 0

    @property
    def passed(self) -> bool:
        """Whether every array is right."""
        return all(array.passed for array in self.arrays)

    @property
    def complaint(self) -> str:
        """What is wrong, in words; "" if all is right."""
        wrong = [f"{array}, of {array.amount}" for array in self.arrays if not array.passed]
        right = [array.name for array in self.arrays if array.passed]
        tail = f" ({', '.join(right)}: right)" if right else ""
        return f"verification with float64 attention failed: {'; '.join(wrong)}{tail}{self._hint}" if wrong else ""

    @property
    def _hint(self) -> str:
        """What is said of queries that finite biases hide."""
        if not self.faint:
            return ""
        return (
            f"; {self.faint} queries see only keys whose biases hide them but are finite, such as -1e9: rounding "
            "decides their weights and gradients; write -inf in place of such numbers"
        )

    def __str__(self) -> str:
        amounts = dict.fromkeys(array.amount for array in self.arrays)
        parts = [
            f"{amount}: {', '.join(str(array) for array in self.arrays if array.amount == amount)}"
            for amount in amounts
        ]
        return f"{'; '.join(parts)}: {'passed' if self.passed else 'FAILED'}{self._hint}"
