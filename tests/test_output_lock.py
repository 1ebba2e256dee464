"""The lock of OUT: two jobs do not write it at the same time, and what jobs that ended have left stops nobody."""

import errno
import fcntl
import os
import re
import socket
import subprocess
import sys
import threading

import launch
import pytest
from files import assert_right, write_input
from launch import mpirun
from mpi4py import MPI

from mpiattn.comm.peers import Peers
from mpiattn.errors import FileError
from mpiattn.files.output import Contents, Output
from mpiattn.system import output_lock, partial_files
from mpiattn.system.atomic_file import HDF5, NewFile
from mpiattn.system.output_lock import OutputLock

LOCK = ".out.h5.lock"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.h5"


@pytest.fixture(autouse=True)
def become(monkeypatch):
    """A function that sets Slurm's variables, by name without SLURM_; none are set before."""
    for name in os.environ:
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)

    def become(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"SLURM_{name}", value)

    return become


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def take(out):
    return NewFile("OUT", out, (), HDF5, locked=True)


def finish(new):
    new.publish()
    new.discard()


def refused(out):
    with pytest.raises(FileError) as error:
        take(out)
    return str(error.value)


# Held


def test_who_comes_second_is_refused(out, become):
    become(JOB_ID="123", ARRAY_JOB_ID="120", ARRAY_TASK_ID="2")
    first = take(out)
    assert (out.parent / LOCK).stat().st_mode & 0o777 == 0o644  # all may read who it is
    become(JOB_ID="124", ARRAY_TASK_ID="3")
    message = refused(out)
    assert re.fullmatch(
        rf"OUT is '{out}'; job 123 \(task 2 of array 120\) of \w+ on {socket.gethostname()} has been writing it since "
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d; give another name, or wait for its end",
        message,
    ), message
    assert len(left_in(out.parent)) == 2  # the lock, the first one's partial
    finish(first)
    assert left_in(out.parent) == ["out.h5"]
    finish(take(out))
    assert left_in(out.parent) == ["out.h5"]


def test_outside_of_slurm(out):
    first = take(out)
    assert f"; process {os.getpid()} of " in refused(out)
    first.discard()
    assert left_in(out.parent) == []


def test_others_are_free(out):
    """Files of which the name begins alike too, and what takes no lock."""
    with take(out), NewFile("OUT", out), take(out.parent / "out.h"), take(out.parent / ("o" * 250)):
        take(out.parent / ("o" * 249)).discard()
    assert len(left_in(out.parent)) == 3


def test_the_lock_lies_beside_the_real_file(out, tmp_path_factory):
    link = tmp_path_factory.mktemp("elsewhere") / "link.h5"
    link.symlink_to(out)
    with take(out):
        assert f"OUT is '{link}'" in refused(link)
        assert left_in(link.parent) == ["link.h5"]


