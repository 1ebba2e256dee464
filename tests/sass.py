"""What a kernel executes, read off its machine code: instructions by kind on the path that matters, estimated cycles.

`python tests/sass.py` prints that of the kernels of the ladder in kernels/README.md, on sm_90.  Nothing is run: counts
are exact for the path that is named, cycles are ESTIMATES by the figures in LATENCY, of one warp that has its scheduler
to itself.  So are times, of an H100 by HERTZ and the rest.  Needs the extra cuda-compile: NVRTC and nvdisasm.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

if importlib.util.find_spec("mpiattn") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpiattn.backends.cuda import nvrtc
from mpiattn.backends.cuda.kernels import ELEMENTS_PER_THREAD, VECTOR
from mpiattn.backends.cuda.launches import cast_kernel, merge_kernel
from mpiattn.backends.cuda.tile_table import Blocks, attention_kernel

PRODUCTS = {"forward": 2, "decode": 2, "gradient_q": 3, "gradient_kv": 4}  # of a tile
KINDS = {
    "mma": "HMMA",
    "ldmatrix": "LDSM",
    "copy": "LDGSTS",
    "load": "LDG LD",
    "store": "STG ST",
    "shared": "LDS STS",
    "shuffle": "SHFL VOTE VOTEU",
    "special": "MUFU",
    "convert": "F2FP F2F I2F F2I HADD2 HFMA2 I2FP",
    "float": "FADD FMUL FFMA FMNMX FSEL FSETP FSET DADD DFMA DMUL",
    "control": "BRA BSSY BSYNC WARPSYNC BAR DEPBAR LDGDEPBAR EXIT CALL RET NOP BMOV YIELD",
}
KIND = {name: kind for kind, names in KINDS.items() for name in names.split()}  # all others: integer
# Cycles until what an instruction gives can be used: global memory and its caches, shared memory, and the rest as
# microbenchmarks of recent GPUs have them, rounded.
LATENCY = {"load": 700, "shared": 30, "ldmatrix": 33, "shuffle": 24, "special": 24, "mma": 33, "convert": 8}
DEFAULT_LATENCY = 5
# Of an H100 SXM: its clock under load, four schedulers on each of its multiprocessors, what its memory gives.
HERTZ, SCHEDULERS, BYTES_PER_SECOND = 1.7e9, 4 * 132, 3.0e12
PARTS_AHEAD = 8  # AHEAD of kernels/cuda/partials.cu


class Instruction(NamedTuple):
    """One instruction; guarded: it runs under a condition."""

    name: str
    operands: str
    guarded: bool

    @property
    def base(self):
        return self.name.split(".")[0]

    @property
    def kind(self):
        return KIND.get(self.base, "integer")


class Block(NamedTuple):
    """Instructions that run one after another, and the numbers of the blocks that may follow."""

    code: list
    after: list


def nvdisasm():
    """Path of nvdisasm, or None."""
    wheels = (path for folder in sys.path for path in Path(folder or ".").glob("nvidia/cu*/bin/nvdisasm"))
    return next(filter(None, [shutil.which("nvdisasm"), *map(str, wheels)]), None)


def disassembled(cubin):
    """Kernels in machine code by name, as lists of lines."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([nvdisasm(), "-c", file.name], capture_output=True, text=True, check=True).stdout
    kernels, lines = {}, None
    for line in text.splitlines():
        if line.startswith(".text."):
            lines = kernels.setdefault(line[6:-1], [])
        elif line.lstrip().startswith(".section"):
            lines = None
        elif lines is not None:
            lines.append(line)
    return kernels


def blocks_of(lines):
    """The basic blocks of a kernel, in the order of their addresses."""
    code, labels = [], {}
    for line in lines:
        label = re.match(r"(\.L_x_\d+):", line)
        parts = re.match(r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line)
        if label:
            labels[label[1]] = len(code)
        elif parts:
            code.append(Instruction(parts[2], parts[3], bool(parts[1])))
    ends = {i + 1 for i, each in enumerate(code) if each.base in ("BRA", "EXIT", "RET", "BRX")}
    starts = sorted(({0, *labels.values(), *ends}) & set(range(len(code))))
    number = {start: i for i, start in enumerate(starts)}
    blocks = []
    for i, start in enumerate(starts):
        stop = starts[i + 1] if i + 1 < len(starts) else len(code)
        last, after = code[stop - 1], []
        label = re.search(r"(\.L_x_\d+)", last.operands)
        if last.base == "BRA" and label and last.name != "BRA.DIV":
            after.append(number[labels[label[1]]])
        always = (
            last.base in ("BRA", "EXIT", "RET")
            and last.name != "BRA.DIV"
            and not last.guarded
            and (last.base != "BRA" or re.fullmatch(r"`\(\S+\)", last.operands))
        )
        if not always and i + 1 < len(starts):
            after.append(i + 1)
        blocks.append(Block(code[start:stop], after))
    return blocks


