"""MPI and GPU memory: what is judged before MPI starts, and how a launch says which transport it takes and why."""

import json
import os
import shutil
import subprocess
import sys

import launch
import pytest
from files import write_input
from launch import ROOT, TESTS, mpirun

from mpiattn.backends.testing import emulated
from mpiattn.system.gpu_aware_mpi import without_transport

VERSION = "MPI VERSION    : CRAY MPICH version 8.1.30 (ANL base 3.4a2)"
SWITCH = "MPICH_GPU_SUPPORT_ENABLED"
# A command whose MPI says that it is Cray's.
CRAY = f"""
import mpi4py, sys
mpi4py.rc.initialize = False
from mpi4py import MPI
MPI.Get_library_version = lambda: "{VERSION}"
from mpiattn.cli import main
code = main(sys.argv[1:])
print("MPI started:", MPI.Is_initialized())
sys.exit(code)
"""


def on_a_cray(*words, **variables):
    launch.require_launch()
    return subprocess.run(
        [sys.executable, "-c", CRAY, *words],
        env=launch.environment(variables),
        text=True,
        capture_output=True,
        timeout=60 * launch.time_factor(),
    )


@pytest.fixture(scope="module")
def gtl(tmp_path_factory):
    """A library of the name of Cray's GPU transport."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("gtl") / "libmpi_gtl_cuda.so"
    (library.parent / "empty.c").write_text("")
    subprocess.run([compiler, "-shared", "-o", library, library.parent / "empty.c"], check=True)
    return str(library)


@pytest.mark.parametrize("command", ["info", "check", "run"])
def test_an_mpi_that_would_end_every_rank_is_not_started(tmp_path, command):
    """Cray's does so in MPI_Init, where it is to take device memory and lacks the library for that."""
    words = {"run": ("run", tmp_path / "in.h5", tmp_path / "out.h5")}.get(command, (command,))
    outcome = on_a_cray(*map(str, words), MPICH_GPU_SUPPORT_ENABLED="1")
    said = " ".join((outcome.stdout + outcome.stderr).split())
    assert outcome.returncode == 1 and "MPI started: False" in said
    assert "MPICH_GPU_SUPPORT_ENABLED is 1" in said and "libmpi_gtl_cuda" in said and "not linked" in said
    for cure in ("unset MPICH_GPU_SUPPORT_ENABLED", "LD_PRELOAD=", "MPICC='cc -shared' pip install", "--no-cache-dir"):
        assert cure in said, said
    assert ("FAIL GPU-aware MPI" in said) == (command == "check")


def test_the_tests_of_a_cluster_do_not_start_it_either():
    outcome = on_a_cray("check", "--full", MPICH_GPU_SUPPORT_ENABLED="1")
    assert outcome.returncode == 1 and "MPI started: False" in outcome.stdout
    assert "FAIL  GPU-aware MPI" in outcome.stdout and "passed" not in outcome.stdout


@pytest.mark.parametrize(
    "device, library, first, also",
    [
        ("nvidiactl", "libmpi_gtl_cuda,", "load the module of the GPUs (craype-accel-nvidia80", "unset"),
        ("kfd", "libmpi_gtl_hsa,", f"unset {SWITCH}: mpiattn computes on no AMD GPU", "craype-accel-amd-gfx90a"),
        ("", "libmpi_gtl_cuda or libmpi_gtl_hsa,", f"unset {SWITCH}: this node has no GPU", "craype-accel-nvidia80"),
    ],
)
def test_the_advice_goes_by_the_gpus_of_the_node(device, library, first, also):
    """Cray's library of the node's maker is named; on a node without GPUs the variable alone is wrong."""
    why, advice = without_transport(VERSION, {SWITCH: "1"}, [], [device])
    assert f"{SWITCH} is 1, but {library}" in why and "GTL library is not linked" in why
    assert advice.startswith(first) and also in advice
    assert "MPICC='cc -shared' pip install --force-reinstall --no-cache-dir --no-binary=mpi4py mpi4py" in advice
    (preload,) = [word for word in advice.split() if word.startswith("LD_PRELOAD=")]
    assert preload.endswith("libmpi_gtl_hsa.so" if device == "kfd" else "libmpi_gtl_cuda.so")
    assert without_transport(VERSION, {SWITCH: "1"}, ["/opt/cray/pe/lib64/libmpi_gtl_hsa.so.0"], [device]) is None


# A command whose mpi4py raises an error as it loads its MPI.
UNLOADABLE = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py.MPI":
            raise {}
sys.meta_path.insert(0, Finder())
from mpiattn.cli import main
sys.exit(main(sys.argv[1:]))
"""
COMPILED = "ImportError('libcudart.so.12: cannot open shared object file', name=name)"
WHEEL = "RuntimeError('cannot load MPI library\\nlibmpi.so.12: cannot open shared object file')"


@pytest.mark.parametrize("command, error", [("info", WHEEL), ("check", COMPILED), ("run", COMPILED)])
def test_an_mpi_that_cannot_be_loaded(tmp_path, command, error):
    """As that of mpi4py with libmpi_gtl_cuda on nodes without CUDA: a line says so, not Python's trace."""
    launch.require_launch()
    words = {"run": ("run", tmp_path / "in.h5", tmp_path / "out.h5")}.get(command, (command,))
    outcome = subprocess.run(
        [sys.executable, "-c", UNLOADABLE.format(error), *map(str, words)],
        env=launch.environment(),
        text=True,
        capture_output=True,
        timeout=60 * launch.time_factor(),
    )
    assert outcome.returncode == 1 and len(outcome.stderr.splitlines()) == 1, outcome.stderr
    assert f"mpiattn {command}: mpi4py cannot load its MPI on " in outcome.stderr
    assert error.split("'")[1].split("\\n")[-1] in outcome.stderr and "Load the modules of the MPI" in outcome.stderr


