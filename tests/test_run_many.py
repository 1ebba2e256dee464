"""`mpiattn run` of files that hold many problems, one a group, and its going on where an earlier run ended."""

import json
import os
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
import warm
from files import assert_right, datasets, write_input, write_problems
from launch import environment, mpiexec, mpirun, require_launch, time_factor

from mpiattn import errors
from mpiattn.files.problems import read_problems

LAYERS = {
    "layers/10": {"seqlen": 41},
    "layers/2": {"seqlen": 67},
    "layers/1": {"seqlen": 41},
    "encoder": {"seqlen": 30, "heads": 2, "dtype": "float64", "batch": 2},
}
ORDER = ["encoder", "layers/1", "layers/2", "layers/10"]

# The command line, in which the first rank meets a signal after so many problems: for one of them, or in the middle of
# the next one's forward pass.
STOPPED = """
import os, sys
number, after, where, *arguments = sys.argv[1:]
from mpiattn.cli import main, run_problem
from mpiattn.console import witness
from mpiattn.system.launch_variables import launch_rank
witness.watch(launch_rank())
import mpiattn.engine.executor as e
solve, calls = run_problem.solve, []
def counted(*arguments, **how):
    calls.append(1)
    return solve(*arguments, **how)
run_problem.solve, whole = counted, e.Executor.run
def struck(self, *arguments, **how):
    if len(calls) == int(after) + 1 and launch_rank() == int(where):
        e.Executor.run = whole
        os.kill(os.getpid(), int(number))
    return whole(self, *arguments, **how)
e.Executor.run = struck
sys.exit(main(arguments))
"""


def stopped(n, number, after, where, *arguments):
    """A launch of `mpiattn run` in which rank `where` gets a signal in the problem after the first `after`."""
    command = [sys.executable, "-c", STOPPED, int(number), after, where, "run", *arguments]
    return mpirun(n, command, timeout=90, check=False)


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


def test_a_run_that_is_stopped_goes_on(tmp_path):
    """With the same bits: by SIGUSR1 after the problem at hand, by SIGTERM and SIGKILL without it."""
    source, out, left = write_problems(tmp_path / "in.h5", LAYERS), tmp_path / "out.h5", tmp_path / "out.h5.unfinished"
    arguments = [source, out, "--causal", "--resume"]
    run(3, source, tmp_path / "whole.h5", "--causal")
    outcome = stopped(3, signal.SIGUSR1, 0, 1, *arguments)
    assert outcome.returncode == 138
    assert outcome.stderr.count("mpiattn run: ended by SIGUSR1, OUT was not written; 1 of 4 problems are in ") == 1
    assert not out.exists() and sorted(path.name for path in left.iterdir()) == ["finished.jsonl", "out.h5"]
    outcome = stopped(3, signal.SIGTERM, 1, 0, *arguments)  # in the second of this launch, the third of all
    assert outcome.stderr.count("ended by SIGTERM, OUT was not written; 2 of 4 problems are in ") == 1
    outcome = stopped(3, signal.SIGKILL, 1, 2, *arguments)
    assert (
        outcome.returncode and not out.exists() and len(left.joinpath("finished.jsonl").read_text().splitlines()) == 4
    )
    outcome = run(3, *arguments, "--json", tmp_path / "report.json")
    assert "4 problems in 'encoder' to 'layers/10', of 3 shapes, 3 of them finished before" in outcome.stdout
    assert list(json.loads((tmp_path / "report.json").read_text())["problems"]) == ORDER
    assert datasets(out) == datasets(tmp_path / "whole.h5") and not left.exists()
    said = run(3, *arguments, "--json", tmp_path / "report.json").stdout
    assert "is whole, made by the same command; nothing is left to do" in said
    assert json.loads((tmp_path / "report.json").read_text())["whole"]


@pytest.fixture
def half(tmp_path):
    """A folder with in.h5 and results of one of its problems."""
    source = write_problems(tmp_path / "in.h5", {"a": {"seqlen": 30}, "b": {"seqlen": 30}})
    assert stopped(1, signal.SIGUSR1, 0, 0, source, tmp_path / "out.h5", "--resume").returncode == 138
    return tmp_path


