"""`mpiattn run` as a user calls it: right results, a table, JSON, whatever the tile, layout, schedule and route."""

import json
import os
import sys

import h5py
import numpy as np
import pytest
import warm
from files import assert_right, write_input
from launch import mpirun

from mpiattn.cli import main
from mpiattn.files.trace_file import read
from mpiattn.system.host import BLAS_VARIABLES
from mpiattn.verify import reference

RUN = [sys.executable, "-m", "mpiattn", "run"]


def run(n, source, out, *options, **how):
    return warm.command(n, ["run", source, out, *options], **how)


@pytest.mark.draw(3)
@pytest.mark.parametrize(
    "n, options, shape",
    [
        (1, [], {}),
        (2, ["--causal", "--layout", "striped"], {"batch": 2, "dtype": "float64"}),
        (3, ["--causal", "--tile", "3x1", "--schedule", "collective"], {"value_dim": 24, "dtype": "float16"}),
        (4, ["--causal", "--tile", "2x2", "--route", "ring", "--scale", "0.5"], {"batch": 3, "seqlen_k": 101}),
        (4, ["--causal", "--tile", "qring", "--schedule", "greedy", "--layout", "contiguous"], {"seqlen_k": 40}),
        (5, "--axes bshd --tile ring --backend deferred --max-message 999".split(), {"seqlen": 3, "kv_heads": 4}),
        (6, ["--causal", "--tile", "2x3", "--schedule", "greedy", "--layout", "zigzag"], {"kv_heads": 1}),
        (3, ["--causal", "--tile", "bands", "--layout", "zigzag"], {"batch": 2, "seqlen_k": 70}),
    ],
)
def test_right(tmp_path, n, options, shape):
    source = write_input(tmp_path / "in.h5", **shape)
    outcome = run(n, source, tmp_path / "out.h5", "--verify", *options)
    assert "passed" in outcome.stdout
    assert "equal on every rank" in outcome.stdout
    scale = float(options[options.index("--scale") + 1]) if "--scale" in options else None
    tolerance = {"float16": 2e-3, "float64": 1e-10}.get(shape.get("dtype"), 1e-5)
    chosen = assert_right(source, tmp_path / "out.h5", "--causal" in options, scale, tolerance)
    assert chosen["ranks"] == n
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("in.h5", "out.h5")] == []


def test_keys_that_hold_the_values(tmp_path):
    """A file without v, in either order of its dimensions; dk takes both gradients."""
    source, wide = tmp_path / "in.h5", tmp_path / "wide.h5"
    made = ["--seqlen", "50", "--heads", "4", "--kv-heads", "2", "--head-dim", "24", "--value-dim", "16", "--dout"]
    assert main(["generate", str(source), *made, "--shared-kv"]) == 0
    outcome = run(3, source, tmp_path / "out.h5", "--verify", "--backward", "--causal", "--scale", "0.25")
    assert outcome.stdout.count("passed") == 2 and "dv" not in outcome.stdout
    with h5py.File(source) as file, h5py.File(tmp_path / "out.h5") as out, h5py.File(wide, "w") as turned:
        assert sorted(file) == ["dout", "k", "q"] and sorted(out) == ["dk", "dq", "lse", "out"]
        q, k, dout = (file[name][:] for name in ("q", "k", "dout"))
        dq, dk, dv = reference.backward(dout, q, k, k[..., :16], causal=True, scale=0.25)
        dk[..., :16] += dv
        for name, ref in (("dq", dq), ("dk", dk)):
            assert np.abs(out[name][:] - ref).max() < 1e-5 * np.abs(ref).max()
        for name, array in (("q", q), ("k", k)):
            turned[name] = array.swapaxes(1, 2)
        turned.attrs["value_dim"] = 25
    said = run(2, wide, tmp_path / "no.h5", "--axes", "bhsd", check=False).stderr
    assert "its attribute value_dim is 25, it must be a whole number from 1 to head_dim, which is 24" in said
    with h5py.File(wide, "r+") as turned:
        turned.attrs["value_dim"] = 16
    assert (
        "passed"
        in run(2, wide, tmp_path / "turned.h5", "--axes", "bhsd", "--causal", "--verify", "--scale", "1").stdout
    )
    said = run(2, wide, tmp_path / "no.h5", "--axes", "bhsd", check=False).stderr
    assert "scale is left out; where keys hold the values (shared_kv) it must be given (of a command: --scale)" in said


