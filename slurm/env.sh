# The only file to change on a new cluster.  Every script of this folder sources it, in the folder from which the job
# was submitted and before bash's strict mode, which module and activate scripts do not survive.

# Modules: the compiler and the MPI that mpi4py was installed with, the same here as then.
# module purge
# module load gcc openmpi

# The environment in which `python3` finds mpiattn.
# shellcheck source=/dev/null
source .venv/bin/activate || return

# What starts the ranks, without their number: "mpiexec", "srun --mpi=pmix", "srun --mpi=pmi2", with further options if
# your site wants them.  Unset, launch.sh tries what the MPI may be started by; each job's first lines say what it chose.
# export MPIATTN_LAUNCH="srun --mpi=pmix"

# Seconds within which python3 of every node must say what it has, and two ranks must see each other, before the others
# are started.
# export MPIATTN_LOOK_SECONDS=60

# Threads of a rank: one for each core that it has by --cpus-per-task, so that ranks on one node share none.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(cores_of_a_rank)}

# The fabric, where the MPI does not find the fast one by itself.  `mpiattn check` measures what you get.
# export FI_PROVIDER=cxi                     # MPICH and Intel MPI, through libfabric: cxi, verbs, psm3, efa, tcp
# export OMPI_MCA_pml=ucx                    # Open MPI on InfiniBand
# export UCX_NET_DEVICES=mlx5_0:1
# export MPICH_GPU_SUPPORT_ENABLED=1         # Cray MPICH: buffers in GPU memory

# A folder that all nodes see, for what bench.sbatch writes and deletes; enough space for one `out` and `lse`.
export MPIATTN_SCRATCH=${MPIATTN_SCRATCH:-.}