def test_only_the_same_run_goes_on(half):
    source, out = half / "in.h5", half / "out.h5"

    def said(*options, n=1):
        outcome = run(n, source, out, "--resume", *options, check=False)
        assert outcome.returncode == 1 and outcome.stderr.count("mpiattn: ") == 1
        return outcome.stderr

    assert "holds results of a run with another causal: False then, True now" in said("--causal")
    assert "holds results of a run with another ranks: 1 then, 2 now; run it as then, or remove that folder" in said(
        n=2
    )
    assert "another dropout: none then, 0.5 now" in said("--dropout", "0.5", "--seed", "3")
    about = source.stat()
    os.utime(source, ns=(about.st_atime_ns, about.st_mtime_ns + 10**9))
    assert "another IN: " in said()
    os.utime(source, ns=(about.st_atime_ns, about.st_mtime_ns))
    run(1, source, out)  # without --resume it is not looked at
    assert (half / "out.h5.unfinished").exists()
    run(1, source, out, "--resume")
    assert_right(source, out, group="b")


@pytest.mark.draw(2)
@pytest.mark.parametrize("harm", ["torn", "no journal", "no results", "odd journal", "short results", "other results"])
def test_what_was_left_is_harmed(half, harm):
    """By a crash: begun anew, or from the last whole line; by others: an error that says what to remove."""
    source, out, left = half / "in.h5", half / "out.h5", half / "out.h5.unfinished"
    journal, results = left / "finished.jsonl", left / "out.h5"
    if harm == "torn":
        journal.write_text(journal.read_text() + '{"problem": "b", "repo')
    elif harm == "no journal":
        journal.unlink()
    elif harm == "no results":
        results.unlink()
    elif harm == "odd journal":
        journal.write_text("odd\n")
    elif harm == "short results":
        os.truncate(results, 200)
    else:
        write_input(results)
    outcome = run(2 if harm == "no journal" else 1, source, out, "--resume", check=False)
    if harm in ("torn", "no journal", "no results"):
        assert outcome.returncode == 0 and ("1 of them finished before" in outcome.stdout) == (harm == "torn")
        assert_right(source, out, group="a")
        assert_right(source, out, group="b")
    else:
        assert outcome.returncode == 1 and outcome.stderr.count("mpiattn: OUT is ") == 1
        assert "out.h5.unfinished" in outcome.stderr and not out.exists()


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


def test_the_launcher_hands_the_signal_on(tmp_path):
    """SIGUSR1 to mpiexec, as from a batch script, ends the run after a problem."""
    require_launch()
    shape = {"seqlen": 700, "heads": 8}
    source, out = write_problems(tmp_path / "in.h5", {str(i): shape for i in range(40)}), tmp_path / "out.h5"
    command = [mpiexec(), "-n", "2", sys.executable, "-m", "mpiattn", "run", str(source), str(out), "--resume"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    journal, end = tmp_path / "out.h5.unfinished/finished.jsonl", time.monotonic() + 60 * time_factor()
    while not (journal.exists() and len(journal.read_text().splitlines()) > 1) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=60 * time_factor())
    assert process.returncode == 138 and "ended by SIGUSR1" in said
    assert 1 < len(journal.read_text().splitlines()) <= 41


@pytest.mark.parametrize("after", ["add", "commit"])
def test_the_only_problem_is_finished_and_out_is_not(tmp_path, after):
    """Killed between the two: the report then is that of many problems, and OUT the same."""
    source, out, made = write_input(tmp_path / "in.h5"), tmp_path / "out.h5", tmp_path / "run.json"
    owner = "files.unfinished.Unfinished" if after == "add" else "files.output.Output"
    code = (
        "import os, sys, importlib\n"
        f"module, name = '{owner}'.rsplit('.', 1)\n"
        "owner = getattr(importlib.import_module('mpiattn.' + module), name)\n"
        f"whole = owner.{after}\n"
        "def struck(self, *arguments):\n"
        f"    {'whole(self, *arguments)' if after == 'add' else 'pass'}\n"
        "    os._exit(9)\n"
        f"owner.{after} = struck\n"
        "from mpiattn.cli import main; main(sys.argv[1:])"
    )
    outcome = subprocess.run([sys.executable, "-c", code, "run", source, out, "--resume"], env=environment())
    assert outcome.returncode == 9 and not out.exists()
    assert "(no group)" in run(1, source, out, "--resume", "--json", made).stdout
    assert list(json.loads(made.read_text())["problems"]) == [""]
    assert_right(source, out)
