"""What every benchmark says of where it has measured."""

from ..system import host
from ..system.installation import mpi_library


def machine(**more):
    """The processor, and the BLAS of this process; more: other facts."""
    blas, threads = host.blas()
    return {"processor": host.processor(), **more, "blas": blas, "blas_threads": threads}


def versions():
    """NumPy's and MPI's."""
    return {"numpy": host.version("numpy"), "mpi": mpi_library()}


def numpy_in_words(data, machine):
    """NumPy's version and BLAS.  machine: of `machine`."""
    return f"NumPy {data['versions']['numpy']} ({machine['blas'] or 'unknown BLAS'})"