def test_what_cannot_be_made_leaves_no_lock(out, monkeypatch):
    monkeypatch.setattr(partial_files, "create", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    assert "it cannot be written: full" in refused(out)
    assert left_in(out.parent) == []


def test_other_ranks_hold_nothing(out):
    """A rank other than 0 removes the partial when it must end; as long as rank 0 lives, others are refused."""
    new = take(out)
    partial_files.discard_all()
    assert left_in(out.parent) == [LOCK] and refused(out)
    output_lock.remove_all()  # the last thing before a rank ends the job
    assert left_in(out.parent) == []
    new.discard()


# Left behind


def test_a_process_that_was_killed(out):
    """The system has taken its lock back, on any host; the file that it left means nothing."""
    code = (
        "import os, sys\nfrom mpiattn.system.output_lock import OutputLock\nOutputLock(sys.argv[1]).take()\nos._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, out], env=launch.environment())
    assert left_in(out.parent) == [LOCK]
    finish(take(out))
    assert left_in(out.parent) == ["out.h5"]


def test_children_of_the_process_hold_nothing(out):
    """A program that goes on after `KVCache.save` may have started others meanwhile."""
    new = take(out)
    child = subprocess.Popen(["sleep", "60"])
    new.discard()
    take(out).discard()
    child.kill()
    child.wait()


# Races and odd file systems


def test_one_of_many_gets_it(out):
    """Also while those who had it remove its file: of a file that is gone nobody has the lock."""
    holders, most, guard = [], [], threading.Lock()

    def work():
        for _ in range(50):
            lock = OutputLock(str(out))
            if lock.take() is None:
                with guard:
                    holders.append(lock)
                    most.append(len(holders))
                with guard:
                    holders.remove(lock)
                lock.release()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and left_in(out.parent) == []


def test_the_file_is_removed_while_it_is_taken(out, monkeypatch):
    """By who had the lock until then: another file is made, since others would not see this one."""
    flock, times = fcntl.flock, []

    def late(handle, how):
        if not times:
            os.unlink(out.parent / LOCK)
        times.append(1)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    new = take(out)
    assert len(times) == 2 and refused(out)
    new.discard()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(out, monkeypatch, caplog, code):
    """It refuses nobody, and who comes second hears of the first; each job has a partial of its own."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
    first = take(out)
    assert caplog.messages == []
    second = take(out)
    (note,) = caplog.messages
    assert note.startswith(f"mpiattn: process {os.getpid()} of ") and "has been writing it since" in note
    assert note.endswith(f", or was killed: '{out.parent / LOCK}' cannot be locked on its file system")
    finish(first)
    finish(second)
    assert left_in(out.parent) == ["out.h5"]


def test_nfs_locks_of_other_users(out, monkeypatch):
    """Their files are open for reading alone, and then NFS gives no exclusive lock."""
    opened, flock = os.open, fcntl.flock

    def of_another_user(path, flags, *mode):
        if os.path.exists(path) and str(path).endswith(LOCK) and flags & os.O_ACCMODE != os.O_RDONLY:
            raise PermissionError(errno.EACCES, "not yours", path)
        return opened(path, flags, *mode)

    def of_nfs(handle, how):
        reads = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        if reads and how & fcntl.LOCK_EX:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(handle, how)

    monkeypatch.setattr(os, "open", of_another_user)
    monkeypatch.setattr(fcntl, "flock", of_nfs)
    first = take(out)
    assert "has been writing it since" in refused(out)
    finish(first)
    (out.parent / LOCK).write_text("mpiattn: job 1, which was killed")
    finish(take(out))
    assert left_in(out.parent) == ["out.h5"]


@pytest.mark.parametrize("contents", ["", "mpi", "mpiattn: process 1"])
def test_a_lock_that_is_not_whole(out, contents):
    (out.parent / LOCK).write_text(contents)
    finish(take(out))
    assert left_in(out.parent) == ["out.h5"]


@pytest.mark.parametrize("kind", ["file", "folder", "pipe", "link"])
def test_what_is_no_lock_stays(out, kind):
    path = out.parent / LOCK
    {
        "file": lambda: path.write_text("of another program"),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to("nowhere"),
    }[kind]()
    assert re.search(r"is no lock of mpiattn|is no file|cannot be written", refused(out))
    assert left_in(out.parent) == [LOCK]


def test_a_full_disk(out, monkeypatch):
    """Who writes is then not said, and others are refused all the same."""
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    new = take(out)
    assert "another process is writing it" in refused(out)
    new.discard()


# Outputs


def test_an_output_holds_it(out):
    peers, shapes = Peers(MPI.COMM_SELF), {"x": ((3,), "float32")}
    output = Output(peers, out, {"": Contents(shapes)})
    with pytest.raises(FileError, match="has been writing it since"):
        Output(peers, out, {"": Contents(shapes)})
    output.commit()
    Output(peers, out, {"": Contents(shapes)}).abandon()
    assert left_in(out.parent) == ["out.h5"]


WAIT = """
import os, sys, time
from mpiattn.files.input import Input
from mpi4py import MPI
def wait(*args, **how):
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0: print('reading', flush=True)
    while not os.path.exists(sys.argv[1] + '/go'): time.sleep(0.05)
    return chunks(*args, **how)
chunks, Input.chunks = Input.chunks, wait
from mpiattn.cli import main; sys.exit(main(sys.argv[2:]))
"""


def test_two_runs_of_one_output(tmp_path):
    """The second one is refused, once for all ranks; the first one's result is whole."""
    launch.require_launch()
    source = write_input(tmp_path / "in.h5")
    run = ["run", str(source), str(tmp_path / "out.h5")]
    first = subprocess.Popen(
        [launch.mpiexec(), "-n", "2", sys.executable, "-c", WAIT, str(tmp_path), *run],
        env=launch.environment(),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert any(line == "reading\n" for line in first.stdout)
        second = mpirun(2, [sys.executable, "-m", "mpiattn", *run], check=False)
        (tmp_path / "go").touch()
        code = first.wait(launch.patience(40))
    finally:
        first.kill()
        first.communicate()
    said = [line for line in second.stderr.splitlines() if line.startswith("mpiattn")]
    assert second.returncode == 1 and len(said) == 1, second
    assert f"OUT is '{tmp_path}/out.h5'; process " in said[0] and "has been writing it since" in said[0]
    assert code == 0 and left_in(tmp_path) == ["go", "in.h5", "out.h5"]
    assert_right(source, tmp_path / "out.h5")
