# How many cores a rank has.  Slurm counts CPUs, which on many sites are hardware threads, two or more to a core; blocks
# of attention fill a core with one thread.
#
#     count_cores                   asks Slurm, once
#     cores_of_a_rank               prints the number
#     one_thread_a_core OPTIONS     whether srun is to leave the other hardware threads alone
#
# shellcheck disable=SC2034         # launch.sh reads some of the variables

# The least or the most ("head" or "tail") in a list of numbers as Slurm writes it for nodes, 72(x2),36.
extreme() {
    tr , "\n" <<< "$2" | sed "s/(.*//" | sort -n | "$1" -n 1
}

# Sets `cpus_of_a_core`, 1 where Slurm counts cores and where the user has said what to do with hardware threads, and
# `share`, the cores of a node of this job for each of its ranks, 0 where ranks share them.
count_cores() {
    local node total sockets cores
    cpus_of_a_core=1
    if [ -z "${SLURM_HINT:-}${SLURM_THREADS_PER_CORE:-}" ]; then
        node=$(scontrol show node -o "${SLURMD_NODENAME:-}" 2> /dev/null) || node=""
        total=$(sed -n "s/.* CPUTot=\([0-9]*\).*/\1/p" <<< "$node")
        sockets=$(sed -n "s/.* Sockets=\([0-9]*\).*/\1/p" <<< "$node")
        cores=$(sed -n "s/.* CoresPerSocket=\([0-9]*\).*/\1/p" <<< "$node")
        [[ -z $total || -z $sockets || -z $cores || $total -le $((sockets * cores)) ]] ||
            cpus_of_a_core=$((total / (sockets * cores)))
    fi
    cores_of_a_node=$(($(extreme head "${SLURM_JOB_CPUS_PER_NODE:-1}") / cpus_of_a_core))
    share=$((cores_of_a_node / $(extreme tail "${SLURM_TASKS_PER_NODE:-1}")))
}

# What --cpus-per-task asks for, but no more than the rank's share: where Slurm counts hardware threads and gives no more
# than was asked for, that is half of it.
cores_of_a_rank() {
    local asked=${SLURM_CPUS_PER_TASK:-1}
    if [ "$cpus_of_a_core" -eq 1 ] || [ "$share" -gt "$asked" ]; then
        echo "$asked"
    else
        echo $((share < 1 ? 1 : share))
    fi
}

# srun refuses --hint=nomultithread where there are fewer cores than ranks, and beside what the user may have said of it.
one_thread_a_core() {
    local said=" $* "
    [[ $cpus_of_a_core -gt 1 && $share -ge 1 && -z ${SLURM_NTASKS_PER_CORE:-}${SLURM_CPU_BIND:-} &&
        ! $said =~ \ (--hint|--cpu[-_]bind|--threads-per-core|--ntasks-per-core|--extra-node-info|-B) ]]
}
