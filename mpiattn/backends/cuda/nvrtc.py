"""Compile kernels by NVRTC with the options that CuPy uses, and read the assembler's report.  No GPU is needed."""

import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ...errors import ArgumentError, MpiattnError
from . import kernel_source

# The options that CuPy's RawModule adds to a kernel's own, besides the architecture.
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")


class Report(NamedTuple):
    """A kernel's resources on one architecture.  registers: of a thread.  spilled: bytes of spill stores and loads.

    stack: bytes of the stack frame.  log: the compiler's log.  cubin: the machine code.
    """

    registers: int
    spilled: int
    stack: int
    log: str
    cubin: bytes


@cache
def load():
    """The Python bindings of NVRTC; ArgumentError if they or the library are missing."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # the first call loads the library, and raises if it is missing
    except Exception as error:  # a missing library raises no specific exception
        raise ArgumentError(
            f"kernels are compiled by NVRTC, which is not here: pip install 'mpiattn[cuda-compile]' ({error!r:.100})"
        ) from error
    return nvrtc


def missing():
    """Why NVRTC cannot be used; None if it can."""
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
    """Folder of compiled kernels and logs, in $XDG_CACHE_HOME/mpiattn or ~/.cache/mpiattn."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpiattn" / "compiled"


def build(kernel, architecture):
    """The `Report` of a kernel on an architecture such as "sm_80", from the cache if compiled before.

    Raises MpiattnError with the compiler's log.
    """
    options = (
        f"--gpu-architecture={architecture}",
        "-std=c++17",
        "--ptxas-options=-v",
        *CUPY_OPTIONS,
        *kernel.options(),
    )
    kept = cache_dir() / f"{kernel.name}-{architecture}-{kernel_source.digest(kernel, _version(), *options)}.cubin"
    log = kept.with_suffix(".log")
    if not log.is_file():
        _compile(kernel, architecture, options, kept, log)
    text = log.read_text()
    numbers = [
        int(re.search(pattern, text)[1])
        for pattern in (
            r"Used (\d+) registers",
            r"(\d+) bytes spill stores",
            r"(\d+) bytes spill loads",
            r"(\d+) bytes stack frame",
        )
    ]
    return Report(numbers[0], numbers[1] + numbers[2], numbers[3], text, kept.read_bytes())


def _compile(kernel, architecture, options, cubin_path, log_path):
    nvrtc = load()
    source = kernel_source.expanded(kernel.file)
    program = _call(nvrtc.nvrtcCreateProgram, source.encode(), kernel.file.encode(), 0, [], [])
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
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
    with tempfile.TemporaryDirectory(dir=cubin_path.parent) as folder:  # another process may write the same
        for path, data in ((cubin_path, cubin), (log_path, text.encode())):  # the log last: if it exists, both do
            made = Path(folder) / path.name
            made.write_bytes(data)
            made.replace(path)


def build_all(kernels, architecture):
    """Yield the reports of several kernels, compiled in parallel, in the order of the kernels."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda kernel: build(kernel, architecture), kernels)
