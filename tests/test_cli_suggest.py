"""Mistyped commands, options and choices: the error says what was probably meant."""

import sys

import pytest
from launch import mpirun

from mpiattn.cli import main
from mpiattn.system.closest import closest


@pytest.mark.parametrize(
    "line, meant",
    [
        ("run --casual in.h5 out.h5", "unrecognized arguments: --casual; did you mean --causal?"),
        ("rnu in.h5 out.h5", "; did you mean run?"),
        ("run --layout zigzg in.h5 out.h5", "; did you mean zigzag?"),
        ("bench --dtype flot32", "; did you mean float32?"),
        ("generate x.h5 --seqlen 4 --haeds=3", "required: --heads; did you mean --heads by --haeds?"),
        ("generate x.h5 --seqlen 4 --Heads=3", "; did you mean --heads by --Heads?"),
        ("generate x.h5 --seqlan 4 --heads=3", "unrecognized arguments: --seqlan 4; did you mean --seqlen?"),
        ("decode c.h5 q.h5 out.h5 --way levels", "--way levels; --way is now called --algorithm"),
        ("run --is-causal in.h5 out.h5", "--is-causal; --is-causal is called --causal here"),
        (
            "plan --ranks 4 --dropout-p=0",
            "--dropout-p: this command has no dropout, an argument of MeshAttention.forward",
        ),
        ("plan --attn-bias b.h5", "--attn-bias: this command has no bias, an argument of MeshAttention.forward"),
        ("run a.h5 b.h5 --names q=a k=b", "--names q=NAME,k=NAME,v=NAME, with commas and without spaces"),
        ("run q.npy k.npy v.npy", "mpiattn convert q.npy k.npy v.npy qkv.h5"),
        ("run a.h5 b.h5 --window -1,0", "write --window=LEFT,RIGHT, for example --window=-1,0"),
        ("run a.h5 b.h5 --window 128", "write LEFT,RIGHT, for example 1024,0; leave a side empty for no limit"),
        ("plan --rank 4 --seqlen 9 --heads 3 --head-dm=4", "; did you mean --head-dim by --head-dm?"),
    ],
)
def test_meant(capsys, line, meant):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith(meant)


@pytest.mark.parametrize(
    "line",
    [
        "run in.h5 out.h5 third",
        "run --xyz in.h5 out.h5",
        "frobnicate",
        "run --layout round in.h5 out.h5",
        "plan -- --rankz 3",
    ],
)
def test_nothing_alike(capsys, line):
    with pytest.raises(SystemExit):
        main(line.split())
    assert "did you mean" not in capsys.readouterr().err


def test_closest():
    assert closest("", ["--a"]) is None
    assert closest("2", [1, 2, 3]) == "2"


def test_said_once_by_all_ranks():
    outcome = mpirun(3, [sys.executable, "-m", "mpiattn", "run", "--casual", "in.h5", "out.h5"], check=False)
    assert outcome.returncode == 2 and outcome.stderr.count("did you mean --causal?") == 1
