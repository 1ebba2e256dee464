"""Runs tests/mpi under mpiexec, one test a rank count, and checks the launcher helper itself.

MPIATTN_RANKS chooses other rank counts, such as MPIATTN_RANKS=1,3,4.
"""

import os
import sys
import time

import launch
import pytest

RANKS = [int(n) for n in os.environ.get("MPIATTN_RANKS", "1,2,3,4,5,6,7,8,12,16").split(",")]
MANY = 9              # from here on only the tests marked `many`: ranks that share few cores take their time
LIMIT = 300           # seconds


def run_pytest(n, *arguments, **options):
    return launch.mpirun(n, [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", *arguments],
                         **options)


@pytest.mark.parametrize("n", RANKS)
def test_multi_rank(n):
    selection = ["-m", "many"] if n >= MANY else []
    outcome = run_pytest(n, str(launch.TESTS / "mpi"), *selection, timeout=LIMIT, cwd=launch.ROOT,
                         env={"MPIATTN_LAUNCHES": ",".join(map(str, RANKS))})
    assert " passed" in outcome.stdout, outcome.stdout      # a run that collects nothing must not pass
    print(outcome.stdout)


def test_time_limit_ends_every_rank(tmp_path):
    code = ("import os, pathlib, time; pathlib.Path(str(os.getpid())).touch(); print('started', flush=True); "
            "time.sleep(300)")
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="no end after 2 s"):
        launch.mpirun(2, [sys.executable, "-c", code], timeout=2, cwd=tmp_path)
    assert time.monotonic() - start < 2 + 3 * launch.GRACE
    time.sleep(0.5)
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    assert len(ranks) == 2
    assert not [pid for pid in ranks if _alive(pid)]


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_exit_code_is_a_failure():
    with pytest.raises(pytest.fail.Exception, match="exit code"):
        launch.mpirun(1, [sys.executable, "-c", "raise SystemExit(3)"])
    assert launch.mpirun(1, [sys.executable, "-c", "raise SystemExit(3)"], check=False).returncode


def test_one_rank_that_fails_ends_the_job(tmp_path):
    """The other ranks wait for it in a barrier; its traceback, with its rank, must come out and soon."""
    folder = tmp_path / "mpi"
    folder.mkdir()
    (folder / "conftest.py").write_text((launch.TESTS / "mpi" / "conftest.py").read_text())
    (folder / "test_it.py").write_text("def test_it(comm):\n"
                                       "    assert comm.rank != 1, 'the second rank is wrong'\n"
                                       "    comm.Barrier()\n")
    path = launch.ROOT, launch.TESTS, launch.TESTS / "mpi"         # with the helpers that the copied conftest imports
    outcome = run_pytest(3, folder, timeout=60, check=False, cwd=tmp_path,
                         env={"PYTHONPATH": os.pathsep.join(map(str, path))})
    assert outcome.returncode
    assert "failed on rank 1 of 3" in outcome.stderr
    assert "the second rank is wrong" in outcome.stderr


def test_whole_suite_under_a_launcher(tmp_path):
    """Serial tests run on rank 0 only, launch tests are skipped, the rank count is in the header."""
    tests = str(launch.TESTS)
    outcome = launch.mpirun(2, [sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider",
                                f"{tests}/test_mask.py", f"{tests}/test_launch.py", f"{tests}/mpi/test_scatter.py"],
                            timeout=60, cwd=launch.ROOT)
    assert "ranks: 2" in outcome.stdout
    assert outcome.stdout.count("test session starts") == 1
    assert outcome.stdout.count("test_drawings_of_the_docstring") == 1
    assert "isn't run under one" in outcome.stdout
    assert " failed" not in outcome.stdout
