"""`mpiattn run --resume`: a run goes on where an earlier one ended, with the bits of a run that nothing disturbed."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
import warm
from files import LAYERS, ORDER, assert_right, datasets, write_input, write_problems
from launch import environment, mpiexec, mpirun, require_launch, time_factor

from mpiattn.errors import FileError
from mpiattn.files import unfinished
from mpiattn.files.unfinished import _File

# The command line, in which the first rank meets a signal after so many problems: for one of them, or in the middle of
# the next one's forward pass.
STOPPED = """
import os, signal, sys
number, after, where, *arguments = sys.argv[1:]
from mpiattn.cli import main, run_problem
from mpiattn.console import interrupts, witness
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
leave = interrupts.EndRequest.__exit__
def late(self, *exception):  # as where a launcher's signal reaches one rank long before the others
    leave(self, *exception)
    if int(number) == signal.SIGUSR1:
        os.kill(os.getpid(), signal.SIGUSR1)
interrupts.EndRequest.__exit__ = late
sys.exit(main(arguments))
"""


def run(n, *arguments, **how):
    return warm.command(n, ["run", *arguments], **how)


def stopped(n, number, after, where, *arguments):
    """A launch of `mpiattn run` in which rank `where` gets a signal in the problem after the first `after`."""
    command = [sys.executable, "-c", STOPPED, int(number), after, where, "run", *arguments]
    return mpirun(n, command, timeout=90, check=False)


def kinds(left):
    """The names of files in a folder of unfinished results, but for what all begin with."""
    assert len({path.name[:8] for path in left.iterdir()}) == 1
    return sorted(path.name[8:] for path in left.iterdir())


def test_a_run_that_is_stopped_goes_on(tmp_path):
    """With the same bits: by SIGUSR1 after the problem at hand, by SIGTERM and SIGKILL without it."""
    source, out, left = write_problems(tmp_path / "in.h5", LAYERS), tmp_path / "out.h5", tmp_path / "out.h5.unfinished"
    arguments = [source, out, "--causal", "--resume"]
    run(3, source, tmp_path / "whole.h5", "--causal")
    outcome = stopped(3, signal.SIGUSR1, 0, 1, *arguments)
    assert outcome.returncode == 138
    assert outcome.stderr.count("mpiattn run: ended by SIGUSR1, OUT was not written; 1 of 4 problems are in ") == 1
    assert not out.exists() and kinds(left) == [".0.json", ".h5"]
    outcome = stopped(3, signal.SIGTERM, 1, 0, *arguments)  # in the second of this launch, the third of all
    assert outcome.stderr.count("ended by SIGTERM, OUT was not written; 2 of 4 problems are in ") == 1
    outcome = stopped(3, signal.SIGKILL, 1, 2, *arguments)
    assert outcome.returncode and not out.exists() and kinds(left) == [".0.json", ".1.json", ".2.json", ".h5"]
    outcome = run(3, *arguments, "--json", tmp_path / "report.json")
    assert "4 problems in 'encoder' to 'layers/10', of 3 shapes, 3 of them finished before" in outcome.stdout
    assert list(json.loads((tmp_path / "report.json").read_text())["problems"]) == ORDER
    assert datasets(out) == datasets(tmp_path / "whole.h5") and not left.exists()
    said = run(3, *arguments, "--json", tmp_path / "report.json").stdout
    assert "is whole, made by the same command; nothing is left to do" in said
    assert json.loads((tmp_path / "report.json").read_text())["whole"]
    assert not list(tmp_path.glob(".*"))  # no lock


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
    assert "another dropout: 0.0 then, 0.5 now" in said("--dropout", "0.5", "--seed", "3")
    about = source.stat()
    os.utime(source, ns=(about.st_atime_ns, about.st_mtime_ns + 10**9))
    assert "another IN: " in said()
    os.utime(source, ns=(about.st_atime_ns, about.st_mtime_ns))
    run(1, source, out)  # without --resume it is not looked at
    assert (half / "out.h5.unfinished").exists()
    out.chmod(0o640)
    run(1, source, out, "--resume")
    assert_right(source, out, group="b")
    assert out.stat().st_mode & 0o777 == 0o640  # that of the file which it replaces


@pytest.mark.draw(2)
@pytest.mark.parametrize(
    "harm", ["draft", "of another run", "no reports", "no results", "odd report", "short results", "other results"]
)
def test_what_was_left_is_harmed(half, harm):
    """By a crash: begun anew, or with the problems that are whole; by others: an error that says what to remove."""
    source, out, left = half / "in.h5", half / "out.h5", half / "out.h5.unfinished"
    (report,), (results,) = left.glob("*.json"), left.glob("*.h5")
    if harm == "draft":
        results.with_suffix(".draft").write_text('{"problem": "b", "repo')
    elif harm == "of another run":  # whose file of results was removed
        (left / "0123abcd.1.json").write_text('{"problem": "b", "report": {}}')
    elif harm == "no reports":
        report.unlink()
    elif harm == "no results":
        results.unlink()
    elif harm == "odd report":
        report.write_text("odd\n")
    elif harm == "short results":
        os.truncate(results, 200)
    else:
        write_input(results)
    outcome = run(2 if harm == "no reports" else 1, source, out, "--resume", check=False)
    if harm in ("draft", "of another run", "no reports", "no results"):
        assert outcome.returncode == 0 and not left.exists()
        assert ("1 of them finished before" in outcome.stdout) == (harm in ("draft", "of another run"))
        assert_right(source, out, group="a")
        assert_right(source, out, group="b")
    else:
        assert outcome.returncode == 1 and outcome.stderr.count("mpiattn: OUT is ") == 1
        assert "out.h5.unfinished" in outcome.stderr and not out.exists()


def test_the_launcher_hands_the_signal_on(tmp_path):
    """SIGUSR1 to mpiexec, as from a batch script, ends the run after a problem."""
    require_launch()
    shape = {"seqlen": 700, "heads": 8}
    source, out = write_problems(tmp_path / "in.h5", {str(i): shape for i in range(40)}), tmp_path / "out.h5"
    command = [mpiexec(), "-n", "2", sys.executable, "-m", "mpiattn", "run", str(source), str(out), "--resume"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    left, end = tmp_path / "out.h5.unfinished", time.monotonic() + 60 * time_factor()
    while not list(left.glob("*.json")) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=60 * time_factor())
    assert process.returncode == 138 and "ended by SIGUSR1" in said
    assert 1 <= len(list(left.glob("*.json"))) <= 40


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


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with in.h5, documents and results of one of its problems, made with every option that others lack."""
    folder = tmp_path_factory.mktemp("begun")
    source = write_problems(folder / "in.h5", {"1": {"seqlen": 1300, "heads": 2}, "2": {"seqlen": 1300, "heads": 2}})
    with h5py.File(source, "r+") as file:
        for group in file.values():
            group["w"] = group["v"][...] + 1
    np.save(folder / "cuts.npy", np.arange(1301))
    return folder


