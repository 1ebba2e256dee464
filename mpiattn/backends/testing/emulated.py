"""A test-only back end that runs the sources of the CUDA kernels on the CPU, compiled with kernels/emulation.

It tests that kernels are correct and says nothing about their speed.  It needs a C++ compiler: $CXX, c++, g++ or
clang++.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import numpy as np

from ...errors import MpiattnError
from ...system.sources import kernel_dir
from ..cuda import kernel_source
from ..cuda.kernels import KernelLaunches
from ..numpy.backend import NumpyBackend
from .deferred import DeferredBackend

COMPILERS = ("c++", "g++", "clang++")
# Shadow stacks and fortified longjmp would abort on a switch between fibers.
OPTIONS = (
    "-std=c++17",
    "-march=native",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-U_FORTIFY_SOURCE",
    "-Wno-unknown-pragmas",
)
RUNTIME_OPTIONS = ("-O2", "-r", "-nostdlib")  # one object of several sources
KERNEL_OPTIONS = ("-O1", "-shared")
GRID_LIMIT = 65535  # CUDA's limit for the second and third dimension of a grid
PROCESSORS = 3  # multiprocessors of the emulated GPU; sets into how many splits decoding cuts the keys

_C_TYPES = {np.int32: ctypes.c_int, np.uint32: ctypes.c_uint, np.int64: ctypes.c_longlong, np.float32: ctypes.c_float}


def compiler():
    """Path of a C++ compiler; None if there is none."""
    return next(filter(None, map(shutil.which, (*filter(None, [os.environ.get("CXX")]), *COMPILERS))), None)


def cache_dir():
    """Folder of compiled kernels, in $XDG_CACHE_HOME/mpiattn or ~/.cache/mpiattn."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpiattn" / "emulated"


def _emulation():
    """The folder of the emulation's sources."""
    return kernel_dir() / "emulation"


@cache
def _environment():
    """What compiled kernels depend on besides their source: compiler, its options, and the emulation's files."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    texts = (path.read_text() for path in sorted(_emulation().iterdir()))
    return version, *OPTIONS, *RUNTIME_OPTIONS, *KERNEL_OPTIONS, *texts


@contextmanager
def _in_turn(path):
    """Hold a lock file in the body, so that processes take turns; no lock if the file system has none."""
    with open(path, "w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compiled(name, source, *arguments):
    """The path of a file in the cache, compiled into it with these arguments if it is not there."""
    target = cache_dir() / name
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with _in_turn(target.with_suffix(".lock")):  # one rank compiles for all
            if not target.is_file():
                _compile(target, source, *arguments)
    return target


def _compile(target, source, *arguments):
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # ranks on other hosts may compile the same
        made = Path(folder) / target.name
        done = subprocess.run([compiler(), *OPTIONS, *arguments, "-o", made], capture_output=True, text=True)
        if done.returncode:
            raise MpiattnError(f"{source} does not compile for the CPU:\n{done.stderr}")
        made.replace(target)


@cache
def _runtime():
    """The object that all libraries are linked with: what depends on no kernel and takes long to compile."""
    key = hashlib.sha256("\0".join(_environment()).encode()).hexdigest()[:24]
    sources = [_emulation() / name for name in ("fibers.cpp", "hazards.cpp", "operations.cpp")]
    return _compiled(f"runtime-{key}.o", "the emulation", *RUNTIME_OPTIONS, *sources)


@cache
def library(kernel):
    """The entry function of a compiled kernel, from the cache or compiled into it."""
    target = _compiled(
        f"{kernel.name}-{kernel_source.digest(kernel, *_environment())}.so",
        kernel.file,
        *KERNEL_OPTIONS,
        f"-I{_emulation()}",
        f"-I{kernel_source.path('')}",
        f'-DSOURCE="{kernel.file}"',
        f"-DKERNEL={kernel.name}",
        *kernel.options(),
        _emulation() / "main.cpp",
        _runtime(),
    )
    function = ctypes.CDLL(str(target)).emulate
    function.restype = ctypes.c_char_p
    return function


class EmulatedBackend(KernelLaunches, NumpyBackend):
    """The kernels on NumPy arrays, one thread block after another; a launch is complete when it returns."""

    name = "emulated"
    processors = PROCESSORS
    architecture = 90
    descending = False  # whether the warps of a block run in descending order

    @classmethod
    def missing(cls):
        return "" if compiler() else f"it needs a C++ compiler: $CXX, {', '.join(COMPILERS)}"

    def _address(self, array):
        return array.ctypes.data

    def _run(self, kernel, grid, *arguments):
        if 0 in grid:
            return
        if max(grid[1:]) > GRID_LIMIT:
            raise MpiattnError(f"{kernel.name}: the grid is {grid}; but for the first it may have {GRID_LIMIT} at most")
        held = [
            _C_TYPES[type(each)](each) if isinstance(each, np.generic) else ctypes.c_void_p(each.ctypes.data)
            for each in arguments
        ]
        addresses = (ctypes.c_void_p * len(held))(*(ctypes.addressof(each) for each in held))
        error = library(kernel)(
            (ctypes.c_uint * 3)(*grid), kernel.threads, kernel.shared_bytes, int(self.descending), addresses, len(held)
        )
        if error:
            raise MpiattnError(f"{kernel.name}: {error.decode()}")


class DeferredEmulatedBackend(DeferredBackend, EmulatedBackend):
    """The emulation with the delays of `mpiattn.backends.testing.deferred`."""

    name = "deferred-emulated"

    def empty(self, shape, dtype):
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8).fill(0xFF)  # NaN, and no valid index
        return array
