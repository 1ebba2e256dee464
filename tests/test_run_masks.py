"""`mpiattn run` with gradients, windows, documents, softcap, bfloat16: right whatever the tile, layout and schedule."""

import json
import sys

import h5py
import numpy as np
import pytest
import warm
from files import assert_right, write_input
from launch import mpirun

from mpiattn.problem.group import Group
from mpiattn.problem.mask import Mask

RUN = [sys.executable, "-m", "mpiattn", "run"]
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.5e-2, "float64": 1e-10}


def run(n, source, out, *options, **how):
    return warm.command(n, ["run", source, out, "--verify", *options], **how)


@pytest.mark.draw(3)
@pytest.mark.parametrize(
    "n, options, shape, masks",
    [
        (
            3,
            ["--causal", "--window", "9,0", "--softcap", "4"],
            {"dtype": "bfloat16"},
            {"causal": True, "window": (9, 0), "softcap": 4.0},
        ),
        (1, ["--backward", "--softcap", "3"], {}, {"softcap": 3.0}),
        (
            2,
            ["--backward", "--causal", "--layout", "striped", "--tile", "2x1"],
            {"dtype": "bfloat16", "batch": 2},
            {"causal": True},
        ),
        (
            3,
            "--backward --window 9,0 --tile 1x3 --layout contiguous --schedule collective".split(),
            {"dtype": "float16", "value_dim": 24},
            {"window": (9, 0)},
        ),
        (
            4,
            "--backward --window=,3 --softcap 5 --tile 2x2 --schedule greedy --layout zigzag".split(),
            {"dtype": "float64", "seqlen_k": 101, "batch": 2},
            {"window": (None, 3), "softcap": 5.0},
        ),
        (
            4,
            ["--backward", "--tile", "4x1", "--route", "ring", "--window", "20,", "--causal", "--scale", "0.3"],
            {"kv_heads": 4},
            {"window": (20, None), "causal": True, "scale": 0.3},
        ),
        (3, ["--backward", "--prefix", "20"], {}, {"causal": True, "prefix": 20}),
        (
            4,
            ["--causal-block", "16", "--window", "40,", "--layout", "striped"],
            {"seqlen_k": 101, "batch": 2},
            {"causal": True, "causal_block": 16, "window": (40, None)},
        ),
        (6, ["--backward", "--tile", "2x3", "--wire-dtype", "bfloat16", "--schedule", "greedy"], {"kv_heads": 1}, {}),
        (
            5,
            "--backward --tile ring --backend deferred --max-message 999 --causal".split(),
            {"seqlen": 3},
            {"causal": True},
        ),
    ],
)
def test_right(tmp_path, n, options, shape, masks):
    backward = "--backward" in options
    source = write_input(tmp_path / "in.h5", backward=backward, **shape)
    outcome = run(n, source, tmp_path / "out.h5", *options)
    assert outcome.stdout.count("passed") == outcome.stdout.count("equal on every rank") == 1 + backward
    tolerance = 1.5e-2 if "--wire-dtype" in options else TOLERANCE.get(shape.get("dtype"), 1e-5)
    made = assert_right(source, tmp_path / "out.h5", tolerance=tolerance, backward=backward, **masks)
    assert made["backward"] == backward
    assert all(made.get(name) == masks.get(name) for name in ("softcap", "prefix", "causal_block"))
    assert made["causal"] == masks.get("causal", False)
    assert made.get("window") == next((text.removeprefix("--window=") for text in options if "," in text), None)
    assert made["wire_dtype"] == (
        "bfloat16" if "--wire-dtype" in options else "float64" if shape.get("dtype") == "float64" else "float32"
    )


CUTS, CUTS_K = [0, 20, 21, 60], [3, 40, 55, 101]
EACH = [[0, 30, 50, 67], [5, 5, 60, 66]]


