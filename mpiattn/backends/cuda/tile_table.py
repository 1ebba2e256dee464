"""The tile table: tile sizes of each kernel, by head dim and architecture, and the kernels that follow from them.

The compiler gets the table's numbers as constants; the host uses them for launches.  Every entry fits the shared memory
of its architecture, and none spills registers for any number of query heads per KV head; a test compiles them.
No entry has been measured yet.
"""

import math
from functools import cache
from typing import NamedTuple

from ...errors import ArgumentError
from .kernel_source import Kernel

LARGEST_DIM = 256
ELEMENTS = {"float32": "float", "float16": "f16", "bfloat16": "bf16"}
DECODE_ROWS = 64  # KV heads with at most so many packed rows use the decode tiles


class Processor(NamedTuple):
    """Limits of a multiprocessor.

    block_shared, shared: KiB of shared memory for a thread block, and for all.  Each block needs 1 KiB more for the
    system.
    warps, blocks: maximum resident warps and thread blocks.  registers: of 32 bits.
    """

    block_shared: int
    shared: int
    warps: int
    blocks: int
    registers: int = 64 * 1024


# By compute capability, from the CUDA C++ Programming Guide; a missing one uses the entry of the next smaller one.
PROCESSORS = {
    80: Processor(163, 164, 64, 32),
    86: Processor(99, 100, 48, 16),
    87: Processor(163, 164, 48, 16),
    89: Processor(99, 100, 48, 24),
    90: Processor(227, 228, 64, 32),
    100: Processor(227, 228, 64, 32),
    120: Processor(99, 100, 48, 24),
}


class Tile(NamedTuple):
    """The tile of scores that a thread block computes at a time.

    rows: rows of the tile, whose results stay in registers.  They are queries, but keys in gradient_kv.
    columns: columns of the tile: keys, but queries in gradient_kv.
    warps: warps of the thread block.
    stages: column tiles that shared memory holds at a time.
    parts: number of thread blocks that divide the columns of the results; each recomputes the scores.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    parts: int = 1


# By work, bytes of an element, and the larger of head dim and value dim, rounded up to an entry.
TILES = {
    "forward": {
        2: {
            32: Tile(128, 128, 4, 1),
            64: Tile(128, 64, 4, 2),
            96: Tile(128, 64, 4, 1),
            128: Tile(128, 64, 4, 1),
            192: Tile(128, 64, 8, 1),
            256: Tile(64, 64, 4, 1),
        },
        4: {
            32: Tile(128, 32, 4, 2),
            64: Tile(128, 32, 4, 2),
            96: Tile(64, 32, 4, 1),
            128: Tile(64, 32, 4, 1),
            192: Tile(64, 32, 4, 1),
            256: Tile(64, 16, 4, 1),
        },
    },
    "decode": {
        2: {
            32: Tile(16, 64, 1, 2),
            64: Tile(16, 64, 1, 2),
            96: Tile(16, 32, 1, 2),
            128: Tile(16, 32, 1, 2),
            192: Tile(16, 32, 1, 2),
            256: Tile(16, 32, 1, 2),
        },
        4: {
            32: Tile(16, 32, 1, 2),
            64: Tile(16, 32, 1, 2),
            96: Tile(16, 16, 1, 2),
            128: Tile(16, 16, 1, 2),
            192: Tile(16, 16, 1, 2),
            256: Tile(16, 16, 1, 2),
        },
    },
    "gradient_q": {
        2: {
            32: Tile(128, 64, 4, 2),
            64: Tile(128, 32, 4, 2),
            96: Tile(64, 64, 4, 1),
            128: Tile(64, 64, 4, 1),
            192: Tile(64, 32, 4, 2),
            256: Tile(64, 32, 4, 1, 2),
        },
        4: {
            32: Tile(64, 32, 4, 2),
            64: Tile(64, 32, 4, 2),
            96: Tile(64, 32, 4, 1),
            128: Tile(64, 32, 4, 1),
            192: Tile(32, 32, 2, 1),
            256: Tile(32, 16, 2, 1, 2),
        },
    },
    "gradient_kv": {
        2: {
            32: Tile(128, 32, 4, 2),
            64: Tile(128, 32, 4, 2),
            96: Tile(64, 32, 4, 2),
            128: Tile(64, 32, 4, 2),
            192: Tile(64, 32, 4, 2, 2),
            256: Tile(64, 16, 4, 1, 2),
        },
        4: {
            32: Tile(64, 32, 4, 2),
            64: Tile(64, 32, 4, 2),
            96: Tile(64, 32, 4, 1),
            128: Tile(64, 16, 4, 1),
            192: Tile(32, 32, 2, 1, 2),
            256: Tile(32, 16, 2, 1, 2),
        },
    },
}

# Entries that replace those, by compute capability as in PROCESSORS, work and bytes of an element.  80, 87, 90 and 100
# have more shared memory, and from 90 on the compiler keeps more in registers.
_WIDE_FORWARD = {("forward", 2): {256: Tile(128, 64, 8, 1)}}
_HOPPER = {
    **_WIDE_FORWARD,
    ("gradient_q", 2): {96: Tile(128, 32, 4, 2), 128: Tile(128, 32, 4, 2)},
    ("gradient_kv", 2): {256: Tile(64, 32, 4, 1, 2)},
}
BETTER = {80: _WIDE_FORWARD, 87: _WIDE_FORWARD, 90: _HOPPER, 100: _HOPPER}


def _padded(dim):
    return -(-dim // 32) * 32


def processor(architecture):
    """The `Processor` of a compute capability, such as 90."""
    return PROCESSORS[max(known for known in PROCESSORS if known <= architecture)]


def table(architecture):
    """The tile table of a compute capability, by work, bytes of an element and head dim."""
    better = BETTER.get(max(known for known in PROCESSORS if known <= architecture), {})
    return {
        work: {size: entries | better.get((work, size), {}) for size, entries in sizes.items()}
        for work, sizes in TILES.items()
    }


@cache
def tile(work, itemsize, head_dim, value_dim, architecture):
    """The table's `Tile` for `work`: "forward", "decode", "gradient_q" or "gradient_kv".

    Raises ArgumentError if a dim is larger than `LARGEST_DIM`.
    """
    if max(head_dim, value_dim) > LARGEST_DIM:
        raise ArgumentError(f"head_dim is {head_dim}, value_dim {value_dim}; the GPU kernels take up to {LARGEST_DIM}")
    entries = table(architecture)[work][itemsize]
    return entries[min(dim for dim in entries if dim >= max(head_dim, value_dim))]


def element(dtype):
    """The kernels' type name for a dtype, given as a string.  Raises ArgumentError for an unsupported dtype."""
    if dtype not in ELEMENTS:
        raise ArgumentError(f"dtype is {dtype}; the GPU kernels take {', '.join(ELEMENTS)}")
    return ELEMENTS[dtype]


