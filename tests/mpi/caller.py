"""Whoever calls the library with arrays of a back end: on a GPU on a stream of his own."""

from contextlib import contextmanager

import numpy as np

from mpiattn.arrays import on_host


@contextmanager
def caller(backend):
    """(give, take): give(array) makes a NumPy array an argument, take(*results) makes results NumPy arrays.

    Of a GPU's back end, arguments are spoilt before results are looked at: that must not come too soon.
    """
    if backend != "cuda":
        yield (lambda array: array), (lambda *results: results)
        return
    import cupy
    given = []

    def give(array):
        if array is not None:
            given.append(cupy.asarray(array))
        return None if array is None else given[-1]

    def take(*results):
        for array in given:
            array.fill(np.nan)
        return tuple(map(on_host, results))
    with cupy.cuda.Stream(non_blocking=True):
        yield give, take
