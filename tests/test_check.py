"""`mpiattn check` as it is run: what it says, its exit code, real trouble, and the tests from an installed package."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time

import launch
import pytest
import warm

from mpiattn.system import host
from mpiattn.system.gpu_probe import SENDING, probe

CHECK = [sys.executable, "-m", "mpiattn", "check"]
# Spoils something on this rank, then runs the command line.
DRIVER = """
import os, sys
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
exec(sys.argv[1])
from mpiattn.cli import main
sys.exit(main(["check", *sys.argv[2:]]))
"""
TIMEOUT = 2.0


def check(n, *arguments, spoil=None, code=0, **options):
    """Run the check with --json; returns its items by name, its facts and what it printed."""
    if spoil is None and not options:
        outcome = warm.command(n, ["check", "--json", "-", *arguments], check=False)
    else:
        command = CHECK if spoil is None else [sys.executable, "-c", DRIVER, spoil]
        outcome = launch.mpirun(n, [*command, "--json", "-", *arguments], timeout=120, check=False, **options)
    assert bool(outcome.returncode) == bool(code), outcome
    assert "Traceback" not in outcome.stderr
    data = json.loads(outcome.stdout[: outcome.stdout.rindex("}") + 1])  # a launcher may add that the code was not 0
    assert data["passed"] == (code == 0)
    return {item["name"]: item for item in data["items"]}, data, outcome


@pytest.mark.draw(1)
@pytest.mark.parametrize("n", [4, 1, 2, 5])
def test_passes_here(tmp_path, n):
    text = warm.command(n, ["check", "--folder", tmp_path, "--json", tmp_path / "check.json"]).stdout
    data = json.loads((tmp_path / "check.json").read_text())
    assert data["passed"] and len(data["ranks"]) == n
    lines = text.splitlines()
    for item in data["items"]:
        assert item["status"] != "FAIL" and bool(item["advice"]) == (item["status"] == "WARN")
        assert sum(line.startswith(f"{item['status']}  {item['name']} ") for line in lines) == 1  # said once
    for rank in data["ranks"]:
        assert rank["memory"]["limit"] is None or isinstance(rank["memory"]["limit"], str)
    devices = any(rank["devices"] for rank in data["ranks"])
    assert any(data["probes"]) == devices  # only where there are any, since a probe takes seconds
    assert lines[-1].endswith(" 0 FAIL")
    assert {path.name for path in tmp_path.iterdir()} == {"check.json"}


def test_all_ranks_on_one_core():
    items, *_ = check(2, spoil="os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})")
    assert items["binding"]["status"] == "WARN" and "ranks 0-1 share 1 core" in items["binding"]["text"]


@pytest.fixture(scope="module")
def many_threads():
    """One launch with more threads than cores, and an MPI that is asked for none."""
    many = str(4 * len(os.sched_getaffinity(0)))
    return check(2, env={"OPENBLAS_NUM_THREADS": many, "OMP_NUM_THREADS": many, "MPI4PY_RC_THREAD_LEVEL": "single"})


def test_too_many_threads(many_threads):
    items, data, _ = many_threads
    if data["ranks"][0]["blas"]["threads"] is None:
        pytest.skip("this BLAS does not tell its threads")
    assert items["threads"]["status"] == "WARN" and "NUM_THREADS=" in items["threads"]["advice"]


def test_thread_level(many_threads):
    items, data, _ = many_threads
    if data["ranks"][0]["mpi"]["thread_level"] != "SINGLE":
        pytest.skip("this MPI gives more than is asked for")
    assert items["MPI"]["status"] == "WARN"


def test_two_nodes():
    if launch.vendor() != "mpich":
        pytest.skip("only MPICH can pretend to have two nodes")
    items, data, _ = check(3, env={"MPIR_CVAR_NUM_CLIQUES": "2"})
    assert "3 ranks on 2 nodes, " in items["ranks"]["text"]
    assert "between nodes: " in items["links"]["text"]
    nodes = [rank["node"] for rank in data["ranks"]]
    assert [link["between"] for link in data["links"]] == [nodes[rank - 1] != nodes[rank] for rank in range(3)]


def test_the_mpiexec_of_another_mpi():
    """What that looks like to a process: the other launcher's variables; MPICH would abort if it were started."""
    launch.require_launch()
    mpich = launch.vendor() == "mpich"
    size, rank = (
        ("PMI_SIZE", "PMI_RANK") if launch.vendor() == "openmpi" else ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    )
    outcomes = [
        subprocess.run(
            CHECK,
            env=launch.environment({size: "2", rank: str(number)}),
            text=True,
            capture_output=True,
            timeout=launch.patience(60),
        )
        for number in range(2)
    ]
    assert [outcome.returncode for outcome in outcomes] == [1, 1]
    says = " of Open MPI, mpi4py has MPICH" if mpich else ", this MPI sees 1 (Open MPI"
    assert f"the launcher started 2 ranks{says}" in " ".join(outcomes[0].stdout.split())
    assert outcomes[0].stdout.count("mpiexec belongs to another MPI") == 1
    assert outcomes[1].stdout == "" and "PASS" not in outcomes[1].stderr


