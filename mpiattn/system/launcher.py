"""Whether the launcher starts ranks of this MPI.

One of another MPI starts programs that do not know of each other: each would be all of the job, N runs for one.
"""

from . import installation
from .launch_variables import OPEN_MPI, launched

ADVICE = ("mpiexec belongs to another MPI than mpi4py: use the mpiexec of that MPI, or install mpi4py anew with yours "
          "loaded (pip install --force-reinstall --no-binary=mpi4py mpi4py); with srun, name the interface that this "
          "MPI knows: srun --mpi=pmix or pmi2 (srun --mpi=list)")


def foreign():
    """What is wrong where Open MPI's mpiexec has started this process and mpi4py's MPI is MPICH, else None.

    MPICH ends the process when it is started so: this is to be asked before.
    """
    ranks, launcher = launched()
    if launcher != OPEN_MPI or "MPICH" not in installation.mpi_library().upper():
        return None
    return f"the launcher started {ranks} ranks of Open MPI, mpi4py has {installation.mpi_library()}"


def copies(size):
    """What is wrong where this MPI sees one rank, `size`, and the launcher has started several, else None."""
    ranks, launcher = launched()
    if size > 1 or ranks in (None, 1):
        return None
    return (f"{launcher} started {ranks} ranks, each of which is alone in {installation.mpi_library()}, the MPI of "
            f"mpi4py: they would do the work {ranks} times")
