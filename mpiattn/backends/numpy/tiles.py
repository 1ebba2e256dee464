"""Row tiles of block attention in NumPy: one head's rows against a panel of keys, forward and backward.

This is FlashAttention's online softmax, tile by tile.  Key tiles that no row of the row tile sees are skipped, tiles
that every row sees in full need no mask, and only the rest are masked.  No array of size queries x keys is made.
"""

from typing import NamedTuple

import numpy as np

from .dropout import factors

# A score tile of 256 x 1024 float32 takes 1 MiB, so the passes over it stay in a core's L2 cache.
ROWS, COLUMNS = 256, 1024
MOST = np.iinfo(np.int32).max


class Panel(NamedTuple):
    """Consecutive keys of one KV head from `first` on, rows of numbers in the accumulation dtype.

    values: maybe the keys' first numbers, of the same memory.
    """

    first: int
    kv_head: int
    keys: np.ndarray
    values: np.ndarray

    @property
    def span(self):
        """Its first key and the end."""
        return self.first, self.first + len(self.keys)


class RowTile:
    """Consecutive rows with their intervals, and the hull [lo, hi) of the keys that any of them sees."""

    def __init__(self, span, begin, end, lo, hi, full_from, full_to):
        self.span, self.begin, self.end, self.lo, self.hi = span, begin[span], end[span], lo, hi
        self.count = span.stop - span.start
        self.full_from, self.full_to = full_from, full_to  # the keys that every row sees

    def within(self, first, last):
        """The keys [lo, hi) among [first, last) that any row sees; none if hi <= lo."""
        return max(self.lo, first), min(self.hi, last)

    def hidden(self, work, start, stop):
        """Mask (rows, keys) of those keys [start, stop) that a row does not see, a work array; None if it is empty."""
        if self.full_from <= start and stop <= self.full_to:
            return None
        columns = np.arange(start, stop, dtype=np.int32)
        before, after = (work(name, (self.count, stop - start), "bool") for name in ("hidden before", "hidden after"))
        np.less(columns, self.begin[:, None], out=before)
        np.greater_equal(columns, self.end[:, None], out=after)
        return np.logical_or(before, after, out=before)


def row_tiles(begin, end):
    """The row tiles that see at least one key."""
    if not len(begin):
        return []
    starts = np.arange(0, len(begin), ROWS)
    sees = begin < end
    least, most = np.minimum.reduceat, np.maximum.reduceat  # of all tiles at once
    hulls = (
        least(np.where(sees, begin, MOST), starts),
        most(np.where(sees, end, 0), starts),
        most(begin, starts),
        least(end, starts),
    )
    return [
        RowTile(slice(start, min(start + ROWS, len(begin))), begin, end, lo, *rest)
        for start, lo, *rest in zip(*(numbers.tolist() for numbers in (starts, *hulls)))
        if lo < rest[0]
    ]


def _add_product(work, acc, weight, matrix, hidden, product):
    """acc += weight @ matrix; `product` is a work array of acc's shape.

    hidden: mask of weight's masked pairs, or None.  Their weight is 0, but 0 * NaN must not reach acc.
    """
    if hidden is None or (finite := np.isfinite(matrix, out=work("finite", matrix.shape, "bool")).all(axis=1)).all():
        np.matmul(weight, matrix, out=product)
        acc += product
        return
    acc += weight @ np.where(finite[:, None], matrix, 0)
    for row in np.flatnonzero(~finite):
        seen = ~hidden[:, row]
        acc[seen] += weight[seen, row, None] * matrix[row]


def _scores(work, rows, query, panel, start, stop, softcap):
    """(scores, hidden) of a row tile and the keys [start, stop).  With a softcap, scores are tanh(score / softcap)."""
    score = work("score", (rows.count, stop - start), query.dtype)
    np.matmul(query, panel.keys[start - panel.first : stop - panel.first].T, out=score)
    if softcap is not None:
        score *= 1 / softcap
        np.tanh(score, out=score)
    return score, rows.hidden(work, start, stop)