MASKS = ["blocks 130 " + ",".join(f"{i}:{j}" for i, j in enumerate(order)) for order in (range(10), range(9, -1, -1))]
PLAN = "--schedule greedy --tile 1x1 --layout contiguous --mesh-layout contiguous --route direct".split()


@pytest.mark.draw(3)
@pytest.mark.parametrize(
    "first, then, differs",
    [
        (["--names", "v=w"], [], "names"),
        (["--mask", MASKS[0]], ["--mask", MASKS[1]], "mask"),
        (["--documents", "cuts.npy"], ["--documents", "cuts.npy"], "content of --documents"),
        (["--verify"], [], "verify"),
        (["--documents", "cuts.npy"], [], "documents"),
        (["--dropout", "0.5", "--seed", "1"], ["--dropout", "0.5", "--seed", "2"], "seed"),
    ],
)
def test_what_results_depend_on(begun, first, then, differs):
    """An option that differs, or a file that it names, is not mixed into results of another one."""
    out = begun / "out.h5"
    command = ["run", begun / "in.h5", out, "--resume", *PLAN]
    try:
        program = [sys.executable, "-c", STOPPED, int(signal.SIGUSR1), 0, 0, *command, *first]
        assert mpirun(1, program, timeout=90, check=False, cwd=begun).returncode == 138
        if differs.startswith("content"):
            cuts = np.arange(1301)
            cuts[500:600] += 1
            np.save(begun / "cuts.npy", cuts)
        outcome = warm.command(1, [*command, *then], check=False, cwd=begun)
        assert outcome.returncode == 1 and f"holds results of a run with another {differs}: " in outcome.stderr
    finally:
        np.save(begun / "cuts.npy", np.arange(1301))
        for path in (begun / "out.h5.unfinished").iterdir():
            path.unlink()
        (begun / "out.h5.unfinished").rmdir()


@pytest.mark.parametrize("contents", ["[]", "5", '{"x": 1}', ""])
def test_a_report_of_something_else(half, contents):
    (report,) = (half / "out.h5.unfinished").glob("*.json")
    report.write_text(contents)
    outcome = run(1, half / "in.h5", half / "out.h5", "--resume", check=False)
    assert outcome.returncode == 1
    assert "it does not hold what such a run leaves; to begin anew remove it" in outcome.stderr


