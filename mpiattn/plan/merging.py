"""`merge`: attention over two disjoint sets of keys, from the results over each set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arguments.arrays import Axes, Required, checked_array
from ..arguments.untraced import untraced
from ..backends.numpy.backend import NumpyBackend
from ..engine.folding import Folding
from ..errors import ArgumentError
from ..problem.problem import dtype_name
from ..problem.tensors import as_array, as_given

if TYPE_CHECKING:
    from ..backends.base import Array


@untraced
def merge(out: Array, lse: Array, out_b: Array, lse_b: Array, *more: Array) -> tuple[Array, Array]:
    """Combine the attention of the same queries over two or more disjoint sets of keys; local, sends nothing.

    Arithmetic is in the dtype of lse, and out is rounded once.  A NaN in lse makes its row of the result NaN; a NaN in
    out makes its element NaN.  Attention sinks must be counted in only one of the results.

    Parameters
    ----------
    out, out_b : array, (batch, tokens, heads, value_dim)
        float16, bfloat16, float32 or float64, both the same: NumPy arrays, or torch tensors on the CPU.  Inputs
        are not changed.
    lse, lse_b : array, (batch, heads, tokens)
        Natural logarithms of the rows' sums of exponentials, both float32 or both float64, as `MeshAttention.forward`,
        `tree_decode` and FlashAttention return them.  A row with lse -inf has seen no key, and its out is
        ignored.  So it is with +inf, which FlashAttention-2 gives such a row.
    more : array
        out and lse of further results, in turn.

    Returns
    -------
    out : array, (batch, tokens, heads, value_dim)
        New, in the dtype of the first out, a tensor if that is one.  0 in a row that has seen no key in any result.
    lse : array, (batch, heads, tokens)
        New, in the dtype of the first lse.  -inf in a row that has seen no key in any result.

    Raises
    ------
    ArgumentError
        On this rank only.

    Examples
    --------
    Results over the first 60 keys and over the others combine into the result over all keys:

    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> import mpiattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 100, 4, 16), np.float32)
    >>> first, others, both = (mpiattn.attention(q, k[:, part], v[:, part], comm=MPI.COMM_SELF)
    ...                        for part in (slice(60), slice(60, None), slice(None)))
    >>> out, lse = mpiattn.merge(*first, *others)
    >>> bool(np.allclose(out, both[0], atol=1e-5) and np.allclose(lse, both[1], atol=1e-5))
    True
    """
    backend, given = NumpyBackend(), out
    if len(more) % 2:
        raise ArgumentError(f"{4 + len(more)} arrays are to be merged; it must be an out and an lse for each result")
    out, lse = as_array("out", out), as_array("lse", lse)
    arrays = {"out": out, "lse": lse, "out_b": out_b, "lse_b": lse_b}
    names = [("out", "lse"), ("out_b", "lse_b")]
    for number, pair in enumerate(zip(more[::2], more[1::2]), 3):
        names.append((f"out of result {number}", f"lse of result {number}"))
        arrays.update(zip(names[-1], pair))
    wide = dtype_name(getattr(lse, "dtype", None), "the dtype of lse", ("float32", "float64"))
    dtype = dtype_name(getattr(out, "dtype", None), "the dtype of out")
    shape = np.shape(out)
    if len(shape) != 4:
        raise ArgumentError(f"out has shape {tuple(shape)}; it must be (batch, tokens, heads, value_dim)")
    batch, tokens, heads, _ = shape
    wanted = (
        Required(tuple(shape), dtype, Axes(("batch", "tokens", "heads", "value_dim"))),
        Required((batch, heads, tokens), wide, Axes(("batch", "heads", "tokens"))),
    )
    folding, states = Folding(backend, batch), []
    for state in names:
        of_rows, sums = (checked_array(backend, name, arrays[name], kind) for name, kind in zip(state, wanted))
        of_rows, sums = (
            folding.fold(name, array)
            for name, array in zip(state, (of_rows.astype(wide), sums.transpose(0, 2, 1).copy()))
        )
        sums[sums == np.inf] = -np.inf
        of_rows[sums == -np.inf] = 0
        states.append((of_rows, sums))
    (whole, total), *others = states
    for other in others:
        backend.merge(whole, total, *other)
    result = np.empty(shape, dtype)
    folding.unfold(result, whole)
    return as_given(given, result, folding.by_batch(total).transpose(1, 2, 0).copy())
