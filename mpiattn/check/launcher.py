"""Whether the launcher is of another MPI, found out before MPI is started: under Open MPI's mpiexec MPICH aborts."""

import os
import subprocess
import sys

from .item import FAIL, Item

ASK = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
ADVICE = ("mpiexec belongs to another MPI than mpi4py: use the mpiexec of that MPI, or install mpi4py anew with yours "
          "loaded (pip install --force-reinstall --no-binary=mpi4py mpi4py); with srun, name the interface that this "
          "MPI knows: srun --mpi=pmix or pmi2 (srun --mpi=list)")


def foreign():
    """The item that says so where Open MPI's mpiexec has started this process and mpi4py's MPI is MPICH, else None."""
    launched = os.environ.get("OMPI_COMM_WORLD_SIZE")
    if launched is None:
        return None
    says = subprocess.run([sys.executable, "-c", ASK], text=True, capture_output=True).stdout
    if "MPICH" not in says.upper():
        return None
    library = " ".join(says.splitlines()[0].split())
    return Item("ranks", FAIL, f"the launcher started {launched} ranks of Open MPI, mpi4py has {library}", ADVICE)
