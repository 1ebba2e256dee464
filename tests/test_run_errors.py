"""What `mpiattn run` does with what it can't do: one message on all ranks, a non-zero code, no hang, no OUT."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer

import launch
import numpy as np
import pytest
import warm
from files import RANK_1_RAISES, assert_right, write_input
from launch import mpirun

RUN = [sys.executable, "-m", "mpiattn", "run"]
DEATH = 10  # seconds within which a launch must end when one of its ranks was killed


def fails(source, out, *options, n=3, command=None, code=1):
    """Run what must fail, in a launch of its own if it is another command; returns the one line that says why."""
    if command is None:
        outcome = warm.command(n, ["run", source, out, *options], check=False)
    else:
        outcome = mpirun(n, [*command, source, out, *options], timeout=40, check=False)
    assert outcome.returncode == code, outcome
    said = [line for line in outcome.stderr.splitlines() if line.startswith("mpiattn")]
    assert len(said) == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not os.path.isfile(out) or os.path.samefile(source, out)
    assert not list(Path(out).parent.glob(".*"))
    return said[0]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.h5"


def test_missing_file(tmp_path, out):
    assert "there is no such file" in fails(tmp_path / "none.h5", out)


def test_not_hdf5(tmp_path, out):
    (tmp_path / "in.h5").write_text("hello")
    said = fails(tmp_path / "in.h5", out)
    assert "IN is" in said and "it is no HDF5 file; `mpiattn convert` makes one of .npy" in said


def test_missing_dataset(tmp_path, out):
    assert "no dataset 'v'" in fails(write_input(tmp_path / "in.h5", v=None), out)


def test_shapes_that_do_not_fit(tmp_path, out):
    source = write_input(tmp_path / "in.h5", seqlen=30, v=np.zeros((1, 31, 2, 16), "f4"))
    assert "(1, 31, 2, 16)" in fails(source, out)


def test_unknown_dtype(tmp_path, out):
    message = fails(write_input(tmp_path / "in.h5", dtype="int32"), out)
    assert "int32" in message and "float16, float32, float64" in message


def test_mixed_dtypes(tmp_path, out):
    source = write_input(tmp_path / "in.h5", k=np.zeros((1, 67, 2, 16), "f8"))
    assert "float32, float64, float32" in fails(source, out)


def test_heads_not_divisible(tmp_path, out):
    assert "kv_heads is 3; it must divide heads, which is 4" in fails(write_input(tmp_path / "in.h5", kv_heads=3), out)


def test_tile_that_does_not_divide(tmp_path, out):
    said = fails(write_input(tmp_path / "in.h5"), out, "--tile", "2x2")
    assert "ulysses, ring, qring, bands, dealt, mesh or auto" in said


def test_unknown_option_value(tmp_path, out):
    assert "--layout" in fails(write_input(tmp_path / "in.h5"), out, "--layout", "round", code=2)


def test_scale_not_finite(tmp_path, out):
    assert "scale is nan" in fails(write_input(tmp_path / "in.h5"), out, "--scale", "nan")


def test_out_in_no_folder(tmp_path):
    assert "there is no folder" in fails(write_input(tmp_path / "in.h5"), tmp_path / "none" / "out.h5")


def test_out_is_a_folder(tmp_path):
    (tmp_path / "folder").mkdir()
    assert "it is a folder" in fails(write_input(tmp_path / "in.h5"), tmp_path / "folder")


def test_out_where_nothing_can_be_written(tmp_path):
    assert "OUT is '/proc/out.h5'" in fails(write_input(tmp_path / "in.h5"), "/proc/out.h5")


def test_out_equal_to_in(tmp_path):
    source = write_input(tmp_path / "in.h5")
    before = source.read_bytes()
    (tmp_path / "link.h5").symlink_to(source)
    assert "must be another file" in fails(source, source)
    assert "must be another file" in fails(source, tmp_path / "link.h5")
    assert source.read_bytes() == before


def test_out_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in fails(write_input(tmp_path / "in.h5"), tmp_path / "pipe")
    assert not (tmp_path / "pipe").is_file()


def test_files_of_others_stay(tmp_path, out):
    """Nothing but what this run made is touched, whatever it is called."""
    theirs = tmp_path / "out.h5.partial"
    write_input(theirs)
    before = theirs.read_bytes()
    assert "must be another file" in fails(theirs, theirs)
    warm.command(2, ["run", theirs, out])
    assert theirs.read_bytes() == before


def test_json_in_no_folder(tmp_path, out):
    assert "--json" in fails(write_input(tmp_path / "in.h5"), out, "--json", tmp_path / "none" / "x.json")


def test_json_on_a_full_disk(tmp_path):
    """OUT was written before it; the code tells that not all was done."""
    source = write_input(tmp_path / "in.h5")
    outcome = mpirun(2, [*RUN, source, tmp_path / "out.h5", "--json", "/dev/full"], timeout=40, check=False)
    assert outcome.returncode == 1
    assert [line for line in outcome.stderr.splitlines() if line.startswith("mpiattn")] == [
        "mpiattn: --json is '/dev/full'; it cannot be written: No space left on device"
    ]
    assert_right(source, tmp_path / "out.h5")


@pytest.mark.parametrize("home", [{"HOME": "/proc/nowhere"}, {"HOME": ""}, {"HOME": "/dev/null"}])
def test_odd_home(tmp_path, home):
    """The store of machines is then not there."""
    source = write_input(tmp_path / "in.h5")
    warm.command(2, ["run", source, tmp_path / "out.h5"], env={"XDG_CONFIG_HOME": None, **home})
    assert_right(source, tmp_path / "out.h5")


def test_standard_output_is_closed(tmp_path):
    """As by `| head`: the code of a program that SIGPIPE ended, and no word of Python's."""
    reading, writing = os.pipe()
    os.close(reading)
    outcome = subprocess.run(
        [sys.executable, *"-m mpiattn plan --ranks 4 --seqlen 999 --heads 4 --head-dim 64".split()],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=launch.environment(),
        timeout=launch.patience(60),
    )
    os.close(writing)
    assert (outcome.returncode, outcome.stderr) == (141, b"")


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 400 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here (it takes root)")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_disk_full_is_told_at_once(tmp_path, small_disk):
    source = write_input(tmp_path / "in.h5", seqlen=2000, heads=4)
    assert "No space left on device" in fails(source, small_disk / "out.h5")


