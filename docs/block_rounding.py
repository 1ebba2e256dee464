"""RMS error where every block's results are rounded to the inputs' dtype before they are added, as by `cuda+cudnn`.

    python docs/block_rounding.py            # the table of numbers.md

Everything but these roundings is float64, so that no back end has a say.  Errors are shares of the RMS of float64's.
"""

import argparse

import ml_dtypes
import numpy as np

TOKENS, HEADS, DIM = 1024, 2, 64
NAMES = ("out", "dq", "dk", "dv")


def rounded(array, dtype):
    """Numbers of a dtype, as float64."""
    return array.astype(dtype).astype(np.float64)


def results(q, k, v, dout, causal, blocks, dtype, each):
    """out, dq, dk and dv of (heads, tokens, dim), of blocks x blocks blocks.

    each: whether the results of each block are rounded, and delta is made of an out that is rounded.
    """

    def of_block(array):
        return rounded(array, dtype) if each else array

    parts = np.array_split(np.arange(q.shape[1]), blocks)
    scale, out, lse = q.shape[2] ** -0.5, np.zeros_like(q), np.full(q.shape[:2], -np.inf)

    def scores(rows, keys):
        score = np.einsum("hid,hjd->hij", q[:, rows], k[:, keys]) * scale
        return np.where(keys > rows[:, None], -np.inf, score) if causal else score

    pairs = [(rows, keys) for rows in parts for keys in parts if not causal or keys[0] <= rows[-1]]
    for rows, keys in pairs:
        score = scores(rows, keys)
        total = np.logaddexp.reduce(score, axis=-1)
        block = of_block(np.exp(score - total[..., None]) @ v[:, keys])
        both = np.logaddexp(lse[:, rows], total)
        weights = [np.exp(partial - both)[..., None] for partial in (lse[:, rows], total)]
        out[:, rows], lse[:, rows] = weights[0] * out[:, rows] + weights[1] * block, both
    out = rounded(out, dtype)
    delta = (dout * out).sum(-1, keepdims=True)
    if each:
        delta = (dout * rounded(dout * delta / (dout**2).sum(-1, keepdims=True), dtype)).sum(-1, keepdims=True)
    dq, dk, dv = np.zeros((3, *q.shape))
    for rows, keys in pairs:
        weights = np.exp(scores(rows, keys) - lse[:, rows, None])
        dscores = weights * (np.einsum("hid,hjd->hij", dout[:, rows], v[:, keys]) - delta[:, rows]) * scale
        dq[:, rows] += of_block(dscores @ k[:, keys])
        dk[:, keys] += of_block(dscores.swapaxes(1, 2) @ q[:, rows])
        dv[:, keys] += of_block(weights.swapaxes(1, 2) @ dout[:, rows])
    return out, *(rounded(grad, dtype) for grad in (dq, dk, dv))


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.parse_args()
    print("| dtype | mask | blocks of a row | out | dq | dk | dv |\n|---|---|---|---|---|---|---|")
    for dtype in (ml_dtypes.bfloat16, np.float16):
        given = [rounded(array, dtype) for array in np.random.default_rng(0).standard_normal((4, HEADS, TOKENS, DIM))]
        for causal in (False, True):
            exact = results(*given, causal, 1, np.float64, False)
            for blocks, each in ((1, False), (1, True), (2, True), (4, True), (16, True)):
                got = results(*given, causal, blocks, dtype, each)
                errors = [np.sqrt(np.square(a - b).mean() / np.square(b).mean()) for a, b in zip(got, exact)]
                row = [np.dtype(dtype).name, "causal" if causal else "full", blocks if each else "rounded once"]
                print("|", " | ".join(map(str, [*row, *(f"{error:.2e}" for error in errors)])), "|")


if __name__ == "__main__":
    main()
