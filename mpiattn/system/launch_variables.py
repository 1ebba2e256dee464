"""Rank, number of ranks and ranks on this host, from the environment variables that launchers set."""

import os

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID", "PALS_RANKID", "MV2_COMM_WORLD_RANK")
# The number of ranks.  Without a PMI that MPI knows, srun starts independent programs of one rank each; then only its
# own variable has the number.  It comes last because mpiexec may have started its daemons by srun.
OPEN_MPI = "the mpiexec of Open MPI"
LAUNCHERS = {
    "PMI_SIZE": "the mpiexec of MPICH or Intel MPI (or another launcher with PMI)",
    "OMPI_COMM_WORLD_SIZE": OPEN_MPI,
    "PALS_SIZE": "the launcher of PALS",
    "MV2_COMM_WORLD_SIZE": "the launcher of MVAPICH",
    "SLURM_STEP_NUM_TASKS": "srun",
}
# The number of ranks on this host: MPICH's and Intel's, Open MPI's, Slurm's srun.
LOCAL_RANKS = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE")


def launch_rank(otherwise=0, environment=os.environ):
    """This process's rank from the launcher's environment, before MPI starts; `otherwise` without a launcher.

    environment: that of another process.
    """
    for name in RANK_VARIABLES:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return otherwise


def launched():
    """The number of ranks that the launcher started, and its name in words; (None, None) without a launcher."""
    for variable, launcher in LAUNCHERS.items():
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable]), launcher
    return None, None


def local_ranks():
    """Ranks of this launch on this host, from the launcher's environment; 1 if unknown."""
    for name in LOCAL_RANKS:
        count = os.environ.get(name, "").split("(")[0].split(",")[0]  # Slurm writes 4(x2) for two hosts of 4
        if count.isdigit() and int(count):
            return int(count)
    return 1
