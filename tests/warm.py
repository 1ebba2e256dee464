"""Commands of mpiattn on ranks that are already there: to start each in a launch of its own takes a second a time.

    warm.command(3, ["run", source, out])        # as mpirun(3, [sys.executable, "-m", "mpiattn", "run", source, out])

For what is tested of a command is what it says and leaves, not how its processes start and end.  The ranks wait for
commands in a folder and run each by `mpiattn.cli.main`, their output in files; conftest ends them with the session.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import launch
import pytest

LONGEST = 60  # seconds of a command on two quiet cores
PAUSE = 0.01  # seconds between looks at the folder

_launches = []


def command(n, arguments, check=True):
    """Run `mpiattn arguments` on n ranks; returns a CompletedProcess, whose returncode is that of every rank.

    With `check` the test fails on another code than 0.
    """
    launch.require_launch()
    return _ranks(n).run([*map(str, arguments)], check)


def end():
    """End all ranks that have been started."""
    while _launches:
        _launches.pop().end()
    _ranks.cache_clear()


@cache
def _ranks(n):
    _launches.append(_Ranks(n))
    return _launches[-1]


class _Ranks:
    def __init__(self, n):
        self.n, self.number = n, 0
        self.folder = tempfile.TemporaryDirectory(prefix="mpiattn-warm-")
        self.said = open(Path(self.folder.name) / "said", "w+")  # by the launcher, and by a rank that dies
        self.process = subprocess.Popen(
            [launch.mpiexec(), "-n", str(n), sys.executable, __file__, self.folder.name],
            env=launch.environment(),
            stdin=subprocess.DEVNULL,
            stdout=self.said,
            stderr=self.said,
            start_new_session=True,
        )

    def run(self, arguments, check):
        self.number += 1
        done = Path(self.folder.name) / f"{self.number}.done"
        _write(Path(self.folder.name) / f"{self.number}.json", json.dumps([arguments, os.getcwd()]))
        limit = time.monotonic() + LONGEST * launch.time_factor()
        while not done.exists():
            if self.process.poll() is not None or time.monotonic() > limit:
                self._fail(f"no end of mpiattn {' '.join(arguments)} on {self.n} ranks")
            time.sleep(PAUSE)
        codes = json.loads(done.read_text())
        out, err = ("".join(self._of(rank, stream) for rank in range(self.n)) for stream in ("out", "err"))
        if len(set(codes)) > 1 or (check and codes[0]):
            pytest.fail(f"exit codes {codes}: mpiattn {' '.join(arguments)}\n{out}\n{err}", pytrace=False)
        return subprocess.CompletedProcess(arguments, codes[0], out, err)

    def _of(self, rank, stream):
        return (Path(self.folder.name) / f"{self.number}.{rank}.{stream}").read_text()

    def _fail(self, why):
        """The ranks are of no more use: the next command starts others."""
        launch.kill(self.process)
        written = "\n".join(path.read_text() for path in sorted(Path(self.folder.name).glob(f"{self.number}.*.*")))
        self.said.seek(0)
        said = self.said.read()
        end()
        pytest.fail(f"{why}\n{written}\n{said}", pytrace=False)

    def end(self):
        _write(Path(self.folder.name) / f"{self.number + 1}.json", "null")
        try:
            self.process.wait(timeout=launch.GRACE * launch.time_factor())
        except subprocess.TimeoutExpired:
            launch.kill(self.process)
        self.said.close()
        self.folder.cleanup()


def _write(path, text):
    """A file that is there with all that it holds, or not at all."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def _serve(folder):
    """On each rank: run the commands that come, until there is null."""
    from mpi4py import MPI

    from mpiattn.console import witness

    witness.watch = lambda rank: None  # it is forked, before MPI starts
    comm, number, environment = MPI.COMM_WORLD, 0, dict(os.environ)
    while True:
        number += 1
        asked = folder / f"{number}.json"
        while comm.rank == 0 and not asked.exists():
            time.sleep(PAUSE)
        _settle(comm)
        what = json.loads(asked.read_text())
        if what is None:
            return
        arguments, place = what
        os.chdir(place)
        code = _run(arguments, folder / f"{number}.{comm.rank}")
        os.environ.clear()
        os.environ.update(environment)
        _settle(comm)
        codes = comm.gather(code)
        if comm.rank == 0:
            _write(folder / f"{number}.done", json.dumps(codes))


def _run(arguments, files):
    from mpiattn.cli import main

    kept = os.dup(1), os.dup(2)
    for stream, ending in ((1, ".out"), (2, ".err")):
        file = os.open(f"{files}{ending}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    sys.argv = ["mpiattn", *arguments]
    try:
        return main() or 0
    except SystemExit as left:
        return left.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, file in enumerate(kept, 1):
            os.dup2(file, stream)
            os.close(file)


def _settle(comm):
    """A barrier that leaves the cores to others."""
    done = comm.Ibarrier()
    while not done.Test():
        time.sleep(PAUSE / 4)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
