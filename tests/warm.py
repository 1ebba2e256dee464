"""Commands of mpiattn on ranks that are already there: to start each in a launch of its own takes a second a time.

    warm.command(3, ["run", source, out])        # as mpirun(3, [sys.executable, "-m", "mpiattn", "run", source, out])

For tests of what a command says and leaves, not of how its processes start and end.  The ranks look for commands in
a folder and run each by `mpiattn.cli.main`, their output in files; conftest ends them with the session.
"""

import gc
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

MOST = 4  # ranks that are kept; more are launched for each command
LONGEST = 120  # seconds of a command on two quiet cores
PAUSE = 0.01  # seconds between looks at the folder
KINDS = "code", "out", "err"

_launches = []


def command(n, arguments, check=True, cwd=None, env=None):
    """Run `mpiattn arguments` on n ranks; returns a CompletedProcess, whose returncode is that of every rank.

    With `check` the test fails on another code than 0.  cwd: the folder to run it in, else that of the caller.
    env: variables, but those that MPI and BLAS look at when they start; None takes one away.
    """
    launch.require_launch()
    if n > MOST:
        assert not env
        return launch.mpirun(n, [sys.executable, "-m", "mpiattn", *arguments], LONGEST, check=check, cwd=cwd)
    return _ranks(n).run([*map(str, arguments)], check, str(cwd or os.getcwd()), env or {})


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
        self.place = Path(self.folder.name)
        with open(self.place / "said", "w") as said:  # by the launcher, and by a rank that dies
            self.process = subprocess.Popen(
                [launch.mpiexec(), "-n", str(n), sys.executable, __file__, self.place],
                env=launch.environment(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def run(self, arguments, check, cwd, env):
        self.number += 1
        files = {kind: [self.place / f"{self.number}.{rank}.{kind}" for rank in range(self.n)] for kind in KINDS}
        _write(self.place / f"{self.number}.json", json.dumps([arguments, cwd, env]))
        limit = time.monotonic() + LONGEST * launch.time_factor()
        while not all(path.exists() for path in files["code"]):
            if self.process.poll() is not None or time.monotonic() > limit:
                self._fail(f"no end of mpiattn {' '.join(arguments)} on {self.n} ranks")
            time.sleep(PAUSE)
        codes, *texts = ([path.read_text() for path in files[kind]] for kind in KINDS)
        out, err = map("".join, texts)
        if len(set(codes)) > 1 or (check and codes[0] != "0"):
            pytest.fail(f"exit codes {codes}: mpiattn {' '.join(arguments)}\n{out}\n{err}", pytrace=False)
        return subprocess.CompletedProcess(arguments, int(codes[0]), out, err)

    def _fail(self, why):
        """The ranks are of no more use: the next command starts others."""
        launch.kill(self.process)
        written = [path.read_text() for path in (*sorted(self.place.glob(f"{self.number}.*.*")), self.place / "said")]
        end()
        pytest.fail("\n".join([why, *written]), pytrace=False)

    def end(self):
        _write(self.place / f"{self.number + 1}.json", "null")
        try:
            self.process.wait(timeout=launch.GRACE * launch.time_factor())
        except subprocess.TimeoutExpired:
            launch.kill(self.process)
        self.folder.cleanup()


def _write(path, text):
    """A file that is there with all that it holds, or not at all."""
    part = Path(f"{path}.part")
    part.write_text(text)
    part.rename(path)


def _serve(folder):
    """On each rank: run the commands that come, until there is null."""
    from mpi4py import MPI

    from mpiattn.console import witness

    witness.watch = lambda rank: None  # it is forked, before MPI starts
    number, environment = 0, dict(os.environ)
    while True:
        number += 1
        asked = folder / f"{number}.json"
        while not asked.exists():
            time.sleep(PAUSE)
        what = json.loads(asked.read_text())
        if what is None:
            return
        arguments, place, more = what
        os.chdir(place)
        for name, value in more.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        files = f"{number}.{MPI.COMM_WORLD.rank}"
        code = _run(arguments, folder / f"{files}.out", folder / f"{files}.err")
        gc.collect()  # files that the traceback of an error keeps open
        os.environ.clear()
        os.environ.update(environment)
        _write(folder / f"{files}.code", str(code))


def _run(arguments, *outputs):
    from mpiattn.cli import main
    from mpiattn.console import message

    before = os.dup(1), os.dup(2)
    for stream, path in enumerate(outputs, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    sys.argv = ["mpiattn", *arguments]
    message.options.clear()  # of the command before
    try:
        return main() or 0
    except SystemExit as left:
        return left.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, file in enumerate(before, 1):
            os.dup2(file, stream)
            os.close(file)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