def test_more_than_one_piece(tmp_path):
    """Slabs that are read and written in several pieces, and a slab that ends before the others."""
    source = write_input(tmp_path / "in.h5", seqlen=1501, heads=4, kv_heads=4)
    code = (
        "import mpiattn.comm.rounds as r; r.PIECE_BYTES = 30_000; "
        "import sys; from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    mpirun(3, [sys.executable, "-c", code, "run", source, tmp_path / "out.h5", "--causal"])
    assert_right(source, tmp_path / "out.h5", causal=True)


def test_json_and_attributes(tmp_path):
    source = write_input(tmp_path / "in.h5", seqlen=50)
    run(4, source, tmp_path / "out.h5", *"--tile 2x2 --schedule greedy --verify --json".split(), tmp_path / "run.json")
    report = json.loads((tmp_path / "run.json").read_text())
    assert (report["tile"], report["schedule"], report["ranks"]) == ("2x2", "greedy", 4)
    assert report["problem"]["seqlen"] == 50
    assert [rank["tokens"] for rank in report["per_rank"]] == [13, 13, 12, 12]
    assert report["verify"]["passed"] and report["verify"]["rows"] == 50
    for rank in report["per_rank"]:  # one hop of Q and O in the row, one of K and V in the column
        tokens, partner = rank["tokens"], report["per_rank"][rank["rank"] ^ 1]["tokens"]
        sent = rank["forward"]["sent_bytes"]
        assert sent == tokens * 4 * 16 * 4 + partner * 4 * 17 * 4 + tokens * 2 * 32 * 4
        assert sent == rank["forward"]["formula_bytes"]
        assert rank["nbytes"] < rank["peak_bytes"]
    attributes = assert_right(source, tmp_path / "out.h5")
    assert (attributes["tile"], attributes["layout"], attributes["causal"]) == ("2x2", "contiguous", False)


def test_pieces(tmp_path):
    """The report says so; each rank has its own steps, and the trace has what all of them sent."""
    source = write_input(tmp_path / "in.h5", seqlen=50, backward=True)
    options = "--tile bands --causal --backward --verify --trace".split()
    files = [tmp_path / "trace.json", "--json", tmp_path / "run.json"]
    outcome = run(3, source, tmp_path / "out.h5", *options, *files)
    assert outcome.stdout.count("equal on every rank") == 2 and outcome.stdout.count("passed") == 2
    assert "pieces           each rank computes pieces of the scores, of any KV heads (tile bands)" in outcome.stdout
    assert "in step" not in outcome.stdout and "column" not in outcome.stdout
    report = json.loads((tmp_path / "run.json").read_text())
    assert (report["tile"], report["schedule"], report["route"]) == ("bands", "pieces", "direct")
    assert sum(rank["pairs"] for rank in report["per_rank"]) == 50 * 51 / 2
    for direction, of_ranks in read("FILE", files[0]).items():
        sent = [rank[direction]["sent_bytes"] for rank in report["per_rank"]]
        assert [sum(each.sent.values()) for each in of_ranks.values()] == sent
    with h5py.File(tmp_path / "out.h5") as file:
        assert (file.attrs["tile"], file.attrs["schedule"]) == ("bands", "pieces")


@pytest.mark.draw(1)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["greedy", "collective"])
def test_memory_is_what_was_planned(tmp_path, schedule):
    """Peak memory of every rank: nbytes within 10 %, and 14 MB more than interpreter and libraries had taken before."""
    source = write_input(tmp_path / "in.h5", seqlen=8192, heads=8, kv_heads=8, head_dim=64)
    options = ["--tile", "2x2", "--layout", "striped", "--schedule", schedule, "--verify"]
    command = [*RUN, source, tmp_path / "out.h5", *options, "--json", tmp_path / "run.json"]
    mpirun(4, command, timeout=120)  # ranks that have used no memory before
    for rank in json.loads((tmp_path / "run.json").read_text())["per_rank"]:
        assert rank["nbytes"] > 30e6
        assert rank["peak_bytes"] <= 1.1 * rank["nbytes"] + rank["peak_bytes_before"] + 14e6


