"""The benchmarks on tiny sizes: that they run, check, and say what they measured."""

import importlib.util
import json
import os
import shutil
import sys

import launch
import pytest

SDPA = [sys.executable, *"-m mpiattn.bench.sdpa --seqlen 129 --heads 2 --head-dim 16 --runs 2".split()]

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed (the bench extra has it)"
)


@pytest.mark.draw(1)
@needs_torch
@pytest.mark.parametrize(
    "dtype, options, products",
    [
        ("float16", [], 2),
        ("float32", [], 2),
        ("float64", [], 2),
        ("float32", ["--backward"], 5),
        ("bfloat16", ["--backward"], 5),
    ],
)
def test_sdpa_every_tile(dtype, options, products):
    options = ["--causal", "--all-tiles", "--dtype", dtype, *options, "--json", "-"]
    outcome = launch.mpirun(2, [*SDPA, *options], timeout=120)
    data = json.loads(outcome.stdout)
    assert [row.get("tile") for row in data["results"]] == ["1x2", "2x1", None]
    assert all(len(row["seconds"]) == 2 and row["median"] > 0 for row in data["results"])
    assert data["results"][-1]["threads"] == data["ranks"] == data["ranks_on_host"] == 2
    assert data["flops"] == 2 * products * 2 * 16 * 129 * 130 // 2  # 129 causal queries, products of 16


@needs_torch
def test_sdpa_table(tmp_path):
    path = tmp_path / "sdpa.json"
    text = launch.mpirun(2, [*SDPA, "--tile", "qring", "--threads", "1", "--json", path], timeout=120).stdout
    assert "mpiattn 2x1" in text and "torch, 1 thread " in text and "time over torch" in text
    assert json.loads(path.read_text())["machine"]["blas_threads"] in (1, None)


@needs_torch
@pytest.mark.parametrize("options", [["dense", "--backward"], ["alibi"]])
def test_sdpa_with_a_bias(options):
    """Both have the same results; mpiattn is measured without it too."""
    outcome = launch.mpirun(2, [*SDPA, "--bias", *options, "--tile", "1x2", "--json", "-"], timeout=120)
    data = json.loads(outcome.stdout)
    assert [row["name"] for row in data["results"]] == ["mpiattn", "mpiattn without", "torch"]
    assert data["bias"] == options[0] and 0 < data["results"][0]["difference"] < 1e-5


def test_sdpa_without_torch_names_the_extra(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('not here')\n")
    outcome = launch.mpirun(
        2, SDPA, check=False, env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(launch.ROOT)])}
    )
    assert outcome.returncode
    assert outcome.stderr.count("pip install 'mpiattn[bench]'") == 1
    assert "Traceback" not in outcome.stderr


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--runs", "0"], "--runs is 0"),
        (["--tile", "3x1"], "tile is 3x1"),
        (["--bias", "alibi", "--causal"], "--bias is given with --causal"),
        (["--tile", "2x1", "--all-tiles"], "not allowed with"),
    ],
)
def test_sdpa_errors(arguments, message):
    outcome = launch.mpirun(2, [*SDPA, *arguments], check=False)
    assert outcome.returncode
    assert outcome.stderr.count(message) == 1 and "Traceback" not in outcome.stderr


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    "options, facts, words",
    [
        (
            "--grid 65x88 --dims 2x2 --kernel 5x4",
            {"grid": [65, 88], "dims": [2, 2], "mask": "neighborhood 5x4 grid=65x88 cyclic=1 edge=clipped"},
            "a grid of 65x88 in 2x2 blocks, 2 heads x 16",
        ),
        (
            "--seqlen 129 --window 9 --layout contiguous",
            {"causal": True, "window": 9},
            "129 tokens, 2 heads x 16, float32, causal in a window of 10 keys",
        ),
    ],
)
def test_halo(tmp_path, options, facts, words):
    """A plan of a flat mesh sends what the exchange by hand sends."""
    path = tmp_path / "halo.json"
    program = [sys.executable, "-m", "mpiattn.bench.halo", "--heads", "2", "--head-dim", "16", "--runs", "2"]
    program += ["--tile", "ring", "--schedule", "greedy"]
    text = launch.mpirun(4, [*program, *options.split(), "--json", path]).stdout
    assert words in text and "halo exchange by hand" in text
    data = json.loads(path.read_text())
    assert {name: data[name] for name in facts} == facts and data["difference"] < 1e-5
    for nbytes in (data["sent_bytes"], data["sent_bytes_of_all"]):
        assert nbytes["plan"] == nbytes["halo"] > 0
    assert all(len(data["seconds"][name]) == 2 for name in ("plan", "halo"))


FLEX = [sys.executable, *"-m mpiattn.bench.flex --grid 12x24 --kernel 5x4 --heads 2 --head-dim 16 --runs 2".split()]


@pytest.mark.slow
@needs_torch
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles by g++")
def test_flex(tmp_path):
    path = tmp_path / "flex.json"
    text = launch.limited([*FLEX, "--threads", "2", "--json", path], 200, launch.environment()).stdout
    assert "neighborhood 5x4 grid=12x24 cyclic=1 edge=clipped" in text and "2 threads" in text
    data = json.loads(path.read_text())
    assert data["difference"] < 1e-5 and [row["name"] for row in data["results"]] == ["mpiattn", "torch"]
    assert all(len(row["seconds"]) == 2 for row in data["results"])
    of_rows = (5 * 12 - 2 * (2 + 1)) * 24  # rows that points see, without those beyond the edges
    assert data["flops"] == 4 * 2 * 16 * 4 * of_rows


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    "ranks, arguments, message",
    [
        (2, [], "there are 2 ranks; this program measures one"),
        (1, ["--threads", "0"], "--threads is 0"),
        (1, ["--kernel", "3"], "--kernel is 3; it must have two axes"),
    ],
)
def test_flex_errors(ranks, arguments, message):
    outcome = launch.mpirun(ranks, [*FLEX, *arguments], check=False)
    assert outcome.returncode
    assert outcome.stderr.count(message) == 1 and "Traceback" not in outcome.stderr


def test_other_ranks_sleep_while_rank_0_works():
    code = (
        "import time; from mpi4py import MPI; from mpiattn.bench.sdpa import asleep\n"
        "from mpiattn.comm.peers import Peers\n"
        "comm = MPI.COMM_WORLD; comm.Barrier(); start = time.process_time()\n"
        "asleep(Peers(comm), lambda: time.sleep(1.5))\n"
        "used = comm.gather(time.process_time() - start)\n"
        "if comm.rank == 0: print(max(used))"
    )
    assert float(launch.mpirun(3, [sys.executable, "-c", code]).stdout) < 0.75
