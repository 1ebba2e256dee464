"""Kernels, grids and scalar arguments of launches, computed once for each combination of shapes."""

import math
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from .kernel_source import Kernel
from .tile_table import DECODE_ROWS, attention_kernel, element, score_form

THREADS = 128  # of a block of the memory-bound kernels
WARPS = THREADS // 32
# Thread blocks that a multiprocessor holds at a time: by registers and shared memory on sm_90, for head dim 128.
BLOCKS_PER_PROCESSOR = {"forward": 2, "decode": 6}
KEPT = 1024  # entries of each cache of launches


class Launch(NamedTuple):
    """A launch without its arrays.  numbers: scalar arguments.  alignment: bytes that divide the result's address."""

    kernel: Kernel
    grid: tuple
    numbers: tuple
    alignment: int = 4


def _alignment(dim):
    """Bytes of alignment of a float32 array with rows of `dim` numbers: kernels write up to four numbers at a time."""
    return 4 * math.gcd(dim, 4)


@lru_cache(KEPT)
def forward_launch(
    q_shape, k_shape, value_dim, groups, keys, dtype, scale, softcap, page_size, architecture, processors, shared_kv
):
    """The `Launch` of attention of q to `keys` keys of a chunk or, if page_size is not 0, of a pool.

    groups: groups of heads with their own intervals, or sequences of a pool.  shared_kv: whether keys hold the values.

    The grid is (row tiles * KV heads * sequences, splits, 1).  If there would be fewer thread blocks than all
    multiprocessors hold at a time, each tile's keys are split.
    """
    (tokens, heads, head_dim), kv_heads = q_shape, k_shape[0 if page_size else 1]
    packed, sequences = heads // kv_heads, groups if page_size else 1
    tokens //= sequences
    score, inner, factor = score_form(scale, softcap)
    work = "decode" if tokens * packed <= DECODE_ROWS else "forward"
    kernel, cut = attention_kernel(
        work, dtype.name, head_dim, value_dim, packed, score, architecture, page_size=page_size, shared_kv=shared_kv
    )
    tiles = -(-tokens * packed // cut.rows) * kv_heads * sequences
    splits = max(1, min(-(-keys // cut.columns), BLOCKS_PER_PROCESSOR[work] * processors // tiles))
    numbers = *map(np.int32, (tokens, keys, k_shape[1], kv_heads, groups)), np.float32(inner), np.float32(factor)
    return Launch(kernel, (tiles, splits, 1), numbers, _alignment(value_dim))


@lru_cache(KEPT)
def backward_launches(q_shape, k_shape, value_dim, groups, dtype, scale, softcap, architecture, shared_kv):
    """The launches of a block's gradients: dq, then the hulls of gradient_kv's row tiles, then dk and dv."""
    (tokens, heads, head_dim), (keys, kv_heads, _) = q_shape, k_shape
    packed = heads // kv_heads
    score, inner, factor = score_form(scale, softcap)
    (of_q, q_cut), (of_kv, kv_cut) = (
        attention_kernel(work, dtype.name, head_dim, value_dim, packed, score, architecture, shared_kv=shared_kv)
        for work in ("gradient_q", "gradient_kv")
    )
    numbers = *map(np.int32, (tokens, keys, kv_heads, groups)), *map(np.float32, (inner, factor, scale))
    tiles = -(-tokens * packed // kv_cut.columns)
    return (
        Launch(of_q, (-(-tokens * packed // q_cut.rows) * kv_heads, q_cut.parts, 1), numbers, _alignment(head_dim)),
        Launch(hulls_kernel(packed, kv_cut), (tiles * groups, 1, 1), (np.int32(tokens),)),
        Launch(of_kv, (-(-keys // kv_cut.rows) * kv_heads, kv_cut.parts, 1), numbers, _alignment(value_dim)),
    )


@cache
def partials_kernel(name, dtype, vector=1):
    """The kernel `name` of partials.cu, for partials or outputs of a dtype.  vector: elements at a time."""
    shared = {"sink_gradient": WARPS * 8, "merge_parts": THREADS * 16}.get(name, 0)  # bytes
    defines = ("ELEMENT", element(dtype)), ("THREADS", THREADS), ("VECTOR", vector)
    return Kernel(name, "partials.cu", defines, THREADS, shared)


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
