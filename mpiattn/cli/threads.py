"""How many BLAS threads a rank may use: its share of the host's cores, unless the user has said."""

import os

from ..host import BLAS_VARIABLES

# How launchers tell a rank the number of ranks on its host: MPICH's and Intel's, Open MPI's, Slurm's srun.
LOCAL_RANKS = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE")


def local_ranks():
    """Ranks of this launch on this host by the launcher's environment; 1 if it does not say."""
    for name in LOCAL_RANKS:
        count = os.environ.get(name, "").split("(")[0].split(",")[0]     # Slurm writes 4(x2) for two hosts of 4
        if count.isdigit() and int(count):
            return int(count)
    return 1


def limit_threads():
    """Set the variables that BLAS libraries read when NumPy is first imported, so that ranks share the cores.

    Without it every rank would start a thread on every core, and on full hosts run several times slower.
    """
    if any(name in os.environ for name in BLAS_VARIABLES):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name in BLAS_VARIABLES:
        os.environ[name] = str(max(1, cores // local_ranks()))
