"""Checks that the launcher belongs to this MPI.

The launcher of another MPI starts processes that are each alone in their world: each would do the whole work.
"""

import warnings
from functools import cache

from . import installation
from .launch_variables import OPEN_MPI, launch_rank, launched

ADVICE = (
    "mpiexec belongs to another MPI than mpi4py: use the mpiexec of mpi4py's MPI, or rebuild mpi4py with your "
    "MPI loaded (pip install --force-reinstall --no-binary=mpi4py mpi4py); with srun, name the process manager "
    "interface that this MPI supports: srun --mpi=pmix or pmi2 (srun --mpi=list)"
)

ALONE = "each of which is alone in"


def foreign():
    """An error text where Open MPI's mpiexec has started this process but mpi4py's MPI is MPICH, else None.

    Call it before MPI starts: MPICH would end the process.
    """
    ranks, launcher = launched()
    if launcher != OPEN_MPI or "MPICH" not in installation.mpi_library().upper():
        return None
    return f"the launcher started {ranks} ranks of Open MPI, mpi4py has {installation.mpi_library()}"


def copies(size):
    """An error text where this MPI sees `size` = 1 rank but the launcher has started several, else None."""
    ranks, launcher = launched()
    if size > 1 or ranks in (None, 1):
        return None
    return (
        f"{launcher} started {ranks} ranks, {ALONE} {installation.mpi_library()}, the MPI of "
        f"mpi4py: they would do the work {ranks} times"
    )


@cache
def warn_of_copies(size):
    """Warn a program once, on one rank of the launch, of what `copies` says about its world of `size` ranks."""
    wrong = copies(size)
    if wrong and launch_rank() == 0:
        warnings.warn(
            f"{wrong}. Start the program with the mpiexec of its own MPI, or with srun --mpi=pmix or pmi2 "
            "(srun --mpi=list). Programs that are meant to be alone take MPI.COMM_SELF",
            RuntimeWarning,
            stacklevel=2,
        )
