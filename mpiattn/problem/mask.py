"""Masks as row intervals: every query may attend to one interval of key positions.

`causal` and `window` are relative to a diagonal that is aligned bottom-right: the last query stands on the last
key, query i on key i + Sk - Sq.  Causal, with Sq = 2, Sk = 4 and Sq = 4, Sk = 2 (1 = may attend):

    1 1 1 0         0 0
    1 1 1 1         0 0      <- a row that sees nothing gives out = 0, lse = -inf
                    1 0
                    1 1

A window (left, right) allows the keys from `left` before the diagonal to `right` after it; (1, 0), Sq = Sk = 4:

    1 0 0 0
    1 1 0 0
    0 1 1 0
    0 0 1 1

Two masks see more than causal, in keys that are counted from the first of the sequence or document: a prefix is seen by
all queries; causal blocks let a query see to the end of the block of keys that it stands in.  Prefix 2 and blocks of 2,
Sq = Sk = 4:

    1 1 0 0         1 1 0 0
    1 1 0 0         1 1 0 0
    1 1 1 0         1 1 1 1
    1 1 1 1         1 1 1 1

Documents packed in one sequence (`problem.documents`) see only themselves, each with a diagonal of its own, and may
have a prefix of their own and be causal or not; tokens in no document are padding and see nothing.  A query sees what
all of these let it see, and any mix leaves it one interval of keys.

Positions inside a chunk increase under every layout, so that interval is one interval [begin, end) of a chunk's
local columns, found by searchsorted.  Kernels see only these two integers a row; they know neither masks nor
layouts.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

PIECE = 2 ** 20          # queries counted at a time


class Group(NamedTuple):
    """The documents of one batch entry, or of all where they are alike: int64 arrays, of `causal` bool.

    Document d holds the queries from q_cuts[d] to q_cuts[d + 1] and the keys from k_cuts[d] to k_cuts[d + 1]; what lies
    outside is padding.  prefixes, causal: of every document; None for what the mask says.
    """

    q_cuts: np.ndarray
    k_cuts: np.ndarray
    prefixes: np.ndarray = None
    causal: np.ndarray = None

    def as_lists(self):
        """The same, to be compared."""
        return tuple(None if array is None else array.tolist() for array in self)


@dataclass(frozen=True)
class Mask:
    """What the queries of one attention may see, apart from documents.

    seqlen: number of queries.  seqlen_k: number of keys.  causal: no key after the diagonal.
    window: (left, right), how many keys before and after the diagonal a query sees; None for all.
    prefix: how many keys are seen in spite of `causal`, the first ones.
    causal_block: keys of a block to whose end `causal` lets a query see; None or 1 for the diagonal.
    """

    seqlen: int
    seqlen_k: int
    causal: bool = False
    window: tuple = (None, None)
    prefix: int = 0
    causal_block: int = None

    def __str__(self):
        """In a few words."""
        left, right = ("" if side is None else side for side in self.window)
        window = "" if self.window == (None, None) else f" in window {left},{right}"
        prefix = f" after a prefix of {self.prefix}" if self.prefix else ""
        blocks = f" by blocks of {self.causal_block}" if self.causal_block else ""
        return f"{'causal' if self.causal else 'full'}{blocks}{prefix}{window}"

    @cached_property
    def _whole(self):
        """The sequence as one document, the only group."""
        return (Group(np.array([0, self.seqlen]), np.array([0, self.seqlen_k])),)

    def key_interval(self, positions, documents=None):
        """First and one past the last key that the queries at `positions` see: (lo, hi), int64 (groups, queries).

        documents: `Group`s, as made by `mpiattn.problem.documents.documents`, or None for the sequence as one document.
        """
        rows = [self._interval(positions, *group) for group in documents or self._whole]
        return np.stack([lo for lo, _ in rows]), np.stack([hi for _, hi in rows])

    def _interval(self, positions, q_cuts, k_cuts, prefixes=None, causal=None):
        document = np.searchsorted(q_cuts, positions, side="right")      # 0: before the first, len: padding
        inside = (document > 0) & (document < len(q_cuts))
        document = np.where(inside, document, 1)
        lo, hi = k_cuts[document - 1], k_cuts[document]
        diagonal = positions + hi - q_cuts[document]
        left, right = self.window
        if self.causal if causal is None else causal.any():
            end = self._causal_end(diagonal, lo, self.prefix if prefixes is None else prefixes[document - 1])
            hi = np.minimum(hi, end if causal is None else np.where(causal[document - 1], end, hi))
        if left is not None:
            lo = np.maximum(lo, diagonal - left)
        if right is not None:
            hi = np.minimum(hi, diagonal + right + 1)
        return np.where(inside, lo, 0), np.where(inside, np.maximum(lo, hi), 0)

    def _causal_end(self, diagonal, first, prefix):
        """One past the last key that `causal` lets queries see, of documents whose keys begin at `first`."""
        end = diagonal + 1
        if self.causal_block:
            end = first - (first - end) // self.causal_block * self.causal_block        # up to a whole block
        return np.maximum(end, first + prefix)

    def pairs(self, documents=None):
        """Number of (query, key) pairs attended to, summed over the groups of documents."""
        total = 0
        for start in range(0, self.seqlen, PIECE):
            lo, hi = self.key_interval(np.arange(start, min(start + PIECE, self.seqlen)), documents)
            total += int((hi - lo).sum())
        return total


def local_interval(lo, hi, key_positions):
    """Intervals of key positions [lo, hi) as local columns [begin, end) of a chunk: int32 of their shape.

    key_positions: increasing positions of the chunk's keys.
    """
    begin = np.searchsorted(key_positions, lo).astype(np.int32)
    end = np.searchsorted(key_positions, hi).astype(np.int32)
    return begin, np.maximum(begin, end)
