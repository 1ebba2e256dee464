"""Launches of the GPU kernels, the same for a GPU and for their emulation on the CPU.

What runs a kernel is left to the back end: `_run(kernel, grid, *arguments)` with its own arrays and NumPy scalars, as
CuPy takes them, in the order of the calls.  It also has `empty` and `contiguous`, and `processors`, the number of a
GPU's multiprocessors.
"""

import numpy as np

from ..errors import ArgumentError
from . import kernel_tiles
from .kernel_source import Kernel
from .kernel_tiles import DECODE_ROWS, attention_kernel, element, score_form

THREADS = 128                     # of a block of the kernels that wait for memory
ELEMENTS_PER_THREAD = 8           # that such a kernel goes through in a loop, so that grids stay small
# Thread blocks that a multiprocessor takes at a time, by their registers and shared memory on sm_90 for head dim 128.
BLOCKS_PER_PROCESSOR = {"forward": 2, "decode": 6}


class KernelLaunches:
    """`attend` and the other launches of `mpiattn.backends.base` that compute, by kernels."""

    dtypes = tuple(kernel_tiles.ELEMENTS)

    def __init__(self):
        super().__init__()
        self._held = {}

    def scratch_bytes(self, head_dim, value_dim, dtype, backward=False):
        rows = {work: kernel_tiles.tile(work, kernel_tiles.itemsize(dtype), head_dim, value_dim).rows
                for work in BLOCKS_PER_PROCESSOR}                  # of the partials of split keys
        return 0 if backward else max(4 * (value_dim + 1) * rows[work] * self._blocks(work) for work in rows)

    def _work_array(self, name, shape, dtype):
        """A work array that the next launches may use, from memory that is kept between calls."""
        size = int(np.prod(shape))
        held = self._held.get((name, dtype))
        if held is None or held.size < size:
            held = self._held[name, dtype] = self.empty((size,), dtype)
        return held[:size].reshape(shape)

    # Attention

    def attend(self, q, k, v, begin, end, out, lse, scale, softcap=None, after=()):
        _check_groups(begin, k.shape[1])
        if len(q) and len(k):
            self._attend(q, k, v, None, len(k), begin, end, out, lse, scale, softcap)

    def attend_pages(self, q, keys, values, pages, page_size, begin, end, out, lse, scale, softcap=None, after=()):
        if len(q):
            self._attend(q, keys, values, pages, len(pages) * page_size, begin[None], end[None], out, lse, scale,
                         softcap, page_size)

    def _attend(self, q, k, v, pages, keys, begin, end, out, lse, scale, softcap, page_size=0):
        """Add to a partial what rows see of a chunk of `keys`, or make it what they see of a pool's pages."""
        tokens, heads, head_dim = q.shape
        kv_heads, value_dim = k.shape[0 if page_size else 1], v.shape[2]
        packed = heads // kv_heads
        score, inner, factor = score_form(scale, softcap)
        work = "decode" if tokens * packed <= DECODE_ROWS else "forward"
        kernel, cut = attention_kernel(work, q.dtype.name, head_dim, value_dim, packed, score, page_size=page_size)
        row_tiles = -(-tokens * packed // cut.rows)
        splits = max(1, min(-(-keys // cut.columns), self._blocks(work) // (row_tiles * kv_heads)))
        into = (out, lse) if splits == 1 else (self._work_array("out", (splits, *out.shape), "float32"),
                                               self._work_array("lse", (splits, *lse.shape), "float32"))
        begin, end = self.contiguous(begin), self.contiguous(end)
        self._run(kernel, (row_tiles, kv_heads, splits), *map(self.contiguous, (q, k, v)), begin, end,
                  self.contiguous(pages) if page_size else begin, *into, np.int32(tokens), np.int32(keys),
                  np.int32(k.shape[1]), np.int32(kv_heads), np.int32(len(begin)), np.float32(inner), np.float32(factor))
        if splits > 1:
            self._merge(out, lse, *into, splits, fresh=bool(page_size))

    def _blocks(self, work):
        """How many thread blocks all multiprocessors take at a time: keys are split where there would be fewer."""
        return BLOCKS_PER_PROCESSOR[work] * self.processors

    def attend_backward(self, q, dout, lse, delta, k, v, begin, end, dq, dk, dv, scale, softcap=None, after=()):
        (tokens, heads, head_dim), (keys, kv_heads, value_dim) = q.shape, v.shape
        _check_groups(begin, kv_heads)
        if not (tokens and keys):
            return
        packed, groups = heads // kv_heads, len(begin)
        score, inner, factor = score_form(scale, softcap)
        of_q, of_kv = (attention_kernel(work, q.dtype.name, head_dim, value_dim, packed, score)
                       for work in ("gradient_q", "gradient_kv"))
        inputs = [self.contiguous(array) for array in (q, dout, lse, delta, k, v, begin, end)]
        numbers = (np.int32(tokens), np.int32(keys), np.int32(kv_heads), np.int32(groups), np.float32(inner),
                   np.float32(factor), np.float32(scale))
        kernel, cut = of_q
        self._run(kernel, (-(-tokens * packed // cut.rows), kv_heads, cut.parts), *inputs, dq, *numbers)
        kernel, cut = of_kv
        tiles = -(-tokens * packed // cut.columns)
        hulls = self._work_array("hulls", (groups, tiles, 4), "int32")
        self._run(hulls_kernel(packed, cut), (tiles, groups, 1), *inputs[-2:], hulls, np.int32(tokens))
        self._run(kernel, (-(-keys // cut.rows), kv_heads, cut.parts), *inputs, hulls, dk, dv, *numbers)

    # Partials

    def _run_rows(self, name, dtype, rows, *arguments):
        """A kernel of partials.cu that gives every row a warp."""
        self._run(partials_kernel(name, dtype), (-(-rows // (THREADS // 32)), 1, 1), *arguments)

    def _merge(self, out, lse, out_b, lse_b, parts, fresh=False):
        self._run_rows("merge", out_b.dtype.name, lse.size, out, lse, out_b, lse_b, np.int64(lse.size),
                       np.int32(out.shape[-1]), np.int32(parts), np.int32(fresh))

    def merge(self, out, lse, out_b, lse_b, after=()):
        self._merge(out, lse, out_b, lse_b, 1)

    def unnormalize(self, out, lse, top):
        self._run_rows("unnormalize", "float32", lse.size, out, lse, top, np.int64(lse.size), np.int32(out.shape[-1]))

    def normalize(self, out, lse, top):
        self._run_rows("normalize", "float32", lse.size, out, lse, top, np.int64(lse.size), np.int32(out.shape[-1]))

    def add(self, arrays, others, after=()):
        for array, other in zip(arrays, others):
            self._run(partials_kernel("add", other.dtype.name), _flat_grid(array), array, other, np.int64(array.size))

    def delta(self, delta, dout, out, dlse):
        given = dlse is not None
        self._run_rows("delta", dout.dtype.name, delta.size, delta, dout, out, dlse if given else delta,
                       np.int64(delta.size), np.int32(dout.shape[-1]), np.int32(given))

    def sink(self, out, lse, sinks):
        self._run_rows("sink", "float32", lse.size, out, lse, sinks, np.int64(lse.size), np.int32(lse.shape[1]),
                       np.int32(out.shape[-1]))

    def sink_gradient(self, gradient, sinks, lse, delta):
        self._run(partials_kernel("sink_gradient", "float32"), (len(gradient), 1, 1), gradient, sinks, lse, delta,
                  np.int32(len(lse)), np.int32(len(gradient)))

    def copy(self, dst, src):
        shape = [np.int64(n) for n in (1,) * (4 - dst.ndim) + dst.shape]
        strides = [np.int64(n // array.itemsize) for array in (dst, src)
                   for n in (0,) * (4 - dst.ndim) + array.strides]
        self._run(cast_kernel(dst.dtype.name, src.dtype.name), _flat_grid(dst), dst, src, *shape, *strides)


def partials_kernel(name, dtype):
    """A kernel of partials.cu, for partials or outputs of a dtype."""
    shared = THREADS // 32 * 8 if name == "sink_gradient" else 0
    return Kernel(name, "partials.cu", (("ELEMENT", element(dtype)), ("THREADS", THREADS)), THREADS, shared)


def hulls_kernel(heads_per_kv, cut):
    """The kernel that says which keys the tiles of rows see that gradient_kv goes through."""
    return Kernel("hulls", "hulls.cu", (("HEADS_PER_KV", heads_per_kv), ("TILE_COLUMNS", cut.columns)), 32)


def cast_kernel(to, of):
    """The kernel that casts one dtype to another."""
    return Kernel("cast", "cast.cu", (("TARGET", element(to)), ("ELEMENT", element(of)), ("THREADS", THREADS)), THREADS)


def _flat_grid(array):
    return -(-array.size // (THREADS * ELEMENTS_PER_THREAD)), 1, 1


def _check_groups(begin, kv_heads):
    if kv_heads % len(begin):
        raise ArgumentError(f"begin has {len(begin)} groups of heads; of {kv_heads} KV heads it may have a divisor")
