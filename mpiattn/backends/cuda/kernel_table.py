"""Registers, spills and shared memory of every entry of the tile table, as the compiler reports them."""

from typing import NamedTuple

from . import nvrtc
from .tile_table import (
    LARGEST_SHARED_DIM,
    Blocks,
    ScoreTile,
    attention_kernel,
    blocks_per_processor,
    shared_table,
    table,
)

ARCHITECTURES = "sm_80", "sm_89", "sm_90", "sm_100"
HEADS_PER_KV = 7  # query heads per KV head: not a power of two, because that takes the most registers
SHARED_VALUE_DIM = 512  # of absorbed MLA
DTYPES = {2: "bfloat16", 4: "float32"}


class Row(NamedTuple):
    """An entry of the table.  registers, spilled: of a thread, spilled in bytes.  shared_bytes: of a thread block."""

    work: str
    dtype: str
    head_dim: int
    architecture: str
    tile: ScoreTile
    registers: int
    spilled: int
    shared_bytes: int
    blocks: int  # thread blocks that a multiprocessor holds at a time


def entries(architecture, heads_per_kv=HEADS_PER_KV):
    """(work, dtype, head dim, kernel, tile) of every entry of an architecture's table, such as "sm_90"."""
    for work, sizes in table(int(architecture[3:])).items():
        for size, by_dim in sizes.items():
            for dim in by_dim:
                blocks = Blocks(DTYPES[size], dim, dim, heads_per_kv)
                yield work, DTYPES[size], dim, *attention_kernel(work, blocks, int(architecture[3:]))
    for work, sizes in shared_table(int(architecture[3:])).items():
        for size in sizes:
            blocks = Blocks(DTYPES[size], LARGEST_SHARED_DIM, SHARED_VALUE_DIM, heads_per_kv, shared_kv=True)
            kernel = attention_kernel(work, blocks, int(architecture[3:]))
            yield f"{work}, shared_kv", DTYPES[size], LARGEST_SHARED_DIM, *kernel


def rows(architecture, heads_per_kv=HEADS_PER_KV):
    """Yield a `Row` for every entry, each as soon as it is compiled.  Raises ArgumentError if NVRTC is missing."""
    nvrtc.load()
    all_entries = list(entries(architecture, heads_per_kv))
    for (work, dtype, dim, kernel, tile), report in zip(
        all_entries, nvrtc.build_all([kernel for *_, kernel, _ in all_entries], architecture)
    ):
        yield Row(
            work,
            dtype,
            dim,
            architecture,
            tile,
            report.registers,
            report.spilled,
            kernel.shared_bytes,
            blocks_per_processor(kernel, report.registers, int(architecture[3:])),
        )