def test_srun_without_an_interface_to_mpi():
    launch.require_launch()
    outcome = subprocess.run(
        CHECK,
        env=launch.environment({"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"}),
        text=True,
        capture_output=True,
        timeout=launch.patience(60),
    )
    assert outcome.returncode == 1 and "the launcher started 3 ranks, this MPI" in outcome.stdout


SPOILT = """
from mpiattn import backends
from mpiattn.system import host
version, exists, best = host.version, os.path.exists, type(backends.get())
merge = best.merge
def wrong(self, out, lse, *others, **how):
    event = merge(self, out, lse, *others, **how)
    out *= 1 + 1e-3 * (rank == 1)
    return event
host.version = lambda *names: "0.1" if rank and "mpi4py" in names else version(*names)
best.merge = wrong
os.path.exists = lambda path: exists(path) and not (rank and "check" in str(path))
"""


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """One launch whose ranks have other versions, another folder, and one of them wrong results."""
    folder = tmp_path_factory.mktemp("folder")
    items, *_ = check(3, "--folder", folder, spoil=SPOILT, code=1)
    return items, folder


def test_versions_that_differ(spoilt):
    items, _ = spoilt
    assert items["versions"]["status"] == "FAIL" and "0.1 on ranks 1-2" in items["versions"]["text"]


def test_wrong_results(spoilt):
    items, _ = spoilt
    assert items["results"]["status"] == "FAIL"
    assert "tile 3x1, full, greedy, direct route: " in items["results"]["text"]
    assert "out off by " in items["results"]["text"] and "FAILED" in items["results"]["text"]


def test_ranks_that_see_another_folder(spoilt):
    items, folder = spoilt
    assert "that ranks 1-2 on" in items["files"]["text"] and "not there" in items["files"]["text"]
    assert not list(folder.iterdir())


@pytest.mark.draw(1)
@pytest.mark.parametrize("folder", ["/proc", "/no/such/folder"])
def test_folder_that_takes_no_file(folder):
    items, *_ = check(2, "--folder", folder, code=1)
    assert items["files"]["status"] == "FAIL" and f"cannot write in {folder!r}" in items["files"]["text"]


@pytest.mark.draw(1)
@pytest.mark.parametrize("place", ["facts.inside", None, "results._run", "links.take_turns", "folder.gather"])
def test_a_rank_that_stops(tmp_path, place):
    spoil = "import signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)"  # at the start
    if place == "facts.inside":  # in a call of MPI that has no nonblocking form, once all had come
        spoil = (
            "import signal\nfrom mpi4py import MPI\nfrom mpiattn.comm import mesh\nhonest = mesh.blocking\n"
            "def blocking(peers, call):\n"
            "    if rank == 1:\n"
            "        peers.barrier()\n"
            "        os.kill(os.getpid(), signal.SIGSTOP)\n"
            "    return honest(peers, call)\n"
            "mesh.blocking = blocking"
        )
    elif place:
        module, name = place.split(".")
        spoil = (
            f"import signal\nfrom mpiattn.check import {module} as module\nhonest = module.{name}\n"
            "def struck(*args, **how):\n"
            "    if rank == 1:\n"
            "        os.kill(os.getpid(), signal.SIGSTOP)\n"
            "    return honest(*args, **how)\n"
            f"module.{name} = struck"
        )
    timeout, start = TIMEOUT * launch.time_factor(), time.monotonic()
    outcome = launch.mpirun(
        3, [sys.executable, "-c", DRIVER, spoil, "--timeout", timeout, "--folder", tmp_path], timeout=60, check=False
    )
    assert time.monotonic() - start < 40 * launch.time_factor()
    assert outcome.returncode and "PASS" not in outcome.stdout
    said = [line for line in outcome.stderr.splitlines() if "mpiattn: " in line]  # the launcher may indent it
    assert len(said) == 1 and f"has waited {timeout:g} s" in said[0] and "phase: " in said[0], outcome.stderr


@pytest.mark.parametrize(
    "code, answer, text",
    [
        (f"print('{SENDING}')", "yes", "sent device buffers"),
        (f"print('{SENDING}', flush=True); import os; os.kill(os.getpid(), 11)", "no", "was ended by SIGSEGV"),
        (f"print('{SENDING}'); raise SystemExit(3)", "no", "ended with code 3"),
        ("raise ImportError('no libcuda')", "unknown", "before it sent: ImportError: no libcuda"),
        (
            "import sys; sys.exit('one\\n-----\\nMPI_Init failed:\\nmore\\n-----\\n')",
            "unknown",
            "before it sent: MPI_Init failed:",
        ),
        ("import time; time.sleep(6000)", "unknown", "timed out"),
    ],
)
def test_probe(code, answer, text):
    result = probe([sys.executable, "-c", code], timeout=3 * launch.time_factor())
    assert result["answer"] == answer and text in result["text"]


