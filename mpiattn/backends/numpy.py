"""Block attention in NumPy: cache-sized tiles, one pass over the keys, float32 (float64) accumulation.

FlashAttention's online softmax, tile by tile: key tiles that no row of a row tile sees are skipped, those
that all its rows see whole take the short way, only the rest are masked.  Nothing of the size of queries
times keys is ever made.
"""

import numpy as np

# A score tile of 256 x 1024 float32 is a megabyte, so that the passes over it stay in a core's L2 cache.
ROWS, COLUMNS = 256, 1024
PANEL = 4096            # keys of one head converted (or made contiguous) at a time
MERGE_ROWS = 1024       # tokens merged at a time, to bound the temporaries


def _flat(array):
    return array.reshape(-1).view(np.uint8)


class NumpyBackend:
    """The protocol of `mpiattn.backends.base` on NumPy arrays; every launch is complete when it returns."""

    name = "numpy"

    def __init__(self):
        self._scratch = {}

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    def contiguous(self, array):
        return np.ascontiguousarray(array)

    def scratch_bytes(self, head_dim, value_dim, dtype):
        work = np.dtype("float64" if dtype == "float64" else "float32").itemsize
        panels = PANEL * (head_dim + value_dim)
        tiles = ROWS * (COLUMNS + head_dim + 2 * value_dim)
        return work * (panels + tiles)

    def _work(self, name, shape, dtype):
        """A contiguous work array of `shape`, from memory that is kept between calls."""
        size = int(np.prod(shape))
        held = self._scratch.get((name, dtype))
        if held is None or held.size < size:
            held = self._scratch[name, dtype] = np.empty(size, dtype)
        return held[:size].reshape(shape)

    # Launches

    def clear(self, out, lse):
        out.fill(0)
        lse.fill(-np.inf)

    def attend(self, q, k, v, begin, end, out, lse, scale, after=()):
        heads, kv_heads = q.shape[1], k.shape[1]
        per_kv, per_group = heads // kv_heads, heads // len(begin)
        tiles = [(g, rows) for g in range(len(begin)) for rows in _row_tiles(begin[g], end[g])]
        with np.errstate(all="ignore"):            # inf - inf and the like are answers here, not mistakes
            for first in range(0, len(k), PANEL):
                last = min(first + PANEL, len(k))
                seen = [(g, rows, max(rows.lo, first), min(rows.hi, last))
                        for g, rows in tiles if rows.lo < last and rows.hi > first]
                for kv_head in range(kv_heads if seen else 0):
                    keys = self._panel("k", k[first:last, kv_head], out.dtype)
                    values = self._panel("v", v[first:last, kv_head], out.dtype)
                    finite = np.isfinite(values).all(axis=1)
                    for head in range(kv_head * per_kv, (kv_head + 1) * per_kv):
                        for g, rows, lo, hi in seen:
                            if head // per_group == g:
                                self._row_tile(rows, q[:, head], out[:, head], lse[:, head], scale,
                                               keys, values, finite, first, lo, hi)

    def _panel(self, name, source, dtype):
        """Keys or values of one head as a contiguous array of the accumulation dtype."""
        panel = self._work(name, source.shape, dtype)
        np.copyto(panel, source)
        return panel

    def _row_tile(self, rows, q, out, lse, scale, keys, values, finite, origin, lo, hi):
        """One head's row tile over the keys [lo, hi), which start at `origin` in the panels."""
        at, dtype = rows.at, out.dtype
        count = at.stop - at.start
        query = self._work("q", (count, q.shape[1]), dtype)
        np.multiply(q[at], dtype.type(scale), out=query, dtype=dtype)
        acc = self._work("acc", (count, out.shape[1]), dtype)
        product = self._work("product", acc.shape, dtype)
        np.copyto(acc, out[at])
        top = lse[at].copy()
        total = (top != -np.inf).astype(dtype)     # acc is normalised: its weights sum to 1, or 0 if empty
        for start in range(lo, hi, COLUMNS):
            stop = min(start + COLUMNS, hi)
            local = slice(start - origin, stop - origin)
            score = self._work("score", (count, stop - start), dtype)
            np.matmul(query, keys[local].T, out=score)
            hidden = rows.hidden(start, stop)
            if hidden is not None:
                np.copyto(score, -np.inf, where=hidden)
            new_top = np.maximum(top, score.max(axis=1))
            base = np.where(new_top == -np.inf, 0, new_top)
            np.subtract(score, base[:, None], out=score)
            np.exp(score, out=score)
            decay = np.exp(top - base)
            total *= decay
            total += score.sum(axis=1)
            acc *= decay[:, None]
            if hidden is None or finite[local].all():
                np.matmul(score, values[local], out=product)
                acc += product
            else:
                _add_visible(acc, score, values[local], finite[local], ~hidden)
            top = new_top
        acc *= np.divide(1, total, out=np.zeros_like(total), where=total != 0)[:, None]
        out[at] = acc
        lse[at] = top + np.log(total)

    def merge(self, out, lse, out_b, lse_b, after=()):
        with np.errstate(all="ignore"):
            for start in range(0, len(out), MERGE_ROWS):
                at = slice(start, start + MERGE_ROWS)
                empty = lse_b[at] == -np.inf       # also keeps -inf - -inf out
                weight = np.where(empty, 0, 1 / (1 + np.exp(lse[at] - lse_b[at])))[..., None]
                out[at] *= 1 - weight
                out[at] += weight * out_b[at]
                lse[at] = np.logaddexp(lse[at], lse_b[at])

    def take(self, dst, src, rows, after=()):
        np.take(src, rows, axis=0, out=dst, mode="clip")   # "raise" would buffer the whole result

    def copy(self, dst, src):
        np.copyto(dst, src, casting="same_kind")

    # Wire

    def outgoing(self, array, after=()):
        return _flat(array)

    def sent(self, array):
        pass

    def incoming(self, array, after=()):
        return _flat(array)

    def arrived(self, array):
        pass

    def forget(self, array):
        pass

    def wait(self, event):
        pass

    def close(self):
        self._scratch.clear()


class _RowTile:
    """Consecutive rows with their intervals, and the hull [lo, hi) of what any of them sees."""

    def __init__(self, at, begin, end):
        self.at, self.begin, self.end = at, begin[at], end[at]
        sees = self.begin < self.end
        self.lo = int(self.begin[sees].min(initial=np.iinfo(np.int32).max))
        self.hi = int(self.end[sees].max(initial=0))
        self.full_from, self.full_to = int(self.begin.max()), int(self.end.min())

    def hidden(self, start, stop):
        """Which of the keys [start, stop) each row does not see; None if every row sees all."""
        if self.full_from <= start and stop <= self.full_to:
            return None
        columns = np.arange(start, stop, dtype=np.int32)
        return (columns < self.begin[:, None]) | (columns >= self.end[:, None])


def _row_tiles(begin, end):
    """The row tiles that see anything."""
    tiles = (_RowTile(slice(start, min(start + ROWS, len(begin))), begin, end)
             for start in range(0, len(begin), ROWS))
    return [tile for tile in tiles if tile.lo < tile.hi]


def _add_visible(acc, weight, values, finite, visible):
    """acc += weight @ values where some values are not finite: 0 * NaN must not reach a row that is masked."""
    acc += weight @ np.where(finite[:, None], values, 0)
    for column in np.flatnonzero(~finite):
        rows = visible[:, column]
        acc[rows] += weight[rows, column, None] * values[column]
