"""Whether this MPI takes buffers in GPU memory (CUDA), with the reason for the answer.

An MPI that is not GPU-aware ends in a segmentation fault on a device buffer, which cannot be caught.  So the answer is
no unless the library itself, or a documented setting of it, says yes.
"""

import os
import re

from .host import ask, loaded

LIBRARY = r"^libp?mpi.*\.so"
QUERY = "MPIX_Query_cuda_support"


def gpu_aware():
    """(True or False, why) for the MPI of this process, which must be initialised."""
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return False, "MPI is not running in this process"
    answers = [(path, ask(path, QUERY)) for path in loaded(LIBRARY)]
    answers = [(path, answer) for path, answer in answers if answer is not None]
    return verdict(
        MPI.Get_library_version(), os.environ, answers[0] if answers else None, bool(loaded(r"^libmpi_gtl_cuda"))
    )


def verdict(version, environ, answer, transport_loaded):
    """(True or False, why) from the collected evidence; separate from `gpu_aware` so that it can be tested.

    version: the library's version text.  answer: (path, result) of MPIX_Query_cuda_support, or None without it.
    transport_loaded: whether Cray's GPU transport library is in this process.
    """

    def is_set(name):
        return environ.get(name, "").strip().lower() in ("1", "yes", "true", "on", "enable")

    if "CRAY MPICH" in version.upper():
        if not is_set("MPICH_GPU_SUPPORT_ENABLED"):
            return False, "Cray MPICH without MPICH_GPU_SUPPORT_ENABLED=1"
        if not transport_loaded:
            return False, "MPICH_GPU_SUPPORT_ENABLED=1, but libmpi_gtl_cuda is not loaded"
        return True, "Cray MPICH with MPICH_GPU_SUPPORT_ENABLED=1 and libmpi_gtl_cuda"
    if "MVAPICH2" in version.upper() and not is_set("MV2_USE_CUDA"):
        return False, "MVAPICH2 without MV2_USE_CUDA=1"
    enabled = environ.get("MPIR_CVAR_ENABLE_GPU")
    if "MPICH" in version.upper() and enabled is not None and not is_set("MPIR_CVAR_ENABLE_GPU"):
        return False, f"MPIR_CVAR_ENABLE_GPU={enabled}"
    configured = re.search(r"--with-cuda(?!=no\b|lib)\S*", version)
    if answer is not None:
        path, yes = answer
        why = f"{QUERY} of {path} says {'yes' if yes else 'no'}"
        if not yes and "MPICH" in version.upper() and not configured:
            why += "; MPICH was configured without --with-cuda"
        return bool(yes), why
    if "MPICH" in version.upper() and configured and is_set("MPIR_CVAR_ENABLE_GPU"):
        return True, f"MPICH configured {configured[0]}, with MPIR_CVAR_ENABLE_GPU={enabled}"
    return False, f"unknown, so no: this MPI has no {QUERY}"
