"""Kernels compiled by NVRTC as CuPy has them compiled, which needs no GPU, and what the assembler says of them."""

import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ...errors import ArgumentError, MpiattnError
from . import kernel_source

# What CuPy's RawModule adds to a kernel's own options, besides the architecture.
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")


class Report(NamedTuple):
    """What a kernel takes on one architecture; spilled in bytes of stores and loads, stack in bytes."""

    registers: int
    spilled: int
    stack: int
    log: str
    cubin: bytes


@cache
def load():
    """The bindings of NVRTC; ArgumentError where they or the library are missing."""
    try:
        from cuda.bindings import nvrtc
        nvrtc.nvrtcVersion()              # the bindings load the library here, and raise if it is not there
    except Exception as error:            # a missing library has no exception of its own
        raise ArgumentError("kernels are compiled by NVRTC, which is not here: pip install 'mpiattn[cuda-compile]' "
                            f"({error!r:.100})") from error
    return nvrtc


def missing():
    """Why NVRTC cannot be used; None where it can."""
    try:
        load()
    except ArgumentError as error:
        return str(error)
    return None


def _call(function, *arguments):
    result, *values = function(*arguments)
    if result != load().nvrtcResult.NVRTC_SUCCESS:
        raise MpiattnError(f"{function.__name__}: {result.name}")
    return values[0] if values else None


def _version():
    return "{}.{}".format(*load().nvrtcVersion()[1:])


def cache_dir():
    """Where reports are kept: $XDG_CACHE_HOME/mpiattn or ~/.cache/mpiattn."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpiattn" / "compiled"


def build(kernel, architecture):
    """The `Report` of a kernel on an architecture such as "sm_80", compiled or kept; raises with the compiler's log."""
    options = (f"--gpu-architecture={architecture}", "-std=c++17", "--ptxas-options=-v", *CUPY_OPTIONS,
               *kernel.options())
    kept = cache_dir() / f"{kernel.name}-{architecture}-{kernel_source.digest(kernel, _version(), *options)}.cubin"
    log = kept.with_suffix(".log")
    if not log.is_file():
        _compile(kernel, architecture, options, kept, log)
    text = log.read_text()
    numbers = [int(re.search(pattern, text)[1]) for pattern in (
        r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads", r"(\d+) bytes stack frame")]
    return Report(numbers[0], numbers[1] + numbers[2], numbers[3], text, kept.read_bytes())


def _compile(kernel, architecture, options, cubin_path, log_path):
    nvrtc = load()
    source = kernel_source.expanded(kernel.file)
    program = _call(nvrtc.nvrtcCreateProgram, source.encode(), kernel.file.encode(), 0, [], [])
    try:
        result, = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytes(_call(nvrtc.nvrtcGetProgramLogSize, program))
        nvrtc.nvrtcGetProgramLog(program, log)
        text = log.decode(errors="replace").rstrip("\0\n ")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise MpiattnError(f"{kernel.name} for {architecture}: {result.name}\n{text}")
        cubin = bytes(_call(nvrtc.nvrtcGetCUBINSize, program))
        nvrtc.nvrtcGetCUBIN(program, cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    cubin_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cubin_path.parent) as folder:         # another process may keep the same
        for path, data in ((cubin_path, cubin), (log_path, text.encode())):    # the log last: then both are there
            made = Path(folder) / path.name
            made.write_bytes(data)
            made.replace(path)


def build_all(kernels, architecture):
    """Reports of several kernels, compiled side by side, in their order as they are ready."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda kernel: build(kernel, architecture), kernels)
