# What starts the ranks: what the site offers for the MPI that mpi4py loads, tried in turn by two ranks.
#
#     find_candidates     fills `candidates`, best first
#     choose_launcher     sets `launcher` to the first of them that works, and `tried` to what the log may say of it
#     launch NODES RANKS COMMAND...
#
# shellcheck disable=SC2034,SC2154  # launch.sh reads `tried`, and has set `slurm`

# The MPI that mpi4py loads, in its own words.  Without MPI_Init, which some sites allow in steps of srun only.
mpi_library() {
    python3 - <<'END'
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(" ".join(MPI.Get_library_version().replace("\0", "").splitlines()[0].split()))
END
}

# Adds srun with each of these types of `srun --mpi=list` that is offered; "default" is the site's own.
add_srun() {
    local type versions
    for type in "$@"; do
        case $type in
            "$default" | default)
                [[ " ${candidates[*]/%/;} " == *" srun; "* ]] || candidates+=(srun) ;;
            pmix)
                # The versions are of interest where there are several: pmix is one of them.
                versions=$({ grep -oE "pmix_v[0-9]+" <<< "$offered" || true; } | sort -ur)
                [[ $offered != *" pmix "* ]] || candidates+=("srun --mpi=pmix")
                # shellcheck disable=SC2086
                [[ $offered == *" pmix "* && $(wc -w <<< "$versions") -lt 2 ]] || add_srun $versions ;;
            *)
                [[ $offered != *" $type "* ]] || candidates+=("srun --mpi=$type") ;;
        esac
    done
}

# For an MPI: its own mpiexec, which finds the nodes of the job by itself, and srun with the interfaces that it speaks.
# The mpiexec of another MPI would start as many programs of one rank each.
find_candidates() {
    local own="" options="" types version default
    candidates=()
    [ -z "${MPIATTN_LAUNCH:-}" ] || return 0
    library=$(mpi_library) || die "mpi4py can't load its MPI, see above; load the MPI's module in $slurm/env.sh"
    library=${library%%,*}
    case $library in
        *"Open MPI"*)   own="open mpi|openrte|prte|prrte" types="pmix pspmix pmi2"
                        options=" --bind-to none" ;;          # else all threads of a rank may share one core
        *ParaStation*)  types="default pspmix pmix pmi2" ;;   # psslurm needs no type
        *CRAY*)         types="cray_shasta pmi2 pmix" ;;      # has no mpiexec for Slurm
        *Intel*)        own="intel" types="pmi2 pmix" ;;
        *)              own="hydra|mpich|mvapich" types="pmi2 pmix cray_shasta" ;;
    esac
    version=$(mpiexec --version 2>&1) || version=""
    [[ -z $own || ! ${version,,} =~ $own ]] || candidates+=("mpiexec$options")
    offered=$({ srun --mpi=list 2>&1 || true; } | tr -s "[:space:]," " ")
    offered=" ${offered% } "
    default=${SLURM_MPI_TYPE:-$({ scontrol show config 2> /dev/null || true; } | sed -n "s/^MpiDefault *= *//p")}
    # The site's default goes first if this MPI speaks it, or if a module has set it for this MPI.
    [[ $default == none || -z ${SLURM_MPI_TYPE:-} && " $types " != *" ${default%_v[0-9]*} "* ]] || add_srun default
    # shellcheck disable=SC2086
    add_srun $types default
    candidates_said=$(printf ", %s" "${candidates[@]}")
    echo "mpiattn: $library may be started by: ${candidates_said:2}"
}

# In each of two ranks, which have to see each other and to exchange a message.
probe='
import signal, sys
signal.alarm(int(sys.argv[1]))
from mpi4py import MPI
comm = MPI.COMM_WORLD
if comm.size != 2:
    sys.exit("each rank is alone")
nodes = comm.allgather(MPI.Get_processor_name())
if comm.rank == 0:
    print("mpiattn: two ranks on", *nodes, flush=True)
