"""Runs tests/mpi under mpiexec, one test a rank count, and checks the launcher helper itself.

MPIATTN_RANKS chooses other rank counts, such as MPIATTN_RANKS=1,3,4.
"""

import os
import subprocess
import sys
import time

import draws
import launch
import pytest

pytestmark = pytest.mark.workshop
WHOLE = (2,)  # rank counts that run all tests, of each up to SOME cases
SOME = 4
DRAWN = 1  # cases of each test on a drawn number of ranks
BRIEF = 1, 3, 4  # that run few by default, a case of each, the others with --slow; one in turn runs those of any number
MORE = 5, 6, 7, 8, 12  # that run few, a case of each, with --slow
CHOSEN = os.environ.get("MPIATTN_RANKS")
RANKS = [int(n) for n in CHOSEN.split(",")] if CHOSEN else sorted(WHOLE + BRIEF + MORE)
FEW = "many or group"  # ranks that share few cores take their time
LIMIT = 450  # seconds


def run_pytest(n, *arguments, **options):
    return launch.mpirun(
        n, [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", *arguments], **options
    )


@pytest.fixture
def run_multi_rank(pytestconfig):
    """run_multi_rank(n, *arguments of pytest) runs tests/mpi on n ranks; most: cases of each test, None for all."""

    def run(n, *selection, most=None):
        limits = [limit for limit in (most, pytestconfig.option.most) if limit is not None]
        outcome = run_pytest(
            n,
            str(launch.TESTS / "mpi"),
            *selection,
            *(["--all"] if pytestconfig.option.all else ["--most", str(min(limits))] if limits else []),
            timeout=LIMIT,
            cwd=launch.ROOT,
            env={"MPIATTN_LAUNCHES": ",".join(map(str, RANKS))},
        )
        assert " passed" in outcome.stdout, outcome.stdout  # a run that collects nothing must not pass
        print(outcome.stdout)

    return run


@pytest.mark.skipif(CHOSEN is not None, reason="MPIATTN_RANKS chooses other numbers of ranks")
def test_multi_rank_drawn(run_multi_rank):
    """Each test on a number of ranks from 1 to 4, drawn by the seed: ranks of one launch, which collects once."""
    run_multi_rank(max(BRIEF), "--drawn-ranks", most=DRAWN)


@pytest.mark.thorough("test_multi_rank_drawn runs each of these tests on one of these numbers of ranks")
@pytest.mark.parametrize("n", [n for n in RANKS if CHOSEN or n not in MORE])
def test_multi_rank(run_multi_rank, n):
    if CHOSEN or n in WHOLE:
        run_multi_rank(n, most=None if CHOSEN else SOME)
    else:
        run_multi_rank(n, "-m", FEW if n == BRIEF[draws.seed() % len(BRIEF)] else "group", most=1)


@pytest.mark.slow
@pytest.mark.draw(1)
@pytest.mark.parametrize("n", [] if CHOSEN else MORE)
def test_multi_rank_more(run_multi_rank, n):
    run_multi_rank(n, "-m", FEW, most=1)


@pytest.mark.slow
@pytest.mark.draw(1)
@pytest.mark.parametrize("n", RANKS)
def test_multi_rank_slow(run_multi_rank, n):
    """The tests of tests/mpi that are slow themselves, and on a few ranks what is left out above."""
    rest = f"slow or not ({FEW})" if n in BRIEF else f"slow and ({FEW})"
    run_multi_rank(n, "--slow", "-m", "slow" if CHOSEN or n in WHOLE else rest, most=2)


def test_time_limit_ends_every_rank(tmp_path):
    code = (
        "import os, pathlib, time; pathlib.Path(str(os.getpid())).touch(); print('started', flush=True); "
        "time.sleep(300)"
    )
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"no end after [0-9.e+]+ s"):
        launch.mpirun(2, [sys.executable, "-c", code], timeout=2, cwd=tmp_path)
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    assert len(ranks) == 2
    while any(map(_alive, ranks)):
        assert time.monotonic() - start < 100 * launch.time_factor(), "ranks have outlived their launcher"
        time.sleep(0.1)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("setting, factor", [("2.5", 2.5), ("0.5", 0.5), ("0", None), ("nan", None), ("fast", None)])