def test_other_names(tmp_path):
    """Datasets in groups and under other names; a wrong name lists what there is."""
    source = write_input(tmp_path / "in.h5", backward=True)
    with h5py.File(source) as given, h5py.File(tmp_path / "other.h5", "w") as other:
        for name, called in (("q", "layers/0/queries"), ("k", "layers/0/k"), ("v", "v"), ("dout", "v grad")):
            other[called] = given[name][...]
    names = "q=layers/0/queries,k=layers/0/k,dout=v grad"
    run(3, tmp_path / "other.h5", tmp_path / "out.h5", "--backward", "--verify", "--names", names)
    assert_right(source, tmp_path / "out.h5", backward=True)
    (tmp_path / "out.h5").unlink()
    outcome = run(2, tmp_path / "other.h5", tmp_path / "out.h5", "--names", "q=layers/0/q", check=False)
    assert outcome.returncode == 1 and outcome.stderr.count("it has no dataset 'layers/0/q'") == 1
    assert outcome.stderr.count("\n  layers/0/queries (1, 67, 4, 16) float32") == 1
    assert not (tmp_path / "out.h5").exists()


def test_json_on_standard_output(tmp_path):
    source = write_input(tmp_path / "in.h5")
    assert json.loads(run(2, source, tmp_path / "out.h5", "--json", "-").stdout)["ranks"] == 2


def test_replaces_an_older_file(tmp_path):
    source = write_input(tmp_path / "in.h5")
    write_input(tmp_path / "out.h5", seqlen=9)
    run(2, source, tmp_path / "out.h5")
    assert_right(source, tmp_path / "out.h5")


def test_link_stays_a_link(tmp_path):
    source = write_input(tmp_path / "in.h5")
    (tmp_path / "folder").mkdir()
    (tmp_path / "out.h5").symlink_to(tmp_path / "folder" / "real.h5")
    run(2, source, tmp_path / "out.h5")
    assert (tmp_path / "out.h5").is_symlink()
    assert_right(source, tmp_path / "folder" / "real.h5")


def test_same_bits_again(tmp_path):
    source = write_input(tmp_path / "in.h5", dtype="float16")
    for name in ("one.h5", "two.h5"):
        run(3, source, tmp_path / name, "--causal")
    with h5py.File(tmp_path / "one.h5") as first_file, h5py.File(tmp_path / "two.h5") as second_file:
        assert np.array_equal(first_file["out"][:], second_file["out"][:])
        assert np.array_equal(first_file["lse"][:], second_file["lse"][:])


def test_verify_fails_on_a_wrong_result(tmp_path):
    """A back end that is wrong in one element: exit code 1, the size of the error, no OUT."""
    source = write_input(tmp_path / "in.h5")
    code = (
        "import sys; from mpiattn.backends.numpy.backend import NumpyBackend as B; copy = B.copy\n"
        "def wrong(self, dst, src):\n"
        "    copy(self, dst, src)\n"
        "    if dst.ndim == 4 and dst.shape[1]: dst[0, 5, 1, 3] += 0.01\n"
        "B.copy = wrong\n"
        "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    outcome = mpirun(3, [sys.executable, "-c", code, "run", source, tmp_path / "out.h5", "--verify"], check=False)
    assert outcome.returncode == 1
    assert outcome.stderr.count("verification failed") == 1
    assert "FAILED" in outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5"]


def test_ranks_share_the_cores():
    """Without a word from the user, BLAS gets a rank's share of the cores, at least one."""
    code = (
        "import os, sys; from mpiattn.console.blas_environment import limit_threads; limit_threads()\n"
        "sys.stdout.write(os.environ['OPENBLAS_NUM_THREADS'] + ' ')"
    )
    unset = [f"-u{name}" for name in BLAS_VARIABLES]
    share = max(1, len(os.sched_getaffinity(0)) // 4)
    assert mpirun(4, ["env", *unset, sys.executable, "-c", code]).stdout.split() == [str(share)] * 4