'

# Starts it by `launcher`, on two nodes if the job has them; `why` is where the ranks were, or why there are none.
try_launcher() {
    local limit=${MPIATTN_LOOK_SECONDS:-60} nodes=$((SLURM_JOB_NUM_NODES > 1 ? 2 : 1)) began=$SECONDS code=0 said starts
    set_starts $nodes 2
    case "${launcher[*]}" in
        srun*)              starts+=(--ntasks-per-node=$((2 / nodes))) ;;
        *"--bind-to none"*) starts+=(--map-by node) ;;
        *)                  starts=("${launcher[@]}" -ppn $((2 / nodes)) -n 2) ;;      # Intel's takes -ppn before -n only
    esac
    said=$(timeout --kill-after=5 $((limit + 10)) "${starts[@]}" python3 -c "$probe" "$limit" 2>&1 < /dev/null) || code=$?
    if why=$(grep -m 1 -o "two ranks on .*" <<< "$said") && [ $code -eq 0 ]; then
        return 0
    fi
    # Slurm's own word, but that a task has ended; else the first that looks like an error; else the first in a frame of
    # dashes, in which Open MPI says its own, or the last.
    why=$(grep -E "^(srun|slurmstepd[^:]*): error: " <<< "$said" | grep -m 1 -vE "tasks? [0-9,-]+: " ||
        grep -m 1 -iE "error|fail|cannot|can't|unable|invalid|not built" <<< "$said" ||
        awk '/^ *-+ *$/ { framed = 1; next } NF { last = $0 } framed && NF && !first { first = $0 } END { print first ? first : last }' \
            <<< "$said")
    if [ $((SECONDS - began)) -ge "$limit" ]; then
        why="no answer within $limit s (MPIATTN_LOOK_SECONDS)${why:+, $why}"
    elif [[ $said == *"each rank is alone"* ]]; then
        why="it starts two programs of one rank each"
    else
        why="code $code, ${why:-without a word}"
    fi
    return 1
}

# The first candidate that works, or the end of the job.  What MPIATTN_LAUNCH names is taken as it is, and one rank needs
# no other.
choose_launcher() {
    local candidate failed="" why
    tried=""
    if [ -n "${MPIATTN_LAUNCH:-}" ]; then
        read -ra launcher <<< "$MPIATTN_LAUNCH"
        tried=" (MPIATTN_LAUNCH)"
        return
    fi
    for candidate in "${candidates[@]}"; do
        read -ra launcher <<< "$candidate"
        [ "$SLURM_NTASKS" -gt 1 ] || return 0
        if try_launcher; then
            tried=" (tried: $why)"
            return
        fi
        echo "mpiattn: not by $candidate: $why"
        failed+=$'\n'"    $candidate: $why"
    done
    die "nothing starts ranks of $library that see each other:$failed"$'\n'"mpiexec on PATH:" \
        "$(command -v mpiexec || echo none); types of srun:${offered% }"$'\n'"Load the module of that MPI," \
        "or set MPIATTN_LAUNCH, in $slurm/env.sh"
}

# `starts`: the launcher with its options for NODES and RANKS.
set_starts() {
    local nodes=$1 ranks=$2
    case ${launcher[0]##*/} in
        srun)   # Slurm does not hand --cpus-per-task on to steps, and by itself lets ranks wait for one that has failed
                starts=("${launcher[@]}" --nodes="$nodes" --ntasks="$ranks" --kill-on-bad-exit=1)
                if one_thread_a_core "${launcher[@]}"; then
                    starts+=(--hint=nomultithread --cpus-per-task="$(cores_of_a_rank)")
                elif [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
                    starts+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
                fi ;;
        *)      starts=("${launcher[@]}" -n "$ranks") ;;
    esac
}

launch() {
    local starts
    set_starts "$1" "$2"
    "${starts[@]}" "${@:3}"
}
