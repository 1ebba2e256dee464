"""Counts numbers that are not finite, which computations and comparisons would not report."""

import numpy as np

PIECE_ELEMENTS = 2**20  # tested at a time


def nonfinite(array, sees_none=False):
    """The number of elements of an array (batch, ...) that are NaN or infinite.

    sees_none: the array is an lse; its -inf, of queries that see no key, are not counted.
    """
    if not array.size:
        return 0
    step, count = max(1, PIECE_ELEMENTS * array.shape[1] // array.size), 0
    for start in range(0, array.shape[1], step):
        piece = array[:, start : start + step]
        odd = ~np.isfinite(piece)
        if sees_none and odd.any():
            odd &= ~np.isneginf(piece)
        count += int(odd.sum())
    return count
