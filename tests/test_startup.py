"""MPI that does not come up, and launchers that start ranks which do not know of each other."""

import os
import shutil
import signal
import subprocess
import sys
from itertools import product

import launch
import pytest
from files import write_input

from mpiattn.console import witness

MPIATTN = [sys.executable, "-m", "mpiattn"]
COMMANDS = {
    "run": ["in.h5", "out.h5"],
    "decode": ["in.h5", "in.h5", "out.h5"],
    "bench": ["--seqlen", "64", "--json", "out.h5"],
    "tune": ["--quick", "--no-store", "--out", "out.h5"],
}
# One rank ends, or stops, before it starts MPI; the others wait there.
DRIVER = """
import os, signal, sys
from mpiattn.cli import main
from mpiattn.console import startup
from mpiattn.system.launch_variables import launch_rank
startup.LOADING = 1.0
if launch_rank() == 1:
    sys.exit(3) if sys.argv[1] == "ends" else os.kill(os.getpid(), signal.SIGSTOP)
sys.exit(main(["check", "--timeout", "2"]))
"""


def alone(command, cwd, **variables):
    """Run without a launcher, with the variables of one."""
    return subprocess.run(
        [*MPIATTN, command, *COMMANDS[command]],
        env=launch.environment(variables),
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=launch.patience(120),
    )


def of_another_mpi():
    """The variables by which the mpiexec of another MPI tells ranks and rank, and how it is called."""
    if launch.vendor() == "openmpi":
        return "PMI_SIZE", "PMI_RANK", "the mpiexec of MPICH or Intel MPI"
    return "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI"


@pytest.mark.draw(2)
@pytest.mark.parametrize("launcher, command", list(product(["srun", "mpiexec"], COMMANDS)))
def test_ranks_that_do_not_know_of_each_other_do_nothing(tmp_path, launcher, command):
    launch.require_launch()
    write_input(tmp_path / "in.h5")
    (tmp_path / "out.h5").write_text("before")
    size, rank, name = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun") if launcher == "srun" else of_another_mpi()
    first, other = (alone(command, tmp_path, **{size: "4", rank: str(number)}) for number in (0, 3))
    assert (first.returncode, other.returncode) == (1, 1)
    (message,) = [line for line in first.stderr.splitlines() if line.startswith("mpiattn")]
    assert name in message and "started 4 ranks" in message and "Nothing was done" in message
    assert "srun --mpi=pmi" in message and "mpi4py" in message
    assert "mpiattn" not in other.stderr and "Traceback" not in first.stderr + other.stderr
    assert (tmp_path / "out.h5").read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"in.h5", "out.h5"}


TWO_PLANS = """
import sys
from mpi4py import MPI
import mpiattn
for _ in range(2):
    with mpiattn.MeshAttention(getattr(MPI, sys.argv[1]), seqlen=8, heads=1, head_dim=8):
        pass
"""