@pytest.mark.draw(2)
@pytest.mark.parametrize("kind", ["dataset", "npy", "text", "a line each", "one a line", "of keys"])
def test_documents(tmp_path, kind):
    text, seqlen_k = tmp_path / "documents", 101 if kind == "of keys" else 67
    nested = kind in ("npy", "a line each")
    cuts, options = EACH if nested else CUTS, ["--documents", "cu_seqlens" if kind == "dataset" else text]
    options.append("--padding")
    masks = {"cu_seqlens": cuts}
    if kind == "npy":
        with open(text, "wb") as file:
            np.save(file, cuts)
    elif kind == "a line each":
        text.write_text("".join(", ".join(map(str, line)) + "\n" for line in cuts))
    else:
        text.write_text(("\n" if kind == "one a line" else " ").join(map(str, cuts)) + "\n")
    datasets = {"cu_seqlens": np.array(CUTS, np.int32)} if kind == "dataset" else {}
    if kind == "of keys":
        datasets["keys"] = np.array(CUTS_K)
        options += ["--documents-k", "keys"]
        masks["cu_seqlens_k"] = CUTS_K
    source = write_input(tmp_path / "in.h5", batch=2, backward=True, seqlen_k=seqlen_k, **datasets)
    how = ["--tile", "2x2", "--causal", "--window", "30,", "--backward"]
    outcome = run(4, source, tmp_path / "out.h5", *how, *options)
    made = assert_right(source, tmp_path / "out.h5", causal=True, window=(30, None), backward=True, **masks)
    assert made["documents"] == str(options[1])
    padding = 6 if nested else 14
    of_keys = f", {2 * (101 - 98)} of 202 keys" if kind == "of keys" else ""
    assert f"{padding} of 134 tokens{of_keys}; out 0, lse -inf" in outcome.stdout
    assert f"all 67 rows, {padding} tokens of padding" in outcome.stdout
    assert (made["padding"], made["padding_k"]) == (padding, 6 if of_keys else padding)


@pytest.mark.parametrize("name, value", [("q", np.nan), ("v", np.inf), ("dout", np.nan)])
def test_not_finite(tmp_path, name, value):
    """What no pair has to do with stays finite, and verification knows which that is."""
    source = write_input(tmp_path / "in.h5", backward=True)
    with h5py.File(source, "r+") as file:
        file[name][0, 20, 1, 3] = value
    run(2, source, tmp_path / "out.h5", "--causal", "--backward")
    with h5py.File(tmp_path / "out.h5") as made:
        touched = {"q": ("out", "dq", "dk", "dv"), "v": ("out", "dq", "dk"), "dout": ("dq", "dk", "dv")}[name]
        for dataset in ("out", "dq", "dk", "dv"):
            finite = np.isfinite(made[dataset][:])
            assert finite.any() and finite.all() == (dataset not in touched), dataset


def test_a_dataset_wins_over_a_file(tmp_path):
    (tmp_path / "cuts").write_text("0 10 67")
    source = write_input(tmp_path / "in.h5", cuts=np.array([0, 40, 67]))
    run(2, source, tmp_path / "out.h5", "--documents", "cuts", cwd=tmp_path)
    assert_right(source, tmp_path / "out.h5", cu_seqlens=[0, 40, 67])


def test_documents_without_verify(tmp_path):
    """The masks reach the passes, not only their verification."""
    source = write_input(tmp_path / "in.h5", backward=True, cuts=np.array(CUTS))
    mpirun(3, [*RUN, source, tmp_path / "out.h5", "--documents", "cuts", "--padding", "--backward", "--window", "4,2"])
    assert_right(source, tmp_path / "out.h5", cu_seqlens=CUTS, window=(4, 2), backward=True)


