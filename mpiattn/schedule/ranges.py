"""Ranges of a chunk's tokens, as tuples of pairs (start, stop) in its own order, increasing and disjoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ..problem.layout import Layout

Ranges: TypeAlias = "tuple[tuple[int, int], ...]"
FEW = 64  # pairs of ranges up to which each of one side is looked at with each of the other, which is quicker


def total(ranges: Iterable[tuple[int, int]]) -> int:
    """The number of tokens."""
    return sum(stop - start for start, stop in ranges)


def whole(length: int) -> Ranges:
    """All tokens of a chunk."""
    return ((0, length),) if length else ()


def runs_of(layout: Layout, chunk: int) -> Ranges:
    """The runs of tokens that a layout gives a chunk: two in zigzag, the rows of a block of a grid, else one."""
    ends, before = [], 0
    for tokens in layout.ranges(chunk):
        ends.append((before, before + len(tokens)))
        before += len(tokens)
    return tuple(ends)


def meeting(ranges: Ranges, others: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(number of a range, start, stop) of what each of `ranges` has in common with each of others, of all that meet.

    others: increasing and disjoint, as `ranges` are.
    """
    if len(ranges) * len(others) <= FEW:
        for i, (first, last) in enumerate(ranges):
            for start, stop in others:
                if start < last and first < stop:
                    yield i, max(start, first), min(stop, last)
        return
    at = 0
    for i, (first, last) in enumerate(ranges):
        while at < len(others) and others[at][1] <= first:
            at += 1
        j = at
        while j < len(others) and others[j][0] < last:
            yield i, max(others[j][0], first), min(others[j][1], last)
            j += 1


def positions(layout: Layout, chunk: int, ranges: Ranges) -> list[range]:
    """The positions in the sequence of some tokens of a chunk."""
    tokens, runs = layout.ranges(chunk), runs_of(layout, chunk)
    return [tokens[i][start - runs[i][0] : stop - runs[i][0]] for i, start, stop in meeting(runs, ranges)]


def increasing(chunks: Iterable[Sequence[range]]) -> list[range] | NDArray[np.int64]:
    """The positions of some chunks of one layout, in increasing order: as few ranges or, of stripes, an array."""
    ranges = sorted((tokens for chunk in chunks for tokens in chunk if tokens), key=lambda tokens: tokens.start)
    if len(ranges) > 1 and any(tokens.step > 1 for tokens in ranges):
        return np.sort(np.concatenate([np.arange(t.start, t.stop, t.step) for t in ranges]))
    joined: list[range] = []
    for tokens in ranges:
        if joined and joined[-1].stop == tokens.start:
            tokens = range(joined.pop().start, tokens.stop)
        joined.append(tokens)
    return joined


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Disjoint increasing ranges of the same tokens."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def overlap(ranges: Ranges, others: Ranges) -> Ranges:
    """The tokens that two `Ranges` have in common."""
    return tuple((start, stop) for _, start, stop in meeting(ranges, others))


def places(held: Ranges, ranges: Ranges) -> list[slice]:
    """Where each of `ranges` lies in an array of the tokens `held`, which include them."""
    slices, before, at = [], 0, 0
    for start, stop in ranges:
        while held[at][1] < stop:
            before += held[at][1] - held[at][0]
            at += 1
        slices.append(slice(before + start - held[at][0], before + stop - held[at][0]))
    return slices


def rest(held: Ranges, ranges: Ranges) -> Ranges:
    """What `held` has besides `ranges`, which lie within it."""
    left, at = [], 0
    for start, stop in held:
        while at < len(ranges) and ranges[at][1] <= stop:
            left.append((start, ranges[at][0]))
            start = ranges[at][1]
            at += 1
        left.append((start, stop))
    return tuple((start, stop) for start, stop in left if start < stop)
