"""Starts commands under the mpiexec of the running interpreter, with a hard time limit.

    mpirun(4, [sys.executable, "-m", "mpiattn", "info"])        # mpiexec -n 4 python -m mpiattn info

Neither this module nor a test that uses it imports MPI: a process that has started MPI can't safely start mpiexec.
"""

import os
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
DOCS, SLURM = TESTS.parent / "docs", TESTS.parent / "slurm"             # docs are not there where mpiattn is installed
# The folder that holds mpiattn: the checkout, or where mpiattn is installed with its tests inside.
ROOT = next(folder for folder in TESTS.parents if (folder / "mpiattn" / "__init__.py").is_file())

# What a launcher leaves in the environment of its ranks; a second mpiexec would mistake it for its own.
_LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "PMI2_", "PALS_", "MV2_COMM_", "HYDI_", "HYDRA_", "OMPI_", "PRTE_", "MPI_LOCAL",
                      "SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PALS_RANKID", "MV2_COMM_WORLD_RANK")

# Open MPI refuses root and more ranks than cores until told; on one machine, sm alone starts ten times faster.
_OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
             "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
             "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}

GRACE = 3.0       # seconds between asking a launcher to end its ranks and killing it


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
    """Which MPI the mpiexec belongs to: "openmpi", "mpich" (and what derives from it) or "none"."""
    if mpiexec() is None:
        return "none"
    says = subprocess.run([mpiexec(), "--version"], env=_scrubbed(), text=True, capture_output=True, timeout=60)
    says = (says.stdout + says.stderr).lower()
    return "openmpi" if any(word in says for word in ("open mpi", "openrte", "prte", "prrte")) else "mpich"


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
    if vendor() == "openmpi":
        env = {**_OPEN_MPI, **env}
    if not _installed():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    return env | (extra or {})


def require_launch():
    """Skip the calling test where mpiexec can't be run."""
    if under_launcher():
        pytest.skip("starts mpiexec itself, so it isn't run under one")
    if mpiexec() is None:
        pytest.skip("no mpiexec beside the interpreter or on PATH")


def mpirun(n, command, timeout=60, env=None, cwd=None, check=True):
    """Run `mpiexec -n n command`; returns a CompletedProcess with text stdout and stderr.

    command: what follows `mpiexec -n n`, a list.  After `timeout` seconds the launch and all its ranks are
    killed and the test fails with their output; with `check` it also fails on a non-zero exit code.
    """
    require_launch()
    command = [mpiexec(), "-n", str(n), *map(str, command)]
    process = subprocess.Popen(command, env=environment(env), cwd=cwd, text=True, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        stdout, stderr = _kill(process)
        pytest.fail(f"no end after {timeout} s: {' '.join(command)}\n{stdout}\n{stderr}", pytrace=False)
    except BaseException:
        _kill(process)
        raise
    if check and process.returncode:
        pytest.fail(f"exit code {process.returncode}: {' '.join(command)}\n{stdout}\n{stderr}", pytrace=False)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _kill(process):
    """End a launch and its ranks; returns what they wrote.

    Launchers put ranks into process groups of their own, which only they can end: they are asked first.
    """
    process.terminate()
    try:
        return process.communicate(timeout=GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=GRACE)
    except subprocess.TimeoutExpired:         # a rank that outlived its launcher still holds the pipes
        return "", "(the output can't be read: a rank outlived its launcher)"
