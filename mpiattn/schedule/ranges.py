"""Ranges of a chunk's tokens, as tuples of pairs (start, stop) in its own order, increasing and disjoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..problem.layout import Layout

Ranges: TypeAlias = "tuple[tuple[int, int], ...]"


def total(ranges: Iterable[tuple[int, int]]) -> int:
    """The number of tokens."""
    return sum(stop - start for start, stop in ranges)


def whole(length: int) -> Ranges:
    """All tokens of a chunk."""
    return ((0, length),) if length else ()


def runs_of(layout: Layout, chunk: int) -> Ranges:
    """The runs of tokens that a layout gives a chunk: two in zigzag, else one."""
    ends, before = [], 0
    for tokens in layout.ranges(chunk):
        ends.append((before, before + len(tokens)))
        before += len(tokens)
    return tuple(ends)


def positions(layout: Layout, chunk: int, ranges: Ranges) -> list[range]:
    """The positions in the sequence of some tokens of a chunk."""
    parts = []
    for tokens, (first, last) in zip(layout.ranges(chunk), runs_of(layout, chunk)):
        for start, stop in ranges:
            if start < last and first < stop:
                parts.append(tokens[max(start, first) - first : min(stop, last) - first])
    return parts


def cover(runs: Ranges, ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Of each run, the tokens from the first to the last that lies in one of `ranges`; neighbours are joined.

    The cover of a part lies within the cover of the whole, so what a rank received includes all that it passes on.
    """
    covered: list[tuple[int, int]] = []
    ranges = tuple(ranges)
    for first, last in runs:
        inside = [(max(start, first), min(stop, last)) for start, stop in ranges if start < last and first < stop]
        if inside:
            start, stop = min(start for start, _ in inside), max(stop for _, stop in inside)
            if covered and covered[-1][1] == start:
                start, _ = covered.pop()
            covered.append((start, stop))
    return tuple(covered)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The tokens that lie in any of `ranges`, no more."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            start, stop = joined[-1][0], max(stop, joined.pop()[1])
        joined.append((start, stop))
    return tuple(joined)


def overlap(ranges: Ranges, others: Ranges) -> Ranges:
    """The tokens that two `Ranges` have in common."""
    both = ((max(start, first), min(stop, last)) for start, stop in ranges for first, last in others)
    return tuple((start, stop) for start, stop in both if start < stop)


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
    left = []
    for start, stop in held:
        for first, last in ranges:
            if start <= first and last <= stop:
                left.append((start, first))
                start = last
        left.append((start, stop))
    return tuple((start, stop) for start, stop in left if start < stop)
