"""What this process runs on: processor, packages, and loaded shared libraries.  Uses no MPI and no device."""

import ctypes
import os
import platform
import re
from functools import cache
from importlib import metadata

# Variables from which BLAS libraries read their number of threads when they are loaded.
BLAS_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
# Functions of BLAS libraries that return their number of threads; NumPy's wheels have the first one.
BLAS_THREADS = ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads",
                "MKL_Get_Max_Threads", "bli_thread_get_num_threads")


def cores():
    """Numbers of the cores that this process may use, as a set."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


@cache
def processor():
    """The model of the processor, as Linux names it."""
    try:
        with open("/proc/cpuinfo") as info:
            names = re.findall(r"^model name\s*:\s*(.+)$", info.read(), re.MULTILINE)
    except OSError:
        names = []
    return names[0].strip() if names else platform.processor() or platform.machine()


def version(*packages):
    """Version of the first of these distributions that is installed, read without importing it; else None."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def loaded(pattern):
    """Paths of the shared libraries in this process whose file name matches a regular expression.

    Empty where there is no /proc (not Linux).
    """
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line}
    except OSError:
        return []
    return sorted(path for path in paths if re.search(pattern, os.path.basename(path)))


def ask(path, function):
    """The int that a function without arguments of a loaded library returns; None if it has no such function."""
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)     # never loads a second copy
        return int(getattr(library, function)())
    except (OSError, AttributeError):
        return None


def blas():
    """NumPy's BLAS and its number of threads: (name, threads), each None where it is unknown."""
    name, path, function = _blas()
    return name, function and ask(path, function)


@cache
def _blas():
    """Name of NumPy's BLAS, its library, and its function that returns the threads; each None where unknown."""
    import numpy as np
    try:
        built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        name = f"{built['name']} {built['version']}"
    except (TypeError, KeyError):              # NumPy before 1.26
        name = None
    for path in loaded(r"blas|mkl|blis"):
        for function in BLAS_THREADS:
            if ask(path, function) is not None:
                return name, path, function
    return name, None, None
