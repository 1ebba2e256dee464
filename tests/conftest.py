"""One suite, three ways to run it:

    python -m pytest                              serial tests, and tests/mpi under mpiexec by test_launch.py;
                                                  -n 2 runs two files at a time (pytest-xdist)
    mpiexec -n 4 python -m pytest tests           serial tests on rank 0, tests/mpi on all four ranks
    mpiexec -n 4 python -m pytest tests/mpi       multi-rank tests only

Without a launcher, tests/mpi is collected only if it is named, and then runs on one rank.

Of a sweep, a test marked `draw`, a few cases are run, drawn by a seed (see draws.py); --all runs every case.
Tests marked `thorough` run with --thorough, and where their file is named; those marked `slow` with --slow, which runs
both, and alone with --slow -m slow.  `mpiattn check --full`, on somebody's cluster, leaves out those marked `workshop`.
"""

import importlib.util
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
if importlib.util.find_spec("mpiattn") is None:
    sys.path.insert(0, str(HERE.parent))

import draws  # noqa: E402  (beside this file; pytest puts the folder on the path)
import launch  # noqa: E402
import thorough  # noqa: E402
import warm  # noqa: E402

if sys.dont_write_bytecode and not launch.under_launcher():
    # Launched ranks and workers would each compile all modules again: what they compile is kept as long as this run.
    BYTECODE = tempfile.TemporaryDirectory(prefix="mpiattn-bytecode-")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = BYTECODE.name
    sys.dont_write_bytecode = False

# What starts a run in the background, such as nohup, may have them ignored, which all that tests start would inherit.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

MPI_TESTS = HERE / "mpi"
# Machines that somebody measured here must not decide what is tested, nor may a test change them.
CONFIG = tempfile.TemporaryDirectory(prefix="mpiattn-config-")
os.environ["XDG_CONFIG_HOME"] = CONFIG.name
os.environ.pop("MPIATTN_MACHINE", None)
LAUNCHED = launch.under_launcher()
if LAUNCHED:
    from mpi4py import MPI

    RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    os.environ[draws.VARIABLE] = MPI.COMM_WORLD.bcast(str(draws.seed()) if RANK == 0 else None)
else:
    RANK, SIZE = 0, 1


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="run the tests marked thorough too")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow or thorough too")
    parser.addoption("--all", action="store_true", help="run every case of each sweep, not a few drawn ones")
    parser.addoption(
        "--drawn-ranks", action="store_true", help="run each test of tests/mpi on a number of ranks that is drawn"
    )
    parser.addoption("--most", type=int, metavar="N", help="run at most N cases of each test, drawn")


