"""The NumPy back end: a launch is complete when it returns.  It accumulates in float32, or in float64 for float64."""

import functools
import itertools
import os

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ...errors import ArgumentError
from ...model.machine import DEFAULT
from ...problem.tensors import what_is
from ..block import BackwardInputs, BlockInputs
from ..kept import Kept
from ..pages import Tables
from ..wire import in_memory
from . import paged, tiles
from .casts import narrow, widen
from .tiles import Panel, row_tiles

PANEL = 4096  # keys of one head that are converted or made contiguous at a time
LOWEST = float(np.finfo(np.float32).min)
MERGED = 2**16  # elements of a partial that are merged at a time, to bound the work arrays
NARROWED = 2**12  # elements that are rounded at a time, in a few arrays of as many
PACKED = "q", "k", "v", "begin", "end", "scale", "softcap"  # the fields of a block whose heads are packed
UNPACKED = [name for name in BlockInputs._fields if name not in PACKED]


def _packing(block):
    """Number of query heads of a KV head to pack into one: all if one head has fewer rows than a row tile, else 1.

    One product of many rows is faster than many products of few rows.  Packed heads must share their intervals, and a
    block that has other fields stays as it is.
    """
    if len(block.begin) > 1 or len(block.q) >= tiles.ROWS or any(getattr(block, name) is not None for name in UNPACKED):
        return 1
    return block.q.shape[1] // max(block.k.shape[1], 1)


