"""A small block that kernels compute at first use, so that a wrong set of them is noticed before it serves anybody.

A compiler may have taken options that make kernels wrong in silence.  The result is compared with NumPy in float64, and
not with another set, since such options make all sets wrong alike.
"""

import numpy as np

from .library import ELEMENTS, Array, Launch

ROWS, KEYS, DIM = 40, 70, 64  # more than a tile of each set
SCALE = 0.5
LINE = 64  # bytes, by which scratch memory is aligned
NAN_ROW = 5  # of q
INFINITE_KEY, INFINITE_NUMBER = 66, 7  # of v
# By dtype, the largest error of numbers up to 1.  Some sets round weights of bfloat16 inputs to it.
LIMITS = {"float32": 1e-4, "float64": 1e-10, "float16": 1e-4, "bfloat16": 2e-2}


def fault(kernels):
    """The fault of the kernels of an instruction set, in words; "" if there is none.  Takes 1 ms."""
    q, k, v, begin, end = _block()
    want, want_lse = _attention(q, k, v, begin, end)
    for dtype, limit in LIMITS.items():
        out, lse = _launched(kernels, dtype, [_converted(array, dtype) for array in (q, k, v)], begin, end)
        for name, got, right in (("out", out, want), ("lse", lse, want_lse)):
            finite = np.isfinite(right)
            same = np.array_equal(got[~finite], right[~finite], equal_nan=True)
            if not same or not np.isfinite(got[finite]).all():
                return f"NaN or infinity is lost in {name} with {dtype}"
            off = abs(got[finite] - right[finite]).max()
            if off > limit * max(1, abs(right[finite]).max()):
                return f"{name} is off by {off:.2g} with {dtype}"
    return ""


def _block():
    """q, k, v as numbers that every dtype has, and which keys each row sees: the first one none."""
    q, k, v = (
        (np.arange(rows * DIM).reshape(rows, DIM) * step % 17 - 8) / 8
        for rows, step in ((ROWS, 37), (KEYS, 29), (KEYS, 43))
    )
    q[NAN_ROW, 3] = np.nan
    v[INFINITE_KEY, INFINITE_NUMBER] = np.inf
    end = np.arange(ROWS, dtype=np.int32) * 2
    begin = np.maximum(end - 60, 0)
    return q, k, v, begin, end


def _attention(q, k, v, begin, end):
    """out and lse of a block in float64."""
    keys = np.arange(KEYS)
    sees = (begin[:, None] <= keys) & (keys < end[:, None])
    scores = np.where(sees, SCALE * (q @ k.T), -np.inf)
    top = scores.max(axis=1, initial=-1e9)  # finite, also of a row that sees nothing
    weights = np.exp(scores - top[:, None])
    total = weights.sum(axis=1)
    out = weights @ np.where(np.isinf(v), 0, v) / np.where(total == 0, 1, total)[:, None]
    out[sees[:, INFINITE_KEY], INFINITE_NUMBER] = np.inf
    with np.errstate(divide="ignore"):
        return out, top + np.log(total)


def _converted(array, dtype):
    """An array with a dtype; of bfloat16, its bits."""
    if dtype == "bfloat16":
        return np.right_shift(array.astype(np.float32).view(np.uint32), 16).astype(np.uint16)
    return array.astype(dtype)


def _launched(kernels, dtype, inputs, begin, end):
    """out and lse of a block that kernels compute."""
    real = "float64" if dtype == "float64" else "float32"
    out, lse = np.zeros((ROWS, DIM), real), np.full(ROWS, -np.inf, real)
    arrays = dict(zip("qkv", inputs)) | {"out": out, "lse": lse}
    launch = Launch(
        element=ELEMENTS[dtype],
        groups=1,
        heads=1,
        kv_heads=1,
        head_dim=DIM,
        value_dim=DIM,
        threads=1,
        lists=1,
        tokens=ROWS,
        keys=KEYS,
        scale=SCALE,
        begin=begin.ctypes.data,
        end=end.ctypes.data,
        **{name: Array(array.ctypes.data, array.strides[0], array.strides[0]) for name, array in arrays.items()},
    )
    scratch = np.empty(kernels.scratch_bytes(launch, "forward") + LINE, np.uint8)
    launch.scratch = scratch.ctypes.data + -scratch.ctypes.data % LINE
    kernels.run(launch, "forward")
    return out, lse
