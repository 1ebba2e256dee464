"""slurm/launch.sh on sites that cannot be had: stubs of srun, scontrol and mpiexec answer as theirs would."""

import os
import shutil
import subprocess

import launch
import pytest

pytestmark = pytest.mark.workshop

CRAY = "MPI VERSION : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)"
PARASTATION = "=== ParaStation MPI 5.13.0-1 ==="
OPEN = "Open MPI v5.0.8, package: Open MPI root@site Distribution, ident: 5.0.8"
MPICH, INTEL = "MPICH Version: 4.3.2", "Intel(R) MPI Library 2021.18 for Linux* OS"
HYDRA, PRTE = "HYDRA build details:", "mpiexec (Open MPI) 5.0.8"
TYPES = (
    "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\n\tcray_shasta\nspecific pmix plugin versions available: pmix_v5"
)
JUELICH = "MPI plugin types are...\n\tnone\n\tpspmix\n\tpmi2"
VERSIONS = TYPES + ",pmix_v4"
OLD = "srun: MPI types are...\nsrun: pmix_v3\nsrun: pmi2\nsrun: none\nsrun: pmix_v4"
# A node of 64 cores, of two hardware threads each, where Slurm counts threads, or cores.
SMT = "NodeName=n1 CoresPerSocket=32 CPUAlloc=128 CPUEfctv=128 CPUTot=128 CPULoad=0 Sockets=2 Boards=1 ThreadsPerCore=2"
CORES = SMT.replace("128", "64")

PYTHON = """\
case $2 in
    "import mpiattn") ;;
    "") cat > /dev/null; echo "$LIBRARY" ;;
esac
"""
# Two ranks see each other if $WORKS names the type that was given or is the default, and say $SAYS if they don't.
SRUN = """\
[ "$1" != --mpi=list ] || { echo -e "$TYPES" >&2; exit; }
case $* in
    *SLURMD_NODENAME*) printf "n1\\tsame\\nn2\\tsame\\n"; exit ;;
    *"two ranks on"*) said=$*; echo "srun ${said%% python3*}" >> calls ;;
    *) echo "srun $*" >> calls; exit ;;
esac
type=${SLURM_MPI_TYPE:-$DEFAULT}
for word in "$@"; do [[ $word != --mpi=* ]] || type=${word#--mpi=}; done
[[ " $WORKS " != *" $type "* ]] || { echo "mpiattn: two ranks on n1 n2"; exit; }
sleep "${SLOW:-0}"
echo -e "${SAYS:-each rank is alone}"
exit 1
"""
SCONTROL = """\
[ -n "$DEFAULT" ] || { echo "slurm_load_ctl_conf error: Access/permission denied" >&2; exit 1; }
case $2 in
    config) echo "MpiDefault              = $DEFAULT" ;;
    node) echo "$NODE" ;;
esac
"""
MPIEXEC = """\
[ -n "$MPIEXEC" ] || exit 127
[ "$1" != --version ] || { echo "$MPIEXEC"; exit; }
said=$*
echo "mpiexec ${said%% python3*}" >> calls
[[ " $WORKS " != *" mpiexec "* ]] || { echo "mpiattn: two ranks on n1 n2"; exit; }
echo "[mpiexec@n1] HYDU_create_process: execvp error on file srun"
exit 255
"""
JOB = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "64(x2)",
    "SLURMD_NODENAME": "n1",
}


@pytest.fixture
def job(tmp_path):
    """job(script, *arguments, **site): exit code, output and calls of a script of bash in a job of that site."""
    stubs = {"python3": PYTHON, "srun": SRUN, "scontrol": SCONTROL, "mpiexec": MPIEXEC}
    (tmp_path / "bin").mkdir()
    for name, text in stubs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / "bin" / name).chmod(0o755)
    shutil.copytree(launch.SLURM, tmp_path / "slurm")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()

    def job(script, *arguments, **site):
        environment = {"DEFAULT": "none", "TYPES": TYPES, "LIBRARY": MPICH, "NODE": "", **JOB, **site}
        outcome = subprocess.run(
            ["bash", "-c", f"source slurm/launch.sh\n{script}", "job", *arguments],
            env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"} | environment,
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=launch.patience(60),
        )
        calls = tmp_path / "calls"
        return outcome.returncode, outcome.stdout, calls.read_text().splitlines() if calls.exists() else []

    return job