def run_two(tmp_path, solve):
    """A run of two problems, a and b, by a command whose `solve` is what this text defines."""
    source = write_problems(tmp_path / "in.h5", {"a": {"seqlen": 30}, "b": {"seqlen": 30}})
    code = (
        "import os, sys; from mpiattn.cli import main, run_problem\n"
        f"right = run_problem.solve\n{solve}\nrun_problem.solve = solve\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    program = [sys.executable, "-c", code, "run", source, tmp_path / "out.h5", "--resume"]
    outcome = mpirun(1, program, check=False)
    assert outcome.returncode == 1, outcome.stderr
    return outcome.stderr


def test_a_run_that_has_finished_nothing_holds_up_no_other(tmp_path):
    """Nothing of a run that fails in its first problem stays."""
    run_two(tmp_path, "def solve(*given, **how): raise OSError(28, 'No space left on device')")
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5"]


def test_in_is_changed_while_it_is_read(tmp_path):
    """The problem at hand does not count, and the earlier ones stay for an IN as it was."""
    said = run_two(
        tmp_path,
        "def solve(job, args, task, *given):\n"
        "    os.utime(args.input, (5, 5)) if task.group == 'b' else None\n"
        "    return right(job, args, task, *given)",
    )
    assert "it was changed while it was read: " in said, said
    assert "; 1 of 2 problems are in " in said and "the same command with --resume goes on with the others" in said
    assert kinds(tmp_path / "out.h5.unfinished") == [".0.json", ".h5"]


@pytest.mark.parametrize("harm", ["other files", "an error of the file system"])
def test_nothing_else_is_removed(half, harm, monkeypatch):
    """No file that a run has not made, and nothing where the system does not say what is there."""
    left, given = half / "out.h5.unfinished", (half / "out.h5", half / "in.h5")
    if harm == "other files":
        next(left.glob("*.json")).unlink()
        (left / "thesis.h5").touch()
        stays, says = ["thesis.h5"], "cannot be written: Directory not empty; to begin anew remove it"
    else:
        stays, says = sorted(os.listdir(left)), "cannot be read: Stale file handle; to begin anew remove it"
        stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        monkeypatch.setattr(os, "listdir", lambda _: (_ for _ in ()).throw(stale))
    with pytest.raises(FileError, match=says):
        _File(*given, {})
    monkeypatch.undo()
    assert sorted(path.name for path in left.iterdir()) == stays
    assert not list(half.glob(".*"))


def made_by(half):
    (results,) = (half / "out.h5.unfinished").glob("*.h5")
    with h5py.File(results) as file:
        return json.loads(file.attrs["made_by"])


def test_out_has_its_name_before_the_rest_is_removed(half, monkeypatch):
    """On the disk too: a crash may otherwise undo the first alone."""
    left, seen = half / "out.h5.unfinished", []
    assert left.stat().st_mode & 0o777 == 0o700
    file = _File(half / "out.h5", half / "in.h5", made_by(half))
    monkeypatch.setattr(unfinished, "sync", lambda path: seen.append((str(path), kinds(left))))
    file.publish()
    assert seen == [(str(half), [".0.json"])] and not left.exists()
    file.discard()
    assert not list(half.glob(".*"))


def test_results_that_another_job_has_removed(half):
    """As where the file system has no locks: nothing of the problem counts."""
    left = half / "out.h5.unfinished"
    file = _File(half / "out.h5", half / "in.h5", made_by(half))
    next(left.glob("*.h5")).unlink()
    with pytest.raises(FileError, match="another job has removed it"):
        file.add("b", {})
    assert kinds(left) == [".0.json", ".draft"]
    file.discard()


def test_two_runs_of_one_folder(half):
    """Whoever has it, in whatever phase, is alone."""
    first = _File(half / "out.h5", half / "in.h5", made_by(half))
    with pytest.raises(FileError, match="has been writing it since"):
        _File(half / "out.h5", half / "in.h5", made_by(half))
    first.discard()
    assert not list(half.glob(".*")) and kinds(half / "out.h5.unfinished") == [".0.json", ".h5"]


def test_partials_of_jobs_that_were_killed_go(tmp_path):
    source, out = write_problems(tmp_path / "in.h5", {"a": {"seqlen": 30}, "b": {"seqlen": 30}}), tmp_path / "out.h5"
    stopped(1, signal.SIGKILL, 0, 0, source, out, "--resume")  # in its first problem
    (partial,) = tmp_path.glob(".out.h5.*.partial")
    outcome = mpirun(1, [sys.executable, "-m", "mpiattn", "run", source, out, "--resume"])
    assert f"mpiattn: removed '{partial}', which a job that was killed left behind" in outcome.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.h5", "out.h5"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_a_problem_is_finished(tmp_path, number):
    """Nothing is left, and nothing is said of it."""
    source = write_problems(tmp_path / "in.h5", {"a": {"seqlen": 30}, "b": {"seqlen": 30}})
    outcome = stopped(2, number, 0, 1, source, tmp_path / "out.h5", "--resume")
    assert outcome.returncode == 128 + number and "OUT was not written\n" in outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5"]


# The command line, in which a rank gets SIGTERM while rank 0 puts the folder on the disk, which takes long.
SLOW_DISK = """
import os, signal, sys, time
from pathlib import Path
victim, pid, *arguments = sys.argv[1:]
from mpiattn.cli import main
from mpiattn.console import witness
from mpiattn.system.launch_variables import launch_rank
witness.watch(launch_rank())
if launch_rank() == int(victim):
    Path(pid).write_text(str(os.getpid()))
fsync = os.fsync
def slow(handle):
    if os.readlink(f"/proc/self/fd/{handle}").endswith(".unfinished"):
        os.fsync = fsync
        time.sleep(1)  # the other rank hears of what stays
        os.kill(int(Path(pid).read_text()), signal.SIGTERM)
        time.sleep(30)
    fsync(handle)
os.fsync = slow
sys.exit(main(arguments))
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_when_a_problem_has_just_been_finished(tmp_path, victim):
    """What stays, which is as large as OUT, is always told."""
    source = write_problems(tmp_path / "in.h5", {"a": {"seqlen": 30}, "b": {"seqlen": 30}})
    program = [sys.executable, "-c", SLOW_DISK, victim, tmp_path / "pid"]
    outcome = mpirun(2, [*program, "run", source, tmp_path / "out.h5", "--resume"], check=False)
    assert outcome.returncode == 143 and outcome.stderr.count("; 1 of 2 problems are in ") == 1, outcome
    assert kinds(tmp_path / "out.h5.unfinished") == [".0.json", ".h5"]


def test_a_partial_that_cannot_be_moved_goes(half, monkeypatch):
    shutil.rmtree(half / "out.h5.unfinished")
    file = _File(half / "out.h5", half / "in.h5", {})
    replace = os.replace

    def refuse(source, target):
        if target.endswith(".h5"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(FileError, match="quota"):
        file.add("a", {})
    file.discard()
    assert [path.name for path in half.iterdir()] == ["in.h5"]


def test_a_run_without_resume_says_that_results_are_there(half):
    said = mpirun(1, [sys.executable, "-m", "mpiattn", "run", half / "in.h5", half / "out.h5"]).stderr
    assert said.count("unfinished' holds results of a run with --resume, which this run leaves there unused") == 1
    assert kinds(half / "out.h5.unfinished") == [".0.json", ".h5"]


def test_a_folder_without_results_is_not_said_to_hold_any(tmp_path, caplog):
    """A run left it that was killed as it began the folder, or at its very end."""
    folder = tmp_path / "out.h5.unfinished"
    folder.mkdir()
    (folder / "0123abcd.0.json").write_text("{}")
    unfinished.note_unused(tmp_path / "out.h5")
    assert caplog.messages == []
    (folder / "0123abcd.h5").touch()
    unfinished.note_unused(tmp_path / "out.h5")
    assert len(caplog.messages) == 1


# The command line, which says what is put on the disk, and how many reports there are then.
DISK = """
import os, sys
from pathlib import Path
fsync, left = os.fsync, Path(sys.argv[3] + ".unfinished")
def noted(handle):
    name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}")).split(".")[-1]
    print("disk:", name, len([*left.glob("*.json")]), file=sys.stderr)
    fsync(handle)
