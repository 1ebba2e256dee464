"""Commands print whatever names they are given, where the terminal's encoding lacks their characters."""

import subprocess
import sys

import launch
import pytest
from files import write_input

ASCII = {"PYTHONIOENCODING": "ascii"}
POSIX = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NAME = "d\N{LATIN SMALL LETTER E WITH ACUTE}"
SIZES = "--seqlen", "64", "--heads", "2", "--head-dim", "8"
# By what they are: commands in a folder with in.h5, whose output names it or what else was typed.
COMMANDS = {
    "generate": ["generate", f"{NAME}/new.h5", *SIZES],
    "run": ["run", f"{NAME}/in.h5", f"{NAME}/out.h5", "--causal", "--verify"],
    "json": ["run", f"{NAME}/in.h5", f"{NAME}/out.h5", "--json", f"{NAME}/out.json"],
    "trace": ["run", f"{NAME}/in.h5", f"{NAME}/out.h5", "--trace", f"{NAME}/trace.json"],
    "plan": ["plan", "--ranks", "4", *SIZES, "--steps", "--json", f"{NAME}/plan.json"],
    "convert": ["convert", f"{NAME}/in.h5", f"{NAME}/new.h5"],
    "no file": ["run", f"{NAME}/none.h5", f"{NAME}/out.h5"],
    "no folder": ["run", f"{NAME}/in.h5", f"{NAME}{NAME}/out.h5"],
    "no option": ["run", f"{NAME}/in.h5", f"{NAME}/out.h5", f"--{NAME}"],
    "no number": ["plan", "--ranks", NAME, *SIZES],
    "no mask": ["run", f"{NAME}/in.h5", f"{NAME}/out.h5", "--mask", NAME],
}
FAIL = "no file", "no folder", "no option", "no number", "no mask"


@pytest.mark.draw(6)
@pytest.mark.parametrize("variables", [ASCII, POSIX], ids=["ascii", "posix"])
@pytest.mark.parametrize("name", COMMANDS)
def test_names_are_printed(name, variables, tmp_path):
    folder = tmp_path / NAME
    folder.mkdir()
    write_input(folder / "in.h5")
    outcome = subprocess.run(
        [sys.executable, "-m", "mpiattn", *COMMANDS[name]],
        cwd=tmp_path,
        env=launch.environment(variables),
        capture_output=True,
        timeout=launch.patience(60),
    )
    assert bool(outcome.returncode) == (name in FAIL), outcome.stderr
    assert b"Traceback" not in outcome.stderr and b"UnicodeEncodeError" not in outcome.stderr


@pytest.mark.parametrize("variables", [ASCII, POSIX], ids=["ascii", "posix"])
def test_of_a_rank_that_fails_alone(variables, tmp_path):
    """The message of one rank, with a name in it that is no text in any encoding."""
    code = (
        "import os, sys\n"
        "from mpiattn.cli import main, info\n"
        "def fail(job):\n"
        "    if job.comm.rank == 1: raise RuntimeError(os.fsdecode(b'd\\xe9\\xff'))\n"
        "    job.peers.barrier()\n"
        "info._run = lambda job, args: fail(job)\n"
        "sys.exit(main(['info']))"
    )
    outcome = launch.mpirun(2, [sys.executable, "-c", code], env=variables, check=False)
    assert outcome.returncode and outcome.stderr.count("mpiattn: rank 1 of 2 on ") == 1
    assert "UnicodeEncodeError" not in outcome.stderr and "RuntimeError: d\\udce9\\udcff" in outcome.stderr
