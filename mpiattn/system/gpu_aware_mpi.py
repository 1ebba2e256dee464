"""Whether this MPI takes buffers in GPU memory (CUDA), with the reason for the answer.

An MPI that is not GPU-aware ends in a segmentation fault on a device buffer, which cannot be caught.  So the answer is
no unless the library itself, or a documented setting of it, says yes.

Cray MPICH ends a process in MPI_Init if it is to take device memory and lacks its library for that.
"""

import os
import re

from .host import ask, loaded

LIBRARY = r"^libp?mpi.*\.so"
QUERY = "MPIX_Query_cuda_support"
CRAY, CRAY_SWITCH = "CRAY MPICH", "MPICH_GPU_SUPPORT_ENABLED"
GTL = "libmpi_gtl_{}"  # by which Cray MPICH takes device memory; one for CUDA, one for AMD's HSA
NVIDIA, AMD = "nvidiactl", "kfd"  # what Linux has in /dev where there are GPUs of that maker
UNSET = f"unset {CRAY_SWITCH}"
REBUILD = (
    "load the module of the GPUs ({}) and rebuild mpi4py with it, so that it is linked (MPICC='cc -shared' pip install "
    "--force-reinstall --no-cache-dir --no-binary=mpi4py mpi4py), or set "
    "LD_PRELOAD=$CRAY_MPICH_ROOTDIR/gtl/lib/{}.so for all ranks"
)
REBUILD_CUDA = REBUILD.format("craype-accel-nvidia80 or craype-accel-nvidia90", GTL.format("cuda"))
REBUILD_HSA = REBUILD.format("craype-accel-amd-gfx90a on MI250X", GTL.format("hsa"))


def unfit():
    """(why, what to do) if MPI would end this process as it starts, else None.  Call it before MPI starts."""
    from mpi4py import MPI

    if MPI.Is_initialized():
        return None
    devices = [name for name in (NVIDIA, AMD) if os.path.exists(f"/dev/{name}")]
    return without_transport(MPI.Get_library_version(), os.environ, loaded(r"^libmpi_gtl_"), devices)


def without_transport(version, environ, transports, devices):
    """As `unfit`, from the collected evidence.

    transports: Cray's GPU transport libraries that are in this process.  devices: those of NVIDIA and AMD that
        the node's /dev has.
    """
    if CRAY not in version.upper() or not _is_set(environ, CRAY_SWITCH) or transports:
        return None
    library, advice = _cray_advice(devices)
    return (
        f"{CRAY_SWITCH} is {environ[CRAY_SWITCH]}, but {library}, the library by which Cray MPICH takes device "
        "memory, is not in this process: MPI would end every rank ('GTL library is not linked')",
        advice,
    )


def _cray_advice(devices):
    """(the library that is missing, what to do) on a node with these devices."""
    if NVIDIA in devices:
        return GTL.format("cuda"), f"{REBUILD_CUDA}, or, to do without GPU-aware MPI, {UNSET}"
    if AMD in devices:
        return GTL.format("hsa"), (
            f"{UNSET}: mpiattn computes on no AMD GPU, and MPI gets host memory from it. Where MPI gets memory of AMD "
            f"GPUs from the same program, {REBUILD_HSA}"
        )
    return " or ".join(map(GTL.format, ("cuda", "hsa"))), (
        f"{UNSET}: this node has no GPU. For jobs on nodes with NVIDIA's GPUs, {REBUILD_CUDA}"
    )


def _is_set(environ, name):
    return environ.get(name, "").strip().lower() in ("1", "yes", "true", "on", "enable")


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
    if CRAY in version.upper():
        if not _is_set(environ, CRAY_SWITCH):
            return False, "Cray MPICH without MPICH_GPU_SUPPORT_ENABLED=1"
        if not transport_loaded:
            return False, "MPICH_GPU_SUPPORT_ENABLED=1, but libmpi_gtl_cuda is not loaded"
        return True, "Cray MPICH with MPICH_GPU_SUPPORT_ENABLED=1 and libmpi_gtl_cuda"
    if "MVAPICH2" in version.upper() and not _is_set(environ, "MV2_USE_CUDA"):
        return False, "MVAPICH2 without MV2_USE_CUDA=1"
    enabled = environ.get("MPIR_CVAR_ENABLE_GPU")
    if "MPICH" in version.upper() and enabled is not None and not _is_set(environ, "MPIR_CVAR_ENABLE_GPU"):
        return False, f"MPIR_CVAR_ENABLE_GPU={enabled}"
    configured = re.search(r"--with-cuda(?!=no\b|lib)\S*", version)
    if answer is not None:
        path, yes = answer
        why = f"{QUERY} of {path} says {'yes' if yes else 'no'}"
        if not yes and "MPICH" in version.upper() and not configured:
            why += "; MPICH was configured without --with-cuda"
        return bool(yes), why
    if "MPICH" in version.upper() and configured and _is_set(environ, "MPIR_CVAR_ENABLE_GPU"):
        return True, f"MPICH configured {configured[0]}, with MPIR_CVAR_ENABLE_GPU={enabled}"
    return False, f"unknown, so no: this MPI has no {QUERY}"