def test_disk_full_while_writing(tmp_path, small_disk):
    """Where blocks could not be reserved beforehand, the write itself fails, on rank 0 alone."""
    source = write_input(tmp_path / "in.h5", seqlen=2000, heads=4)
    code = (
        "import sys, mpiattn.files.output as output; output.reserve = lambda path: None\n"
        "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    message = fails(source, small_disk / "out.h5", command=[sys.executable, "-c", code, "run"])
    assert "No space left on device" in message


@pytest.mark.parametrize("command", ["run", "generate"])
def test_disk_that_others_fill_meanwhile(tmp_path, small_disk, command):
    """All that a file takes is reserved before the work, so that no work is lost."""
    code = (
        "import os, sys, mpiattn.files.hdf5 as h, mpiattn.files.staged as s\n"
        "writes = h.write, s.StagedFile.write\n"
        "def fill():\n"
        "    h.write, s.StagedFile.write = writes\n"
        f"    with open({str(small_disk / 'theirs')!r}, 'wb', 0) as file:\n"
        "        try:\n"
        "            while True: file.write(bytes(4096))\n"
        "        except OSError as error:\n"
        "            print(error.strerror, flush=True)\n"
        "def filled(write):\n"
        "    return lambda *args, **how: [fill(), write(*args, **how)]\n"
        "h.write, s.StagedFile.write = map(filled, writes)\n"
        "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    source = write_input(tmp_path / "in.h5", seqlen=500)
    arguments = (
        [source, small_disk / "out.h5"]
        if command == "run"
        else [small_disk / "out.h5", "--seqlen", "300", "--heads", "1", "--documents", "4"]
    )
    outcome = mpirun(1 if command == "generate" else 2, [sys.executable, "-c", code, command, *arguments], timeout=40)
    assert "No space left on device" in outcome.stdout
    if command == "run":
        assert_right(source, small_disk / "out.h5")
    assert sorted(path.name for path in small_disk.iterdir()) == ["out.h5", "theirs"]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_is_killed(tmp_path, out, victim):
    """The others wait for it in a transfer; the launch ends soon and OUT does not appear."""
    launch.require_launch()
    source = write_input(tmp_path / "in.h5")
    code = (
        "import os, sys, time, mpiattn.engine.executor as e\n"
        "from mpi4py import MPI\n"
        "run_block = e.Executor._run_block\n"
        "def slow(self, *arguments):\n"
        "    run_block(self, *arguments)\n"
        f"    if MPI.COMM_WORLD.rank == {victim}:\n"
        "        print('pid', os.getpid(), flush=True)\n"
        "        time.sleep(60)\n"
        "e.Executor._run_block = slow\n"
        "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [launch.mpiexec(), "-n", "4", sys.executable, "-c", code, "run", source, out, "--schedule", "greedy"],
        env=launch.environment(),
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    limit = Timer(60 * launch.time_factor(), process.terminate)
    limit.start()
    try:
        pid = next(int(line.split()[1]) for line in process.stdout if line.startswith("pid"))
        os.kill(pid, signal.SIGKILL)
        assert process.wait(timeout=DEATH * launch.time_factor()) != 0
    finally:
        limit.cancel()
        process.kill()
        process.stdout.close()
    assert not out.exists()


def test_a_rank_raises(tmp_path, out):
    """An error that only one rank knows of: its traceback, with its rank and host, and the launch ends."""
    source = write_input(tmp_path / "in.h5")
    outcome = mpirun(
        3, [sys.executable, "-c", RANK_1_RAISES, "run", source, out, "--schedule", "greedy"], timeout=30, check=False
    )
    assert outcome.returncode
    assert "mpiattn: rank 1 of 3 on " in outcome.stderr
    assert outcome.stderr.count("Traceback") == 1
    assert not out.exists()
