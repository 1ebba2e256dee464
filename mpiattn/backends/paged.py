"""Attention of a few queries over many keys that lie in pages, in NumPy: as fast as memory gives the keys.

A pool is (kv_heads, slots, dim), so that consecutive pages are one contiguous matrix for each KV head, whatever the
page size.  Its query heads and queries are the rows of one product with that matrix: every key is read once.
"""

import numpy as np

from ..pages import stretches
from . import tiles
from .tiles import COLUMNS, ROWS, Panel, row_tiles

GATHER = 4096       # keys of one head that are copied together, where they are scattered or of a narrower dtype
DIRECT = 1024       # consecutive keys from which on they are used where they lie
LONGEST = 8192      # keys of a score tile of few rows


def _groups(found, direct):
    """Stretches one after another, cut and put together: pairs of a number of keys and a list of stretches.

    direct: whether a long stretch is a group of its own, to be read where it lies.
    """
    group, count = [], 0
    for first, last in found:
        if direct and last - first >= DIRECT:
            if group:
                yield count, group
            yield last - first, [(first, last)]
            group, count = [], 0
            continue
        while first < last:
            take = min(last - first, GATHER - count)
            group.append((first, first + take))
            first, count = first + take, count + take
            if count == GATHER:
                yield count, group
                group, count = [], 0
    if group:
        yield count, group


def _matrix(work, name, pool, slots, dtype):
    """The rows of a KV head's pool at some stretches, contiguous and in `dtype`: a view if it can be one."""
    if len(slots) == 1 and pool.dtype == dtype:
        return pool[slots[0][0]:slots[0][1]]
    matrix, at = work(name, (sum(last - first for first, last in slots), pool.shape[1]), dtype), 0
    for first, last in slots:
        matrix[at:at + last - first] = pool[first:last]
        at += last - first
    return matrix


def _columns(rows):
    """Keys of a score tile of so many rows."""
    return min(max(COLUMNS, ROWS * COLUMNS // rows), LONGEST)


def _all_heads(work, q, keys, values, found, out, lse, scale, softcap, meanwhile):
    """Attention where every query sees all the keys, where they lie: one product for all KV heads.

    Of few keys it takes a fraction of the time that a call for each head does.
    """
    kv_heads, queries, dtype = len(keys), len(q), out.dtype

    def by_head(array):
        """(queries, heads, ...) as (kv_heads, queries * heads of one, ...)."""
        split = array.reshape(queries, kv_heads, -1, *array.shape[2:])
        return split.swapaxes(0, 1).reshape(kv_heads, -1, *array.shape[2:])
    query = by_head(np.multiply(q, dtype.type(scale), dtype=dtype))
    rows = query.shape[1]
    acc, total = np.zeros((kv_heads, rows, values.shape[2]), dtype), np.zeros((kv_heads, rows, 1), dtype)
    top, product = np.full(total.shape, -np.inf, dtype), work("product", acc.shape, dtype)
    columns = _columns(kv_heads * rows)
    for start, stop in ((start, last) for first, last in found for start in range(first, last, columns)):
        if meanwhile:
            meanwhile()
        at = slice(start, min(start + columns, stop))
        score = work("score", (kv_heads, rows, at.stop - start), dtype)
        np.matmul(query, keys[:, at].swapaxes(1, 2), out=score)
        if softcap is not None:
            score *= 1 / softcap
            np.tanh(score, out=score)
            score *= softcap
        new_top = np.maximum(top, score.max(axis=2, keepdims=True))
        base = np.where(new_top == -np.inf, 0, new_top)
        score -= base
        np.exp(score, out=score)
        decay = np.exp(top - base)
        total *= decay
        total += score.sum(axis=2, keepdims=True)
        acc *= decay
        np.matmul(score, values[:, at], out=product)
        acc += product
        top = new_top
    acc *= np.divide(1, total, out=np.zeros_like(total), where=total != 0)
    top += np.log(total)

    def by_query(array):
        return array.reshape(kv_heads, queries, -1, array.shape[2]).swapaxes(0, 1)
    out[...] = by_query(acc).reshape(out.shape)
    lse[...] = by_query(top).reshape(lse.shape)


def attend(work, q, keys, values, pages, page_size, begin, end, out, lse, scale, softcap, meanwhile=None):
    """See `mpiattn.backends.base.Backend.attend_pages`; work(name, shape, dtype): a work array."""
    out.fill(0)
    lse.fill(-np.inf)
    queries, heads, _ = q.shape
    per_kv = heads // len(keys)
    rows = row_tiles(*(np.repeat(bound, per_kv) for bound in (begin, end)))
    if not rows:
        return
    lo, hi = min(tile.lo for tile in rows), max(tile.hi for tile in rows)
    found = stretches(pages, page_size, lo, hi)
    if keys.dtype == out.dtype and DIRECT * (len(found) - 1) <= hi - lo and (begin == lo).all() and (end == hi).all():
        _all_heads(work, q, keys, values, found, out, lse, scale, softcap, meanwhile)
        return
    columns = _columns(queries * per_kv)
    packed = (queries * per_kv, -1)
    for kv_head in range(len(keys)):
        mine = slice(kv_head * per_kv, (kv_head + 1) * per_kv)
        query, acc, top = (np.ascontiguousarray(array[:, mine]).reshape(packed) for array in (q, out, lse))
        first = lo
        for count, slots in _groups(found, keys.dtype == out.dtype):
            panel = Panel(first, kv_head, _matrix(work, "k", keys[kv_head], slots, out.dtype),
                          _matrix(work, "v", values[kv_head], slots, out.dtype))
            for tile in rows:
                start, stop = max(tile.lo, first), min(tile.hi, first + count)
                if start < stop:
                    tiles.forward(work, tile, query, acc, top[:, 0], scale, softcap, panel, start, stop,
                                  meanwhile, columns)
            first += count
        out[:, mine], lse[:, mine] = acc.reshape(out[:, mine].shape), top.reshape(lse[:, mine].shape)