def itemsize(dtype):
    """Bytes of an element of a dtype, given as a string."""
    return 4 if element(dtype) == "float" else 2


def score_form(scale, softcap):
    """The constants (SCORE, inner, factor) that kernels/cuda/softmax.cuh defines."""
    if softcap is not None:
        return 2, scale / softcap, softcap * math.log2(math.e)
    if scale > 0:
        return 0, 0.0, scale * math.log2(math.e)
    return 1, scale, math.log2(math.e)


@cache
def attention_kernel(work, dtype, head_dim, value_dim, heads_per_kv, score, architecture, cut=None, page_size=0):
    """(Kernel, Tile) for `work`, as in `tile`.

    score: SCORE of `score_form`.  architecture: compute capability, such as 90.  cut: a Tile in place of the table's.
    page_size: slots of a page if the keys are in a pool, forward only; 0 if they are a chunk.
    """
    size = itemsize(dtype)
    cut = cut or tile(work, size, head_dim, value_dim, architecture)
    dims = _padded(head_dim) + _padded(value_dim)
    if work in ("forward", "decode"):
        name, shared = "forward", size * (cut.rows * _padded(head_dim) + cut.stages * cut.columns * dims) + 8 * cut.rows
    else:
        name, shared = work, size * dims * (cut.rows + cut.stages * cut.columns)
        shared += 16 * (cut.rows if work == "gradient_q" else cut.stages * cut.columns)  # interval, lse, delta
    defines = {
        "ELEMENT": element(dtype),
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "HEADS_PER_KV": heads_per_kv,
        "SCORE": score,
        "TILE_ROWS": cut.rows,
        "TILE_COLUMNS": cut.columns,
        "WARPS": cut.warps,
        "STAGES": cut.stages,
        "PARTS": cut.parts,
        "SHARED_BYTES": shared,
    }
    if name == "forward":
        defines["PAGE_SIZE"] = page_size
    return Kernel(name, f"{name}.cu", tuple(defines.items()), 32 * cut.warps, shared), cut


def blocks_per_processor(kernel, registers, architecture):
    """Number of blocks of a kernel that a multiprocessor holds at a time.  registers: of a thread."""
    of = processor(architecture)
    warps = kernel.threads // 32
    a_warp = -(-registers * 32 // 256) * 256  # registers are allocated in units of 256
    return min(
        of.blocks, of.warps // warps, of.registers // (a_warp * warps), of.shared * 1024 // (kernel.shared_bytes + 1024)
    )