@pytest.hookimpl(trylast=True)  # after the terminal reporter is there
def pytest_configure(config):
    # here, not in pyproject.toml, which is not there where mpiattn is installed
    for line in (
        "many: a multi-rank test that is also worth its time on 5, 6, 7, 8 and 12 ranks",
        "whole: a multi-rank test of the launch itself, which needs all of its ranks",
        "group: a multi-rank test of a given number of ranks (set by itself)",
        "thorough(why): takes seconds, and quicker tests look at the same; runs with --thorough or --slow, or by name",
        "slow: takes long; runs with --slow",
        "draw(n, slow=n): a sweep, of whose cases n are drawn by the seed, of slow ones `slow`; all run with --all",
        "turn(i, n): runs if the seed modulo n is i; all run with --all",
        "workshop: of no use on a cluster, since it builds networks, emulates GPUs or tests developers' tools",
        "gpu: needs a GPU and CuPy; skipped where there is none",
    ):
        config.addinivalue_line("markers", line)
    if RANK:  # one rank speaks; the others' failures are printed by tests/mpi
        config.pluginmanager.get_plugin("terminalreporter")._tw._file = open(os.devnull, "w")  # noqa: SIM115


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With -n: a file's tests run in one process, since they share what they start, such as a Slurm.

    Launches are apart, and so is each emulated processor, which takes longest.
    """
    if config.option.dist != "load":  # the default; another --dist has the last word
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            emulated = re.search(r"aarch64-\w+", nodeid)
            return nodeid if "test_launch.py" in nodeid else super()._split_scope(nodeid) + (emulated or [""])[0]

    config.option.loadscopereorder = False  # the longest file is not the one with the most tests
    return Scheduling(config, log)


def pytest_report_header(config):
    cases = "all cases" if config.option.all else f"cases drawn by {draws.VARIABLE}={draws.seed()}; --all runs all"
    if LAUNCHED:
        return f"MPI: {MPI.Get_library_version().splitlines()[0].strip()}; ranks: {SIZE}; {cases}"
    return f"MPI: {launch.vendor()}, {launch.mpiexec()}; ranks: none here, tests/test_launch.py starts them; {cases}"


def _is_multi_rank(path):
    return path == MPI_TESTS or MPI_TESTS in path.parents


def pytest_ignore_collect(collection_path, config):
    path = Path(collection_path).resolve()
    if path.is_dir() and not _is_multi_rank(path):
        return None
    if _is_multi_rank(path):
        return None if LAUNCHED or any(map(_is_multi_rank, _named(config))) else True
    if RANK:  # serial tests are rank 0's
        return True
    # To import a file, only to leave all its tests out, takes time.
    wanted = config.option.thorough or config.option.slow or path in _named(config)
    return True if path.name in thorough.WHY and not wanted else None


def pytest_itemcollected(item):
    if "group" in getattr(item, "fixturenames", ()):
        item.add_marker("group")
    if why := thorough.why(item):
        item.add_marker(pytest.mark.thorough(why))


@pytest.hookimpl(trylast=True)  # what -m and -k leave
def pytest_collection_modifyitems(config, items):
    """Multi-rank tests first, so that the other ranks don't spin in MPI while rank 0 runs the serial ones.

    Their launches are the longest tests, so that with -n the other files run beside them, none after them.
    """
    kept = [item for item in items if _is_wanted(item, config)]
    kept = kept if config.option.all else draws.drawn(kept, SIZE, config.option.most)
    config.hook.pytest_deselected(items=list(set(items).difference(kept)))
    items[:] = sorted(kept, key=lambda item: not (_is_multi_rank(item.path) or item.path.name == "test_launch.py"))


def _is_wanted(item, config):
    """Whether a test runs, by its marks and the options of this run."""
    if config.option.slow:
        return True
    if item.get_closest_marker("slow"):
        return False
    return config.option.thorough or not item.get_closest_marker("thorough") or item.path in _named(config)


def _named(config):
    """The paths that the command line names."""
    return {Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args}


def _end_the_job(text):
    """The other ranks would wait for this one for ever."""
    if SIZE > 1:
        print(f"\nrank {RANK}: {text}", file=sys.stderr, flush=True)
        time.sleep(0.5)  # a launcher that ends the job may drop what it has not yet passed on
        MPI.COMM_WORLD.Abort(1)


def pytest_collectreport(report):
    if report.failed:
        _end_the_job(report.longreprtext)


def pytest_internalerror(excrepr):
    _end_the_job(excrepr)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    warm.end()
    if RANK and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
    if SIZE > 1:
        done = MPI.COMM_WORLD.Ibarrier()
        while not done.Test():
            time.sleep(0.01)  # Finalize would spin on a core that rank 0 can use


@pytest.fixture(params=[False, True], ids=["ascending", "descending"])
def backend(request):
    """The emulated kernels, in both orders of a block's warps: what lacks a barrier differs between them."""
    from mpiattn import backends

    made = backends.get("emulated")
    made.descending = request.param
    yield made
    made.close()


@pytest.fixture
def gpu():
    """The back end `cuda` on a made-up CuPy."""
    import fake_cupy

    from mpiattn import backends
    from mpiattn.backends.cuda import devices

    with fake_cupy.install():
        devices._dealt.clear()
        made = backends.get("cuda")
        yield made
        made.close()
    fake_cupy._devices[:] = [0]
