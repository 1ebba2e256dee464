"""Whoever calls the library with arrays of a back end: on a GPU on a stream of his own."""

from contextlib import contextmanager

import numpy as np

from mpiattn.arguments.arrays import on_host

BUSY = 20  # launches that an argument comes after


def late(cupy, array):
    """A NumPy array on the GPU once the current stream has come to it; until then it is NaN."""
    source, rows = cupy.asarray(array.reshape(-1)), cupy.asarray(np.arange(array.size))
    made = cupy.empty(array.shape, array.dtype)
    for _ in range(BUSY):
        made.fill(np.nan)
    bits = f"uint{8 * array.itemsize}"
    cupy.take(source.view(bits), rows, axis=0, out=made.reshape(-1).view(bits))
    return made


@contextmanager
def caller(backend):
    """(give, take): give(array) makes a NumPy array an argument, take(*results) makes results NumPy arrays.

    Of a GPU's back end, arguments are made late, a while after the call has begun, and spoilt before results are looked
    at: neither must the library come too soon, nor that.
    """
    if not backend.startswith("cuda"):
        yield (lambda array: array), (lambda *results: results)
        return
    import cupy

    given = []

    def give(array):
        if array is not None:
            given.append(late(cupy, array))
        return None if array is None else given[-1]

    def take(*results):
        for array in given:
            array.fill(np.nan)
        return tuple(map(on_host, results))

    with cupy.cuda.Stream(non_blocking=True):
        yield give, take


def memory_like(backend, array):
    """Memory of the caller's for such a result, of strides that go backward and that skip."""
    shape = *array.shape[:-1], 2 * array.shape[-1]
    if backend.startswith("cuda"):
        import cupy

        whole = cupy.empty(shape, array.dtype)
    else:
        whole = np.full(shape, np.nan, array.dtype)
    return whole[:, ::-1, ..., ::2]