@pytest.mark.parametrize(
    "site, candidates",
    [
        # Cray MPICH: by the site's default, by name, and where there is no more than pmi2 and scontrol says nothing.
        (
            {"LIBRARY": CRAY, "DEFAULT": "cray_shasta", "WORKS": "cray_shasta"},
            "*srun; srun --mpi=pmi2; srun --mpi=pmix",
        ),
        ({"LIBRARY": CRAY, "WORKS": "cray_shasta"}, "*srun --mpi=cray_shasta; srun --mpi=pmi2; srun --mpi=pmix; srun"),
        ({"LIBRARY": CRAY, "WORKS": "pmi2", "TYPES": "none pmi2", "DEFAULT": ""}, "*srun --mpi=pmi2; srun"),
        # ParaStation MPI, whose daemons are behind srun of every type but none; and Open MPI there.
        ({"LIBRARY": PARASTATION, "TYPES": JUELICH, "WORKS": "none"}, "*srun; srun --mpi=pspmix; srun --mpi=pmi2"),
        ({"LIBRARY": PARASTATION, "TYPES": JUELICH, "WORKS": "pspmix"}, "srun; *srun --mpi=pspmix; srun --mpi=pmi2"),
        ({"LIBRARY": OPEN, "TYPES": JUELICH, "WORKS": "pspmix"}, "*srun --mpi=pspmix; srun --mpi=pmi2; srun"),
        ({"LIBRARY": OPEN, "TYPES": JUELICH, "WORKS": "pspmix", "SLURM_MPI_TYPE": "pspmix"}, "*srun; srun --mpi=pmi2"),
        # Open MPI: its mpiexec, PMIx, of which there may be several versions, and the site's default.
        (
            {"LIBRARY": OPEN, "MPIEXEC": PRTE, "WORKS": "mpiexec"},
            "*mpiexec --bind-to none; srun --mpi=pmix; srun --mpi=pmi2; srun",
        ),
        (
            {"LIBRARY": OPEN, "MPIEXEC": PRTE, "WORKS": "pmix"},
            "mpiexec --bind-to none; *srun --mpi=pmix; srun --mpi=pmi2; srun",
        ),
        (
            {"LIBRARY": OPEN, "TYPES": VERSIONS, "WORKS": "pmix_v4"},
            "srun --mpi=pmix; srun --mpi=pmix_v5; *srun --mpi=pmix_v4; srun --mpi=pmi2; srun",
        ),
        (
            {"LIBRARY": OPEN, "TYPES": OLD, "WORKS": "pmix_v3"},
            "srun --mpi=pmix_v4; *srun --mpi=pmix_v3; srun --mpi=pmi2; srun",
        ),
        ({"LIBRARY": OPEN, "DEFAULT": "pmix", "WORKS": "pmix"}, "*srun; srun --mpi=pmi2"),
        ({"LIBRARY": OPEN, "DEFAULT": "pmix_v5", "WORKS": "pmix_v5"}, "*srun; srun --mpi=pmix; srun --mpi=pmi2"),
        ({"LIBRARY": INTEL, "DEFAULT": "pmix", "WORKS": "pmix"}, "*srun; srun --mpi=pmi2"),
        ({"LIBRARY": OPEN, "DEFAULT": "pmi2", "TYPES": "none pmi2", "WORKS": "pmi2"}, "*srun"),
        # MPICH and what derives from it: not by the mpiexec of another MPI; by a default that this page doesn't know.
        (
            {"MPIEXEC": HYDRA, "WORKS": "mpiexec"},
            "*mpiexec; srun --mpi=pmi2; srun --mpi=pmix; srun --mpi=cray_shasta; srun",
        ),
        ({"MPIEXEC": PRTE, "WORKS": "mpiexec pmi2", "TYPES": "none pmi2"}, "*srun --mpi=pmi2; srun"),
        ({"WORKS": "pmi1", "DEFAULT": "pmi1", "TYPES": "none pmi2 pmi1"}, "srun --mpi=pmi2; *srun"),
        (
            {"WORKS": "pmi2", "DEFAULT": "none", "TYPES": "none pmi2", "SLURM_MPI_TYPE": "none"},
            "*srun --mpi=pmi2; srun",
        ),
    ],
)
def test_what_starts_the_ranks(job, site, candidates):
    """Every candidate is named, those that fail are tried in order, and the first that works (*) is taken."""
    code, said, calls = job("launch 2 8 program", **site)
    named = candidates.split("; ")
    chosen = next(name for name in named if name.startswith("*"))
    library = site.get("LIBRARY", MPICH).split(",")[0]
    assert code == 0, said
    assert f"mpiattn: {library} may be started by: {', '.join(named).replace('*', '')}\n" in said
    assert [line.split(": ")[1] for line in said.splitlines() if "mpiattn: not by " in line] == [
        f"not by {name}" for name in named[: named.index(chosen)]
    ]
    assert f"8 ranks on 2 nodes (n[1-2]), started by {chosen[1:]} (tried: two ranks on n1 n2)\n" in said
    tried = [name.strip("*") for name in named[: named.index(chosen) + 1]]
    assert len(calls) == len(tried) + 1
    for call, name in zip(calls, [*tried, tried[-1]]):
        assert call.startswith(name + " ")
    assert calls[-1].endswith(" program") and ("--ntasks=8" in calls[-1] or "-n 8" in calls[-1])


