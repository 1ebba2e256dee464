"""Signals at chosen moments of a command, from its first line to the end of its process.

The job ends with a documented code, says so in one line, and leaves nothing behind; or it was at its end, and OUT is
whole.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import product

import launch
import pytest
from files import assert_right, write_input

from mpiattn.system.output_lock import OutputLock

RANKS = 3
NUMBERS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
MOMENTS = {
    "load": "before the rank has its witness",
    "parse": "before MPI is loaded",
    "load MPI": "while it is loaded",
    "start MPI": "while MPI starts",
    "started": "when MPI has started",
    "write": "while OUT is written",
    "commit": "before OUT gets its name",
    "end": "when the last message is printed",
    "exit": "when Python ends",
}
LATE = "end", "exit"  # the command has done its work

# Runs the command as its script does; at a moment it sends a signal to this rank or to the launcher.
DRIVER = """
import atexit, importlib, os, sys, time
moment, victim, target, number, *arguments = sys.argv[1:]
sys.argv[1:] = arguments
import mpiattn.cli
from mpiattn.console import signals
from mpiattn.system.launch_variables import launch_rank

if target == "launcher":  # it hands signals on to all ranks, of which one that still starts Python would die
    signals.handle(signals.note)
    begun = os.environ["BEGUN"]
    os.mkdir(os.path.join(begun, str(launch_rank())))
    while len(os.listdir(begun)) < int(os.environ["RANKS"]):
        time.sleep(0.01)

def send(rank):
    os.kill(rank if target == "rank" else int(os.environ["LAUNCHER"]), int(number))

def strike(pause=1.0):
    send(os.getpid())
    end = time.monotonic() + pause
    while time.monotonic() < end:  # signals are handled between two short sleeps
        time.sleep(0.01)

def plant(place, act=strike):
    module, name = place.rsplit(".", 1)
    owner = importlib.import_module(f"mpiattn.{module.split(':')[0]}")
    for part in module.split(":")[1:]:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    def struck(*given, **how):
        setattr(owner, name, original)
        act()
        return original(*given, **how)
    setattr(owner, name, struck)

class Loading:
    def find_spec(self, name, *where):
        if name == "mpi4py.MPI":
            sys.meta_path.remove(self)
            if moment == "load MPI":
                strike()
            else:
                from mpi4py import MPI
                start = MPI.Init_thread
                def struck(*given):
                    rank, child = os.getpid(), os.fork()
                    if not child:  # this rank waits for the others in MPI's start then
                        time.sleep(0.3)
                        send(rank)
                        os._exit(0)
                    level = start(*given)
                    os.waitpid(child, 0)  # a rank that is alone starts sooner
                    return level
                MPI.Init_thread = struck

if launch_rank() == int(victim):
    if moment in ("load MPI", "start MPI"):
        sys.meta_path.insert(0, Loading())
    elif moment == "exit":
        atexit.register(strike)
    else:
        plant({
            "load": "console.witness.watch",
            "parse": "cli.commands.parser_of",
            "started": "console.launch:Job.__init__",
            "write": "files.output:Output.write_each",
            "commit": "files.output:Output.commit",
            "end": "console.witness.end",
        }[moment])
elif moment == "start MPI":  # the others come later, and hold signals as a command does
    plant("cli.commands.parser_of", lambda: time.sleep(1.0))
