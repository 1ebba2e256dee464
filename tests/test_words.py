"""Numbers in the words of reports: plurals, shares beyond sense, and files that were written."""

import re
import subprocess

import h5py
import numpy as np
import pytest
import warm
from files import write_input

from mpiattn.cli import main
from mpiattn.cli.opening import predicted
from mpiattn.console.table import written
from mpiattn.system.sources import slurm_dir
from mpiattn.system.words import number, span

# "1 rows" and the like, but not "1 us" and "1x1 is"; a share below 0 or above 1 in percent; a figure that says nothing.
WRONG = re.compile(
    r"(?<![\w.,/-])1 (?:\w+ )?(?!us\b|ms\b|is\b|has\b|this\b)[a-zA-Z]+s\b|-\d[\d.]* %|\d{4,}\.\d %|\b1 times"
)


@pytest.mark.parametrize(
    "count, noun, words",
    [
        (1, "row", "1 row"),
        (2, "row", "2 rows"),
        (0, "KV head", "0 KV heads"),
        (3, "query", "3 queries"),
        (2, "key", "2 keys"),
        (span([1, 1]), "token", "1 token"),
        (span([0, 1]), "token", "0 to 1 tokens"),
    ],
)
def test_number(count, noun, words):
    assert number(count, noun) == words


@pytest.mark.parametrize("count, words", [(1, "1 node"), (12, "12 nodes")])
def test_number_of_the_batch_scripts(count, words):
    function = re.search(r"^number\(\) \{\n.*?^\}", (slurm_dir() / "launch.sh").read_text(), re.DOTALL | re.MULTILINE)
    said = subprocess.run(["bash", "-c", f"{function[0]}\nnumber {count} node"], capture_output=True, text=True)
    assert said.stdout == f"{words}\n"


def test_predicted():
    assert predicted(["forward"], [2.0]) == "2 s forward"
    both = predicted(["forward", "backward"], [0.5, 0.5, 0.001])
    assert both == "1 ms to 500 ms forward and backward of each problem, 1 s of all 3"


def test_written():
    assert written("a.json", None, "-", "b.png") == "a.json, b.png"


@pytest.mark.parametrize("ranks, seqlen", [(1, 1), (2, 1), (2, 4096), (16, 4096)])
@pytest.mark.parametrize("more", [[], ["--window", "64,0", "--direction", "both"]])
def test_plan(capsys, ranks, seqlen, more):
    assert main(["plan", *f"--ranks {ranks} --seqlen {seqlen} --heads 1 --head-dim 1".split(), *more]) == 0
    assert not WRONG.findall(capsys.readouterr().out)


def test_plan_of_more_bytes_than_ring(capsys):
    """Where a tile sends more than Ring, nothing is saved: how many times as much it sends is said."""
    assert main("plan --ranks 2 --seqlen 4096 --heads 8 --head-dim 64 --window 64,0".split()) == 0
    (ulysses,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("2x1x1 Ulysses"))
    assert " 64.2 x Ring " in ulysses


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_run(tmp_path, ranks):
    source, out = tmp_path / "in.h5", tmp_path / "out.h5"
    write_input(source, seqlen=1, heads=1, kv_heads=1, head_dim=1, backward=True)
    said = warm.command(ranks, ["run", source, out, "--causal", "--verify", "--backward"]).stdout
    assert not WRONG.findall(said)
    assert f"1 column x {number(ranks, 'row')} (tile 1x{ranks})" in said


def test_run_of_many_problems(tmp_path):
    with h5py.File(tmp_path / "in.h5", "w") as file:
        for group in "ab":
            for name in "qkv":
                file[f"{group}/{name}"] = np.ones((1, 8, 1, 2), np.float32)
    run = ["run", tmp_path / "in.h5", tmp_path / "out.h5"]
    said = warm.command(1, [*run, "--json", tmp_path / "j.json"]).stdout
    assert " of each problem, " in said and " of all 2, on machine " in said
    assert f"written  {tmp_path / 'out.h5'}, {tmp_path / 'j.json'}\n" in said
    said = warm.command(1, [*run, "--problems", "b"]).stdout
    assert not WRONG.findall(said)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "command",
    [
        "info",
        "check",
        "bench --seqlen 1 --heads 1 --head-dim 8 --runs 1",
        "bench --decode --seqlen 1 --heads 1 --head-dim 8 --runs 1",
    ],
)
def test_commands(ranks, command):
    said = warm.command(ranks, command.split(), check=False)
    assert said.stdout and not WRONG.findall(said.stdout)
