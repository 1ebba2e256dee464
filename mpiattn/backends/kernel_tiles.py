"""The tile table: how each kernel cuts its work for each head dim, and the kernels that follow from it.

One table for the compiler, which gets its numbers as constants, and for the host, which needs them to launch.
All of it fits 99 KiB of shared memory (sm_86, sm_89), and no entry makes the compiler spill registers on sm_80 and
sm_90; a test compiles them all.  Where keys are in pages that is promised of "decode" alone, and not of float32 with
head dims above 192 and a query head for each KV head on sm_80, which spills 260 bytes.  The sizes follow
FlashAttention-2's; none has been measured yet.
"""

import math
from typing import NamedTuple

from ..errors import ArgumentError
from .kernel_source import Kernel

LARGEST_DIM = 256
SHARED_LIMIT = 99 * 1024
ELEMENTS = {"float32": "float", "float16": "f16", "bfloat16": "bf16"}
DECODE_ROWS = 64            # up to so many packed rows of a KV head, the keys are split over thread blocks


class Tile(NamedTuple):
    """Rows and columns of scores that a thread block makes at a time, its warps, and how many column tiles it holds.

    rows: whose results stay in registers; queries, but keys in gradient_kv.  columns: of the other side.
    parts: the columns of the results are divided among so many thread blocks, which make the scores anew.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    parts: int = 1


# By bytes of an element, and the larger of head dim and value dim rounded up.
TILES = {
    "forward": {
        2: {32: Tile(128, 128, 4, 1), 64: Tile(128, 64, 4, 2), 96: Tile(128, 64, 4, 1), 128: Tile(128, 64, 4, 1),
            192: Tile(128, 64, 8, 1), 256: Tile(64, 64, 4, 1)},
        4: {32: Tile(128, 32, 4, 2), 64: Tile(128, 32, 4, 2), 96: Tile(64, 32, 4, 1), 128: Tile(64, 32, 4, 1),
            192: Tile(64, 32, 4, 1), 256: Tile(64, 16, 4, 1)}},
    "decode": {
        2: {32: Tile(16, 64, 1, 2), 64: Tile(16, 64, 1, 2), 96: Tile(16, 32, 1, 2), 128: Tile(16, 32, 1, 2),
            192: Tile(16, 32, 1, 2), 256: Tile(16, 32, 1, 2)},
        4: {32: Tile(16, 32, 1, 2), 64: Tile(16, 32, 1, 2), 96: Tile(16, 16, 1, 2), 128: Tile(16, 16, 1, 2),
            192: Tile(16, 16, 1, 2), 256: Tile(16, 16, 1, 2)}},
    "gradient_q": {
        2: {32: Tile(64, 64, 4, 2), 64: Tile(64, 64, 4, 2), 96: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2),
            192: Tile(64, 32, 4, 2), 256: Tile(64, 32, 4, 1, 2)},
        4: {32: Tile(64, 32, 4, 2), 64: Tile(64, 32, 4, 2), 96: Tile(64, 32, 4, 1), 128: Tile(64, 32, 4, 1),
            192: Tile(32, 32, 2, 1), 256: Tile(32, 16, 2, 1, 2)}},
    "gradient_kv": {
        2: {32: Tile(64, 64, 4, 2), 64: Tile(64, 64, 4, 2), 96: Tile(64, 32, 4, 2), 128: Tile(64, 32, 4, 2),
            192: Tile(64, 32, 4, 2, 2), 256: Tile(64, 32, 4, 1, 2)},
        4: {32: Tile(64, 32, 4, 2), 64: Tile(64, 32, 4, 2), 96: Tile(64, 32, 4, 1), 128: Tile(64, 16, 4, 1),
            192: Tile(32, 32, 2, 1, 2), 256: Tile(32, 16, 2, 1, 2)}},
}


def _padded(dim):
    return -(-dim // 32) * 32


def tile(work, itemsize, head_dim, value_dim):
    """The entry of the table for some work, "forward", "decode", "gradient_q" or "gradient_kv"."""
    if max(head_dim, value_dim) > LARGEST_DIM:
        raise ArgumentError(f"head_dim is {head_dim}, value_dim {value_dim}; the GPU kernels take up to {LARGEST_DIM}")
    table = TILES[work][itemsize]
    return table[min(dim for dim in table if dim >= max(head_dim, value_dim))]


def element(dtype):
    """The kernels' name of a dtype, given as a string."""
    if dtype not in ELEMENTS:
        raise ArgumentError(f"dtype is {dtype}; the GPU kernels take {', '.join(ELEMENTS)}")
    return ELEMENTS[dtype]


def itemsize(dtype):
    """Bytes of an element."""
    return 4 if element(dtype) == "float" else 2


def score_form(scale, softcap):
    """(SCORE, inner, factor) of kernels/cuda/softmax.cuh."""
    if softcap is not None:
        return 2, scale / softcap, softcap * math.log2(math.e)
    if scale > 0:
        return 0, 0.0, scale * math.log2(math.e)
    return 1, scale, math.log2(math.e)


def attention_kernel(work, dtype, head_dim, value_dim, heads_per_kv, score, cut=None, page_size=0):
    """The kernel of some work and its tile.

    score: the form of the scores, see `score_form`.  cut: a Tile other than the table's.  page_size: of the pool that
    holds the keys, forward; 0 where they are a chunk.
    """
    size = itemsize(dtype)
    cut = cut or tile(work, size, head_dim, value_dim)
    dims = _padded(head_dim) + _padded(value_dim)
    if work in ("forward", "decode"):
        name, shared = "forward", size * (cut.rows * _padded(head_dim) + cut.stages * cut.columns * dims)
    else:
        name, shared = work, size * dims * (cut.rows + cut.stages * cut.columns)
    if work == "gradient_kv":
        shared += cut.stages * cut.columns * 2 * 4                 # lse and delta of the columns
    defines = {"ELEMENT": element(dtype), "HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "HEADS_PER_KV": heads_per_kv,
               "SCORE": score, "TILE_ROWS": cut.rows, "TILE_COLUMNS": cut.columns, "WARPS": cut.warps,
               "STAGES": cut.stages, "PARTS": cut.parts, "SHARED_BYTES": shared}
    if name == "forward":
        defines["PAGE_SIZE"] = page_size
    return Kernel(name, f"{name}.cu", tuple(defines.items()), 32 * cut.warps, shared), cut
