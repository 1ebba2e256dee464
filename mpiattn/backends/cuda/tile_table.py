"""The tile table: tile sizes of each kernel, by head dim and architecture, and the kernels that follow from them.

The compiler gets the table's numbers as constants; the host uses them for launches.  Every entry fits the shared memory
of its architecture, and with 1, 4, 7 and 8 query heads per KV head none spills registers on sm_80 and sm_90; a test
compiles them.
No entry has been measured yet.
"""

import math
from functools import cache
from typing import NamedTuple

from ...errors import ArgumentError
from .kernel_source import Kernel

LARGEST_DIM = 256
LARGEST_SHARED_DIM = 576  # of keys that hold the values
ELEMENTS = {"float32": "float", "float16": "f16", "bfloat16": "bf16"}
# With a larger softcap, s / softcap would become too small for a normal float and be flushed to 0.  Such a cap bends no
# score of which exp() is finite, so it is left out.
LARGEST_CAP = 2.0**100
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


class ScoreTile(NamedTuple):
    """The tile of scores that a thread block computes at a time.

    rows: rows of the tile, whose results stay in registers.  They are queries, but keys in gradient_kv.
    columns: columns of the tile: keys, but queries in gradient_kv.
    warps: warps of the thread block.
    stages: column tiles that shared memory holds at a time.
    parts: number of thread blocks, or of groups of a block's warps where keys hold the values, that divide the columns
    of the results; each recomputes the scores.
    column_warps: number of a block's warps that divide the columns of the tile, and of the results, of the same rows;
    scores meet in shared memory.  Of gradient_kv and 16-bit elements only.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    parts: int = 1
    column_warps: int = 1


# By work, bytes of an element, and the larger of head dim and value dim, rounded up to an entry.
TILES = {
    "forward": {
        2: {
            32: ScoreTile(128, 128, 4, 1),
            64: ScoreTile(128, 64, 4, 2),
            96: ScoreTile(128, 64, 4, 1),
            128: ScoreTile(128, 64, 4, 1),
            192: ScoreTile(128, 64, 8, 1),
            256: ScoreTile(64, 64, 4, 1),
        },
        4: {
            32: ScoreTile(128, 32, 4, 2),
            64: ScoreTile(128, 32, 4, 2),
            96: ScoreTile(64, 32, 4, 1),
            128: ScoreTile(64, 32, 4, 1),
            192: ScoreTile(64, 32, 4, 1),
            256: ScoreTile(64, 16, 4, 1),
        },
    },
    "decode": {
        2: {
            32: ScoreTile(16, 64, 1, 2),
            64: ScoreTile(16, 64, 1, 2),
            96: ScoreTile(16, 32, 1, 2),
            128: ScoreTile(16, 32, 1, 2),
            192: ScoreTile(16, 32, 1, 2),
            256: ScoreTile(16, 32, 1, 2),
        },
        4: {
            32: ScoreTile(16, 32, 1, 2),
            64: ScoreTile(16, 32, 1, 2),
            96: ScoreTile(16, 16, 1, 2),
            128: ScoreTile(16, 16, 1, 2),
            192: ScoreTile(16, 16, 1, 2),
            256: ScoreTile(16, 16, 1, 2),
        },
    },
    "gradient_q": {
        2: {
            32: ScoreTile(128, 64, 4, 2),
            64: ScoreTile(128, 32, 4, 2),
            96: ScoreTile(64, 64, 4, 1),
            128: ScoreTile(64, 64, 4, 1),
            192: ScoreTile(64, 32, 4, 2),
            256: ScoreTile(64, 32, 4, 1, 2),
        },
        4: {
            32: ScoreTile(64, 32, 4, 2),
            64: ScoreTile(64, 32, 4, 2),
            96: ScoreTile(64, 32, 4, 1),
            128: ScoreTile(64, 32, 4, 1),
            192: ScoreTile(32, 32, 2, 1),
            256: ScoreTile(32, 16, 2, 1, 2),
        },
    },
    "gradient_kv": {
        2: {
            32: ScoreTile(128, 32, 4, 2),
            64: ScoreTile(128, 32, 4, 2),
            96: ScoreTile(64, 64, 4, 1, column_warps=2),
            128: ScoreTile(64, 64, 4, 1, column_warps=2),
            192: ScoreTile(64, 32, 4, 2, 2),
            256: ScoreTile(32, 32, 4, 1, column_warps=2),
        },
        4: {
            32: ScoreTile(64, 32, 4, 2),
            64: ScoreTile(64, 32, 4, 2),
            96: ScoreTile(64, 32, 4, 1),
            128: ScoreTile(64, 16, 4, 1),
            192: ScoreTile(32, 32, 2, 1, 2),
            256: ScoreTile(32, 16, 2, 1, 2),
        },
    },
}

# Where keys hold the values, for all dims up to LARGEST_SHARED_DIM.
SHARED = {
    "forward": {2: ScoreTile(32, 32, 4, 1, 2), 4: ScoreTile(16, 16, 4, 1, 4)},
    "decode": {2: ScoreTile(16, 32, 4, 2, 4), 4: ScoreTile(16, 16, 4, 1, 4)},
    "gradient_q": {2: ScoreTile(32, 16, 2, 1, 3), 4: ScoreTile(16, 8, 1, 1, 3)},
    "gradient_kv": {2: ScoreTile(32, 16, 2, 1, 3), 4: ScoreTile(16, 8, 1, 1, 3)},
}
# Entries that replace those where there is more shared memory: on 80, 87, 90 and 100.
BETTER_SHARED = {
    ("forward", 2): ScoreTile(64, 32, 8, 2, 2),
    ("gradient_q", 2): ScoreTile(64, 16, 4, 1, 3),
    ("gradient_kv", 2): ScoreTile(64, 16, 4, 2, 3),
}

# Entries that replace those, by compute capability as in PROCESSORS, work and bytes of an element.  80, 87, 90 and 100
# have more shared memory, and from 90 on the compiler keeps more in registers.
_AMPERE = {
    ("forward", 2): {256: ScoreTile(128, 64, 8, 1)},
    ("gradient_kv", 2): {
        128: ScoreTile(128, 64, 8, 2, column_warps=2),
        192: ScoreTile(64, 64, 8, 1, column_warps=2),
        256: ScoreTile(64, 64, 8, 1, column_warps=2),
    },
}
_HOPPER = {
    **_AMPERE,
    ("forward", 2): {64: ScoreTile(128, 96, 4, 1), 256: ScoreTile(64, 64, 4, 1)},
    ("gradient_q", 2): {
        64: ScoreTile(128, 64, 4, 1),
        96: ScoreTile(128, 32, 4, 2),
        128: ScoreTile(128, 32, 4, 2),
        256: ScoreTile(64, 32, 4, 1),
    },
}
BETTER = {80: _AMPERE, 87: _AMPERE, 90: _HOPPER, 100: _HOPPER}


def _padded(dim, to=32):
    return -(-dim // to) * to


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


def shared_table(architecture):
    """The tile table of a compute capability where keys hold the values, by work and bytes of an element."""
    better = BETTER_SHARED if max(known for known in PROCESSORS if known <= architecture) in BETTER else {}
    return {
        work: {size: better.get((work, size), entry) for size, entry in sizes.items()} for work, sizes in SHARED.items()
    }


@cache
def tile(work, itemsize, head_dim, value_dim, architecture, shared_kv=False):
    """The table's `ScoreTile` for `work`: "forward", "decode", "gradient_q" or "gradient_kv".

    shared_kv: whether keys hold the values.
    Raises ArgumentError if a dim is larger than `LARGEST_DIM`, or with shared_kv than `LARGEST_SHARED_DIM`.
    """
    if shared_kv:
        if head_dim > LARGEST_SHARED_DIM:
            raise ArgumentError(
                f"head_dim is {head_dim}; of keys that hold the values the GPU kernels take up to {LARGEST_SHARED_DIM}"
            )
        return shared_table(architecture)[work][itemsize]
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
    if softcap is not None and softcap <= LARGEST_CAP:
        return 2, scale / softcap, softcap * math.log2(math.e)
    if scale > 0:
        return 0, 0.0, scale * math.log2(math.e)
    return 1, scale, math.log2(math.e)


class Blocks(NamedTuple):
    """The blocks that a kernel is compiled for.

    score: SCORE of `score_form`.
    page_size: slots of a page if the keys are in a pool, forward only; 0 if they are a chunk.
    shared_kv: whether keys hold the values.
    options: (name, value) of the constants of what few blocks have (`extras`).
    """

    dtype: str
    head_dim: int
    value_dim: int
    heads_per_kv: int
    score: int = 0
    page_size: int = 0
    shared_kv: bool = False
    options: tuple = ()


@cache
def attention_kernel(work, blocks, architecture, cut=None):
    """(Kernel, ScoreTile) for `work`, as in `tile`, on some `Blocks`.

    architecture: compute capability, such as 90.  cut: in place of the table's tile.
    """
    dtype, head_dim, value_dim, heads_per_kv, score, page_size, shared_kv, options = blocks
    size = itemsize(dtype)
    cut = cut or tile(work, size, head_dim, value_dim, architecture, shared_kv)
    depth, value_depth = (_padded(dim, 64 if shared_kv else 32) for dim in (head_dim, value_dim))
    if shared_kv and work in ("gradient_q", "gradient_kv"):
        depth = _padded(head_dim, 64 * cut.parts)
    keys = depth + (0 if shared_kv else value_depth)
    if work in ("forward", "decode"):
        name, shared = "forward", size * (cut.rows * depth + cut.stages * cut.columns * keys) + 8 * cut.rows
    elif work == "gradient_q":
        name, queries = work, depth + value_depth
        shared = size * (cut.rows * queries + cut.stages * cut.columns * keys) + 16 * cut.rows  # interval, lse, delta
    else:
        name, queries = work, 2 * depth if shared_kv else depth + value_depth
        shared = size * (cut.rows * keys + cut.stages * cut.columns * queries) + 16 * cut.stages * cut.columns
        if cut.column_warps > 1:
            shared += 2 * size * cut.rows * cut.columns  # P and dS
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
        "SHARED_KV": int(shared_kv),
    }
    if name == "gradient_kv":
        defines["COLUMN_WARPS"] = cut.column_warps
    if name == "forward":
        defines["PAGE_SIZE"] = page_size
    return Kernel(name, f"{name}.cu", (*defines.items(), *options), 32 * cut.warps, shared), cut


def blocks_per_processor(kernel, registers, architecture):
    """Number of blocks of a kernel that a multiprocessor holds at a time.  registers: of a thread."""
    of = processor(architecture)
    warps = kernel.threads // 32
    a_warp = -(-registers * 32 // 256) * 256  # registers are allocated in units of 256
    return min(
        of.blocks, of.warps // warps, of.registers // (a_warp * warps), of.shared * 1024 // (kernel.shared_bytes + 1024)
    )
