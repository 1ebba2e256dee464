"""A folder from which batch jobs of slurm/ are submitted on this machine, with the environment that runs the tests."""

import shlex
import shutil
import sys
from pathlib import Path

import launch

# Open MPI's transport for ranks of one node does not reach the others, which here are this machine too.
ACROSS_NODES = {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}


def prepare(folder):
    """Put slurm/ and a .venv into the folder; gives the environment for sbatch."""
    shutil.copytree(launch.SLURM, folder / "slurm")
    across = ACROSS_NODES if launch.vendor() == "openmpi" else {}
    env = {name: value for name, value in launch.environment(across).items() if not name.startswith("MPIATTN_")}
    activate = {
        name: value
        for name, value in env.items()
        if name.startswith(("PYTHONPATH", "OMPI_", "PRTE_", "OPENBLAS_", "I_MPI_"))
    }
    activate["PATH"] = f"{Path(sys.executable).parent}:{Path(launch.mpiexec()).parent}:{env['PATH']}"
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").write_text(
        "".join(f"export {name}={shlex.quote(value)}\n" for name, value in activate.items())
    )
    env.pop("OMP_NUM_THREADS")  # env.sh sets it
    return env
