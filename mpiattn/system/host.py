"""What this process runs on: processor, packages, and loaded shared libraries.  Uses no MPI and no device."""

import ctypes
import os
import platform
import re
from functools import cache

# Variables from which BLAS libraries read their number of threads when they are loaded.
BLAS_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}  # what OpenBLAS's kernels for SKYLAKEX need
CORE_TYPE = "OPENBLAS_CORETYPE"  # the variable that names the type of core to OpenBLAS when it is loaded


def cores():
    """Numbers of the cores that this process may use, as a set."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def processor():
    """The model of the processor, as Linux names it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


@cache
def _cpuinfo(field):
    """A field of the first processor in /proc/cpuinfo; "" where there is none."""
    try:
        with open("/proc/cpuinfo") as info:
            values = re.search(rf"^{field}\s*:\s*(.+)$", info.read(), re.MULTILINE)
    except OSError:
        return ""
    return values[1].strip() if values else ""


def version(*packages):
    """Version of the first of these distributions that is installed, read without importing it; else None."""
    from importlib import metadata  # every rank of every command imports this module; few ask for versions

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
        library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)  # never loads a second copy
        return int(getattr(library, function)())
    except (OSError, AttributeError):
        return None


def blas():
    """NumPy's BLAS and its number of threads: (name, threads), each None where it is unknown.

    The name has the version and, of OpenBLAS and BLIS, the type of core whose kernels run: "openblas 0.3.31 SkylakeX".
    """
    info = _blas()
    name = " ".join(filter(None, map(info.get, ("internal_api", "version", "architecture"))))
    return name or None, info.get("num_threads")


def _has_avx512():
    return AVX512.issubset(_cpuinfo("flags").split())


def mistaken_by_openblas():
    """Whether OpenBLAS may take this processor for one without AVX-512: it knows few of AMD's that have it."""
    return _cpuinfo("vendor_id") == "AuthenticAMD" and _has_avx512()


def blas_advice():
    """What a program should set so that OpenBLAS uses AVX-512 on a processor that has it; None if nothing."""
    core = _blas().get("architecture")
    if os.environ.get(CORE_TYPE) == "SKYLAKEX" and mistaken_by_openblas():
        return f"commands set {CORE_TYPE}=SKYLAKEX on this processor; do so in your own program before NumPy is loaded"
    if core not in ("Haswell", "Zen") or not _has_avx512():
        return None
    taken = f"{CORE_TYPE} is {os.environ[CORE_TYPE]}" if CORE_TYPE in os.environ else f"OpenBLAS takes it for {core}"
    return f"{taken}, but this processor has AVX-512: set {CORE_TYPE}=SKYLAKEX before NumPy is loaded"


def _blas():
    """What threadpoolctl says of NumPy's BLAS; {} of one that it does not know."""
    infos = [info for info in (library.info() for library in _libraries()) if info["user_api"] == "blas"]
    return min(infos, key=lambda info: "numpy.libs" not in info["filepath"], default={})  # SciPy may have its own


@cache
def _libraries():
    """Controllers of the loaded libraries that have threads; looking for them takes longer than making a plan."""
    import numpy  # noqa: F401  (which loads its BLAS)
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().lib_controllers
