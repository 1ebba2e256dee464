"""Attention of a few queries over many keys in pages, in NumPy.  Its speed is limited by memory bandwidth.

A pool is (kv_heads, slots, dim), so consecutive pages are one contiguous matrix for each KV head, for any page size.
All queries and query heads of a KV head are the rows of one product with that matrix, so every key is read once.
"""

import numpy as np

from ..pages import stretches
from . import tiles
from .casts import widen
from .tiles import COLUMNS, ROWS, Panel, row_tiles

# Scattered keys, or keys of a narrower dtype, are copied so many at a time, counted over all KV heads: enough to
# amortize the calls, few enough to stay in cache.
GATHER = 8192
LONGEST = 8192  # maximum keys of a score tile with few rows


def _groups(slots, direct, most):
    """Cut and join slot ranges, in order, into groups of at most `most` keys: pairs (number of keys, slot ranges).

    direct: whether a range of `most` or more keys is a group by itself, uncut, to be read in place.
    """
    group, count = [], 0
    for first, last in slots:
        if direct and last - first >= most:
            if group:
                yield count, group
            yield last - first, [(first, last)]
            group, count = [], 0
            continue
        while first < last:
            take = min(last - first, most - count)
            group.append((first, first + take))
            first, count = first + take, count + take
            if count == most:
                yield count, group
                group, count = [], 0
    if group:
        yield count, group


def _matrix(work, name, pool, slots, dtype):
    """The rows of the pool in the slot ranges `slots`, (heads, keys, dim) in `dtype`: a view where possible."""
    if len(slots) == 1:
        gathered = pool[:, slots[0][0] : slots[0][1]]
    else:
        heads, _, dim = pool.shape
        count, copied = sum(last - first for first, last in slots), 0
        gathered = work("gathered " + name, (heads, count, dim), pool.dtype)
        for first, last in slots:
            gathered[:, copied : copied + last - first] = pool[:, first:last]
            copied += last - first
    if pool.dtype == dtype:
        return gathered
    matrix = work(name, gathered.shape, dtype)
    widen(matrix, gathered)
    return matrix


