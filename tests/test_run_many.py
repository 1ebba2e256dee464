"""`mpiattn run` of files that hold many problems, one a group."""

import json
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
import warm
from files import LAYERS, ORDER, assert_right, datasets, write_input, write_problems
from launch import mpirun, require_launch

from mpiattn import errors
from mpiattn.files import hdf5
from mpiattn.files.problems import read_problems


def run(n, *arguments, **how):
    return warm.command(n, ["run", *arguments], **how)


def test_groups_in_turn(tmp_path):
    """In the order of the numbers in their paths, with a plan for all of one shape, into the same groups of OUT."""
    source, out, made = write_problems(tmp_path / "in.h5", LAYERS, backward=True), tmp_path / "out.h5", tmp_path / "j"
    said = run(3, source, out, "--causal", "--backward", "--verify", "--json", made).stdout
    assert "4 problems in 'encoder' to 'layers/10', of 3 shapes; the first: q (2, 30, 2, 16)" in said
    assert said.count("passed") == 4 and [name for line in said.splitlines() for name in ORDER if line.startswith(name)]
    report = json.loads(made.read_text())
    assert list(report["problems"]) == ORDER and report["ranks"] == 3
    for group in ORDER:
        tolerance = 1e-10 if group == "encoder" else 1e-5
        about = assert_right(source, out, True, None, tolerance, backward=True, group=group)
        assert (about["causal"], about["ranks"], about["backward"]) == (True, 3, True)
        assert report["problems"][group]["verify"]["passed"] and "command" not in about
    for rank in report["per_rank"]:
        of_each = [each["per_rank"][rank["rank"]]["forward"] for each in report["problems"].values()]
        assert rank["forward"]["sent_bytes"] == sum(each["sent_bytes"] for each in of_each)
        assert rank["forward"]["sent_bytes"] == rank["forward"]["formula_bytes"]
    with h5py.File(out) as file:
        assert sorted(file) == ["encoder", "layers"] and file.attrs["command"].startswith("mpiattn run ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.h5", "j", "out.h5"]


def test_the_problem_that_is_in_no_group_is_the_only_one(tmp_path):
    source = write_input(tmp_path / "in.h5")
    with h5py.File(source, "r+") as file:
        file.copy("q", file.require_group("older"))
    run(2, source, tmp_path / "out.h5")
    assert_right(source, tmp_path / "out.h5")


def test_some_of_the_problems(tmp_path):
    source, out = write_problems(tmp_path / "in.h5", LAYERS), tmp_path / "out.h5"
    run(2, source, out, "--problems", "layers/1*")
    with h5py.File(out) as file:
        assert sorted(file["layers"]) == ["1", "10"] and list(file) == ["layers"]
    run(2, source, out, "--problems", "layers/2", "--trace", tmp_path / "trace.json")
    assert list(datasets(out)) == ["layers/2/lse", "layers/2/out"]
    assert_right(source, out, group="layers/2")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_each_group_has_its_own_attributes_masks_and_biases(tmp_path):
    """Names are those in the group, or with a slash those of the file; an attribute of a group counts first."""
    source, out = tmp_path / "in.h5", tmp_path / "out.h5"
    write_problems(source, {"a": {"seqlen": 40}, "b": {"seqlen": 40}})
    with h5py.File(source, "r+") as file:
        for group, cut in (("a", 11), ("b", 30)):
            file[f"{group}/cuts"] = np.array([0, cut, 40])
            file[f"{group}/slopes"] = np.random.default_rng(cut).standard_normal((4, 40)).astype(np.float32)
        for name in "qkv":
            turned = file[f"b/{name}"][...].swapaxes(1, 2)
            del file[f"b/{name}"]
            file[f"b/{name}"] = turned
        file["b"].attrs["axes"], file["cuts"] = "bhsd", np.array([0, 5, 40])
    results = {}
    for names in ("cuts", "/cuts"):
        run(2, source, out, "--documents", names, "--key-bias", "slopes", "--verify")
        results[names] = datasets(out)
        with h5py.File(out) as file:
            assert file["a/out"].shape == (1, 40, 4, 16) and file["b/out"].shape == (1, 4, 40, 16)
    assert all(results["cuts"][name] != results["/cuts"][name] for name in ("a/out", "b/out"))
    run(2, source, tmp_path / "one.h5", "--documents", "cuts", "--key-bias", "slopes", "--problems", "a")
    assert datasets(tmp_path / "one.h5")["a/out"] == results["cuts"]["a/out"]


