"""Ranks that are killed, stopped or raise, at each phase of `mpiattn run`.

The job ends soon, says why once, and leaves no OUT.
"""

import os
import re
import sys
import time
from itertools import product

import launch
import pytest
from files import write_input

RANKS = 4
TIMEOUT = 2.0  # seconds that a rank waits for others, on a quiet machine
SOON = 30.0  # seconds within which a job must end, from its start
FATES = "raise", "SIGKILL", "SIGSTOP"
PHASES = {
    "read": "files.input.Input.chunks",
    "exchange": "comm.rounds.Rounds.turn",
    "steps": "engine.executor.Executor._run_block",
    "write": "files.output.Output.write_each",
}

# Lets a rank meet its fate where a method is first called, then runs the command line.
DRIVER = """
import importlib, os, signal, sys
fate, victim, place, *arguments = sys.argv[1:]
from mpiattn.console import witness
from mpiattn.system.launch_variables import launch_rank
witness.watch(launch_rank())                   # before MPI starts, as the command does
from mpi4py import MPI
module, owner, name = place.rsplit(".", 2)
owner = getattr(importlib.import_module(f"mpiattn.{module}"), owner)
if module == "comm.rounds":                    # ranks of several hosts exchange what they read
    import mpiattn.files.access
    mpiattn.files.access.on_one_host = lambda peers: False
original = getattr(owner, name)

def struck(self, *args, **how):
    setattr(owner, name, original)
    if MPI.COMM_WORLD.rank == int(victim):
        if fate == "raise":
            raise ZeroDivisionError("on purpose")
        os.kill(os.getpid(), getattr(signal, fate))
    return original(self, *args, **how)

setattr(owner, name, struck)
from mpiattn.cli import main
sys.exit(main(arguments))
"""


@pytest.mark.draw(4)
@pytest.mark.parametrize("phase, victim_and_fate", list(product(PHASES, product(range(RANKS), FATES))))
def test_one_message_and_no_out(tmp_path, phase, victim_and_fate):
    victim, fate = victim_and_fate
    source, out = write_input(tmp_path / "in.h5"), tmp_path / "out.h5"
    timeout, start = TIMEOUT * launch.time_factor(), time.monotonic()
    outcome = launch.mpirun(
        RANKS,
        [
            sys.executable,
            "-c",
            DRIVER,
            fate,
            victim,
            PHASES[phase],
            "run",
            source,
            out,
            "--schedule",
            "greedy",
            "--tile",
            "2x2",
            "--layout",
            "striped",  # whose tokens are exchanged when they are read
            "--timeout",
            timeout,
        ],
        timeout=60,
        check=False,
    )
    assert time.monotonic() - start < SOON * launch.time_factor()
    assert outcome.returncode
    assert not out.exists()
    said = [line for line in outcome.stderr.splitlines() if line.startswith("mpiattn")]
    assert len(said) == 1, outcome.stderr
    assert outcome.stderr.count("Traceback") == (fate == "raise")
    host = f"of {RANKS} on {os.uname().nodename}"
    if fate == "SIGKILL":
        assert f"mpiattn: rank {victim} {host} was ended by SIGKILL" in said[0]
        at = {"read": "read, 0 of", "exchange": "read, ", "steps": "forward", "write": "write, 0 of"}
        assert f"it was at: {at[phase]}" in said[0]
    elif fate == "raise":
        where = (
            "in step 1 of 4 of the forward pass"
            if phase == "steps"
            else (f"in phase {'write' if phase == 'write' else 'read'}")
        )
        assert said[0] == f"mpiattn: rank {victim} {host} failed {where}: ZeroDivisionError: on purpose"
    else:
        assert f"{host} has waited {timeout:g} s" in said[0] and f"rank {victim} {host}" not in said[0]
        if phase == "steps":
            # what it had to send may have been on its way; who needs no more of it waits for all after the pass
            assert re.search(
                r"in step \d of 4 of the forward pass to (send|receive) \d+ bytes (to|from) rank \d"
                "|for the other ranks",
                said[0],
            )


def test_timeout_must_be_a_time(tmp_path):
    source = write_input(tmp_path / "in.h5")
    for wrong, code in (("0", 1), ("nan", 1), ("soon", 2)):
        outcome = launch.mpirun(
            2,
            [sys.executable, "-m", "mpiattn", "run", source, tmp_path / "out.h5", f"--timeout={wrong}"],
            timeout=60,
            check=False,
        )
        said = [line for line in outcome.stderr.splitlines() if line.startswith("mpiattn")]
        assert outcome.returncode == code and len(said) == 1 and "timeout" in said[0], outcome.stderr