def test_check_tells_programs_as_well(tmp_path):
    outcome = on_a_cray("check", "--json", str(tmp_path / "check.json"), MPICH_GPU_SUPPORT_ENABLED="1")
    report = json.loads((tmp_path / "check.json").read_text())
    assert outcome.returncode == 1 and not report["passed"]
    assert [item["name"] for item in report["items"]] == ["GPU-aware MPI"]


@pytest.mark.parametrize("variables", [{}, {"MPICH_GPU_SUPPORT_ENABLED": "0"}, {"MPICH_GPU_SUPPORT_ENABLED": "1"}])
def test_an_mpi_that_can_start_is_started(gtl, variables):
    """Where no GPU support is asked for, or its library is there, however it has come."""
    preload = {"LD_PRELOAD": gtl} if variables.get("MPICH_GPU_SUPPORT_ENABLED") == "1" else {}
    outcome = on_a_cray("info", **variables, **preload)
    assert outcome.returncode == 0 and "MPI started: True" in outcome.stdout, outcome.stderr
    aware = "GPU-aware MPI   yes: Cray MPICH with" if preload else "GPU-aware MPI   no: Cray MPICH without"
    assert " ".join(aware.split()) in " ".join(outcome.stdout.split())


# Which transport a launch takes

LAUNCH = """
import sys, fake_cupy
sys.modules["cupy"] = fake_cupy
from mpiattn.backends.cuda.wires import AsItIs
from mpiattn.comm import device_trial
from mpiattn.system import gpu_aware_mpi, gpu_probe
aware, answer, text, broken, ipc = sys.argv[1:6]
if aware:
    gpu_aware_mpi.gpu_aware = lambda: (True, "a test says so")
gpu_probe.probe = lambda: {"answer": answer, "text": text}
if broken:
    AsItIs.incoming = lambda self, array, after: self.outgoing(fake_cupy.empty(array.shape, array.dtype), after)
seconds = device_trial.seconds
def timed(peers, nodes, backend):
    assert seconds(peers, nodes, backend) > 0
    return device_trial.NBYTES / {"device": 50e9, "ipc": float(ipc)}[backend.transport]
device_trial.seconds = timed
from mpiattn.cli import main
sys.exit(main(sys.argv[6:]))
"""
BUSY = "all GPUs are busy"
CASES = {  # of an MPI that moves 50 GB/s between ranks of a node: the arguments of LAUNCH, and what is said
    "not aware": ("", "yes", "", "", "1", "ipc: this MPI does not take device memory"),
    "aware": (
        "1",
        "yes",
        "a child sent",
        "",
        "60e9",
        "device: a test says so; a child sent; between ranks of a node 50 GB/s by MPI, 60 GB/s by CUDA IPC",
    ),
    "slower": (
        "1",
        "yes",
        "a child sent",
        "",
        "200e9",
        "ipc: a test says so; a child sent; between ranks of a node 50 GB/s by MPI, 200 GB/s by CUDA IPC",
    ),
    "crashes": ("1", "no", "a child was ended by SIGSEGV", "", "1", "ipc: a child was ended by SIGSEGV"),
    "unknown": (
        "1",
        "unknown",
        BUSY,
        "",
        "1e9",
        f"device: a test says so; {BUSY}; tried by the ranks themselves; between ranks of a node 50 GB/s by MPI",
    ),
    "lost": ("1", "unknown", BUSY, "1", "1", "ipc: what the ranks sent each other did not arrive"),
}


@pytest.mark.draw(2)
@pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler")
@pytest.mark.parametrize("case", CASES)
def test_a_run_says_which_transport_it_takes_and_why(tmp_path, case):
    aware, answer, text, broken, ipc, expected = CASES[case]
    source = write_input(tmp_path / "in.h5", seqlen=43, kv_heads=2, heads=4, head_dim=16)
    words = "run", source, tmp_path / "out.h5", "--backend", "cuda", "--verify", "--json", tmp_path / "run.json"
    outcome = mpirun(
        2,
        [sys.executable, "-c", LAUNCH, aware, answer, text, broken, ipc, *words],
        env={"PYTHONPATH": os.pathsep.join(map(str, (ROOT, TESTS)))},
    )
    lines = [line for line in outcome.stdout.splitlines() if line.startswith("transport")]
    assert lines and all(expected in line for line in lines), lines
    assert outcome.stdout.count("passed") == 1
    report = json.loads((tmp_path / "run.json").read_text())
    assert expected in report["transport"]
    tried = "mpiattn: ranks now send each other device memory"
    assert (tried in outcome.stderr) == (answer == "unknown")
    if answer == "unknown":  # if it had crashed, this would be the last that anybody says
        (said,) = [line for line in outcome.stderr.splitlines() if tried in line]
        assert text in said and "a test says so" in said and "transport 'staged'" in said


@pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler")
def test_one_rank_tries_nothing():
    words = (
        *("1", "unknown", "busy", "", "1"),
        *"bench --decode --backend cuda --seqlen 9 --heads 1 --head-dim 16 --runs 1".split(),
    )
    outcome = mpirun(
        1, [sys.executable, "-c", LAUNCH, *words], env={"PYTHONPATH": os.pathsep.join(map(str, (ROOT, TESTS)))}
    )
    assert "now send each other" not in outcome.stderr
