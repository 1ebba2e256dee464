"""Masks of a sequence that need only a number or two: windows, chunks, blocks, global tokens, shared questions."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError
from ..system.values import LARGEST, UNLIMITED, whole_number
from .interval_mask import IntervalMask, without_empty
from .pieces import needed_cuts
from .places import Places
from .values import digest, explained, fits, whole_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .interval_mask import Intervals

    IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Window(IntervalMask):
    """See `window`."""

    left: int | None
    right: int | None

    @property
    def by_distance(self) -> bool:  # type: ignore[override]
        """Not of `causal`, which is the order of the tokens in memory."""
        return (self.left, self.right) not in ((None, None), (None, 0))

    def __str__(self) -> str:
        if (self.left, self.right) == (None, 0):
            return "causal"
        return f"window {'' if self.left is None else self.left},{'' if self.right is None else self.right}"

    def intervals(self, queries: IntArray, seqlen: int, seqlen_k: int) -> Intervals:
        diagonal, everything = queries + (seqlen_k - seqlen), seqlen + seqlen_k
        left, right = (everything if side is None else min(side, everything) for side in (self.left, self.right))
        begin, end = np.maximum(diagonal - left, 0), np.minimum(diagonal + (right + 1), seqlen_k)
        return without_empty(begin[None], end[None])

    def cuts(self, seqlen: int, seqlen_k: int) -> IntArray:
        """Of more queries than keys the first may see nothing."""
        right = min(self.right or 0, seqlen + seqlen_k)
        return needed_cuts(self, np.array([seqlen - seqlen_k - right]), seqlen, seqlen_k)


@explained
def window(left: int | None = None, right: int | None = None) -> Window:
    """Every query sees the keys around its diagonal: from `left` before it to `right` after it.

    The diagonal of query i is key i + seqlen_k - seqlen: the last query's is the last key (aligned bottom-right).
    window(1, 0) of four tokens::

        1 0 0 0
        1 1 0 0
        0 1 1 0
        0 0 1 1

    Parameters
    ----------
    left, right : int or None, default None
        Keys before and after the diagonal; None for no limit.

    Raises
    ------
    ArgumentError
        If a side is neither None nor a whole number of at least 0.

    Examples
    --------
    The first four tokens see all and are seen by all; the others see the 128 before them too:

    >>> from mpiattn import masks
    >>> print(masks.global_tokens(4) | masks.window(128, 0))
    global 4 | window 128,0
    """
    sides = (
        None if side is None else whole_number(name, side, 0, ", or None for no limit", UNLIMITED)
        for name, side in (("left", left), ("right", right))
    )
    return Window(*sides)


@explained
def causal() -> Window:
    """Every query sees the keys up to its diagonal: window(None, 0)."""
    return Window(None, 0)


@dataclass(frozen=True)
class Global(IntervalMask):
    """See `global_tokens`."""

    tokens: int

    def __str__(self) -> str:
        return f"global {self.tokens}"

    def intervals(self, queries: IntArray, seqlen: int, seqlen_k: int) -> Intervals:
        end = np.where(queries < min(self.tokens, seqlen), seqlen_k, min(self.tokens, seqlen_k))[None]
        return without_empty(np.zeros_like(end), end)

    def cuts(self, seqlen: int, seqlen_k: int) -> IntArray:
        return needed_cuts(self, np.array([min(self.tokens, seqlen)]), seqlen, seqlen_k)


@explained
def global_tokens(n: int) -> Global:
    """The first n tokens see all, and are seen by all; the others see nothing else.

    For use with another mask, by `|`.  global_tokens(1) of four tokens::

        1 1 1 1
        1 0 0 0
        1 0 0 0
        1 0 0 0

    Parameters
    ----------
    n : int
        The first n queries and the first n keys, at least 0.

    Raises
    ------
    ArgumentError
        If n is not such a number.

    Examples
    --------
    A class token before the patches of an image, which see their neighbours:

    >>> from mpiattn import masks
    >>> print(masks.global_tokens(1) | masks.window(2, 2))
    global 1 | window 2,2
    """
    return Global(whole_number("n", n, 0, most=UNLIMITED))


@dataclass(frozen=True)
class Chunked(IntervalMask):
    """See `chunked`."""

    size: int
    by_distance = True

    def __str__(self) -> str:
        return f"chunked {self.size}"

    def intervals(self, queries: IntArray, seqlen: int, seqlen_k: int) -> Intervals:
        size = min(self.size, seqlen + seqlen_k + 1)  # one chunk of all keys; before it, one of queries that see none
        begin = (queries + (seqlen_k - seqlen)) // size * size
        end = np.minimum(begin + size, seqlen_k)[None]
        return without_empty(np.maximum(begin, 0)[None], end)

    def cuts(self, seqlen: int, seqlen_k: int) -> IntArray:
        """None between two chunks: the second's keys follow on the first's."""
        return needed_cuts(self, np.array([seqlen - seqlen_k]), seqlen, seqlen_k)


@explained
def chunked(size: int) -> Chunked:
    """Every query sees the keys of the chunk that holds its diagonal: block-local attention.

    Chunks hold `size` keys each, the first begins with key 0, the last may be shorter.  chunked(2) of four tokens::

        1 1 0 0
        1 1 0 0
        0 0 1 1
        0 0 1 1

    Parameters
    ----------
    size : int
        Keys in a chunk, at least 1.

    Raises
    ------
    ArgumentError
        If size is not such a number.

    Examples
    --------
    >>> from mpiattn import masks
    >>> print(masks.chunked(8192) & masks.causal())
    chunked 8192 & causal
    """
    return Chunked(whole_number("size", size, 1, most=UNLIMITED))


@dataclass(frozen=True)
class Blocks(IntervalMask):
    """See `blocks`; pairs are in order, each once."""

    size: int
    count: int
    digest: str
    pairs: tuple[tuple[int, int], ...] = field(repr=False, compare=False)

    def __str__(self) -> str:
        if self.count <= 8:
            return f"blocks {self.size} {','.join(f'{q}:{k}' for q, k in self.pairs)}"
        return f"blocks of {self.size}, {self.count} of them"

    def check(self, seqlen: int, seqlen_k: int) -> None:
        last, last_k = (max((pair[i] for pair in self.pairs), default=0) for i in range(2))
        for of, number, tokens in (("queries", last, seqlen), ("keys", last_k, seqlen_k)):
            if number and number * self.size >= tokens:
                raise ArgumentError(
                    f"mask is {self}, which has block {number} of {of}; {tokens} {of} have {-(-tokens // self.size)} "
                    f"blocks of {self.size}, counted from 0"
                )

    @cached_property
    def _runs(self) -> tuple[IntArray, IntArray]:
        """The key blocks [begin, end) of every run of blocks that follow each other: (lists, query blocks) each."""
        q, k = np.array(self.pairs, np.int64).reshape(-1, 2).T
        begins = np.ones(len(q), bool)
        begins[1:] = (np.diff(q) != 0) | (np.diff(k) != 1)
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(q))[: len(first)] - 1
        number = np.arange(len(first)) - np.searchsorted(q[first], q[first])  # of a run, among those of its query block
        begin, end = np.zeros((2, number.max(initial=-1) + 1, q.max(initial=-1) + 1), np.int64)
        begin[number, q[first]], end[number, q[first]] = k[first], k[last] + 1
        return begin, end

    def intervals(self, queries: IntArray, seqlen: int, seqlen_k: int) -> Intervals:
        begin, end = self._runs
        size = min(self.size, max(seqlen, seqlen_k, 1))
        block = queries // size
        block = np.where(block < begin.shape[1], block, -1)
        none = np.zeros((len(begin), 1), np.int64)
        begin, end = (np.concatenate([side, none], axis=1)[:, block] * size for side in (begin, end))
        return without_empty(begin, np.minimum(end, seqlen_k))

    def cuts(self, seqlen: int, seqlen_k: int) -> IntArray:
        return needed_cuts(self, np.arange(0, seqlen, min(self.size, max(seqlen, 1))), seqlen, seqlen_k)


@explained
def blocks(size: int, pairs: Any) -> Blocks:
    """Block-sparse attention: a query sees the blocks of keys that are listed for its own block.

    Parameters
    ----------
    size : int
        Tokens in a block of queries, and in one of keys; the last may be shorter.
    pairs : sequence of (int, int), or bool matrix
        (block of queries, block of keys), counted from 0, in any order; or (query blocks, key blocks), True where seen.

    Raises
    ------
    ArgumentError
        If size is not a whole number of at least 1, or pairs are none of these.

    Examples
    --------
    >>> from mpiattn import masks
    >>> print(masks.blocks(64, [(0, 0), (1, 1), (1, 2)]))
    blocks 64 0:0,1:1,1:2
    """
    size = whole_number("size", size, 1, most=UNLIMITED)
    if getattr(pairs, "ndim", 0) == 2 and getattr(pairs, "dtype", None) in (bool, np.bool_):
        pairs = np.argwhere(np.asarray(pairs))
    try:
        array = np.asarray(pairs)
        right = array.size == 0 or (array.ndim == 2 and array.shape[1] == 2 and array.dtype.kind in "iu")
        right = right and not (array.size and (array.min() < 0 or array.max() > LARGEST))
    except (TypeError, ValueError):
        right = False
    if not right:
        raise ArgumentError(
            f"pairs is {pairs!r}; it must be a list of (block of queries, block of keys), counted from 0, or a matrix "
            "of bool"
        )
    array = np.unique(array.reshape(-1, 2).astype(np.int64), axis=0)
    return Blocks(size, len(array), digest(array), tuple(map(tuple, array.tolist())))


@dataclass(frozen=True)
class ShareQuestion(IntervalMask):
    """See `share_question`."""

    question: int
    answers: tuple[int, ...]

    def __str__(self) -> str:
        return f"share-question {','.join(map(str, (self.question, *self.answers)))}"

    def check(self, seqlen: int, seqlen_k: int) -> None:
        fits(self, "question and answers have", self.question + sum(self.answers), seqlen, seqlen_k)

    @cached_property
    def _places(self) -> Places:
        starts = self.question + np.cumsum([0, *self.answers[:-1]])
        return Places(np.append(0, starts), np.append(0, self.question - starts))

    def places(self, seqlen_k: int) -> Places:
        """Every answer follows on the question."""
        return self._places

    def intervals(self, queries: IntArray, seqlen: int, seqlen_k: int) -> Intervals:
        starts = self.question + np.cumsum([0, *self.answers])
        answer = np.searchsorted(starts, queries, "right") - 1
        begin = np.where(answer < 0, 0, starts[answer])
        question_end = np.where(answer < 0, 0, self.question)
        # the first answer follows on the question: with it, the question is one interval
        begin, question_end = np.where(answer == 0, 0, begin), np.where(answer == 0, 0, question_end)
        return without_empty(np.stack([begin, np.zeros_like(begin)]), np.stack([queries + 1, question_end]))

    def cuts(self, seqlen: int, seqlen_k: int) -> IntArray:
        return needed_cuts(self, self.question + np.cumsum([0, *self.answers]), seqlen, seqlen_k)


@explained
def share_question(question: int, answers: Sequence[int]) -> ShareQuestion:
    """Several answers to one question, one after another: an answer sees the question and itself, both causally.

    Windows, chunks and biases by distance count as if an answer followed on the question.
    share_question(2, [2, 1])::

        1 0 0 0 0
        1 1 0 0 0
        1 1 1 0 0
        1 1 1 1 0
        1 1 0 0 1

    Parameters
    ----------
    question : int
        Tokens of the question, which come first.
    answers : sequence of int
        Tokens of each answer.  Question and answers are all tokens.

    Raises
    ------
    ArgumentError
        If these are not whole numbers of at least 0.

    Examples
    --------
    >>> from mpiattn import masks
    >>> print(masks.share_question(2048, [512, 256]))
    share-question 2048,512,256
    """
    lengths = whole_numbers("answers", answers, 0, "[10, 10]")
    return ShareQuestion(whole_number("question", question, 0), lengths)
