"""Counts the numbers that are not finite: they pass through every computation and every comparison unseen."""

import numpy as np

PIECE_ELEMENTS = 2 ** 20       # looked at at a time


def nonfinite(array, sees_none=False):
    """How many elements of an array (batch, ...) are NaN or infinite.

    sees_none: it is an lse, which is -inf where a query sees no key; those are not counted.
    """
    if not array.size:
        return 0
    step, count = max(1, PIECE_ELEMENTS * array.shape[1] // array.size), 0
    for start in range(0, array.shape[1], step):
        piece = array[:, start:start + step]
        odd = ~np.isfinite(piece)
        if sees_none and odd.any():
            odd &= ~np.isneginf(piece)
        count += int(odd.sum())
    return count