@pytest.mark.draw(3)
@pytest.mark.parametrize(
    "options, says",
    [
        (["--problems", "layer/*"], "--problems is 'layer/*'; it matches no group with a dataset 'q' of IN, "),
        (["--names", "q=queries"], "it has no dataset 'queries', it must have q, k and v"),
        (["--trace", "t.json"], "--trace is given, and IN has 4 problems; choose one by --problems"),
        (["--trace", "t.json", "--problems", "encoder", "--resume"], "--trace is given with --resume; "),
        (["--documents", "cuts"], "--documents is 'cuts'; it must be a dataset of IN or a file, and "
            "there is none of that name (in group 'encoder' of IN)"),
        (["--backward"], "in.h5:/encoder'; it has no dataset 'dout'"),
        (["--tile", "3x2"], "--tile is 3x2; for 2 ranks it may be 1x2, 2x1"),
    ],
)  # fmt: skip
def test_errors(tmp_path, options, says):
    source = write_problems(tmp_path / "in.h5", LAYERS)
    outcome = run(2, source, tmp_path / "out.h5", *options, check=False, cwd=tmp_path)
    assert outcome.returncode == 1 and says in outcome.stderr, outcome.stderr
    assert outcome.stderr.count("mpiattn: ") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5"]


def test_a_group_that_does_not_fit_is_named(tmp_path):
    """Before anything is computed."""
    source = write_problems(tmp_path / "in.h5", LAYERS)
    with h5py.File(source, "r+") as file:
        del file["layers/2/v"]
        file["layers/2/v"] = h5py.SoftLink("/nowhere")
    with pytest.raises(errors.FileError, match=r"in.h5:/layers/2'; .*'v' is a link to '/nowhere', which is not there"):
        read_problems(source)
    with h5py.File(source, "r+") as file:
        del file["layers/2/v"], file["layers/2/q"]
        file["layers/2/q"], file["loop"] = h5py.SoftLink("/nowhere"), h5py.SoftLink("/layers")
        file["layers/2/v"] = np.zeros((1, 3, 2, 16), np.float32)
    with pytest.raises(errors.FileError, match=r"in.h5:/layers/2'; .*'q' is a link to '/nowhere'"):
        read_problems(source)


def test_groups_with_the_same_attributes(tmp_path):
    """Copies have those attributes and nothing of other groups; in any order, and inside each other."""
    models, attributes = {}, {"causal": True, "tile": "1x1", "scale": 0.5, "padding": [3, 4]}
    with hdf5.writing(tmp_path / "out.h5", create=True) as file:
        for path in ("b/c", "a", "b", "b/d/e", ""):
            hdf5.create_datasets(hdf5.group_with(file, path, attributes, models), {"out": ((2, 3), "float32")})
        hdf5.group_with(file, "other", {"causal": False}, models)
    with h5py.File(tmp_path / "out.h5") as file:
        for path in ("b/c", "a", "b", "b/d/e", "/"):
            about = {name: np.asarray(value).tolist() for name, value in file[path].attrs.items()}
            assert about == attributes and file[path]["out"].shape == (2, 3)
        assert dict(file["other"].attrs) == {"causal": False} and not file["b/d"].attrs
        assert [sorted(file[path]) for path in ("a", "b", "other")] == [["out"], ["c", "d", "out"], []]


