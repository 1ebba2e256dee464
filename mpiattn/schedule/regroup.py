"""Regrouping: how sequences, heads and tokens change ranks before and after the passes of a mesh.  No MPI.

A mesh of h planes gives every plane 1/h of the work, and every rank of a plane a chunk of all tokens.  Planes split the
sequences of a batch as far as they can, and then the heads.  The caller's rank holds all sequences and heads of a chunk
that is 1/h as long.  So an all-to-all takes q, k and v to the mesh, and the results back.  With a batch of 1,
DeepSpeed-Ulysses (arXiv 2309.14509) is a mesh of one rank a plane, and USP (arXiv 2405.07719) has rings for planes.
The layout of the mesh may be another kind than the caller's, also with one plane.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd, lcm
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..problem.layout import Layout
from . import travels
from .kinds import DKEY_BIAS, GATHERED, KINDS, LSE, OUT, Array, K, Q, V, present
from .tile import Tile, tiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..problem.problem import Problem

LOOKED_THROUGH = 64  # chunks; of more, those that hold tokens are found by their tokens


def _gathered(direction: str) -> list[Array]:
    return [array for kind in GATHERED for array in KINDS[direction][kind].arrays]


# What both passes take comes first.
TAKEN = {direction: tuple(dict.fromkeys(_gathered("forward") + _gathered(direction))) for direction in KINDS}
GIVEN = {
    "forward": (OUT, LSE),
    "backward": (*(array._replace(name=f"d{array.name}") for array in (Q, K, V)), DKEY_BIAS),
}


def arrays_of(problem: Problem, direction: str, given: bool) -> tuple[Array, ...]:
    """The arrays that a pass takes or, given, its results."""
    return present(problem, (GIVEN if given else TAKEN)[direction])


@lru_cache(1024)
def split(planes: int, heads: int, kv_heads: int, batch: int = 1) -> tuple[int, int] | None:
    """Into how many parts planes split the sequences of a batch, and the heads of each of these; None if they cannot.

    Several planes may share a KV head.
    """
    most = gcd(batch, planes)
    for of_batch in range(most, 0, -1):
        parts = planes // of_batch
        if most % of_batch == 0 and heads % parts == 0 and (kv_heads % parts == 0 or parts % kv_heads == 0):
            return of_batch, parts
    return None


def every_tile(ranks: int, heads: int, kv_heads: int, batch: int = 1) -> list[Tile]:
    """Every tile of that many ranks whose planes can split batch and heads, those of one plane first."""
    numbers = [h for h in range(1, ranks + 1) if ranks % h == 0 and split(h, heads, kv_heads, batch)]
    return [tile for h in numbers for tile in tiles(ranks, h)]


def method_of(problem: Problem, tile: Tile) -> str | None:
    """The name of the published method that a tile is; None of other tiles.

    Ulysses and USP split the heads, every KV head in one part; planes may also split a batch, and may share KV heads.
    """
    if tile.h == 1:
        return None if (tile.a == 1) == (tile.b == 1) else "Ring" if tile.a == 1 else "Q-ring"
    of_batch, parts = split_of(problem, tile.h)
    if tile.a > 1 or of_batch > 1 or problem.kv_heads % parts:
        return None
    return "Ulysses" if tile.b == 1 else "USP"


def heads_of(total: int, parts: int, part: int) -> slice:
    """One of some parts of `total` heads: some of them or, of fewer heads than parts, one."""
    count = max(1, total // parts)
    first = part * total // parts
    return slice(first, first + count)


def split_of(problem: Problem, planes: int) -> tuple[int, int]:
    """As `split`, of planes that can split a problem; else ValueError."""
    parts = split(planes, problem.heads, problem.kv_heads, problem.batch)
    if parts is None:
        raise ValueError(f"{planes} planes cannot split {problem}")
    return parts


@lru_cache(64)
def plane_problem(problem: Problem, planes: int) -> Problem:
    """The problem of one plane, with its sequences folded into the heads."""
    of_batch, parts = split_of(problem, planes)
    heads, kv_heads = (len(range(total)[heads_of(total, parts, 0)]) for total in (problem.heads, problem.kv_heads))
    sequences = problem.batch // of_batch
    return replace(problem, batch=1, heads=sequences * heads, kv_heads=sequences * kv_heads)


def common(tokens: range, others: range) -> range:
    """The members that two ranges of positive step have in common."""
    step, divisor = lcm(tokens.step, others.step), gcd(tokens.step, others.step)
    apart, odd = divmod(others.start - tokens.start, divisor)
    if odd or not tokens or not others:
        return range(0)
    period = others.step // divisor
    first = tokens.start + apart * pow(tokens.step // divisor, -1, period) % period * tokens.step
    start = max(tokens.start, others.start)
    first += -(-max(start - first, 0) // step) * step
    return range(first, max(first, min(tokens.stop, others.stop)), step)


class Shared(NamedTuple):
    """Tokens that a rank of the caller and a rank of the mesh both hold, as slices of their chunks."""

    outer: slice
    inner: slice

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(range(self.outer.start, self.outer.stop, self.outer.step))


def _runs(layout: Layout, chunk: int) -> Iterator[tuple[int, range]]:
    """The runs of a chunk's tokens, each after the number of the chunk's tokens before it."""
    before = 0
    for tokens in layout.ranges(chunk):
        yield before, tokens
        before += len(tokens)


def shared(outer: Layout, number: int, inner: Layout, chunk: int) -> list[Shared]:
    """The tokens that chunk `number` of one layout and `chunk` of another have in common."""

    if outer.many or inner.many:
        return _shared_of_many(outer, number, inner, chunk)

    def rows(both: range, run: range, before: int) -> slice:
        first, step = before + (both.start - run.start) // run.step, both.step // run.step
        return slice(first, first + (len(both) - 1) * step + 1, step)

    parts = []
    for before, tokens in _runs(outer, number):
        for inner_before, inner_tokens in _runs(inner, chunk):
            both = common(tokens, inner_tokens)
            if both:
                parts.append(Shared(rows(both, tokens, before), rows(both, inner_tokens, inner_before)))
    return parts


def _shared_of_many(outer: Layout, number: int, inner: Layout, chunk: int) -> list[Shared]:
    """As `shared`, of chunks that may have many ranges: only those are looked at that meet."""
    if outer.striped:
        turned = _shared_of_many(inner, chunk, outer, number)
        return sorted((Shared(part.inner, part.outer) for part in turned), key=lambda part: part.outer.start)
    parts = []
    for before, tokens in _runs(outer, number):
        at, shared = inner.between(chunk, tokens.start, tokens.stop)
        for both in shared:
            first = before + both.start - tokens.start
            own = slice(first, first + (len(both) - 1) * both.step + 1, both.step)
            parts.append(Shared(own, slice(at, at + len(both), 1)))
            at += len(both)
    return parts


@lru_cache(64)
def partners(layout: Layout, number: int, other: Layout) -> list[tuple[int, list[Shared]]]:
    """(chunk of the other layout, tokens in common) of all with which a chunk has some, in order of their numbers.

    Of what is shared, `outer` are rows of the chunk of `layout`.
    """
    chunks: Iterable[int] = range(other.chunks)
    if other.chunks > LOOKED_THROUGH:
        chunks = np.unique(other.owner(layout.positions(number))).tolist()
    in_common = [(chunk, shared(layout, number, other, chunk)) for chunk in chunks]
    return [(chunk, parts) for chunk, parts in in_common if parts]


class Part(NamedTuple):
    """Sequences, tokens and heads of an array that a rank exchanges with a peer.

    sequences, heads: of all.  packed: rows of the memory in which they are packed, as the message has them; None if the
    message lies in the chunk of the mesh, or if there is none since the rank is its own peer.
    message: of parts that travel together, at the last of them, the rows of them all.
    """

    peer: int
    shared: Shared
    sequences: slice
    heads: slice
    packed: slice | None
    message: slice | None = None


def _with_messages(parts: list[Part]) -> list[Part]:
    """The same, in which all parts of a peer, which follow one another, are one message."""
    joined = []
    for i, part in enumerate(parts):
        if part.packed and (i == 0 or parts[i - 1].peer != part.peer):
            start = part.packed.start
        if part.packed and (i + 1 == len(parts) or parts[i + 1].peer != part.peer):
            part = part._replace(message=slice(start, part.packed.stop))
        joined.append(part)
    return joined


@dataclass(frozen=True)
class Regrouping:
    """The exchange of a plan whose mesh has several planes, or another layout than its caller.

    problem: the whole.  tile: of the mesh.  outer: layouts of queries and of keys by rank of the mesh.  inner: those of
    a plane, by number of its chunk.
    """

    problem: Problem
    tile: Tile
    outer: tuple[Layout, Layout]
    inner: tuple[Layout, Layout]

    def plane_and_chunk(self, rank: int) -> tuple[int, int]:
        """The plane of a rank of the mesh, and its chunk in that plane."""
        return divmod(rank, self.tile.chunks)

    def to_mesh(self, rank: int, keys: bool) -> list[tuple[int, list[Shared]]]:
        """(rank of the mesh, tokens for it) of all to which the caller's rank gives tokens."""
        parts = partners(self.outer[keys], rank, self.inner[keys])
        chunks = self.tile.chunks
        return [(plane * chunks + chunk, some) for plane in range(self.tile.h) for chunk, some in parts]

    def from_callers(self, rank: int, keys: bool) -> list[tuple[int, list[Shared]]]:
        """(caller's rank, tokens of it) of all from which a rank of the mesh takes tokens: the other end of `to_mesh`.

        Both ends have the tokens in the order in which the caller holds them.
        """
        _, chunk = self.plane_and_chunk(rank)
        return [
            (other, sorted((Shared(part.inner, part.outer) for part in some), key=lambda part: part.outer.start))
            for other, some in partners(self.inner[keys], chunk, self.outer[keys])
        ]

    def joined(self, keys: bool) -> bool:
        """Whether what a rank sends another of an array is one message, as chunks consist of many ranges."""
        return self.outer[keys].many or self.inner[keys].many

    @cached_property
    def split(self) -> tuple[int, int]:
        """Into how many parts the planes split the sequences, and the heads of each of these."""
        return split_of(self.problem, self.tile.h)

    @property
    def by_sequence(self) -> bool:
        """Whether a message holds one sequence after another, as the caller's arrays do, if it holds several.

        Else it holds one token after another, as a chunk of the mesh does.
        """
        return 1 < self.split[0] < self.problem.batch

    def sequences(self, rank: int) -> slice:
        """The sequences that a rank of the mesh computes."""
        of_batch, parts = self.split
        count = self.problem.batch // of_batch
        first = self.plane_and_chunk(rank)[0] // parts * count
        return slice(first, first + count)

    def heads(self, array: Array, rank: int) -> slice:
        """The heads of an array that a rank of the mesh computes."""
        _, parts = self.split
        return heads_of(getattr(self.problem, array.heads), parts, self.plane_and_chunk(rank)[0] % parts)

    def has_all(self, array: Array) -> bool:
        """Whether a plane computes all heads that an array has of a sequence."""
        return self.split[1] == 1 or getattr(self.problem, array.heads) == 1

    def sharing(self, array: Array) -> int:
        """Number of planes that compute each head of a sequence of an array: 1 but for few KV heads."""
        return max(1, self.split[1] // getattr(self.problem, array.heads))

    def dtype(self, array: Array, given: bool) -> str:
        """The dtype of an array in messages: partials that are still to be added keep theirs."""
        p = self.problem
        return p.partial_dtype if given and self.sharing(array) > 1 else getattr(p, array.dtype)

    def parts(self, rank: int, array: Array, given: bool) -> tuple[list[Part], list[Part]]:
        """The parts of an array that a rank exchanges as a rank of the caller, and those as a rank of the mesh.

        given: whether the array is a result.
        """
        key = rank, array.keys, array.heads, given  # arrays of the same heads and tokens have the same parts
        if key not in self._known:
            parts = self._outward(rank, array, given), self._inward(rank, array)
            if self.joined(array.keys):
                parts = _with_messages(parts[0]), _with_messages(parts[1])
            self._known[key] = parts
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, bool, str, bool], tuple[list[Part], list[Part]]]:
        """What `parts` has returned."""
        return {}

    def _outward(self, rank: int, array: Array, given: bool) -> list[Part]:
        """What travels is packed: some heads, or tokens of several sequences; the same for planes with the same heads.

        Where it lies in the caller's array as in the message, it need not be.
        """
        parts, packed, at = [], {}, 0
        added = given and self.sharing(array) > 1
        for peer, some in self.to_mesh(rank, array.keys):
            _, chunk = self.plane_and_chunk(peer)
            sequences, heads = self.sequences(peer), self.heads(array, peer)
            for number, shared in enumerate(some):
                key, rows = (chunk, number, sequences.start, heads.start), None
                if peer != rank or added:
                    if key not in packed or given:
                        packed[key] = slice(at, at + shared.tokens)
                        at += shared.tokens
                    rows = packed[key]
                parts.append(Part(peer, shared, sequences, heads, rows))
        return parts

    def _inward(self, rank: int, array: Array) -> list[Part]:
        """Consecutive tokens travel from and to where they are, if messages have them alone, token after token."""
        parts, sequences, heads, at = [], self.sequences(rank), self.heads(array, rank), 0
        joined = self.joined(array.keys)
        for peer, some in self.from_callers(rank, array.keys):
            for shared in some:
                rows = None
                if (joined or self.by_sequence or shared.inner.step != 1) and peer != rank:
                    rows = slice(at, at + shared.tokens)
                    at += shared.tokens
                parts.append(Part(peer, shared, sequences, heads, rows))
        return parts

    @cached_property
    def plane_problem(self) -> Problem:
        """The problem of one plane."""
        return plane_problem(self.problem, self.tile.h)

    def token_bytes(self, array: Array, given: bool) -> int:
        """Bytes of one token of an array in messages, between a rank of the caller and a rank of the mesh."""
        return travels.size_of([(array.shape(self.plane_problem), self.dtype(array, given))])

    def widened_bytes(self, array: Array) -> int:
        """Bytes of one token of a result by which it is longer on the mesh than on the caller's ranks."""
        returned = travels.size_of([(array.shape(self.plane_problem), getattr(self.problem, array.dtype))])
        return self.token_bytes(array, True) - returned

    def messages(self, rank: int, direction: str, ends: tuple[bool, ...] = (False, True)) -> list[tuple[int, int]]:
        """(peer, bytes) of all that a rank sends before a pass, where `ends` has False, and after it, where True."""
        messages = []
        for given in ends:
            for array in arrays_of(self.problem, direction, given):
                nbytes, joined = self.token_bytes(array, given), self.joined(array.keys)
                for part in self.parts(rank, array, given)[given]:
                    if part.peer != rank and (part.message or not joined):
                        tokens = part.message.stop - part.message.start if part.message else part.shared.tokens
                        messages.append((part.peer, tokens * nbytes))
        return messages

    def sent(self, rank: int, direction: str) -> int:
        """Bytes that a rank sends before and after a pass."""
        return sum(nbytes for _, nbytes in self.messages(rank, direction))


def rows_of(parts: list[Part]) -> int:
    """Rows of memory in which parts are packed."""
    return max((part.packed.stop for part in parts if part.packed), default=0)


def mean_sent(problem: Problem, tile: Tile, direction: str = "forward") -> float:
    """Mean bytes that a rank sends in a pass with a tile, without a mask.

    The ranks that together hold a chunk of a plane exchange among themselves: every rank keeps its share of it.
    """
    layouts = Layout("contiguous", problem.seqlen, tile.ranks), Layout("contiguous", problem.seqlen_k, tile.ranks)
    regrouping = Regrouping(problem, tile, layouts, layouts)
    regrouped = sum(
        (problem.seqlen_k if array.keys else problem.seqlen) * regrouping.token_bytes(array, given)
        for given in (False, True)
        for array in arrays_of(problem, direction, given)
    )
    of_plane = travels.mean_sent(regrouping.plane_problem, tile.plane, direction)
    return of_plane + (tile.h - 1) * regrouped / tile.ranks
