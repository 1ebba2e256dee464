"""Kernels, grids and scalar arguments of launches, computed once for each combination of shapes."""

import math
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from .decode_work import MOST_ITEMS
from .extras import Extras, Owners, options_of
from .kernel_source import Kernel
from .tile_table import DECODE_ROWS, Blocks, attention_kernel, blocks_per_processor, element, score_form

THREADS = 128  # of a block of the memory-bound kernels
WARPS = THREADS // 32
MOST_REGISTERS = 255  # of a thread
# gradient_kv's row tiles are split until there are so many thread blocks for each place on the GPU.  They then end at
# about the same time, although under a causal mask some have much more work than others.
ROUNDS = 4
MOST_SPLITS = 16
LEAST_ROW_TILES = 8  # of a split, so that its sums, which are written and added, cost little
KEPT = 1024  # entries of each cache of launches


class Launch(NamedTuple):
    """A launch without its arrays.  numbers: scalar arguments.  alignment: bytes that divide the result's address.

    of_gradient: scalar arguments that follow the gradient of a bias.
    """

    kernel: Kernel
    grid: tuple
    numbers: tuple
    alignment: int = 4
    of_gradient: tuple = ()


class BlockShape(NamedTuple):
    """All that the launches of a block depend on: what does not change from call to call.

    q, k: shapes of these arrays.  groups: groups of heads with their own intervals, or sequences in pages.
    page_size: 0 if the keys are a chunk.  shared_kv: whether keys hold the values.  extras: `Extras` or None.
    """

    q: tuple
    k: tuple
    value_dim: int
    groups: int
    dtype: np.dtype
    scale: float
    softcap: float | None
    page_size: int
    shared_kv: bool
    extras: Extras | None = None

    @classmethod
    def of(cls, block, value_dim, groups, extras=None):
        """Of a `mpiattn.backends.block.BlockInputs`."""
        q, k, v = block[:3]
        shared_kv, page_size = v is None, block.page_size or 0
        return cls(
            q.shape, k.shape, value_dim, groups, q.dtype, block.scale, block.softcap, page_size, shared_kv, extras
        )


def _alignment(dim):
    """Bytes of alignment of a float32 array with rows of `dim` numbers: kernels write up to four numbers at a time."""
    return 4 * math.gcd(dim, 4)


def _forward(of, tokens, packed, architecture):
    """(work, kernel, tile, inner and factor) of attention of `tokens` tokens with `packed` query heads per KV head."""
    score, inner, factor = score_form(of.scale, of.softcap)
    work = "decode" if tokens * packed <= DECODE_ROWS else "forward"
    options = options_of(of.extras, work)
    blocks = Blocks(of.dtype.name, of.q[2], of.value_dim, packed, score, of.page_size, of.shared_kv, options)
    kernel, cut = attention_kernel(work, blocks, architecture)
    return work, kernel, cut, (np.float32(inner), np.float32(factor))


def places(kernel, architecture, processors):
    """The number of thread blocks of a kernel that a GPU holds at a time, if it takes all registers of a thread."""
    return max(1, blocks_per_processor(kernel, MOST_REGISTERS, architecture)) * processors