def test_json(tmp_path):
    """Work, bytes and operations of every pass, by what the documents leave."""
    source = write_input(tmp_path / "in.h5", batch=2, backward=True, cuts=np.array(CUTS))
    run(
        4,
        source,
        tmp_path / "out.h5",
        *"--backward --tile 1x4 --schedule greedy --layout contiguous --window 900,".split(),
        *"--documents cuts --padding --json".split(),
        tmp_path / "run.json",
    )
    report = json.loads((tmp_path / "run.json").read_text())
    pairs = [rank["pairs"] for rank in report["per_rank"]]
    assert sum(pairs) == 2 * (20**2 + 1 + 39**2) == 2 * Mask(67, 67).pairs((Group(*2 * (np.array(CUTS),)),))
    assert pairs[0] == 2 * 17 * 20
    assert report["balance"] == max(pairs) * 4 / sum(pairs)
    assert report["flops"] == 2 * 4 * (16 + 16) * sum(pairs)
    for name, products in (("forward", 1), ("backward", 2.5)):
        speed = products * report["flops"] / report["seconds"][name] / 1e9
        assert report["gflops_per_second"][name] == pytest.approx(speed)
        assert all(
            rank[name]["sent_bytes"] == rank[name]["formula_bytes"] <= rank[name]["ring_bytes"]
            for rank in report["per_rank"]
        )
        assert sum(rank[name]["sent_bytes"] for rank in report["per_rank"]) > 0
    assert report["verify"]["passed"] and report["verify_gradients"]["passed"]
    assert report["verify_gradients"]["rows"] == report["verify_gradients"]["keys"] == 67
    assert report["problem"]["window"] == [134, None] and report["window"] == "900,", "as it was asked for"


def test_nothing_to_see(tmp_path):
    """Documents without tokens: gradients are 0, and nobody has more work than others."""
    source = write_input(tmp_path / "in.h5", backward=True, cuts=np.array([0, 0]))
    outcome = run(3, source, tmp_path / "out.h5", "--backward", "--documents", "cuts", "--padding", "--json", "-")
    assert json.loads(outcome.stdout)["balance"] == 1
    assert_right(source, tmp_path / "out.h5", cu_seqlens=[0, 0], backward=True)


@pytest.mark.draw(1)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["greedy", "collective"])
def test_memory_is_what_was_planned(tmp_path, schedule):
    """Peak memory of every rank, interpreter and libraries included: nbytes within 10 % and 80 MB."""
    source = write_input(tmp_path / "in.h5", seqlen=1024, heads=32, kv_heads=32, head_dim=64, backward=True)
    options = ["--tile", "2x2", "--layout", "striped", "--schedule", schedule, "--backward", "--window", "200,0"]
    command = [sys.executable, "-m", "mpiattn", "run", source, tmp_path / "out.h5", *options]
    mpirun(4, [*command, "--json", tmp_path / "run.json"], timeout=120)  # ranks that have used no memory before
    for rank in json.loads((tmp_path / "run.json").read_text())["per_rank"]:
        assert rank["nbytes"] > 30e6
        assert rank["peak_bytes"] <= 1.1 * rank["nbytes"] + 80e6


@pytest.mark.draw(1)
@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_verify_fails_on_a_wrong_gradient(tmp_path, name):
    """One element that is off on its way to the file: exit code 1, the size of the error, no OUT."""
    source = write_input(tmp_path / "in.h5", backward=True)
    code = (
        "import sys; from mpiattn.plan.mesh_attention import MeshAttention as M; backward = M.backward\n"
        "def wrong(self, *args, **how):\n"
        "    grads = backward(self, *args, **how)\n"
        f"    grads[{['dq', 'dk', 'dv'].index(name)}][0, 5, 1, 3] += 0.01\n"
        "    return grads\n"
        "M.backward = wrong\n"
        "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    outcome = mpirun(
        3, [sys.executable, "-c", code, "run", source, tmp_path / "out.h5", "--verify", "--backward"], check=False
    )
    assert outcome.returncode == 1
    assert outcome.stderr.count("verification failed") == 1
    assert "FAILED" in outcome.stderr and name in outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5"]
