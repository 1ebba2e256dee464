"""`mpiattn run` where a job has too little memory: one message before anything is read, and its advice."""

import json
import re
import sys

import numpy as np
import pytest
import warm
from files import write_input
from launch import mpirun

MIB = 2**20
SHAPE = {"seqlen": 4096, "heads": 16, "kv_heads": 16, "head_dim": 64}
# Which plan is fastest, and so whether a smaller one is left to advise, depends on the kernels of the processor.
OPTIONS = "--backend numpy --window 300,0 --tile 1x2 --layout contiguous --mesh-layout striped".split()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    bias = np.full((1, 1, 4096, 4096), 0.5, np.float32)
    return write_input(tmp_path_factory.mktemp("memory") / "in.h5", **SHAPE, bias=bias)


def limited(mebibytes, *command):
    """A command on two ranks, in a Slurm job that has asked for so much memory."""
    variables = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_MEM_PER_NODE": str(mebibytes)}
    return warm.command(2, command, check=False, env=variables)


def test_advice(tmp_path, source):
    """A job of too little memory is told what fits, and does fit when it does as it is told."""
    out = tmp_path / "out.h5"
    outcome = limited(160, "run", source, out, *OPTIONS)
    assert outcome.returncode == 1 and not out.exists()
    text = r"the run needs (\d+) MiB on \S+, [\d.]+ MiB .*; ([\d.]+) MiB are left of Slurm's --mem of 160 MiB; "
    needed, left = map(float, re.search(text, outcome.stderr).groups())
    used = 160 - left  # by two ranks that have loaded mpiattn
    enough = int(used + 0.98 * needed)
    outcome = limited(enough, "run", source, out, *OPTIONS)
    (option,) = re.findall("a plan with --max-memory ([0-9.]+M) fits: tile 1x2, greedy ", outcome.stderr)
    assert outcome.stderr.count("MiB are left of") == 1 and not out.exists()
    outcome = limited(enough, "run", source, out, *OPTIONS, "--max-memory", option)
    assert outcome.returncode == 0 and "greedy" in outcome.stdout


def test_what_is_foreseen_is_used(tmp_path, source):
    """Within 10 % of what the ranks' resident memory grows by, biases included."""
    code = (
        "import json, sys; from mpiattn.plan import foresight; from mpiattn.cli import main\n"
        "def note(peers, home, backend, needs, *rest, check=foresight.check_room):\n"
        f"    if peers.rank == 0: json.dump(needs.tolist(), open({str(tmp_path / 'foreseen')!r}, 'w'))\n"
        "    return check(peers, home, backend, needs, *rest)\n"
        "foresight.check_room = note; sys.exit(main(sys.argv[1:]))"
    )
    how = "--window 300,0 --schedule collective --layout contiguous --bias bias --json".split()
    mpirun(2, [sys.executable, "-c", code, "run", source, tmp_path / "out.h5", *how, tmp_path / "run.json"])
    ranks = json.loads((tmp_path / "run.json").read_text())["per_rank"]
    for rank, foreseen in zip(ranks, json.loads((tmp_path / "foreseen").read_text())):
        grown = rank["peak_bytes"] - rank["peak_bytes_before"] - 8e6  # for libraries that are loaded later
        assert 75 * MIB < 0.9 * grown < foreseen < 1.1 * grown