def reached(blocks):
    """The blocks that the first one leads to: not those of lanes that part, nor the trap behind the end."""
    visited, ahead = set(), [0]
    while ahead:
        i = ahead.pop()
        if i not in visited:
            visited.add(i)
            ahead += blocks[i].after
    return visited


def loops_of(blocks):
    """(first, last) blocks of the loops, the innermost first: those between a branch back and where it goes."""
    last_of = {}
    for i in sorted(reached(blocks)):
        for to in blocks[i].after:
            if to <= i:
                last_of[to] = max(i, last_of.get(to, i))
    return sorted(last_of.items(), key=lambda loop: loop[1] - loop[0])


def counts(code):
    return Counter(each.kind for each in code)


def path(blocks, first, last, trips):
    """The instructions from block `first` to the end of `last`, or of an earlier one with which the kernel ends.

    Of all ways it is the one with most products, then most copies, loads and stores, the wide ones for several, then
    fewest others.  trips(code): how often a loop inside runs, of its code once through.
    """
    loops = [loop for loop in loops_of(blocks) if first <= loop[0] and loop[1] <= last and loop != (first, last)]
    inner = {}  # by first block: the outermost only
    for start, stop in sorted(loops, key=lambda loop: loop[0] - loop[1]):
        if not any(a <= start <= b for a, (b, _) in inner.items()):
            once = path(blocks, start, stop, trips)
            inner[start] = stop, once * trips(once)

    def value(code):
        of = counts(code)
        return of["mma"], of["copy"], sum(width_of(each) for each in code if each.kind in ("load", "store")), -len(code)

    best = {}
    for i in range(last, first - 1, -1):
        stop, code = inner.get(i, (i, blocks[i].code))
        after = {to for j in range(i, stop + 1) for to in blocks[j].after if to > stop}
        ways = [code + best[to] for to in after if to in best]
        if stop == last or not blocks[stop].after:
            ways.append(code)
        if ways:
            best[i] = max(ways, key=value)
    return best[first]


def tile_loop(blocks, products, copies):
    """What a warp executes for a tile, of which it is known how many products and copies it takes."""

    def has(loop, kind):
        return sum(each.kind == kind for block in blocks[loop[0] : loop[1] + 1] for each in block.code)

    most = max(has(loop, "mma") for loop in loops_of(blocks))
    loop = next(loop for loop in loops_of(blocks) if has(loop, "mma") == most and (has(loop, "copy") or not copies))

    def kind_trips(kind, total):
        once = path(blocks, *loop, lambda code: 1)
        twice = path(blocks, *loop, lambda code: 2 if counts(code)[kind] else 1)
        each = counts(twice)[kind] - counts(once)[kind]
        return round(1 + (total - counts(once)[kind]) / each) if each else 1

    of_mma, of_copy = kind_trips("mma", products), kind_trips("copy", copies)
    return path(blocks, *loop, lambda code: of_mma if counts(code)["mma"] else of_copy if counts(code)["copy"] else 1)


def epilogue(blocks):
    """What follows the last product or barrier, with everything that is stored."""
    last = max(i for i, block in enumerate(blocks) if any(each.kind == "mma" for each in block.code))
    stores = [i for i in range(last, len(blocks)) if any(each.kind == "store" for each in blocks[i].code)]
    start = last + 1
    code = []
    for block in blocks[start : stores[-1] + 2]:
        code += block.code
    return code


def width_of(instruction):
    """How many registers next to each other an instruction writes or stores."""
    if ".128" in instruction.name or instruction.kind in ("mma", "ldmatrix"):
        return 4
    return 2 if ".64" in instruction.name or ".WIDE" in instruction.name else 1


