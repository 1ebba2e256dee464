"""Checks of what callers pass to a cache.  All raise ArgumentError."""

from typing import Any

from ..errors import ArgumentError
from ..problem.tensors import as_array
from ..system.values import UNLIMITED, is_whole


def sequence_numbers(sequences: Any, count: int) -> list[int] | range:
    """Different numbers below `count`, as a list, or as a range if these are all in order; None for all."""
    if sequences is None:
        return range(count)
    sequences = as_array("sequences", sequences)
    try:
        numbers = [int(sequence) for sequence in sequences if is_whole(sequence, 0, count - 1)]
        wrong = len(numbers) != len(sequences)
    except TypeError:
        wrong = True
    if wrong or len(set(numbers)) < len(numbers):
        raise ArgumentError(
            f"sequences is {sequences!r}; it must be different numbers from 0 to {count - 1}, in a list"
        )
    return range(count) if numbers == list(range(count)) else numbers


def sequence_number(sequence: Any, count: int) -> int:
    """A number below `count`."""
    if not is_whole(sequence, 0, count - 1):
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
    if len(counts) != sequences or not all(is_whole(n, 0, tokens) for n in counts):
        raise ArgumentError(
            f"counts is {counts!r}; it must be a number from 0 to {tokens} for each of {sequences} sequences"
        )
    return list(map(int, counts))


def kept_lengths(lengths: Any, held: list[int]) -> list[int]:
    """Numbers of tokens to keep of sequences that hold `held` tokens, as a list; a single number is for all."""
    lengths = [lengths] * len(held) if is_whole(lengths, -UNLIMITED, UNLIMITED) else _listed("lengths", lengths)
    if len(lengths) != len(held) or not all(is_whole(length, 0, most) for length, most in zip(lengths, held)):
        raise ArgumentError(
            f"lengths is {lengths!r}; it must be a number of tokens for each of the sequences, which have {held}"
        )
    return list(map(int, lengths))
