# What every script of this folder begins with: the site's env.sh, checks, and how to start ranks.  Then there are
#
#     launch NODES RANKS COMMAND...     ranks fill the first nodes of the job
#     readable FILE                     ends the job unless FILE can be read
#     die MESSAGE                       ends the job with code 2
#
# and `slurm`, this folder.
slurm=$(dirname "${BASH_SOURCE[0]}")

die() {
    echo "mpiattn: $*" >&2
    exit 2
}

readable() {
    [ -f "$1" ] && [ -r "$1" ] || die "no file ${1@Q} that $(hostname) can read, in $PWD"
}

# The MPI that mpi4py loads, in its own words.  Without MPI_Init, which some sites allow in steps of srun only.
mpi_library() {
    python3 - <<'END'
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(" ".join(MPI.Get_library_version().replace("\0", "").splitlines()[0].split()))
END
}

# The launcher for that MPI: its own mpiexec, which finds the nodes of the job by itself, else an srun that speaks its
# protocol.  The mpiexec of another MPI would start as many programs of one rank each.
choose_launcher() {
    local library own plugin options="" version offered mpiexec
    library=$(mpi_library) || die "mpi4py can't load its MPI, see above; load the MPI's module in $slurm/env.sh"
    case $library in
        *"Open MPI"*)   own="open mpi|openrte|prte|prrte" plugin=pmix
                        options=" --bind-to none" ;;          # else all threads of a rank may share one core
        *CRAY*)         own="" plugin=cray_shasta ;;          # has no mpiexec for Slurm
        *Intel*)        own="intel" plugin=pmi2 ;;
        *)              own="hydra|mpich|mvapich" plugin=pmi2 ;;
    esac
    version=$(mpiexec --version 2>&1) || version=""
    if [[ -n $own && ${version,,} =~ $own ]]; then
        echo "mpiexec$options"
        return
    fi
    offered=$(srun --mpi=list 2>&1) || offered=""
    offered=$(tr -s "[:space:]" " " <<< "$offered")
    mpiexec=$(command -v mpiexec) || mpiexec="none on PATH"
    [[ " $offered " == *" $plugin "* ]] || die "mpi4py uses $library; this mpiexec is not its own: $mpiexec;" \
        "srun lacks --mpi=$plugin: $offered. Load the MPI's module, or set MPIATTN_LAUNCH, in $slurm/env.sh"
    echo "srun --mpi=$plugin"
}

# Prints what a node has, in one line, for all of them to be compared; or what it lacks, and ends with code 1.
look='
import sys
try:
    import h5py, mpi4py, mpiattn, numpy
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    library = MPI.Get_library_version().replace("\0", "").splitlines()[0]
    print(f"mpiattn {mpiattn.__version__}, Python {sys.version.split()[0]}, mpi4py {mpi4py.__version__}, {library}")
except Exception as error:
    print(f"{sys.executable}: {type(error).__name__}: {error}".splitlines()[0])
    sys.exit(1)
'
# Runs it, on every node, whose shell is to expand what stands here.
# shellcheck disable=SC2016
look_here='
said=$(timeout "$1" python3 -c "$2" 2> /dev/null)
case $? in
    0) ;;
    124) said="FAILS: no answer within $1 s (MPIATTN_LOOK_SECONDS)" ;;
    127) said="FAILS: no python3" ;;
    *) said="FAILS: ${said:-python3 ended without a word}" ;;
esac
printf "%s\t%s\n" "$SLURMD_NODENAME" "$said"
'

# Ends the job unless every node has the same.  Where one lacks something, the ranks of the others would wait for its own.
look_at_nodes() {
    local limit=${MPIATTN_LOOK_SECONDS:-60} nodes=$SLURM_JOB_NUM_NODES said
    said=$(timeout $((2 * limit)) srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --mpi=none \
        bash -c "$look_here" - "$limit" "$look") ||
        die "srun cannot start a program on each node of $SLURM_JOB_NODELIST within $((2 * limit)) s, see above"
    said=$(sort <<< "$said" | awk -F "\t" '{ with[$2] = with[$2] " " $1 } END { for (it in with) print with[it] ": " it }')
    [[ $(wc -l <<< "$said") -eq 1 && $said != *": FAILS: "* ]] ||
        die "nodes lack what others have; see to the modules and the environment of $slurm/env.sh there:"$'\n'"$said"
}

launch() {
    local nodes=$1 ranks=$2 options
    shift 2
    case ${launcher[0]##*/} in
        srun)   # Slurm does not hand --cpus-per-task on to steps, and by itself lets ranks wait for one that has failed
                options=(--nodes="$nodes" --ntasks="$ranks" --kill-on-bad-exit=1)
                [ -z "${SLURM_CPUS_PER_TASK:-}" ] || options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK") ;;
        *)      options=(-n "$ranks") ;;
    esac
    "${launcher[@]}" "${options[@]}" "$@"
}

[ -n "${SLURM_JOB_ID:-}" ] || die "this is not a Slurm job: sbatch ${0@Q} ..."
# shellcheck source=env.sh
source "$slurm/env.sh" || die "$slurm/env.sh failed, see above (in $PWD)"
set -euo pipefail
unset SLURM_EXPORT_ENV        # `sbatch --export=NONE` would else start the ranks without this environment, too
command -v python3 > /dev/null || die "no python3 on PATH: activate the environment of mpiattn in $slurm/env.sh"
python3 -c "import mpiattn" || die "$(command -v python3) has no mpiattn: activate its environment in $slurm/env.sh"
launcher=${MPIATTN_LAUNCH:-$(choose_launcher)} || exit
read -ra launcher <<< "$launcher"
[ "$SLURM_JOB_NUM_NODES" -eq 1 ] || look_at_nodes
echo "mpiattn: $SLURM_NTASKS ranks on $SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST), started by ${launcher[*]}"
