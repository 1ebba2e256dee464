"""From positions of keys to columns of a chunk.

Positions inside a chunk increase under every layout.  An interval of keys is therefore one interval [begin, end) of the
chunk's columns.  The more keys come before a position, the later it is, so the limits of a document become columns once
for all of its queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    IntArray = NDArray[np.integer]

MOST_KEYS = 2**31 - 1  # of a chunk, whose columns are int32 in kernels
FEW_RANGES = 4  # of keys, up to which arithmetic is faster than a search
ToColumns: TypeAlias = "Callable[[IntArray], IntArray]"  # from positions of keys to columns of a chunk


def columns_of(keys: Sequence[range] | IntArray) -> ToColumns:
    """A function from positions to columns of a chunk: how many of its keys come before each position, int32.

    keys: positions of the chunk's keys, increasing: an array, or ranges one after another.
    """
    tokens_k = len(keys) if isinstance(keys, np.ndarray) else sum(map(len, keys))
    if tokens_k > MOST_KEYS:
        raise ArgumentError(f"a chunk has {tokens_k} keys; it may have {MOST_KEYS}, so take more ranks")
    if not isinstance(keys, np.ndarray) and len(keys) > FEW_RANGES:
        keys = np.concatenate([np.arange(t.start, t.stop, t.step) for t in keys])

    def before(positions: IntArray) -> IntArray:
        if isinstance(keys, np.ndarray):
            return np.searchsorted(keys, positions).astype(np.int32)
        counts = []
        for tokens in keys:
            count = positions - tokens.start
            if tokens.step > 1:
                count = -(-count // tokens.step)
            np.maximum(count, 0, out=count)
            np.minimum(count, len(tokens), out=count)
            counts.append(count.astype(np.int32))
        return sum(counts[1:], counts[0]) if counts else np.zeros(positions.shape, np.int32)

    return before