sys.exit(mpiattn.cli.main())
"""


def run(folder, moment, victim, target, number, *options, before=()):
    """A launch in which a rank or the launcher gets a signal; (code, lines of mpiattn, standard error).

    before: words of each rank's command that come before Python.
    """
    launch.require_launch()
    source = write_input(folder / "in.h5")
    rank = [*before, sys.executable, "-c", DRIVER, moment, victim, target, int(number)]
    command = [launch.mpiexec(), "-n", RANKS, *rank, "run", source, folder / "out.h5", *options]
    begun = folder / "begun"  # by rank, a folder
    begun.mkdir()
    env = launch.environment({"BEGUN": str(begun), "RANKS": str(RANKS)})
    outcome = launch.limited(["sh", "-c", 'LAUNCHER=$$ exec "$@"', "sh", *command], timeout=40, env=env, check=False)
    shutil.rmtree(begun)
    said = [line for line in outcome.stderr.splitlines() if line.startswith("mpiattn")]
    return outcome.returncode, said, outcome.stderr


@pytest.mark.draw(3)
@pytest.mark.parametrize("moment, number, resume", list(product(MOMENTS, NUMBERS, [False, True])))
def test_a_signal_to_a_rank(tmp_path, moment, number, resume):
    source, out = tmp_path / "in.h5", tmp_path / "out.h5"
    code, said, wrote = run(tmp_path, moment, 1, "rank", number, *["--resume"] * resume)
    assert "Traceback" not in wrote and not list(tmp_path.glob(".*")), wrote
    if code == 0:  # the work was done, or SIGUSR1 asked for its end after the only problem
        assert moment in LATE or (number == signal.SIGUSR1 and resume)
        assert said == []
        assert_right(source, out)
        return
    how = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    (line,) = said
    assert code == 128 + number and line.startswith(f"mpiattn run: {how}"), wrote
    assert out.exists() == (moment in LATE)
    assert ("OUT was not written" in line) == (moment not in LATE)


@pytest.mark.draw(1)
@pytest.mark.parametrize("moment", ["started", "write"])
def test_nobody_reads_the_message(tmp_path, moment):
    """The code is that of the signal all the same."""
    before = ["sh", "-c", 'exec "$@" 2>&-', "sh"]
    assert run(tmp_path, moment, 1, "rank", signal.SIGTERM, before=before)[0] == 128 + signal.SIGTERM
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.h5"]


@pytest.mark.draw(2)
@pytest.mark.parametrize("moment, number", list(product(MOMENTS, NUMBERS)))
def test_a_signal_to_the_launcher(tmp_path, moment, number):
    """As Ctrl-C, or from a batch system."""
    code, said, wrote = run(tmp_path, moment, 1, "launcher", number)
    assert "Traceback" not in wrote, wrote
    ends = number != signal.SIGUSR1  # Open MPI's launcher, which then kills the ranks
    if launch.vendor() == "openmpi" and ends:
        assert code == 1 or (code == 0 and moment in LATE)
        assert len(said) == 1 or moment in ("load", *LATE)
    elif number == signal.SIGHUP:
        assert code == -signal.SIGHUP  # MPICH's dies of it
    elif code or moment not in LATE:
        assert code == 128 + number and len(said) == 1, wrote
    assert (tmp_path / "out.h5").exists() == (moment in LATE)


@pytest.mark.draw(3)
@pytest.mark.parametrize(
    "command, moment, number",
    [*product(["run"], MOMENTS, NUMBERS), *product(["generate"], ["parse", "end", "exit"], NUMBERS)],
)
def test_without_a_launcher(tmp_path, command, moment, number):
    """Among them Ctrl-C as soon as a command is typed."""
    if moment == "load":
        pytest.skip("a process without a launcher has no witness")
    source = write_input(tmp_path / "in.h5")
    arguments = ["run", source, tmp_path / "out.h5"]
    if command == "generate":
        arguments = ["generate", tmp_path / "out.h5", "--seqlen", "40", "--heads", "2"]
    outcome = subprocess.run(
        [sys.executable, "-c", DRIVER, *map(str, [moment, 0, "rank", int(number), *arguments])],
        env=launch.environment(),
        text=True,
        capture_output=True,
        timeout=launch.patience(60),
    )
    how = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    name = "FILE" if command == "generate" else "OUT"
    lost = "" if moment == "end" else f", {name} was not written"
    expected = (128 + number, f"mpiattn {command}: {how}{lost}\n")
    if moment == "exit":
        expected = (0, "")
    assert (outcome.returncode, outcome.stderr) == expected
    assert (tmp_path / "out.h5").exists() == (moment in LATE) and not list(tmp_path.glob(".*"))


THREAD = """
import sys, threading
from mpiattn.cli import main
codes = []
thread = threading.Thread(target=lambda: codes.append(main(sys.argv[1:])))
thread.start()
thread.join()
sys.exit(*codes)
"""


def test_a_command_in_a_thread(tmp_path):
    """Python lets the main thread alone set handlers."""
    source, out = write_input(tmp_path / "in.h5"), tmp_path / "out.h5"
    command = [sys.executable, "-c", THREAD, "run", source, out]
    subprocess.run([*map(str, command)], env=launch.environment(), timeout=launch.patience(60), check=True)
    assert_right(source, out)


SLOW = """
import os, sys, time
from mpiattn.files.unfinished import Unfinished
from mpiattn.system.launch_variables import launch_rank
add = Unfinished.add
def slow(self, *given):
    if launch_rank() == 1:
        print("pid", os.getpid(), flush=True)
        time.sleep(60)
    time.sleep(3)
    return add(self, *given)
Unfinished.add = slow
from mpiattn.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_rank_0_has_the_lock_until_it_ends(tmp_path):
    """A signal to another rank gives no second job the folder, while rank 0 still writes there."""
    launch.require_launch()
    source = write_input(tmp_path / "in.h5")
    command = [launch.mpiexec(), "-n", "2", sys.executable, "-c", SLOW, "run", source, tmp_path / "out.h5", "--resume"]
    job = subprocess.Popen(
        [*map(str, command)], env=launch.environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        pid = next(int(line.split()[1]) for line in job.stdout if line.startswith("pid"))
        os.kill(pid, signal.SIGTERM)
        refused = 0
        while job.poll() is None:
            lock = OutputLock(str(tmp_path / "out.h5"))
            if lock.take() is not None:
                refused += 1
                continue
            time.sleep(0.3 * launch.time_factor())  # the launcher ends the others within that time
            assert job.poll() is not None
            lock.release()
        said = job.communicate(timeout=launch.patience(40))[1]
    finally:
        job.kill()
    assert refused and said.count("mpiattn run: ended by SIGTERM, OUT was not written") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.h5"]