@lru_cache(KEPT)
def forward_launch(of, architecture, processors):
    """The `Launch` of attention of q to the keys of a chunk.  of: a `BlockShape`.

    The grid is (row tiles * KV heads, splits, 1).  If there would be fewer thread blocks than all multiprocessors hold
    at a time, each tile's keys are split.
    """
    (tokens, heads, _), (keys, kv_heads, _) = of.q, of.k
    _, kernel, cut, factors = _forward(of, tokens, heads // kv_heads, architecture)
    tiles = -(-tokens * (heads // kv_heads) // cut.rows) * kv_heads
    splits = max(1, min(-(-keys // cut.columns), places(kernel, architecture, processors) // tiles))
    numbers = *map(np.int32, (tokens, keys, kv_heads, of.groups)), *factors
    return Launch(kernel, (tiles, splits, 1), numbers, _alignment(of.value_dim))


class PagesLaunch(NamedTuple):
    """A launch on the keys of a pool, but for what its work decides.

    work: "decode" or "forward".  columns: keys of a tile.  blocks: thread blocks of an item of work.  places: thread
    blocks that the GPU holds at a time.  The others are as of `Launch`.
    """

    kernel: Kernel
    work: str
    columns: int
    blocks: int
    places: int
    numbers: tuple
    alignment: int


@lru_cache(KEPT)
def pages_launch(of, architecture, processors):
    """The `PagesLaunch` of attention of the queries of some sequences to their keys in a pool.  of: a `BlockShape`."""
    (rows, heads, _), (kv_heads, slots, _) = of.q, of.k
    tokens, packed = rows // of.groups, heads // kv_heads
    work, kernel, cut, factors = _forward(of, tokens, packed, architecture)
    return PagesLaunch(
        kernel,
        work,
        cut.columns,
        -(-tokens * packed // cut.rows) * kv_heads,
        places(kernel, architecture, processors),
        (*map(np.int32, (tokens, slots, kv_heads, of.groups)), *factors),
        _alignment(of.value_dim),
    )


@lru_cache(KEPT)
def backward_launches(of, architecture, processors):
    """The launches of a block's gradients: dq, then the hulls of gradient_kv's row tiles, then dk and dv.

    of: a `BlockShape`.  The grid of the last is (key tiles * KV heads, parts, splits).  Where
    gradient_kv sums the gradient of a bias, `key_sums` comes last, else None.
    """
    (tokens, heads, head_dim), (keys, kv_heads, _), value_dim, groups = of.q, of.k, of.value_dim, of.groups
    packed = heads // kv_heads
    score, inner, factor = score_form(of.scale, of.softcap)
    extras, sums_keys = of.extras, of.extras is not None and of.extras.sums_keys
    owners = Owners(packed, kv_heads, 1, 0, 1)
    if extras is not None and extras.dbias is not None and not sums_keys:
        owners = Owners.of(extras.dbias, heads, packed)
    all_packed, packed = packed, 1 if sums_keys else packed  # of gradient_kv, which sums those of each query head
    (of_q, q_cut), (of_kv, kv_cut) = (
        attention_kernel(
            work,
            Blocks(of.dtype.name, head_dim, value_dim, together, score, 0, of.shared_kv, options_of(extras, work)),
            architecture,
        )
        for work, together in (("gradient_q", owners.packed), ("gradient_kv", packed))
    )
    numbers = *map(np.int32, (tokens, keys, kv_heads, groups)), *map(np.float32, (inner, factor, of.scale))
    tiles, key_tiles = -(-tokens * packed // kv_cut.columns), -(-keys // kv_cut.rows) * kv_heads
    splits = 1
    if head_dim % 4 == value_dim % 4 == 0:  # add_splits adds four numbers at a time
        wanted = ROUNDS * places(of_kv, architecture, processors) // (key_tiles * kv_cut.parts)
        splits = max(1, min(MOST_SPLITS, wanted, tiles // LEAST_ROW_TILES))
    of_sums = None
    if sums_keys:
        of_sums = key_sums(extras.dbias, (splits * kv_cut.column_warps, heads, keys))
    q_tiles = -(-tokens * owners.packed // q_cut.rows)
    return (
        Launch(
            of_q, (q_tiles * owners.number, q_cut.parts, 1), numbers, _alignment(head_dim), owners.numbers(all_packed)
        ),
        Launch(hulls_kernel(packed, kv_cut), (tiles * groups, 1, 1), (np.int32(tokens),)),
        Launch(
            of_kv,
            (key_tiles, kv_cut.parts, splits),
            (*numbers, np.int32(-(-tiles // splits))),
            _alignment(value_dim),
            (np.int32(all_packed),),
        ),
        of_sums,
    )


@cache
def scratch_bytes(dtype, head_dim, value_dim, architecture, processors, backward, shared_kv):
    """Bytes of the work arrays that launches on such inputs need at most."""

    def held(work):
        """Rows of the tiles that the GPU holds at a time."""
        kernel, cut = attention_kernel(work, Blocks(dtype, head_dim, value_dim, 1, shared_kv=shared_kv), architecture)
        return places(kernel, architecture, processors) * cut.rows

    if backward:  # sums of dk, and of dv, of all splits
        return 4 * ROUNDS * held("gradient_kv") * (head_dim + (0 if shared_kv else value_dim))
    return 4 * (value_dim + 1) * max(held("forward"), held("decode")) * MOST_ITEMS


@cache
def partials_kernel(name, dtype, vector=1, threads=THREADS):
    """The kernel `name` of partials.cu, for partials or outputs of a dtype.  vector: elements at a time."""
    shared = {"sink_gradient": threads // 32 * 8, "merge_parts": threads * 16}.get(name, 0)  # bytes
    defines = ("ELEMENT", element(dtype)), ("THREADS", threads), ("VECTOR", vector)
    return Kernel(name, "partials.cu", defines, threads, shared)


def key_sums(dbias, shape):
    """The `Launch` that adds sums (parts, heads, keys) of gradient_kv to a gradient, and the shape.  dbias: `Rows`."""
    parts, heads, keys = shape
    (own_sequences, own_heads, _), of_sequence = dbias.shape, dbias.heads_of_sequence(heads)
    numbers = (
        *dbias.numbers()[:2],
        *map(np.int32, (keys, heads // of_sequence, of_sequence, own_sequences, own_heads, parts)),
    )
    grid = -(-own_sequences * own_heads * keys // THREADS), 1, 1
    return Launch(partials_kernel("add_key_sums", "float32"), grid, numbers), shape


def merge_kernel(parts):
    """The kernel that merges at most so many parts of a row: with many, more warps wait for memory at a time."""
    return partials_kernel("merge_parts", "float32", threads=THREADS if parts <= 32 else 4 * THREADS)


@cache
def hulls_kernel(heads_per_kv, cut):
    """The kernel that computes which keys each row tile of gradient_kv sees."""
    return Kernel("hulls", "hulls.cu", (("HEADS_PER_KV", heads_per_kv), ("TILE_COLUMNS", cut.columns)), 32)


@cache
def cast_kernel(to, of, vector=1, small=True):
    """The kernel that casts dtype `of` to `to`, `vector` elements at a time.  small: fewer than 2 ** 31 elements."""
    return Kernel(
        "cast",
        "cast.cu",
        (
            ("TARGET", element(to)),
            ("ELEMENT", element(of)),
            ("THREADS", THREADS),
            ("VECTOR", vector),
            ("INDEX", "unsigned" if small else "size_t"),
        ),
        THREADS,
    )
