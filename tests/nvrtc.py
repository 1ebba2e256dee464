"""Compiles kernels with NVRTC, which needs no GPU, and reads what the assembler says of them."""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from mpiattn.backends import kernel_source, kernel_tiles

try:
    from cuda.bindings import nvrtc
    nvrtc.nvrtcVersion()                  # the bindings load the library here, and raise if it is not there
    MISSING = None
except Exception as error:                # a missing library has no exception of its own
    MISSING = f"NVRTC is not here (extra cuda-compile): {error!r:.100}"


class Report(NamedTuple):
    """What a kernel takes on one architecture; spilled in bytes of stores and loads, stack in bytes."""

    registers: int
    spilled: int
    stack: int
    log: str
    cubin: bytes


def _call(function, *arguments):
    result, *values = function(*arguments)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"{function.__name__}: {result.name}")
    return values[0] if values else None


def build(kernel, architecture):
    """Compile a kernel for an architecture such as "sm_80"; raises with the compiler's log."""
    source = kernel_source.expanded(kernel.file)
    program = _call(nvrtc.nvrtcCreateProgram, source.encode(), kernel.file.encode(), 0, [], [])
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "--ptxas-options=-v", *kernel.options()]
    result, = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = bytes(_call(nvrtc.nvrtcGetProgramLogSize, program))
    nvrtc.nvrtcGetProgramLog(program, log)
    log = log.decode(errors="replace").rstrip("\0\n ")
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"{kernel.name} for {architecture}: {result.name}\n{log}")
    cubin = bytes(_call(nvrtc.nvrtcGetCUBINSize, program))
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    numbers = [int(re.search(pattern, log)[1]) for pattern in (
        r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads", r"(\d+) bytes stack frame")]
    return Report(numbers[0], numbers[1] + numbers[2], numbers[3], log, cubin)


def main():
    """Print what every entry of the tile table takes on the architectures named in the arguments."""
    print("work, dtype, dim, architecture, tile: registers, bytes spilled, bytes of shared memory")
    entries = []
    for work, sizes in kernel_tiles.TILES.items():
        for size, table in sizes.items():
            for dim, cut in table.items():
                dtype = "float32" if size == 4 else "bfloat16"
                kernel, _ = kernel_tiles.attention_kernel(work, dtype, dim, dim, 1, 0)
                for architecture in sys.argv[1:] or ["sm_80", "sm_90"]:
                    entries.append((f"{work} {dtype} {dim} {architecture} {tuple(cut)}", kernel, architecture))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (name, kernel, _), report in zip(entries, pool.map(lambda entry: build(*entry[1:]), entries)):
            print(f"{name}: {report.registers} {report.spilled} {kernel.shared_bytes}", flush=True)


if __name__ == "__main__":
    main()