def test_more_groups_of_a_shape_take_no_more_messages(tmp_path):
    """Before anything is computed: with thousands of groups the ranks would wait for each other most of the time."""
    code = (
        "import sys; from mpiattn.cli import main, run_problem; from mpiattn.comm.peers import Peers\n"
        "wait, tasks_of, calls = Peers.wait, run_problem.tasks_of, []\n"
        "def counted(self, *given):\n"
        "    calls.append(1)\n"
        "    return wait(self, *given)\n"
        "def counting(comm, *given):\n"
        "    Peers.wait = counted\n"
        "    tasks = tasks_of(comm, *given)\n"
        "    Peers.wait = wait\n"
        "    print(f'messages: {len(calls)}\\n' * (comm.rank == 0), end='', flush=True)\n"
        "    return tasks\n"
        "run_problem.tasks_of = counting\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    np.save(tmp_path / "cuts.npy", [0, 11, 30])
    counts = []
    for groups in "ab", "abcdef":
        source = write_problems(tmp_path / "in.h5", {group: {"seqlen": 30} for group in groups})
        command = ["run", source, tmp_path / "out.h5", "--documents", tmp_path / "cuts.npy"]
        said = mpirun(2, [sys.executable, "-c", code, *command]).stdout
        counts += [line for line in said.splitlines() if line.startswith("messages: ")]
    assert len(counts) == 2 and len(set(counts)) == 1, counts


def test_what_fails_at_the_end_is_of_no_group(tmp_path):
    code = (
        "import sys; from mpi4py import MPI; from mpiattn.cli import main; from mpiattn.files.output import Output\n"
        "commit = Output.commit\n"
        "Output.commit = lambda self: 1 / 0 if MPI.COMM_WORLD.rank else commit(self)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    program = [sys.executable, "-c", code, "run", write_problems(tmp_path / "in.h5", LAYERS), tmp_path / "out.h5"]
    assert "failed in phase commit: ZeroDivisionError" in mpirun(2, program, check=False).stderr


def test_a_bar_over_all_of_them(tmp_path):
    """A line of the log says how many of all problems are done, and at which the run is."""
    require_launch()
    source = write_problems(tmp_path / "in.h5", LAYERS)
    code = (
        "import sys, mpiattn.console.progress as p; p.APART = p.LOOK = p.SHARE = 0.0\n"
        "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    lines = mpirun(2, [sys.executable, "-c", code, "run", source, tmp_path / "out.h5"]).stderr.splitlines()
    assert any(
        "run " in line and " of 4 problems, " in line and line.endswith("; at layers/2, forward") for line in lines
    )


def test_problems_without_work_and_a_pipe_of_documents(tmp_path):
    """Groups of no tokens; a pipe, which can be read once, holds the documents of all groups."""
    shapes = {"a": {"q": np.zeros((1, 0, 4, 16), np.float32), "seqlen_k": 9}, "b": {}}
    shapes["b"] = shapes["a"]
    run(2, write_problems(tmp_path / "none.h5", shapes), tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["b/out"].shape == (1, 0, 4, 16)
    source = write_problems(tmp_path / "in.h5", {"a": {"seqlen": 30}, "b": {"seqlen": 30}})
    os.mkfifo(tmp_path / "pipe")
    subprocess.Popen(["bash", "-c", 'echo 0 11 30 > "$0"', tmp_path / "pipe"])
    run(2, source, tmp_path / "out.h5", "--documents", tmp_path / "pipe", "--verify")


def test_groups_that_have_several_names(tmp_path):
    """A group comes once, under its own name; one whose place in OUT is a dataset's is refused."""
    source = write_problems(tmp_path / "in.h5", {"b": {"seqlen": 9}, "b/in": {"seqlen": 9}, "2": {"seqlen": 9}})
    with h5py.File(source, "r+") as file:
        file["a"], file["b/back"] = h5py.SoftLink("/b"), h5py.SoftLink("/")
    assert list(read_problems(source)[0]) == ["2", "b", "b/in"]
    outcome = run(1, source, tmp_path / "out.h5", "--documents", __file__, "--problems", "2", check=False)
    assert "(in group '2' of IN)" in outcome.stderr
    write_problems(source, {"x": {"seqlen": 9}, "x/out": {"seqlen": 9}})
    outcome = run(2, source, tmp_path / "out.h5", check=False)
    assert "IN has a problem in group 'x/out', and 'x/out' is a dataset of results in OUT" in outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5"]