@pytest.mark.parametrize(
    "site, spread",
    [
        ({"MPIEXEC": HYDRA, "WORKS": "mpiexec"}, "mpiexec -ppn 1 -n 2"),
        ({"MPIEXEC": HYDRA, "WORKS": "mpiexec", "SLURM_JOB_NUM_NODES": "1"}, "mpiexec -ppn 2 -n 2"),
        ({"LIBRARY": OPEN, "MPIEXEC": PRTE, "WORKS": "mpiexec"}, "mpiexec --bind-to none -n 2 --map-by node"),
        ({"WORKS": "pmi2"}, "srun --mpi=pmi2 --nodes=2 --ntasks=2 --kill-on-bad-exit=1 --ntasks-per-node=1"),
        (
            {"WORKS": "pmi2", "SLURM_JOB_NUM_NODES": "1"},
            "srun --mpi=pmi2 --nodes=1 --ntasks=2 --kill-on-bad-exit=1 --ntasks-per-node=2",
        ),
    ],
)
def test_two_nodes_are_tried_where_there_are_two(job, site, spread):
    _, _, calls = job("", **site)
    assert calls == [spread]


def test_nothing_starts_them(job, tmp_path):
    """Each is named with what it has said."""
    code, said, _ = job(
        "echo never", MPIEXEC=HYDRA, TYPES="none pmi2", SAYS="starting\nsrun: error: task 0 launch failed\nsrun: gone"
    )
    assert code == 2 and "never" not in said
    assert said.endswith(
        "mpiattn: nothing starts ranks of MPICH Version: 4.3.2 that see each other:\n"
        "    mpiexec: code 255, [mpiexec@n1] HYDU_create_process: execvp error on file srun\n"
        "    srun --mpi=pmi2: code 1, srun: error: task 0 launch failed\n"
        "    srun: code 1, srun: error: task 0 launch failed\n"
        f"mpiexec on PATH: {tmp_path}/bin/mpiexec; types of srun: none pmi2\n"
        "Load the module of that MPI, or set MPIATTN_LAUNCH, in slurm/env.sh\n"
    )


def test_ranks_that_do_not_answer(job):
    code, said, _ = job("", TYPES="none", SLOW="1.1", MPIATTN_LOOK_SECONDS="1", SAYS="waiting")
    assert code == 2 and "mpiattn: not by srun: no answer within 1 s (MPIATTN_LOOK_SECONDS), waiting\n" in said


@pytest.mark.parametrize(
    "says, why",
    [
        (r"UCX ERROR bad\nsrun: error: n1: task 0: Aborted\nslurmstepd-n2: error: mpi/pmi2: invalid", 2),
        (r"one\nMPICH ERROR [Rank 0]\nsrun: error: n1: tasks 0-1: Exited with exit code 255", 1),
        (r"MPICH ERROR [Rank 0]\nsrun: error: Unable to create step for job 17: Requested node is busy", 1),
        (r"one\n------\nno such thing", 2),
        (r"one\n------\nThere are not enough slots\nfor two ranks\n------", 2),
        (r"one\ntwo\n", 1),
    ],
)
def test_of_what_was_printed_what_says_why(job, says, why):
    _, said, _ = job("", TYPES="none", SAYS=says)
    line = says.split(r"\n")[why]
    assert f"mpiattn: not by srun: code 1, {line}\n" in said


def test_ranks_that_see_each_other_and_then_fail(job):
    code, said, _ = job("", TYPES="none", SAYS="mpiattn: two ranks on n1 n2\\nMPI_Finalize: no such device")
    assert code == 2 and "mpiattn: not by srun: code 1, MPI_Finalize: no such device\n" in said