def _by_packed(array, packed, per_kv):
    """Views of one shape (tokens, KV heads, per_kv, ...) of `array` and `packed`.

    array: (tokens, heads, ...).  packed: (tokens * per_kv, KV heads, ...).
    """
    tokens, heads, *dim = array.shape
    return (
        array.reshape(tokens, heads // per_kv, per_kv, *dim),
        packed.reshape(tokens, per_kv, heads // per_kv, *dim).swapaxes(1, 2),
    )


def _pack(work, name, array, per_kv):
    """Copy an array (tokens, heads, ...) into a work array (tokens * per_kv, KV heads, ...)."""
    tokens, heads, *dim = array.shape
    packed = work(name, (tokens * per_kv, heads // per_kv, *dim), array.dtype)
    source, target = _by_packed(array, packed, per_kv)
    target[...] = source
    return packed


def _unpack(array, packed, per_kv):
    """Copy `packed`, as `_pack` makes it, back into `array`."""
    target, source = _by_packed(array, packed, per_kv)
    target[...] = source


def _some_tokens(array, elements=MERGED):
    """Slices that cover the tokens of a partial's out, each of at most so many elements or one token."""
    step = max(1, elements // max(1, array[:1].size))
    return (slice(start, start + step) for start in range(0, len(array), step))


def _seen_panels(all_rows, keys):
    """Every panel that some row sees: (first key, end, [(group, row tile)]) with the row tiles that see a key of it."""
    for first in range(0, keys, PANEL):
        last = min(first + PANEL, keys)
        seen = [(g, rows) for g, rows in all_rows if rows.lo < last and rows.hi > first]
        if seen:
            yield first, last, seen


def _counted(meanwhile, all_rows, keys, per_group):
    """A callback to call before each score tile: it calls `meanwhile` with the fraction of the tiles done so far."""
    panels = _seen_panels(all_rows, keys)
    spans = (rows.within(first, last) for first, last, seen in panels for _, rows in seen)
    count, number = per_group * sum(-(-(hi - lo) // tiles.COLUMNS) for lo, hi in spans), itertools.count()
    return lambda: meanwhile(next(number) / count)


def _merge(work, out, lse, out_b, lse_b):
    """`NumpyBackend.merge` of some rows, in few NumPy calls: for one token's partial, call overhead dominates."""
    weight = np.maximum(lse_b, LOWEST)  # if both are empty, -inf - -inf would be nan
    np.subtract(lse, weight, out=weight)
    np.exp(weight, out=weight)
    weight += 1
    np.reciprocal(weight, out=weight)  # the weight of out_b
    np.logaddexp(lse, lse_b, out=lse)
    out *= (1 - weight)[..., None]
    out += np.multiply(weight[..., None], out_b, out=work("product", out.shape, out.dtype))


class NumpyBackend:
    """The protocol of `mpiattn.backends.base` on NumPy arrays."""

    name = "numpy"
    version = np.__version__
    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16", "float16")
    transport, transport_why = None, ""
    assumed_machine = DEFAULT
    emulated_flops = None
    staged_bytes = 0
    strided = False
    takes_lists = False
    sends_blocks = True
    dlse_on_all = False
    takes: tuple[str, ...] = BlockInputs._fields
    idle = staticmethod(os.sched_yield)

    def __init__(self):
        self._work = Kept(np.empty)  # contiguous work arrays

    @classmethod
    def missing(cls):
        return ""

    @classmethod
    def adopt(cls, arrays):
        return arrays

    def device_memory(self):
        return None

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    def array(self, name, argument):
        if type(argument) is np.ndarray:  # nearly always, and it costs least to see
            return argument
        if not isinstance(argument, np.ndarray) or isinstance(argument, np.ma.MaskedArray):
            raise ArgumentError(f"{name} is a {type(argument).__name__}; it must be a NumPy array{what_is(argument)}")
        return argument

    def result(self, shape, dtype, like=None):
        return np.empty(shape, dtype)

    def give(self, array, like=None):
        return array

    def writable(self, name, argument):
        array = self.array(name, argument)
        if not array.flags.writeable:
            raise ArgumentError(f"{name} is read-only; it must be an array that can be written to")
        return array

    def contiguous(self, array, alignment=None, empty=None):
        array = np.asarray(array)
        if array.flags.c_contiguous:
            return array
        copy = (empty or np.empty)(array.shape, array.dtype)
        np.copyto(copy, array)
        return copy

    def accumulates(self, array):
        return array.flags.c_contiguous and array.flags.aligned

    def new_call(self):
        pass

    def begin(self):
        pass

    def finish(self):
        pass

    def drain(self):
        pass

    def scratch_bytes(self, head_dim, value_dim, dtype, backward=False, shared_kv=False, lists=False):
        work = np.dtype("float64" if dtype == "float64" else "float32").itemsize
        panels = PANEL * (head_dim + (0 if shared_kv else value_dim))
        rows = tiles.ROWS * (tiles.COLUMNS + head_dim + 2 * value_dim)
        hidden = 2 * tiles.ROWS * tiles.COLUMNS + tiles.COLUMNS * max(head_dim, value_dim)  # bytes, of booleans
        if not backward:
            return work * (panels + rows + 2 * MERGED) + hidden
        columns = tiles.COLUMNS * (2 * tiles.ROWS + head_dim + value_dim)
        return work * (2 * panels + rows + columns + 3 * MERGED) + hidden

    # Launches

    def clear(self, out, lse):
        out.fill(0)
        lse.fill(-np.inf)

    def attend(self, block, out, lse, after=(), meanwhile=None):
        per_kv = _packing(block)
        if per_kv > 1:
            partial = [
                _pack(self._work, name, array, per_kv) for name, array in (("packed out", out), ("packed lse", lse))
            ]
            NumpyBackend.attend(self, self._packed(block, per_kv), *partial, meanwhile=meanwhile)
            for array, packed in zip((out, lse), partial):
                _unpack(array, packed, per_kv)
            return
        with np.errstate(all="ignore"):  # NaN from inf - inf and the like is a valid result here
            for panel, row_tiles_of_heads, report in self._panels(block, out.shape[2], out.dtype, meanwhile):
                for rows, head in row_tiles_of_heads:
                    tiles.forward(self._work, rows, head, block, (out, lse), panel, tiles.COLUMNS, report)

    def _packed(self, block, per_kv):
        """The block with so many query heads of a KV head packed into one."""
        begin, end = (np.repeat(side, per_kv, axis=1) for side in (block.begin, block.end))
        return block._replace(q=_pack(self._work, "packed q", block.q, per_kv), begin=begin, end=end)

    def attend_pages(self, block, out, lse, after=(), meanwhile=None):
        tables = Tables.of(block.pages)
        with np.errstate(all="ignore"):
            split = len(tables), len(block.q) // len(tables)
            of_rows = zip(
                *(array.reshape(*split, *array.shape[1:]) for array in (block.q, block.begin, block.end, out, lse))
            )
            biases = itertools.repeat(None)
            if block.bias is not None:
                biases = block.bias.reshape(*split, *block.bias.shape[1:])
            for number, (table, bias, (q, begin, end, *partial)) in enumerate(zip(tables, biases, of_rows)):
                report = meanwhile and functools.partial(meanwhile, number / len(tables))
                of_sequence = block._replace(q=q, begin=begin, end=end, pages=table, bias=bias)
                paged.attend(self._work, of_sequence, *partial, report)

    def unnormalize(self, out, lse, top):
        with np.errstate(all="ignore"):
            for tokens in _some_tokens(out):
                np.exp(lse[tokens] - np.where(top[tokens] == -np.inf, 0, top[tokens]), out=lse[tokens])
                out[tokens] *= lse[tokens][..., None]

    def normalize(self, out, lse, top):
        with np.errstate(all="ignore"):
            for tokens in _some_tokens(out):
                out[tokens] /= np.where(lse[tokens] == 0, 1, lse[tokens])[..., None]
                lse[tokens] = top[tokens] + np.log(lse[tokens])

    def attend_backward(self, block, given, grads, after=(), meanwhile=None):
        per_kv = _packing(block)
        if per_kv > 1:
            names = "packed dout", "packed lse", "packed delta", "packed dq"
            *rows, dq = (_pack(self._work, name, a, per_kv) for name, a in zip(names, (*given, grads.dq), strict=True))
            NumpyBackend.attend_backward(
                self, self._packed(block, per_kv), BackwardInputs(*rows), grads._replace(dq=dq), meanwhile=meanwhile
            )
            _unpack(grads.dq, dq, per_kv)
            return
        with np.errstate(all="ignore"):
            (dq, dk, dv, _), value_dim = grads, given.dout.shape[2]
            for panel, row_tiles_of_heads, report in self._panels(block, value_dim, dq.dtype, meanwhile):
                keys = slice(panel.first, panel.first + len(panel.keys)), panel.kv_head
                dk_panel = self._panel("dk", dk[keys], dq.dtype)
                dv_panel = dk_panel[:, :value_dim] if dv is None else self._panel("dv", dv[keys], dq.dtype)
                sums = grads._replace(dk=dk_panel, dv=dv_panel)
                for rows, head in row_tiles_of_heads:
                    tiles.backward(self._work, rows, head, block, given, sums, panel, report)
                dk[keys] = dk_panel
                if dv is not None:
                    dv[keys] = dv_panel

    def _panels(self, block, value_dim, dtype, meanwhile):
        """Yield (panel, row_tiles_of_heads, report) for every panel of a KV head that some row sees.

        row_tiles_of_heads: [(row tile, query head)] of those rows.
        report: to call before each score tile, or None.
        """
        q, k, v, begin, end = block[:5]
        per_kv, per_group = q.shape[1] // k.shape[1], q.shape[1] // len(begin)
        all_rows = [(g, rows) for g in range(len(begin)) for rows in row_tiles(begin[g], end[g])]
        report = meanwhile and _counted(meanwhile, all_rows, len(k), per_group)
        for first, last, seen in _seen_panels(all_rows, len(k)):
            for kv_head in range(k.shape[1]):
                keys = self._panel("k", k[first:last, kv_head], dtype)
                values = keys[:, :value_dim] if v is None else self._panel("v", v[first:last, kv_head], dtype)
                panel = Panel(first, kv_head, keys, values)
                heads = range(kv_head * per_kv, (kv_head + 1) * per_kv)
                yield panel, [(rows, head) for head in heads for g, rows in seen if head // per_group == g], report

    def _panel(self, name, source, dtype):
        """Keys of one head as a contiguous work array of `dtype`, the accumulation dtype."""
        panel = self._work(name, source.shape, dtype)
        widen(panel, source)
        return panel

    def delta(self, delta, dout, out, dlse):
        with np.errstate(all="ignore"):
            for tokens in _some_tokens(out):
                values = self._wide("values", out[tokens], delta.dtype)
                product = self._work("product", out[tokens].shape, delta.dtype)
                np.multiply(self._wide("other", dout[tokens], delta.dtype), values, out=product)
                np.sum(product, axis=-1, out=delta[tokens])
                odd = ~np.isfinite(delta[tokens])
                if odd.any():
                    delta[tokens][odd & ~values.any(axis=-1)] = 0
            if dlse is not None:
                delta -= dlse

    def _wide(self, name, array, dtype):
        """The array in `dtype`, as a work array if that is not its own."""
        if array.dtype == dtype:
            return array
        wide = self._work(name, array.shape, dtype)
        widen(wide, array)
        return wide

    def zero(self, arrays):
        for array in arrays:
            array.fill(0)

    def add(self, arrays, others, after=()):
        with np.errstate(all="ignore"):
            for array, other in zip(arrays, others):
                for tokens in _some_tokens(array):
                    array[tokens] += self._wide("other", other[tokens], array.dtype)

    def merge(self, out, lse, out_b, lse_b, after=()):
        with np.errstate(all="ignore"):
            for tokens in _some_tokens(out):
                other = self._wide("other", out_b[tokens], out.dtype)
                _merge(self._work, out[tokens], lse[tokens], other, lse_b[tokens])

    def sink(self, out, lse, sinks):
        with np.errstate(all="ignore"):
            for tokens in _some_tokens(out):
                unseen = lse[tokens] == -np.inf  # out of such a row is 0, whatever its weight
                out[tokens] *= np.where(unseen, 1, 1 / (1 + np.exp(sinks - lse[tokens])))[..., None]
                np.logaddexp(lse[tokens], sinks, out=lse[tokens])

    def sink_gradient(self, gradient, sinks, lse, delta):
        with np.errstate(all="ignore"):
            weight = np.where(sinks == -np.inf, 0, np.exp(sinks - lse))
            gradient[...] = -np.sum(weight * delta, axis=0, dtype=np.float64)

    def take(self, dst, src, rows, after=()):
        np.take(src, rows, axis=0, out=dst, mode="clip")  # mode "raise" would buffer the whole result

    def copy(self, dst, src, after=()):
        if dst.dtype == src.dtype:
            np.copyto(dst, src)
            return
        with np.errstate(all="ignore"):  # a cast to a narrower dtype may overflow or underflow
            if dst.dtype != np.float16 or src.dtype != np.float32 or dst.shape != src.shape or dst.ndim < 3:
                np.copyto(dst, src, casting="same_kind")
                return
            if dst.flags.c_contiguous and src.flags.c_contiguous:
                dst, src = (array.reshape(-1, *array.shape[-2:]) for array in (dst, src))
            for entry in np.ndindex(dst.shape[:-3]):
                for tokens in _some_tokens(dst[entry], NARROWED):
                    narrow(dst[entry][tokens], src[entry][tokens])

    def accumulate(self, dst, src):
        shared = tuple(axis for axis in range(4) if dst.shape[axis] == 1 < src.shape[axis])
        with np.errstate(all="ignore"):
            dst += src.sum(axis=shared, keepdims=True, dtype=dst.dtype) if shared else src

    def sheared(self, array, tokens):
        *_, rows, width = array.shape
        of_row = (array.strides[2] if rows > 1 else 0) - array.itemsize
        shape = *array.shape[:2], tokens, width - tokens + 1
        return as_strided(array[..., tokens - 1 :], shape, (*array.strides[:2], of_row, array.itemsize))

    def scatter(self, pool, slots, src, entries, tokens):
        if pool.dtype.isbuiltin != 1:  # NumPy copies bfloat16 faster as integers
            pool, src = pool.view(np.int16), src.view(np.int16)
        if len(slots) == 1:
            pool[:, slots[0]] = src[entries[0], tokens if isinstance(tokens, int) else tokens[0]]
        else:  # a view where all entries are meant, so that nothing is gathered first
            rows = src[:, tokens] if isinstance(tokens, int) and len(entries) == len(src) else src[entries, tokens]
            pool[:, slots] = rows.swapaxes(0, 1)

    # Wire

    def outgoing(self, array, after=(), collective=False):
        return in_memory(array)

    def sent(self, array):
        pass

    def incoming(self, array, after=(), collective=False):
        return in_memory(array)

    def arrived(self, array):
        pass

    def forget(self, array):
        pass

    def wait(self, event):
        pass

    def close(self):
        self._work.clear()
