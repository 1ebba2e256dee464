"""The installation of this process: versions, BLAS, MPI and devices."""

import os
import platform

from ..version import __version__
from . import host
from .launch_variables import launched

CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")  # in MPI's order


def versions():
    """Version by name; None where not installed."""
    import h5py

    parallel = "parallel" if h5py.get_config().mpi else "serial"
    return {
        "mpiattn": __version__,
        "Python": platform.python_version(),
        "NumPy": host.version("numpy"),
        "mpi4py": host.version("mpi4py"),
        "h5py": host.version("h5py"),
        "HDF5": f"{h5py.version.hdf5_version}, {parallel}",
        "CuPy": host.version(*CUPY),
        "torch": host.version("torch"),
    }


def blas():
    """NumPy's BLAS, its threads, what to set for it (or None), and the variables that are set."""
    name, threads = host.blas()
    return {
        "library": name,
        "threads": threads,
        "advice": host.blas_advice(),
        "settings": {variable: os.environ[variable] for variable in host.BLAS_VARIABLES if variable in os.environ},
    }


def mpi(comm):
    """This MPI, its capabilities, and the number of ranks by MPI and by the launcher."""
    from mpi4py import MPI

    from .gpu_aware_mpi import gpu_aware

    aware, why = gpu_aware()
    return {
        "library": mpi_library(),
        "standard": ".".join(map(str, MPI.Get_version())),
        "thread_level": THREAD_LEVELS[_level(MPI)],
        "largest_tag": comm.Get_attr(MPI.TAG_UB),
        "gpu_aware": aware,
        "gpu_aware_why": why,
        "ranks": comm.size,
        "launched_ranks": launched()[0],
    }


def mpi_library():
    """Name and version of the MPI library."""
    from mpi4py import MPI

    library = MPI.Get_library_version().splitlines()[0].split(", ")[0]
    return " ".join(library.replace("\0", "").split())


def _level(MPI):
    order = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    return order.index(MPI.Query_thread())


def devices():
    """Names of the CUDA devices that this process sees, and the reason if there are none: (names, why)."""
    if host.version(*CUPY) is None:
        return [], "CuPy is not installed"
    try:
        import cupy

        runtime = cupy.cuda.runtime
        names = [runtime.getDeviceProperties(i)["name"] for i in range(runtime.getDeviceCount())]
    except Exception as error:  # no driver, no device, a broken install: each has its own class in CuPy
        return [], f"CuPy finds none: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return [name.decode() if isinstance(name, bytes) else name for name in names], "CuPy counts 0 devices"


def device_addresses(count):
    """Identifiers of this process's devices, unique on the host: PCI bus addresses, or numbers without those."""
    addresses = []
    for index in range(count):
        try:
            import cupy

            address = cupy.cuda.runtime.deviceGetPCIBusId(index)
        except Exception:
            address = index
        addresses.append(address.decode() if isinstance(address, bytes) else str(address))
    return addresses