def registers(instruction):
    """(written, read) registers; wide operands by the instruction's width."""
    width = width_of(instruction)
    operands = instruction.operands.split(",")
    first = re.match(r"\s*(U?R\d+)", operands[0])
    names = re.findall(r"U?R\d+(?:\.64)?", instruction.operands)
    stores = instruction.kind in ("store", "control") or instruction.base == "STS"

    def wide(name, width):
        kind, start = re.match(r"(U?R)(\d+)", name).groups()
        return [f"{kind}{int(start) + i}" for i in range(2 if name.endswith(".64") else width)]

    written = wide(first[1], width) if first and not stores else []
    return written, [
        each
        for name in (names if stores else names[bool(first) :])
        for each in wide(name, width if stores and name == names[-1] else 1)
    ]


def cycles(code):
    """ESTIMATE of the cycles of one warp alone: an instruction a cycle, in order, each when what it reads is there."""
    ready, now = {}, 0
    for instruction in code:
        written, read = registers(instruction)
        now = max([now + 1, *(ready.get(name, 0) for name in read)])
        for name in written:
            ready[name] = now + LATENCY.get(instruction.kind, DEFAULT_LATENCY)
    return now


def disassembled_blocks(kernel, architecture):
    return blocks_of(disassembled(nvrtc.build(kernel, architecture).cubin)[kernel.name])


def described(name, code):
    """A line for people."""
    of = counts(code)
    return f"{name}: {len(code)} instructions, ~{cycles(code)} cycles (estimate): " + ", ".join(
        f"{kind} {of[kind]}" for kind in [*KINDS, "integer"] if of[kind]
    )


def attention(work, dtype, dim, architecture, page_size=0):
    """(what a warp executes for a tile, what it does at the end) of a kernel of half types; a query head a KV head."""
    kernel, cut = attention_kernel(work, Blocks(dtype, dim, dim, 1, page_size=page_size), int(architecture[3:]))
    blocks = disassembled_blocks(kernel, architecture)
    products = PRODUCTS[work] * (cut.rows // cut.warps // 16) * (cut.columns // 8) * dim // 16
    return tile_loop(blocks, products, 2 * cut.columns * dim // 8 // kernel.threads), epilogue(blocks)


def merge(parts, architecture):
    """What a warp executes at most to merge up to 128 parts of a row of 128 columns.

    The warps of the block share the parts, PARTS_AHEAD at a time.  All other loops are unrolled.
    """
    kernel = merge_kernel(parts)
    blocks = disassembled_blocks(kernel, architecture)
    rounds = -(-parts // (kernel.threads // 32 * PARTS_AHEAD))

    def trips(code):
        of = counts(code)
        return rounds if of["shuffle"] == of["load"] == PARTS_AHEAD else 1

    return path(blocks, 0, len(blocks) - 1, trips)


def cast(architecture):
    """What a warp executes to cast float32 to bfloat16 where both arrays are contiguous."""
    blocks = disassembled_blocks(cast_kernel("bfloat16", "float32", VECTOR), architecture)
    return path(blocks, 0, len(blocks) - 1, lambda code: ELEMENTS_PER_THREAD // VECTOR)


def merge_seconds(code):
    """ESTIMATE for as many rows as the GPU has multiprocessors or fewer: a block each, a warp a scheduler."""
    return cycles(code) / HERTZ


def cast_seconds(code, elements):
    """ESTIMATE for a cast of float32 to bfloat16: what takes longer, its instructions or its memory."""
    warps = elements / (ELEMENTS_PER_THREAD * 32)
    return max(warps / SCHEDULERS * len(code) / HERTZ, elements * (4 + 2) / BYTES_PER_SECOND)


def main():
    """Prints the kernels of the README's ladder."""
    for work, page_size in (*((work, 0) for work in PRODUCTS), ("decode", 64)):
        of = f"{work} bfloat16 128" + (f", pages of {page_size}" if page_size else "")
        for name, code in zip(("a tile", "the end"), attention(work, "bfloat16", 128, "sm_90", page_size)):
            print(described(f"{of}, {name}", code), flush=True)
    code = merge(99, "sm_90")
    print(described("merge of 99 splits, head dim 128, at most", code), end=f"; {merge_seconds(code) * 1e6:.1f} us\n")
    code, elements = cast("sm_90"), 8192 * 32 * 128
    print(described("cast, 8 elements a thread", code), end="; 8192 x 32 x 128 elements: ")
    print(f"{cast_seconds(code, elements) * 1e6:.0f} us (estimate)")


if __name__ == "__main__":
    main()