def _of_pairs(array, block, head, rows, start, stop):
    """The view (rows or 1, keys) of a bias or its gradient, of a head, a row tile and the keys [start, stop)."""
    sequences, heads, tokens, _ = array.shape
    of_head = array[head * sequences // block.q.shape[1], head % heads]
    return of_head[rows.span if tokens > 1 else slice(None), start:stop]


def _add_bias(block, rows, head, start, stop, score):
    if block.bias is not None:
        score += _of_pairs(block.bias, block, head, rows, start, stop)


def _query(work, rows, head, block, dtype):
    query = work("q", (rows.count, block.q.shape[2]), dtype)
    np.multiply(block.q[rows.span, head], dtype.type(block.scale), out=query, dtype=dtype)
    return query


def forward(work, rows, head, block, partial, panel, columns, meanwhile=None):
    """Add the keys of a panel to the partial (out, lse) of the rows of one head in a row tile.

    work(name, shape, dtype) returns a work array.  columns: keys of a score tile.
    """
    out, lse = partial
    span, dtype, softcap = (rows.span, head), out.dtype, block.softcap
    lo, hi = rows.within(*panel.span)
    query = _query(work, rows, head, block, dtype)
    acc = work("acc", (rows.count, out.shape[2]), dtype)
    product = work("product", acc.shape, dtype)
    np.copyto(acc, out[span])
    top = lse[span].copy()
    total = (top != -np.inf).astype(dtype)  # acc is normalised: its weights sum to 1, or to 0 if it is empty
    for start in range(lo, hi, columns):
        if meanwhile:
            meanwhile()
        stop = min(start + columns, hi)
        score, hidden = _scores(work, rows, query, panel, start, stop, softcap)
        if softcap is not None:
            score *= softcap
        _add_bias(block, rows, head, start, stop, score)
        if hidden is not None:
            np.copyto(score, -np.inf, where=hidden)
        new_top = np.maximum(top, np.maximum.reduce(score, axis=1))  # methods of arrays take longer to call
        base = np.where(new_top == -np.inf, 0, new_top)
        np.subtract(score, base[:, None], out=score)
        np.exp(score, out=score)
        decay = np.exp(top - base)
        total *= decay
        total += np.add.reduce(score, axis=1)
        if block.dropout is not None:
            score *= factors(block.dropout, head, rows.span, slice(start, stop), dtype)
        acc *= decay[:, None]
        _add_product(work, acc, score, panel.values[start - panel.first : stop - panel.first], hidden, product)
        top = new_top
    acc *= np.divide(1, total, out=np.zeros_like(total), where=total != 0)[:, None]
    out[span] = acc
    lse[span] = top + np.log(total)


def backward(work, rows, head, block, given, grads, panel, meanwhile=None):
    """Add the gradients of the rows of one head in a row tile, with the keys of a panel, to `grads`.

    grads: dq and dbias of all rows; dk and dv of the panel.
    With P = exp(S - lse) and dP = dout @ V.T: dV += P.T @ dout, dS = P * (dP - delta), dbias += dS,
    dQ += scale * dS @ K and dK += scale * dS.T @ Q.  The softcap multiplies the last two dS by 1 - tanh^2; the bias is
    added after it.  Dropout multiplies dP, and the P of dV, by its factors.
    """
    (dout, lse, delta), (dq, dk_panel, dv_panel, dbias), softcap = given, grads, block.softcap
    span, dtype = (rows.span, head), dq.dtype
    lo, hi = rows.within(*panel.span)
    query = _query(work, rows, head, block, dtype)
    grad = work("dout", (rows.count, dout.shape[2]), dtype)
    np.copyto(grad, dout[span])
    acc = work("acc", query.shape, dtype)
    acc.fill(0)
    product = work("product", acc.shape, dtype)
    base, minus = np.where(lse[span] == -np.inf, 0, lse[span])[:, None], delta[span][:, None]
    for start in range(lo, hi, COLUMNS):
        if meanwhile:
            meanwhile()
        stop = min(start + COLUMNS, hi)
        local = slice(start - panel.first, stop - panel.first)
        weight, hidden = _scores(work, rows, query, panel, start, stop, softcap)
        slope = None
        if softcap is not None:
            slope = np.multiply(weight, weight, out=work("slope", weight.shape, dtype))
            np.subtract(1, slope, out=slope)
            if hidden is not None:  # a hidden score may be NaN, and 0 * NaN is NaN
                np.copyto(slope, 0, where=hidden)
            weight *= softcap
        _add_bias(block, rows, head, start, stop, weight)
        np.subtract(weight, base, out=weight)
        np.exp(weight, out=weight)
        dweight = work("dweight", weight.shape, dtype)
        np.matmul(grad, panel.values[local].T, out=dweight)
        kept = None
        if block.dropout is not None:
            kept = factors(block.dropout, head, rows.span, slice(start, stop), dtype)
            dweight *= kept
        dweight -= minus
        dweight *= weight
        if kept is not None:
            weight *= kept
        if hidden is not None:
            np.copyto(weight, 0, where=hidden)
            np.copyto(dweight, 0, where=hidden)
        if dbias is not None:
            of_pairs = _of_pairs(dbias, block, head, rows, start, stop)
            of_pairs += dweight if len(of_pairs) == rows.count else dweight.sum(axis=0)
        if slope is not None:
            dweight *= slope
        unseen = None if hidden is None else hidden.T
        _add_product(
            work, dv_panel[local], weight.T, grad, unseen, work("dv product", (stop - start, grad.shape[1]), dtype)
        )
        _add_product(
            work, dk_panel[local], dweight.T, query, unseen, work("dk product", (stop - start, query.shape[1]), dtype)
        )
        _add_product(work, acc, dweight, panel.keys[local], hidden, product)
    acc *= dtype.type(block.scale)
    dq[span] += acc
