"""A test-only back end that runs the CUDA kernels' sources on the CPU, compiled under kernels/emulation.

It shows that kernels are right, and nothing about their speed.  It needs a C++ compiler: $CXX, c++, g++ or clang++.
"""

import ctypes
import fcntl
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
# Shadow stacks and fortified longjmp take a change of fiber for an attack.
OPTIONS = ("-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-shared", "-fPIC", "-U_FORTIFY_SOURCE",
           "-Wno-unknown-pragmas")
GRID_LIMIT = 65535              # of CUDA, for all dimensions but the first
PROCESSORS = 3                  # as if a GPU had so many, which decides how finely decoding splits the keys

_C_TYPES = {np.int32: ctypes.c_int, np.int64: ctypes.c_longlong, np.float32: ctypes.c_float}


def compiler():
    """Path of a C++ compiler, or None."""
    return next(filter(None, map(shutil.which, (*filter(None, [os.environ.get("CXX")]), *COMPILERS))), None)


def cache_dir():
    """Where compiled kernels are kept: $XDG_CACHE_HOME/mpiattn or ~/.cache/mpiattn."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpiattn" / "emulated"


@cache
def _environment():
    """What compiled kernels depend on besides their source: the emulation and the compiler."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    folder = kernel_dir() / "emulation"
    return version, *OPTIONS, *(path.read_text() for path in sorted(folder.iterdir()))


@contextmanager
def _in_turn(path):
    """Processes that hold this lock file one after another, where the file system has locks."""
    with open(path, "w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(kernel, target):
    emulation = kernel_dir() / "emulation"
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:         # ranks of other hosts may compile the same
        made = Path(folder) / target.name
        command = [compiler(), *OPTIONS, f"-I{emulation}", f"-I{kernel_source.path('')}",
                   f'-DSOURCE="{kernel.file}"', f"-DKERNEL={kernel.name}", *kernel.options(),
                   emulation / "main.cpp", "-o", made]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise MpiattnError(f"{kernel.file} does not compile for the CPU:\n{done.stderr}")
        made.replace(target)


@cache
def library(kernel):
    """A compiled kernel, from the cache or compiled into it."""
    target = cache_dir() / f"{kernel.name}-{kernel_source.digest(kernel, *_environment())}.so"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with _in_turn(target.with_suffix(".lock")):                        # one rank compiles it for all
            if not target.is_file():
                _compile(kernel, target)
    function = ctypes.CDLL(str(target)).emulate
    function.restype = ctypes.c_char_p
    return function


class EmulatedBackend(KernelLaunches, NumpyBackend):
    """The kernels on NumPy arrays, one thread block after the other; every launch is complete when it returns."""

    name = "emulated"
    processors = PROCESSORS
    architecture = 90
    descending = False                  # the order in which the warps of a block run

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
        held = [_C_TYPES[type(each)](each) if isinstance(each, np.generic) else ctypes.c_void_p(each.ctypes.data)
                for each in arguments]
        at = (ctypes.c_void_p * len(held))(*(ctypes.addressof(each) for each in held))
        error = library(kernel)((ctypes.c_uint * 3)(*grid), kernel.threads, kernel.shared_bytes, int(self.descending),
                                at, len(held))
        if error:
            raise MpiattnError(f"{kernel.name}: {error.decode()}")


class DeferredEmulatedBackend(DeferredBackend, EmulatedBackend):
    """The emulation as late as `mpiattn.backends.testing.deferred` makes it."""

    name = "deferred-emulated"

    def empty(self, shape, dtype):
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8).fill(0xFF)            # NaN, and no valid index
        return array