CUPY = """
import numpy
from numpy import zeros
class cuda:
    class runtime:
        getDeviceCount = staticmethod(lambda: 2)
        getDeviceProperties = staticmethod(lambda index: {"name": b"Fast"})
        deviceSynchronize = staticmethod(lambda: None)
def arange(size, dtype):
    SPOIL
    return numpy.arange(size).astype(dtype)
"""


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    "spoil, says",
    [
        ("pass", "yes: a child process sent"),
        ("import os; print('sending', flush=True); os.abort()", "no: a child process that sent"),
    ],
)
def test_probe_from_inside_a_launch(tmp_path, spoil, says):
    """A CuPy whose arrays are NumPy's: the child process must start MPI by itself, whatever it was started from."""
    (tmp_path / "cupy.py").write_text(CUPY.replace("SPOIL", spoil))
    meta = tmp_path / "cupy_cuda13x-13.6.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: cupy-cuda13x\nVersion: 13.6.0\n")
    items, data, _ = check(2, env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(launch.ROOT)])})
    assert says in items["GPU-aware MPI"]["text"] and items["GPU-aware MPI"]["status"] == "WARN"
    assert items["devices"]["status"] == "PASS"
    assert data["probes"][0] and data["probes"][1] is None


@pytest.mark.draw(2)
@pytest.mark.parametrize(
    "arguments, text",
    [
        (["-k", "mask"], "unrecognized arguments"),
        (["--", "-k"], "'-k' is for pytest, which --full runs"),
        (["--full", "--json", "-"], "--json is given with --full"),
        (["--full", "--folder", "."], "--folder is given with"),
        (["--full", "--timeout", "3"], "--timeout is given with --full"),
    ],
)
def test_arguments_that_do_not_fit(arguments, text):
    outcome = warm.command(2, ["check", *arguments], check=False)
    assert outcome.returncode and outcome.stderr.count(text) == 1, outcome.stderr


def test_wrong_options_are_said_once(tmp_path):
    for arguments, text in ((["--timeout=0"], "timeout is 0"), (["--json", "/no/such/a.json"], "--json is '/no/such/")):
        outcome = warm.command(2, ["check", *arguments], check=False)
        assert outcome.returncode and outcome.stderr.count(text) == 1, outcome.stderr


def test_full_starts_no_mpi():
    """A process that has started MPI can't safely start mpiexec, as the tests do where there is no launcher."""
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, mpiattn.cli.check; print(*sys.modules)"],
        text=True,
        env=launch.environment(),
        capture_output=True,
        timeout=launch.patience(60),
        check=True,
    ).stdout.split()
    assert "mpiattn.cli.check" in loaded and "mpi4py" not in loaded


def test_full_without_pytest():
    spoil = (
        "import importlib.util as util\nhonest = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'pytest' else honest(name, *more)"
    )
    outcome = launch.mpirun(2, [sys.executable, "-c", DRIVER, spoil, "--full"], check=False)
    assert outcome.returncode and outcome.stderr.count("--full needs pytest: pip install") == 1, outcome.stderr


@pytest.mark.slow
def test_full_from_an_installed_package(tmp_path):
    """The tests are there without the checkout, run on all ranks, and pytest gets its arguments and gives its code."""
    launch.require_launch()
    if not (launch.ROOT / "setup.py").is_file():
        pytest.skip("installs a checkout")
    if importlib.util.find_spec("pip") is None or int((host.version("setuptools") or "0").split(".")[0]) < 77:
        pytest.skip("takes pip, and setuptools from 77")
    tree, target = tmp_path / "tree", tmp_path / "installed"
    for folder in ("mpiattn", "tests", "kernels", "slurm"):
        shutil.copytree(launch.ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(launch.ROOT / name, tree)
    made = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", target, tree],
        text=True,
        capture_output=True,
        timeout=launch.patience(300),
    )
    assert not made.returncode, made.stderr
    shutil.rmtree(tree)
    here, there = (
        {path.relative_to(tests) for path in tests.rglob("*.py")}
        for tests in (launch.TESTS, target / "mpiattn" / "tests")
    )
    assert here == there
    how = {"cwd": tmp_path, "env": {"PYTHONPATH": str(target)}, "timeout": 120, "check": False}
    some = [*CHECK, "--full", "--", "-v", "--color=no", "--ignore-glob=*torch*"]
    outcome = launch.mpirun(2, [*some, "-k", "test_drawings_of_the_docstring or test_scatter or test_layers"], **how)
    assert not outcome.returncode, outcome
    assert "ranks: 2" in outcome.stdout and f"rootdir: {target}/mpiattn/tests" in outcome.stdout
    assert "test_layers.py::" not in outcome.stdout  # of use to those who develop it
    assert "mpi/test_scatter.py::" in outcome.stdout and outcome.stdout.count("test_drawings_of_the_docstring") == 1
    assert launch.mpirun(2, [*some, "-k", "no_test_has_this_name"], **how).returncode
