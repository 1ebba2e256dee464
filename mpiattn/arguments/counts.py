"""Checks of what callers pass to a cache.  All raise ArgumentError."""

from numbers import Integral
from typing import Any

from ..errors import ArgumentError
from ..problem.tensors import as_array


def _is_count(value: object) -> bool:
    """Whether a value is a whole number.  A truth value is none: a mask would be taken for 0 and 1."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def sequence_numbers(sequences: Any, count: int) -> list[int] | range:
    """Different numbers below `count`, as a list, or as a range if these are all in order; None for all."""
    if sequences is None:
        return range(count)
    sequences = as_array("sequences", sequences)
    try:
        numbers = [int(sequence) for sequence in sequences if _is_count(sequence)]
        wrong = len(numbers) != len(sequences)
    except TypeError:
        wrong = True
    if wrong or len(set(numbers)) < len(numbers) or not all(0 <= n < count for n in numbers):
        raise ArgumentError(
            f"sequences is {sequences!r}; it must be different numbers from 0 to {count - 1}, in a list"
        )
    return range(count) if numbers == list(range(count)) else numbers


def sequence_number(sequence: Any, count: int) -> int:
    """A number below `count`."""
    if not _is_count(sequence) or not 0 <= sequence < count:
        raise ArgumentError(f"sequence is {sequence!r}; it must be a number from 0 to {count - 1}")
    return int(sequence)


def _listed(name: str, values: Any) -> list[Any]:
    try:
        return list(as_array(name, values))
    except TypeError:
        raise ArgumentError(f"{name} is {values!r}; it must be a sequence of whole numbers") from None


def token_counts(counts: Any, sequences: int, tokens: int) -> list[int]:
    """Numbers of tokens from 0 to `tokens`, one for each of `sequences` sequences, as a list; None for all tokens."""
    if counts is None:
        return [tokens] * sequences
    counts = _listed("counts", counts)
    if len(counts) != sequences or not all(_is_count(n) and 0 <= int(n) <= tokens for n in counts):
        raise ArgumentError(
            f"counts is {counts!r}; it must be a number from 0 to {tokens} for each of {sequences} sequences"
        )
    return list(map(int, counts))


def kept_lengths(lengths: Any, held: list[int]) -> list[int]:
    """Numbers of tokens to keep of sequences that hold `held` tokens, as a list; a single number is for all."""
    lengths = [lengths] * len(held) if _is_count(lengths) else _listed("lengths", lengths)
    if len(lengths) != len(held) or not all(
        _is_count(length) and 0 <= int(length) <= most for length, most in zip(lengths, held)
    ):
        raise ArgumentError(
            f"lengths is {lengths!r}; it must be a number of tokens for each of the sequences, which have {held}"
        )
    return list(map(int, lengths))
