"""Starts commands under the mpiexec of the running interpreter, with a hard time limit.

    mpirun(4, [sys.executable, "-m", "mpiattn", "info"])        # mpiexec -n 4 python -m mpiattn info

Limits are seconds on two quiet cores; where a machine is slower they grow with `time_factor()`.

Neither this module nor a test that uses it imports MPI: a process that has started MPI can't safely start mpiexec.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
DOCS, SLURM = TESTS.parent / "docs", TESTS.parent / "slurm"  # docs are not there where mpiattn is installed
# The folder that holds mpiattn: the checkout, or where mpiattn is installed with its tests inside.
ROOT = next(folder for folder in TESTS.parents if (folder / "mpiattn" / "__init__.py").is_file())

# What a launcher leaves in the environment of its ranks; a second mpiexec would mistake it for its own.
_LAUNCHER_PREFIXES = (
    "PMI_",
    "PMIX_",
    "PMI2_",
    "PALS_",
    "MV2_COMM_",
    "HYDI_",
    "HYDRA_",
    "I_MPI_INFO_",
    "I_MPI_HYDRA_UUID",
    "I_MPI_PIN_INFO",
    "I_MPI_PIN_MAPPING",
    "OMPI_",
    "PRTE_",
    "MPI_LOCAL",
    "SLURM_STEP",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
)
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PALS_RANKID", "MV2_COMM_WORLD_RANK")

# Open MPI refuses root and more ranks than cores until told; on one machine, sm alone starts ten times faster.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
}

# Ranks of one machine take memory only, whatever networks there are and work or not.
_INTEL_MPI = {"I_MPI_FABRICS": "shm"}

GRACE = 3.0  # seconds between asking a launcher to end its ranks and killing it
FACTOR = "MPIATTN_TIME_FACTOR"
QUIET = 0.7  # seconds of a launch of two ranks that start MPI, on two quiet cores of 2024


def under_launcher():
    """Whether this process is a rank of some launch, by the environment alone."""
    steps = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    return any(os.environ.get(name, "").isdigit() for name in _RANK_VARIABLES) or (steps.isdigit() and int(steps) > 1)


@cache
def mpiexec():
    """Path of the mpiexec beside the interpreter, else on PATH; None if there is none."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.is_file() else shutil.which("mpiexec")


@cache
def vendor():
    """Which MPI the mpiexec belongs to: "openmpi", "impi", "mpich" (and what else derives from it) or "none"."""
    if mpiexec() is None:
        return "none"
    says = subprocess.run([mpiexec(), "--version"], env=_scrubbed(), text=True, capture_output=True, timeout=60)
    says = (says.stdout + says.stderr).lower()
    if any(word in says for word in ("open mpi", "openrte", "prte", "prrte")):
        return "openmpi"
    return "impi" if "intel(r) mpi" in says else "mpich"


def _scrubbed():
    return {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}


@cache
def _installed():
    """Whether mpiattn can be imported from elsewhere than the checkout's root."""
    outcome = subprocess.run([sys.executable, "-c", "import mpiattn"], cwd="/", capture_output=True, timeout=60)
    return outcome.returncode == 0


def environment(extra=None):
    """The environment for a launch; `extra` has the last word."""
    env = _scrubbed() if under_launcher() else dict(os.environ)
    env |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    env = {**{"openmpi": _OPEN_MPI, "impi": _INTEL_MPI}.get(vendor(), {}), **env}
    if not _installed():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    return env | (extra or {})


def require_launch():
    """Skip the calling test where mpiexec can't be run."""
    if under_launcher():
        pytest.skip("starts mpiexec itself, so it isn't run under one")
    if mpiexec() is None:
        pytest.skip("no mpiexec beside the interpreter or on PATH")


@cache
def time_factor():
    """The factor for time limits on this machine: MPIATTN_TIME_FACTOR, else measured once.

    That is how long a launch takes, or the load, at least 1.  Under a launcher only the load is looked at.
    """
    setting = os.environ.get(FACTOR)
    if setting is not None:
        try:
            factor = float(setting)
        except ValueError:
            factor = 0
        if not 0 < factor < float("inf"):
            raise pytest.UsageError(f"{FACTOR} is {setting!r}; it must be a positive number")
        return factor
    load = _load()
    if under_launcher() or mpiexec() is None:
        return max(1.0, load)
    start = time.monotonic()
    subprocess.run(
        [mpiexec(), "-n", "2", sys.executable, "-c", "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"],
        env=environment(),
        capture_output=True,
        timeout=120,
    )
    return max(1.0, load, (time.monotonic() - start) / QUIET)


def _load():
    """Processes that want to run, for each core."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def patience(seconds):
    """A time limit of a process that is no launch, which may come when the machine has long been busy."""
    return seconds * max(time_factor(), _load())


def mpirun(n, command, timeout=60, env=None, cwd=None, check=True):
    """Run `mpiexec -n n command` with `limited`, by whose arguments and results it goes.

    command: what follows `mpiexec -n n`, a list.
    """
    require_launch()
    return limited([mpiexec(), "-n", n, *command], timeout, environment(env), cwd, check)


def limited(command, timeout, env, cwd=None, check=True):
    """Run a command that starts ranks; returns a CompletedProcess with text stdout and stderr.

    After `timeout` seconds times `time_factor()`, or times the load if that has grown since, the launch and all its
    ranks are killed and the test fails with their output; with `check` it also fails on a non-zero exit code.
    """
    command, start, limit = [*map(str, command)], time.monotonic(), timeout * time_factor()
    process = subprocess.Popen(
        command,
        env=env | {FACTOR: str(time_factor())},
        cwd=cwd,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        try:
            stdout, stderr = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            stdout, stderr = process.communicate(timeout=max(0, timeout * _load() - limit))
    except subprocess.TimeoutExpired:
        stdout, stderr = kill(process)
        passed = f"{time.monotonic() - start:.4g}"
        pytest.fail(f"no end after {passed} s: {' '.join(command)}\n{stdout}\n{stderr}", pytrace=False)
    except BaseException:
        kill(process)
        raise
    if check and process.returncode:
        pytest.fail(f"exit code {process.returncode}: {' '.join(command)}\n{stdout}\n{stderr}", pytrace=False)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def kill(process):
    """End a launch and its ranks; returns what they wrote.

    Launchers put ranks into process groups of their own, which only they can end: they are asked first.
    """
    process.terminate()
    try:
        return process.communicate(timeout=GRACE * time_factor())
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=GRACE * time_factor())
    except subprocess.TimeoutExpired:  # a rank that outlived its launcher still holds the pipes
        return "", "(the output can't be read: a rank outlived its launcher)"
