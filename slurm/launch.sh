# What every script of this folder begins with: the site's env.sh, checks, and how to start ranks.  Then there are
#
#     launch NODES RANKS COMMAND...     ranks fill the first nodes of the job
#     readable FILE                     ends the job unless FILE can be read
#     die MESSAGE                       ends the job with code 2
#     number COUNT NOUN                 prints "1 node", "2 nodes"
#
# and `slurm`, this folder.  In the script's arguments %a, %A and %j stand for numbers of the job, as in Slurm's names of
# files.
slurm=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launchers.sh
source "$slurm/launchers.sh"
# shellcheck source=cores.sh
source "$slurm/cores.sh"

die() {
    echo "mpiattn: $*" >&2
    exit 2
}

number() {
    if [ "$1" -eq 1 ]; then echo "$1 $2"; else echo "$1 $2s"; fi
}

readable() {
    [ -f "$1" ] && [ -r "$1" ] || die "no file ${1@Q} that $(hostname) can read, in $PWD"
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
printf "mpiattn-look\t%s\t%s\n" "$SLURMD_NODENAME" "$said"       # among what a site may print
'

# Ends the job unless every node has the same.  Where one lacks something, the ranks of the others would wait for its own.
look_at_nodes() {
    local limit=${MPIATTN_LOOK_SECONDS:-60} nodes=$SLURM_JOB_NUM_NODES said
    said=$(timeout $((2 * limit)) srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --mpi=none \
        bash -c "$look_here" - "$limit" "$look") ||
        die "srun cannot start a program on each node of $SLURM_JOB_NODELIST within $((2 * limit)) s, see above"
    said=$(sort <<< "$said" | awk -F "\t" '$1 == "mpiattn-look" { with[$3] = with[$3] " " $2 } END { for (it in with) print with[it] ": " it }')
    [[ $(wc -l <<< "$said") -eq 1 && $said != *": FAILS: "* ]] ||
        die "nodes lack what others have; see to the modules and the environment of $slurm/env.sh there:"$'\n'"$said"
}

# ARGUMENT with %a (the task of an array), %A (the array, or the job) and %j (the job) replaced, %3a with zeros in front;
# %% is a percent sign.
for_this_task() {
    local rest=$1 so_far="" number
    while [[ $rest =~ ^([^%]*)%(([0-9]*)([aAj])|%)?(.*)$ ]]; do
        so_far+=${BASH_REMATCH[1]} rest=${BASH_REMATCH[5]}
        case ${BASH_REMATCH[4]} in
            a)  number=${SLURM_ARRAY_TASK_ID:-}
                [ -n "$number" ] || die "${1@Q} has %a, the task of an array; this job is none: sbatch --array=0-3 ..." ;;
            A)  number=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID} ;;
            j)  number=$SLURM_JOB_ID ;;
            *)  so_far+=%
                continue ;;
        esac
        so_far+=$(printf "%0${BASH_REMATCH[3]:-1}d" "$number")
    done
    printf %s "$so_far$rest"
}

# Whether an argument differs between the tasks of an array: has %a, or %j where the second word says so.
differs() {
    [[ ${1//%%/} =~ %[0-9]*[a${2:-}] ]]
}

[ -n "${SLURM_JOB_ID:-}" ] || die "this is not a Slurm job: sbatch ${0@Q} ..."
count_cores
# shellcheck source=env.sh
source "$slurm/env.sh" || die "$slurm/env.sh failed, see above (in $PWD)"
set -euo pipefail
unset SLURM_EXPORT_ENV        # `sbatch --export=NONE` would else start the ranks without this environment, too
command -v python3 > /dev/null || die "no python3 on PATH: activate the environment of mpiattn in $slurm/env.sh"
python3 -c "import mpiattn" || die "$(command -v python3) has no mpiattn: activate its environment in $slurm/env.sh"
for ((i = $#; i > 0; i--)); do      # each goes from the front to the end
    argument=$(for_this_task "$1") || exit
    set -- "${@:2}" "$argument"
done
[[ ${SLURM_HET_SIZE:-1} -le 1 || ${MPIATTN_LAUNCH:-} == *--het-group* ]] ||
    echo "mpiattn: WARNING: this is a heterogeneous job of $SLURM_HET_SIZE components, of which the first alone runs ranks; the others wait" \
        "till it ends. Ask for one component, or name all in MPIATTN_LAUNCH (srun --het-group=...)" >&2
find_candidates
[ "$SLURM_JOB_NUM_NODES" -eq 1 ] || look_at_nodes
choose_launcher
[ "$share" -gt 0 ] || echo "mpiattn: the ranks of a node share $cores_of_a_node cores, of $cpus_of_a_core hardware threads each;" \
    "with sbatch --hint=nomultithread each has one"
echo "mpiattn: ${SLURM_ARRAY_TASK_ID:+task $SLURM_ARRAY_TASK_ID of array $SLURM_ARRAY_JOB_ID, }$(number "$SLURM_NTASKS" rank) on" \
    "$(number "$SLURM_JOB_NUM_NODES" node) ($SLURM_JOB_NODELIST), started by ${launcher[*]}$tried"