def _columns(rows):
    """Keys of a score tile with `rows` rows."""
    return min(max(COLUMNS, ROWS * COLUMNS // rows), LONGEST)


def _score_tiles(slots, columns):
    """The slot ranges of each score tile of a group: a group of one range is cut, any other is one tile."""
    if len(slots) > 1:
        return [slots]
    first, last = slots[0]
    return [[(start, min(start + columns, last))] for start in range(first, last, columns)]


def _all_heads(work, block, key_slots, first, out, lse, meanwhile):
    """Attention where every query sees all the keys, from `first` on, in one product for all KV heads.

    With few keys this takes a fraction of the time of one call per head.
    """
    q, keys, values = block[:3]
    kv_heads, queries, dtype = len(keys), len(q), out.dtype

    def by_head(array):
        """A view (kv_heads, queries, heads per KV head, ...) of an array (queries, heads, ...)."""
        return array.reshape(queries, kv_heads, -1, *array.shape[2:]).swapaxes(0, 1)

    rows, value_dim = queries * q.shape[1] // kv_heads, out.shape[2]
    query = work("q", (kv_heads, rows, q.shape[2]), dtype)
    by_row = by_head(q)
    np.multiply(by_row, dtype.type(block.scale), out=query.reshape(by_row.shape), dtype=dtype)
    acc, product = (work(name, (kv_heads, rows, value_dim), dtype) for name in ("acc", "product"))
    acc.fill(0)
    total, top = np.zeros((kv_heads, rows, 1), dtype), np.full((kv_heads, rows, 1), -np.inf, dtype)
    columns = _columns(kv_heads * rows)
    groups = _groups(key_slots, keys.dtype == dtype, max(GATHER // kv_heads, 1))
    for slots in (tile for _, group in groups for tile in _score_tiles(group, columns)):
        if meanwhile:
            meanwhile()
        # keys first, then values, so that each copy is still in cache when it is used
        panel = _matrix(work, "panel", keys, slots, dtype)
        score = work("score", (kv_heads, rows, panel.shape[1]), dtype)
        np.matmul(query, panel.swapaxes(1, 2), out=score)
        if block.softcap is not None:
            score *= 1 / block.softcap
            np.tanh(score, out=score)
            score *= block.softcap
        if block.bias is not None:
            of_keys = by_head(block.bias[:, :, first : first + score.shape[2]])
            of_rows = score.reshape(of_keys.shape)
            of_rows += of_keys
        first += score.shape[2]
        new_top = np.maximum(top, score.max(axis=2, keepdims=True))
        base = np.where(new_top == -np.inf, 0, new_top)
        score -= base
        np.exp(score, out=score)
        decay = np.exp(top - base)
        total *= decay
        total += score.sum(axis=2, keepdims=True)
        acc *= decay
        of_values = panel[..., :value_dim] if values is None else _matrix(work, "panel", values, slots, dtype)
        np.matmul(score, of_values, out=product)
        acc += product
        top = new_top
    acc *= np.divide(1, total, out=np.zeros_like(total), where=total != 0)
    top += np.log(total)
    for target, source in ((by_head(out), acc), (by_head(lse), top)):
        target[...] = source.reshape(target.shape)


def _by_rows(work, rows, block, key_slots, first, out, lse, meanwhile):
    """Add the keys from `first` on to the partial, one KV head at a time.  Rows may see different keys."""
    q, keys, values = block[:3]
    per_kv = q.shape[1] // len(keys)
    columns = _columns(len(q) * per_kv)
    for kv_head in range(len(keys)):
        heads, head = slice(kv_head * per_kv, (kv_head + 1) * per_kv), slice(kv_head, kv_head + 1)
        query, acc, top = (
            work("rows of " + name, array[:, heads].shape, array.dtype)
            for name, array in (("q", q), ("out", out), ("lse", lse))
        )
        for target, source in ((query, q), (acc, out), (top, lse)):
            target[...] = source[:, heads]
        query, acc, top = (array.reshape(len(q) * per_kv, 1, *array.shape[2:]) for array in (query, acc, top))
        of_head, start = block._replace(q=query, bias=None), first
        if block.bias is not None:
            of_head = of_head._replace(bias=block.bias[:, heads].reshape(1, 1, len(query), -1))
        for count, slots in _groups(key_slots, keys.dtype == out.dtype, GATHER):
            of_keys = _matrix(work, "k", keys[head], slots, out.dtype)[0]
            of_values = (
                of_keys[:, : out.shape[2]] if values is None else _matrix(work, "v", values[head], slots, out.dtype)[0]
            )
            panel = Panel(start, kv_head, of_keys, of_values)
            for tile in rows:
                lo, hi = tile.within(*panel.span)
                if lo < hi:
                    tiles.forward(work, tile, 0, of_head, (acc, top), panel, columns, meanwhile)
            start += count
        out[:, heads], lse[:, heads] = acc.reshape(out[:, heads].shape), top.reshape(lse[:, heads].shape)


def attend(work, block, out, lse, meanwhile=None):
    """`mpiattn.backends.base.Backend.attend_pages` of one sequence; work(name, shape, dtype) returns a work array."""
    out.fill(0)
    lse.fill(-np.inf)
    if not len(block.q):
        return
    pages, page_size = block.pages, block.page_size
    begins, ends = block.begin.tolist(), block.end.tolist()
    common_lo, common_hi = max(begins), min(ends)
    if common_lo < common_hi:  # else windows do not overlap, or some query sees no key
        _all_heads(work, block, stretches(pages, page_size, common_lo, common_hi), common_lo, out, lse, meanwhile)
        if (min(begins), max(ends)) == (common_lo, common_hi):
            return
    per_kv = block.q.shape[1] // len(block.k)
    rows = row_tiles(*(np.repeat(bound, per_kv) for bound in (block.begin, block.end)))
    if not rows:
        return
    lo, hi = min(tile.lo for tile in rows), max(tile.hi for tile in rows)
    if common_lo >= common_hi:
        common_lo = common_hi = lo
    for first, last in ((lo, common_lo), (common_hi, hi)):
        if first < last:
            _by_rows(work, rows, block, stretches(pages, page_size, first, last), first, out, lse, meanwhile)
