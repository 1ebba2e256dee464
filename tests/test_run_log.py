"""What `mpiattn run` says before and while it works, and what OUT says of how it was made."""

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from datetime import datetime, timedelta, timezone

import h5py
import launch
import numpy as np
import pytest
from files import write_input
from launch import mpirun

import mpiattn
from mpiattn.cli.opening import Host, crowded
from mpiattn.console import progress

RUN = [sys.executable, "-m", "mpiattn", "run"]


def test_the_log_begins_with_what_is_done_and_where(tmp_path):
    source = write_input(tmp_path / "in.h5")
    name = tmp_path / "the result.h5"
    outcome = mpirun(2, [*RUN, source, name, "--causal"])
    head, table = outcome.stdout.split("\n\n")
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in head.splitlines()}
    lines.pop("WARNING", None)  # there are as many cores as there are
    assert list(lines) == ["mpiattn", "command", "ranks", "MPI", "problem", "predicted"]
    assert lines["mpiattn"].startswith(mpiattn.__version__)
    assert lines["command"] == f"mpiattn run {source} '{name}' --causal"
    assert lines["ranks"].startswith(f"2 on 1 host ({os.uname().nodename}), ")
    assert f"NumPy {np.__version__}, h5py {h5py.__version__}" in lines["MPI"]
    assert lines["problem"] == "q (1, 67, 4, 16), k (1, 67, 2, 16), float32; causal"
    assert re.match(r"[\d.]+ us forward, on machine default: ", lines["predicted"])
    assert table.startswith("problem ")
    with h5py.File(name) as file:
        attributes = dict(file.attrs)
    assert attributes["command"] == lines["command"]
    assert timedelta() <= datetime.now(timezone.utc) - datetime.fromisoformat(attributes["date"]) < timedelta(hours=1)
    versions = [attributes[package] for package in ("mpiattn", "numpy", "h5py")]
    assert versions == [mpiattn.__version__, np.__version__, h5py.__version__]
    assert lines["MPI"].startswith(attributes["mpi"])


def test_more_threads_than_cores(tmp_path):
    """Said at the top of the log or, where standard output is JSON, on standard error."""
    source = write_input(tmp_path / "in.h5")
    code = (
        "import sys, mpiattn.system.host as host\n"
        "host.blas = lambda: ('made up', 3); host.cores = lambda: {0, 1, 2, 3}\n"
        "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "run", source, tmp_path / "out.h5"]
    outcome = mpirun(2, command)
    warning = f"2 ranks on {os.uname().nodename} have 6 threads for 4 cores, which can make it many times slower: "
    assert outcome.stdout.count("WARNING    " + warning) == 1
    outcome = mpirun(2, [*command, "--json", "-"])
    assert outcome.stdout.startswith("{") and outcome.stderr.count("mpiattn run: WARNING: " + warning) == 1
    assert "WARNING" not in mpirun(1, command).stdout


@pytest.mark.parametrize(
    "hosts, said",
    [
        ([Host("a", 2, 2, 2, 2), Host("b", 2, 4, 4, 4)], None),
        ([Host("a", 2, None, 1, 4)], None),
        (
            [Host("a", 2, 4, 4, 4), Host("b", 2, 8, 4, 4)],
            "2 ranks on b have 8 threads for 4 cores, which can make it many times slower: set OMP_NUM_THREADS=2",
        ),
        (
            [Host("a", 1, 8, 1, 8)],
            "1 rank on a has 8 threads for 1 core, which can make it many times slower: the launcher "
            "leaves them 1 of 8 cores (Open MPI: mpiexec --bind-to none; Slurm: --cpus-per-task), or "
            "set OMP_NUM_THREADS=1",
        ),
        (
            [Host("a", 4, 4, 2, 2)],
            "4 ranks on a have 4 threads for 2 cores, which can make it many times slower: "
            "take no more than 2 ranks a host",
        ),
    ],
)
def test_crowded(monkeypatch, hosts, said):
    for name in mpiattn.system.host.BLAS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert crowded(hosts) == said


def test_the_variables_that_are_set_are_named(monkeypatch):
    for name in mpiattn.system.host.BLAS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    assert crowded([Host("a", 2, 8, 4, 4)]).endswith("set OPENBLAS_NUM_THREADS=2")


class Clock:
    """Time that a test lets pass."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "_terminal", lambda: None)
    return clock


def advance(clock, bar, steps, seconds, done):
    for _ in range(steps):
        clock.now += seconds
        bar(done)


def test_lines_of_a_long_phase(clock, capsys):
    """None for ten seconds, then one for every tenth that is done, ten seconds apart; none at the end."""
    with progress.Progress("forward", 30, " blocks") as bar:
        advance(clock, bar, 60, 1.0, 0.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"forward {percent} %, {blocks} of 30 blocks, {seconds} s, about {60 - seconds} s to go"
        for percent, blocks, seconds in ((16, 5, 10), (33, 10, 20), (50, 15, 30), (66, 20, 40), (83, 25, 50))
    ]


def test_lines_of_a_slow_phase(clock, capsys):
    """At least one a minute."""
    with progress.Progress("read", 10**6, " tokens") as bar:
        advance(clock, bar, 121, 1.0, 1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(", about")[0] for line in lines] == [
        "read 0 %, 60 of 1000000 tokens, 60 s",
        "read 0 %, 120 of 1000000 tokens, 120 s",
    ]


def test_no_line_of_a_short_phase(clock, capsys):
    with progress.Progress("write", 4) as bar:
        advance(clock, bar, 4, 2.4, 1)
    assert capsys.readouterr() == ("", "")


def test_one_rank_writes_lines(tmp_path):
    """Rank 0 alone, to standard error, and within its only block."""
    source = write_input(tmp_path / "in.h5", seqlen=3000, heads=2)
    code = (
        "import sys, mpiattn.console.progress as p; p.APART = p.LOOK = 0\n"
        "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    outcome = mpirun(2, [sys.executable, "-c", code, "run", source, tmp_path / "out.h5"])
    percents = re.findall(r"^forward (\d+) %, ([\d.]+) of 2 blocks, ", outcome.stderr, re.MULTILINE)
    assert 3 < len(percents) <= 12 and "forward" not in outcome.stdout.split("\n\n")[0].split("predicted")[0]
    assert [int(percent) for percent, _ in percents] == sorted({int(percent) for percent, _ in percents})


def test_a_bar_on_a_terminal(tmp_path):
    """Standard error is a terminal: a bar, which moves within the one block, and no lines."""
    launch.require_launch()
    source = write_input(tmp_path / "in.h5", seqlen=3000, heads=2)
    code = (
        "import sys, mpiattn.console.progress as p; p.APART = 0\n"
        "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    above, below = os.openpty()
    fcntl.ioctl(below, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-c", code, "run", source, tmp_path / "out.h5"],
        stdout=subprocess.DEVNULL,
        stderr=below,
        env=launch.environment({"TQDM_MININTERVAL": "0"}),
    ) as process:
        os.close(below)
        text = b""
        while True:
            try:
                text += os.read(above, 4096)
            except OSError:  # the other end is closed
                break
        assert process.wait(timeout=launch.patience(60)) == 0
    os.close(above)
    percents = set(re.findall(rb"forward:\s+(\d+)%", text))
    assert len(percents) > 3, text
    assert b"to go" not in text