@pytest.mark.parametrize(
    "comm, variables, warned",
    [
        (
            "COMM_WORLD",
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
            "srun started 4 ranks, each of which is alone",
        ),
        ("COMM_WORLD", {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, ""),  # rank 0 has said it
        ("COMM_WORLD", {"PALS_SIZE": "6", "PALS_RANKID": "0"}, "the launcher of PALS started 6 ranks"),
        ("COMM_SELF", {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, ""),
        ("COMM_WORLD", {}, ""),
        ("COMM_WORLD", {"SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, ""),
        ("COMM_WORLD", {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "2"}, ""),
        ("COMM_WORLD", {"PALS_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, ""),
    ],
    ids=["srun", "another rank", "PALS", "COMM_SELF", "no launcher", "batch script", "a step of one", "mpiexec of one"],
)
def test_a_plan_of_a_rank_that_is_alone_in_a_launch_of_several_warns_once(comm, variables, warned):
    launch.require_launch()
    words = [sys.executable, "-c", TWO_PLANS, comm]
    env = launch.environment(variables)
    said = subprocess.run(
        words, env=env, text=True, capture_output=True, timeout=launch.patience(60), check=True
    ).stderr
    assert said.count("RuntimeWarning") == (1 if warned else 0) and warned in said


def test_a_report_that_says_it_has_no_warning_besides(tmp_path):
    launch.require_launch()
    words = [*MPIATTN, "check", "--folder", tmp_path]
    env = launch.environment({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"})
    done = subprocess.run(words, env=env, text=True, capture_output=True, timeout=launch.patience(120), check=False)
    assert "the launcher started 4 ranks" in done.stdout and "Warning" not in done.stderr


def test_plans_under_the_launcher_of_their_mpi_do_not_warn():
    said = launch.mpirun(2, [sys.executable, "-c", TWO_PLANS, "COMM_SELF"]).stderr
    assert "Warning" not in said + launch.mpirun(1, [sys.executable, "-c", TWO_PLANS, "COMM_WORLD"]).stderr


@pytest.mark.parametrize("how", ["in a batch job", "mpiexec of one rank in a step"])
def test_one_rank_that_was_meant(tmp_path, how):
    launch.require_launch()
    write_input(tmp_path / "in.h5")
    if how == "in a batch job":
        outcome = alone("run", tmp_path, SLURM_NTASKS="4", SLURM_NPROCS="4", SLURM_PROCID="0")
    else:
        outcome = launch.mpirun(
            1, [*MPIATTN, "run", *COMMANDS["run"]], cwd=tmp_path, env={"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
        )
    assert outcome.returncode == 0 and (tmp_path / "out.h5").exists(), outcome.stderr


@pytest.mark.parametrize("fate, says", [("ends", "has ended"), ("stops", "is stopped")])
def test_a_rank_that_does_not_start_mpi(fate, says):
    outcome = launch.mpirun(3, [sys.executable, "-c", DRIVER, fate], timeout=60, check=False)
    assert outcome.returncode and "PASS" not in outcome.stdout
    if launch.vendor() == "openmpi" and fate == "ends":  # whose launcher ends the job by itself
        return
    said = [line for line in outcome.stderr.splitlines() if "mpiattn: " in line]
    assert len(said) == 1, outcome.stderr
    assert f" on {os.uname().nodename} was ended by SIGALRM (time was up)" in said[0]
    assert "it was at: starting MPI, for which 3 s were given" in said[0]
    assert said[0].endswith(f"; on this host rank 1 {says}")


def test_help_does_not_start_mpi():
    """Nor do wrong arguments: an MPI that hangs would keep them."""
    launch.require_launch()
    code = (
        "from mpiattn.cli import main\n"
        "try:\n    main(['run', {!r}])\n"
        "except SystemExit:\n    from mpi4py import MPI\n    print('MPI', MPI.Is_initialized())"
    )
    for word in ("--help", "--nonsense"):
        outcome = subprocess.run(
            [sys.executable, "-c", code.format(word)],
            env=launch.environment(),
            text=True,
            capture_output=True,
            timeout=launch.patience(60),
        )
        assert outcome.stdout.splitlines()[-1] == "MPI False", outcome.stderr


@pytest.mark.skipif(launch.vendor() != "mpich", reason="MPICH's way to end")
def test_no_room_in_shared_memory(tmp_path):
    """As in a container with a small /dev/shm; a mount in a namespace of its own takes root."""
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("takes root and unshare")
    command = [*mount, launch.mpiexec(), "-n", "2", *MPIATTN, "info"]
    outcome = launch.limited(command, 60, launch.environment(), check=False)
    assert outcome.returncode
    said = [line for line in outcome.stderr.splitlines() if line.startswith("mpiattn: ")]
    assert said and all("was ended by SIGBUS (/dev/shm has " in line for line in said), outcome.stderr
    assert " left of 64 KiB, and MPICH keeps 1 MiB a rank there: " in said[0] and "--shm-size" in said[0]
    assert "ranks wait there" not in said[0]


def test_a_bus_error_with_room_in_shared_memory_has_no_reason(monkeypatch):
    monkeypatch.setattr(witness, "SHARED", os.sep)
    assert witness._why(signal.SIGBUS) == ""
    monkeypatch.setattr(witness, "SHARED", "/no/such/folder")
    assert witness._why(signal.SIGBUS) == ""