def test_time_factor(monkeypatch, setting, factor):
    monkeypatch.setenv(launch.FACTOR, setting)
    if factor:
        assert launch.time_factor.__wrapped__() == factor
    else:
        with pytest.raises(pytest.UsageError, match=f"{launch.FACTOR} is '{setting}'; it must be a positive number"):
            launch.time_factor.__wrapped__()


def test_time_factor_is_measured(monkeypatch):
    """From one launch and the load; every launch is told it, so that tests on its ranks need not measure."""
    monkeypatch.delenv(launch.FACTOR, raising=False)
    launch.require_launch()
    launch.time_factor()  # is remembered, so that no later test takes the load that is made up below for this one's
    assert launch.time_factor.__wrapped__() >= 1
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0 * os.cpu_count(), 0, 0))
    assert launch.time_factor.__wrapped__() >= 1000
    code = f"import os; print(os.environ[{launch.FACTOR!r}])"
    assert float(launch.mpirun(1, [sys.executable, "-c", code]).stdout) == launch.time_factor()


def test_exit_code_is_a_failure():
    with pytest.raises(pytest.fail.Exception, match="exit code"):
        launch.mpirun(1, [sys.executable, "-c", "raise SystemExit(3)"])
    assert launch.mpirun(1, [sys.executable, "-c", "raise SystemExit(3)"], check=False).returncode


def test_one_rank_that_fails_ends_the_job(tmp_path):
    """The other ranks wait for it in a barrier; its traceback, with its rank, must come out and soon."""
    folder = tmp_path / "mpi"
    folder.mkdir()
    (folder / "conftest.py").write_text((launch.TESTS / "mpi" / "conftest.py").read_text())
    (folder / "test_it.py").write_text(
        "def test_it(comm):\n    assert comm.rank != 1, 'the second rank is wrong'\n    comm.Barrier()\n"
    )
    path = launch.ROOT, launch.TESTS, launch.TESTS / "mpi"  # with the helpers that the copied conftest imports
    outcome = run_pytest(
        3, folder, timeout=60, check=False, cwd=tmp_path, env={"PYTHONPATH": os.pathsep.join(map(str, path))}
    )
    assert outcome.returncode
    assert "failed on rank 1 of 3" in outcome.stderr
    assert "the second rank is wrong" in outcome.stderr


def test_whole_suite_under_a_launcher(tmp_path):
    """Serial tests run on rank 0 only, launch tests are skipped, the rank count is in the header."""
    tests = str(launch.TESTS)
    outcome = launch.mpirun(
        2,
        [
            sys.executable,
            *"-m pytest -v --color=no -p no:cacheprovider".split(),
            f"{tests}/test_mask.py",
            f"{tests}/test_nodes.py",
            f"{tests}/mpi/test_scatter.py",
            "--most=2",
        ],
        timeout=60,
        cwd=launch.ROOT,
    )
    assert "ranks: 2" in outcome.stdout
    assert outcome.stdout.count("test session starts") == 1
    assert outcome.stdout.count("test_drawings_of_the_docstring") == 1
    assert "isn't run under one" in outcome.stdout
    assert " failed" not in outcome.stdout


def test_selections():
    """Slow ones run where they are asked for, and -m and -k stay the user's."""

    def collected(*arguments):
        command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "--collect-only"]
        outcome = subprocess.run(
            [*command, *arguments, launch.TESTS / "test_launch.py"],
            cwd=launch.ROOT,
            text=True,
            env=launch.environment() | {"MPIATTN_RANKS": ""},
            capture_output=True,
            timeout=100,
        )
        return {line.rsplit("::")[-1] for line in outcome.stdout.splitlines() if "::" in line}

    quick, both, slow = collected("--all"), collected("--all", "--slow"), collected("--all", "--slow", "-m", "slow")
    assert quick | slow == both and not quick & slow
    assert {"test_multi_rank[3]", "test_selections"} <= quick
    assert {"test_multi_rank_more[8]", "test_multi_rank_slow[3]"} <= slow
    assert collected("-m", "slow") == set() and collected("-k", "alive") == set()