os.fsync = noted
from mpiattn.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_what_reports_say_is_on_the_disk(tmp_path):
    """The results before each report, the report before its name, and the folder before the next problem."""
    source = write_problems(tmp_path / "in.h5", {"a": {"seqlen": 30}, "b": {"seqlen": 30}})
    (tmp_path / "out").mkdir()
    program = [sys.executable, "-c", DISK, "run", source, tmp_path / "out/out.h5", "--resume"]
    said = [line.split()[1:] for line in mpirun(1, program).stderr.splitlines() if line.startswith("disk: ")]
    first = [["partial", "0"], ["draft", "0"], ["unfinished", "1"], ["out", "1"]]
    second = [["h5", "1"], ["draft", "1"], ["unfinished", "2"]]
    assert said == [*first, *second, ["h5", "2"], ["out", "2"]]


def test_out_behind_a_symbolic_link(tmp_path):
    """What stays is beside the file itself, and the message says so."""
    source = write_problems(tmp_path / "in.h5", {"a": {"seqlen": 30}, "b": {"seqlen": 30}})
    (tmp_path / "there").mkdir()
    (tmp_path / "out.h5").symlink_to("there/real.h5")
    said = stopped(2, signal.SIGUSR1, 0, 1, source, tmp_path / "out.h5", "--resume").stderr
    assert f"1 of 2 problems are in {tmp_path}/there/real.h5.unfinished, and" in said
    run(2, source, tmp_path / "out.h5", "--resume")
    assert_right(source, tmp_path / "there/real.h5", group="b")
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["real.h5"]
