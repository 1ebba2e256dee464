"""The hidden files that outputs are written to: removed whenever a process can, else by the next job of that file."""

import errno
import os
import re
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import launch
import pytest
from files import RANK_1_RAISES, write_input
from launch import mpirun

from mpiattn.errors import FileError
from mpiattn.system import processes
from mpiattn.system.atomic_file import HDF5, NewFile

SAID = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM", signal.SIGHUP: "ended by SIGHUP"}
GENERATE = ["--seqlen", "40", "--heads", "2"]

# Says that it writes, then waits for its fate.
WAIT = (
    "import sys, time, mpiattn.files.hdf5 as h\n"
    "def wait(*args, **how):\n"
    "    print('writing', flush=True)\n"
    "    time.sleep(60)\n"
    "h.write = wait\n"
    "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.fixture(autouse=True, scope="module")
def heeded_signals():
    """Children inherit what is ignored: SIGINT where a shell runs pytest in the background, SIGHUP under nohup."""
    ignored = [number for number in SAID if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def start(*arguments, code=WAIT, command=()):
    """A command that has come to write."""
    process = subprocess.Popen(
        [*command, sys.executable, "-c", code, *map(str, arguments)],
        text=True,
        env=launch.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout.readline() == "writing\n", process.communicate()
    return process


def generate(path):
    return subprocess.run(
        [sys.executable, "-m", "mpiattn", "generate", path, *GENERATE],
        text=True,
        timeout=launch.patience(60),
        env=launch.environment(),
        capture_output=True,
        check=True,
    )


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def killed(tmp_path):
    """The partial that a process of this host left when it was killed."""
    process = start("generate", tmp_path / "x.h5", *GENERATE)
    process.kill()
    process.communicate(timeout=launch.patience(30))
    (name,) = left_in(tmp_path)
    assert re.fullmatch(r"\.x\.h5\..*\.partial", name)
    return name


def test_the_next_job_removes_it_and_says_so(tmp_path, killed):
    outcome = generate(tmp_path / "x.h5")
    assert outcome.stderr == (f"mpiattn: removed {str(tmp_path / killed)!r}, which a job that was killed left behind\n")
    assert left_in(tmp_path) == ["x.h5"]


def test_who_lives_keeps_it(tmp_path):
    living = start("generate", tmp_path / "x.h5", *GENERATE)
    try:
        (name,) = left_in(tmp_path)
        assert generate(tmp_path / "x.h5").stderr == ""
        assert left_in(tmp_path) == [name, "x.h5"]
    finally:
        living.kill()
        living.communicate(timeout=launch.patience(30))


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name.replace(".x.h5.", ".other.h5."),  # of another file
        lambda name: re.sub(r"\.[0-9a-f]{12}-", ".0123456789ab-", name),  # of another host, or an earlier boot
        lambda name: ".x.h5.abcdefgh.partial",  # nobody knows whose
        lambda name: name[1:],
    ],
)
def test_what_may_be_somebody_elses_stays(tmp_path, killed, change):
    os.rename(tmp_path / killed, tmp_path / change(killed))
    assert generate(tmp_path / "x.h5").stderr == ""
    assert left_in(tmp_path) == sorted([change(killed), "x.h5"])


def test_another_process_with_its_number(tmp_path, killed):
    """A process that began at another time is another process."""
    before, after = re.fullmatch(r"(\..*-)[0-9a-f]+(-.*)", killed).groups()
    os.rename(tmp_path / killed, tmp_path / f"{before}{os.getpid():x}{after}")
    assert "removed" in generate(tmp_path / "x.h5").stderr
    assert left_in(tmp_path) == ["x.h5"]


def test_where_processes_cannot_be_told_apart(tmp_path, killed, monkeypatch):
    """Without /proc nothing is removed, and files are made all the same."""
    monkeypatch.setattr(processes, "machine", lambda: None)
    new = NewFile("FILE", tmp_path / "x.h5")
    assert len(left_in(tmp_path)) == 2
    new.publish()
    assert left_in(tmp_path) == sorted([killed, "x.h5"])


def test_long_names(tmp_path):
    path = tmp_path / ("ü" * 120)
    new = NewFile("FILE", path)
    new.publish()
    assert left_in(tmp_path) == [path.name]


def test_a_new_file_as_a_context(tmp_path):
    """It has its name once the body is done; what the system refuses names the argument, and the old file stays."""
    path = tmp_path / "x.json"
    with NewFile("--out", path) as new:
        Path(new.partial).write_text("whole")
    refused = r"--out is '.*x.json'; it cannot be written: "
    with pytest.raises(FileError, match=f"{refused}No space left on device"), NewFile("--out", path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(FileError, match=f"{refused}No such file"), NewFile("--out", path) as new:
        os.remove(new.partial)
    assert path.read_text() == "whole" and left_in(tmp_path) == [path.name]


def test_an_error_leaves_nothing(tmp_path):
    """Of whichever rank, where the others know nothing of it."""
    source = write_input(tmp_path / "in.h5")
    outcome = mpirun(
        3,
        [sys.executable, "-c", RANK_1_RAISES, "run", source, tmp_path / "out.h5", "--schedule", "greedy"],
        check=False,
    )
    assert outcome.returncode and "on purpose" in outcome.stderr
    assert left_in(tmp_path) == ["in.h5"]


# Permissions


def test_a_read_only_file_is_refused(tmp_path):
    path = tmp_path / "x.h5"
    path.write_text("precious")
    path.chmod(0o444)
    outcome = subprocess.run(
        [sys.executable, "-m", "mpiattn", "generate", path, *GENERATE],
        text=True,
        timeout=launch.patience(60),
        env=launch.environment(),
        capture_output=True,
    )
    assert outcome.returncode == 1
    assert outcome.stderr == (
        f"mpiattn generate: FILE is {str(path)!r}; it exists and is read-only; remove it or make "
        "it writable (chmod u+w) to have it replaced\n"
    )
    assert path.read_text() == "precious" and left_in(tmp_path) == ["x.h5"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_a_file_that_is_replaced_hands_on_its_permissions(tmp_path, mode):
    path = tmp_path / "x.h5"
    path.write_bytes(HDF5 + b"older")
    path.chmod(mode)
    generate(path)
    assert path.stat().st_mode & 0o7777 == mode and path.read_bytes() != HDF5 + b"older"


# Signals


@pytest.mark.parametrize("number", SAID)
def test_signals(tmp_path, number):
    process = start("generate", tmp_path / "x.h5", *GENERATE)
    process.send_signal(number)
    assert (
        process.communicate(timeout=launch.patience(30))[1]
        == f"mpiattn generate: {SAID[number]}, FILE was not written\n"
    )
    assert process.returncode == 128 + number
    assert left_in(tmp_path) == []


def test_nohup(tmp_path):
    """What a process was started to ignore it ignores."""
    process = start(
        "generate",
        tmp_path / "x.h5",
        *GENERATE,
        command=["nohup"],
        code=WAIT.replace("time.sleep(60)", "time.sleep(1)"),
    )
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=launch.patience(60))
    assert process.returncode == 0


def test_ctrl_c_in_a_callback(tmp_path):
    """Where Python drops exceptions, as in the callback of a weak reference: h5py's come with every object."""
    code = (
        "import os, signal, sys, weakref, mpiattn.files.hdf5 as h\n"
        "write = h.write\n"
        "class Thing: pass\n"
        "def interrupted(*args, **how):\n"
        "    holder = Thing()\n"
        "    ref = weakref.ref(holder, lambda ref: os.kill(os.getpid(), signal.SIGINT))\n"
        "    del holder\n"
        "    return write(*args, **how)\n"
        "h.write = interrupted\n"
        "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", code, "generate", tmp_path / "x.h5", *GENERATE],
        text=True,
        timeout=launch.patience(60),
        env=launch.environment(),
        capture_output=True,
    )
    assert (outcome.returncode, outcome.stderr) == (130, "mpiattn generate: interrupted, FILE was not written\n")
    assert left_in(tmp_path) == []


# Every rank waits where it first reads; the victim says so, once all are there.
READING = (
    "import os, sys, time\n"
    "victim, *arguments = sys.argv[1:]\n"
    "from mpiattn.console import witness\n"
    "from mpiattn.system.launch_variables import launch_rank\n"
    "witness.watch(launch_rank())\n"
    "from mpiattn.files.input import Input\n"
    "from mpi4py import MPI\n"
    "def wait(*args, **how):\n"
    "    MPI.COMM_WORLD.Barrier()\n"
    "    if MPI.COMM_WORLD.rank == int(victim): print('pid', os.getpid(), flush=True)\n"
    "    time.sleep(60)\n"
    "Input.chunks = wait\n"
    "from mpiattn.cli import main; sys.exit(main(arguments))"
)


@pytest.mark.draw(2)
@pytest.mark.parametrize("number, victim", list(product([signal.SIGINT, signal.SIGTERM], ["launcher", 2, 0])))
def test_signals_to_a_launch(tmp_path, number, victim):
    """To mpiexec, as Ctrl-C sends them, or to one rank, as an operator may: said once, no OUT, nothing left."""
    launch.require_launch()
    source = write_input(tmp_path / "in.h5")
    process = subprocess.Popen(
        [
            launch.mpiexec(),
            "-n",
            "3",
            sys.executable,
            "-c",
            READING,
            str(0 if victim == "launcher" else victim),
            "run",
            source,
            tmp_path / "out.h5",
        ],
        env=launch.environment(),
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        pid = next(int(line.split()[1]) for line in process.stdout if line.startswith("pid"))
        os.kill(process.pid if victim == "launcher" else pid, number)
        said = process.communicate(timeout=launch.patience(40))[1]
    finally:
        process.kill()
        process.communicate()
    lines = [line for line in said.splitlines() if line.startswith("mpiattn")]
    assert process.returncode
    assert left_in(tmp_path) == ["in.h5"]
    if victim != "launcher":
        assert lines == [f"mpiattn run: {SAID[number]}, OUT was not written"], said