@pytest.mark.parametrize("site", [{"MPIATTN_LAUNCH": "srun --mpi=pmi2 -l"}, {"SLURM_NTASKS": "1"}], ids=["said", "one"])
def test_not_tried(job, site):
    """What MPIATTN_LAUNCH names, and what starts a single rank."""
    code, said, calls = job("launch 2 4 program", TYPES="none pmi2", **site)
    assert code == 0 and len(calls) == 1, said
    assert calls[0].startswith(site.get("MPIATTN_LAUNCH", "srun --mpi=pmi2") + " --nodes=2 --ntasks=4 ")
    assert ("may be started by" in said) == ("SLURM_NTASKS" in site)


@pytest.mark.parametrize(
    "site, threads, options",
    [
        # Slurm counts hardware threads, and gives no more than was asked for: half as many cores.
        ({"NODE": SMT, "SLURM_CPUS_PER_TASK": "16"}, 8, "--hint=nomultithread --cpus-per-task=8"),
        ({"NODE": SMT, "SLURM_CPUS_PER_TASK": "32", "SLURM_JOB_CPUS_PER_NODE": "128(x2)"}, 16, "--hint=nomultithread"),
        # The whole node is there: as many cores as were asked for.
        (
            {"NODE": SMT, "SLURM_CPUS_PER_TASK": "12", "SLURM_JOB_CPUS_PER_NODE": "128(x2)"},
            12,
            "--hint=nomultithread --cpus-per-task=12",
        ),
        ({"NODE": SMT}, 1, "--hint=nomultithread --cpus-per-task=1"),
        # The smaller of two nodes counts, and the one with more ranks.
        (
            {"NODE": SMT, "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_CPUS_PER_NODE": "64,32"},
            4,
            "--hint=nomultithread --cpus-per-task=4",
        ),
        ({"NODE": SMT, "SLURM_CPUS_PER_TASK": "16", "SLURM_TASKS_PER_NODE": "3,5"}, 6, "--hint=nomultithread"),
        # More ranks than cores: srun would refuse the hint.
        ({"NODE": SMT, "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}, 1, ""),
        # Slurm counts cores, or nothing is known of the node.
        ({"NODE": CORES, "SLURM_CPUS_PER_TASK": "16"}, 16, "--cpus-per-task=16"),
        ({"DEFAULT": "", "SLURM_CPUS_PER_TASK": "16"}, 16, "--cpus-per-task=16"),
        ({"NODE": CORES}, 1, ""),
        ({"NODE": CORES.replace("CPUTot=64", "CPUTot=32"), "SLURM_CPUS_PER_TASK": "16"}, 16, "--cpus-per-task=16"),
        # The user has said how to take them.
        ({"NODE": SMT, "SLURM_CPUS_PER_TASK": "8", "SLURM_HINT": "nomultithread"}, 8, "--cpus-per-task=8"),
        ({"NODE": SMT, "SLURM_CPUS_PER_TASK": "16", "SLURM_HINT": "multithread"}, 16, "--cpus-per-task=16"),
        ({"NODE": SMT, "SLURM_CPUS_PER_TASK": "16", "SLURM_THREADS_PER_CORE": "2"}, 16, "--cpus-per-task=16"),
        ({"NODE": SMT, "SLURM_CPUS_PER_TASK": "16", "SLURM_NTASKS_PER_CORE": "1"}, 8, "--cpus-per-task=16"),
        ({"NODE": SMT, "SLURM_CPUS_PER_TASK": "16", "SLURM_CPU_BIND": "cores"}, 8, "--cpus-per-task=16"),
        (
            {"NODE": SMT, "SLURM_CPUS_PER_TASK": "16", "MPIATTN_LAUNCH": "srun --cpu-bind=cores"},
            8,
            "--cpus-per-task=16",
        ),
        ({"NODE": SMT, "SLURM_CPUS_PER_TASK": "16", "OMP_NUM_THREADS": "3"}, 3, "--hint=nomultithread"),
    ],
)
def test_threads_are_counted_by_cores(job, site, threads, options):
    code, said, calls = job("launch 2 8 program; echo threads $OMP_NUM_THREADS", WORKS="pmi2", **site)
    assert code == 0 and f"threads {threads}\n" in said, said
    given = calls[-1].split("--kill-on-bad-exit=1 ")[1].removesuffix("program").strip()
    assert given.startswith(options) and ("--hint" in given) == ("--hint" in options)
    assert given or not options
    shared = "mpiattn: the ranks of a node share 2 cores, of 2 hardware threads each; with sbatch --hint=nomultithread"
    assert (shared in said) == (site.get("SLURM_JOB_CPUS_PER_NODE") == "4(x2)")


ARRAY = {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    "site, arguments, become",
    [
        (ARRAY, ["in-%a.h5", "out-%A_%a.h5", "--json", "%j.json"], ["in-3.h5", "out-15_3.h5", "--json", "17.json"]),
        (
            ARRAY,
            ["%4a%%%3A", "100%%a", "5% 7%b %", "*", "", "a\nb"],
            ["0003%015", "100%a", "5% 7%b %", "*", "", "a\nb"],
        ),
        ({}, ["out-%j-%A.h5"], ["out-17-17.h5"]),
        ({}, [], []),
    ],
)
def test_numbers_of_the_job_in_arguments(job, site, arguments, become):
    code, said, _ = job(r'printf "<%s>" "$@"', *arguments, MPIATTN_LAUNCH="srun", **site)
    assert code == 0, said
    assert said.split("(MPIATTN_LAUNCH)\n")[1] == ("".join(f"<{word}>" for word in become) or "<>")
    assert ("mpiattn: task 3 of array 15, 8 ranks on" in said) == (site == ARRAY)


def test_no_array(job):
    code, said, calls = job("echo never", "in.h5", "out-%02a.h5", MPIATTN_LAUNCH="srun")
    assert (code, calls) == (2, [])
    assert said == "mpiattn: 'out-%02a.h5' has %a, the task of an array; this job is none: sbatch --array=0-3 ...\n"


# In place of launch.sh: what starts ranks, stands for srun, and stands for Slurm.
LAUNCH = r"""
set -euo pipefail
die() { echo "mpiattn: $*"; exit 2; }
readable() { :; }
set_starts() { starts=(ranks); }
scontrol() { echo "scontrol $*"; [ -z "${REFUSED:-}" ]; }
"""
# The signal comes as late as it may before the script hands it on.
LATE = r"""
trap() { kill -USR1 $$; builtin trap "$@"; }
ranks() { exec sleep 9; }
"""
# Ranks that finish so many problems, the second of a folder, and end with a code; Slurm does not end the script.
ENDING = r"""
ranks() {
    for ((i = 0; i < FINISH; i++)); do touch out.h5.unfinished/0123abcd.$i.json; done
    return "$CODE"
}
sleep() { echo "sleep $*"; }
"""


@pytest.fixture
def resumed(tmp_path):
    """resumed(stubs, **variables): code and output of run.sbatch with --resume, beside what an earlier job has left."""
    (tmp_path / "out.h5.unfinished").mkdir()
    (tmp_path / "out.h5.unfinished/0123abcd.9.json").touch()

    def resumed(stubs, **variables):
        (tmp_path / "launch.sh").write_text(LAUNCH + stubs)
        outcome = subprocess.run(
            ["bash", launch.SLURM / "run.sbatch", "in.h5", "out.h5", "--resume"],
            env=os.environ | JOB | {"MPIATTN_SLURM": str(tmp_path)} | variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=launch.patience(60),
        )
        return outcome.returncode, outcome.stdout

    return resumed


def test_a_signal_while_the_ranks_are_started(resumed):
    code, said = resumed(LATE)
    assert code == 2 and "SIGUSR1 came before the ranks were started" in said


@pytest.mark.parametrize(
    "ranks, code, says",
    [
        ({"CODE": "0"}, 0, ""),
        ({"CODE": "3", "FINISH": "1"}, 3, ""),
        ({"CODE": "138", "FINISH": "1"}, 0, "{back}scontrol requeue 17\nsleep 60\n"),
        ({"CODE": "138", "FINISH": "1", **ARRAY}, 0, "{back}scontrol requeue 15_3\nsleep 60\n"),
        ({"CODE": "138"}, 2, "mpiattn: no problem was finished in this job's time; "),
        ({"CODE": "138", "FINISH": "1", "REFUSED": "yes"}, 2, "{back}scontrol requeue 17\nmpiattn: this job may"),
    ],
    ids=["done", "failed", "back", "of an array", "no progress", "refused"],
)
def test_how_a_job_with_resume_ends(resumed, ranks, code, says):
    """It goes back into the queue only if a signal has ended the ranks and they have finished a problem."""
    back = "mpiattn: back into the queue, for the other problems\n"
    ended, said = resumed(ENDING, **{"FINISH": "0"} | ranks)
    assert ended == code and said.startswith(says.format(back=back)) and bool(said) == bool(says), said
