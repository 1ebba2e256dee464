"""The lock of OUT: two jobs do not write it at the same time, and what jobs that ended have left stops nobody."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time

import launch
import locks
import pytest
from files import assert_right, write_input
from launch import mpirun
from locks import ARRAY, ELSEWHERE, LOCK, SLURM, change, left_in, refused, take
from mpi4py import MPI

from mpiattn.comm.peers import Peers
from mpiattn.errors import FileError
from mpiattn.files.output import Contents, Output
from mpiattn.system import output_lock, partial_files, processes
from mpiattn.system.atomic_file import NewFile
from mpiattn.system.output_lock import OutputLock


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.h5"


@pytest.fixture(autouse=True)
def become(monkeypatch):
    return locks.slurm(monkeypatch)


@pytest.fixture
def dead():
    """The number of a process of this machine that has ended."""
    child = subprocess.Popen(["true"])
    child.wait()
    return {"number": child.pid}


# Held


def test_who_comes_second_is_refused(out, become):
    become(**SLURM, **ARRAY)
    first = take(out)
    assert (out.parent / LOCK).stat().st_mode & 0o777 == 0o644  # all may read who it is
    become(JOB_ID="124", ARRAY_TASK_ID="3")
    message = refused(out)
    assert re.fullmatch(
        rf"OUT is '{out}'; job 123 \(task 2 of array 120\) on {socket.gethostname()} has been writing it since "
        rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d; give another name, or remove '{out.parent}/{LOCK}' if that job has ended",
        message,
    ), message
    assert len(left_in(out.parent)) == 2  # the lock, the first one's partial
    first.publish()
    assert left_in(out.parent) == ["out.h5"]
    take(out).publish()
    assert left_in(out.parent) == ["out.h5"]


def test_outside_of_slurm(out):
    first = take(out)
    assert f"; process {os.getpid()} on " in (message := refused(out))
    assert message.endswith("if that process has ended")
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
        message = refused(link)
        assert f"OUT is '{link}'" in message and f"remove '{out.parent}/{LOCK}'" in message
        assert left_in(link.parent) == ["link.h5"]


def test_what_cannot_be_made_leaves_no_lock(out, monkeypatch):
    monkeypatch.setattr(partial_files, "create", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    assert "it cannot be written: full" in refused(out)
    assert left_in(out.parent) == []


def test_a_signal_releases_it(out):
    take(out)
    assert partial_files.discard_all() == {"OUT"} and left_in(out.parent) == []


def test_a_signal_while_it_is_taken(out, monkeypatch):
    def linked(*arguments):
        link(*arguments)
        partial_files.discard_all()
        assert left_in(out.parent) == []
        raise KeyboardInterrupt

    link = os.link
    monkeypatch.setattr(os, "link", linked)
    with pytest.raises(KeyboardInterrupt):
        take(out)


def test_nobody_releases_anothers(out):
    new = take(out)
    change(out, mpiattn="0123")
    new.discard()
    assert left_in(out.parent) == [LOCK]


# Left behind


def test_a_process_that_ended(out, dead, caplog):
    """Of this machine; what another process with its number does is its own affair."""
    take(out)
    change(out, process=dead)
    take(out)
    assert [record.getMessage() for record in caplog.records] == [
        f"mpiattn: took over '{out.parent}/{LOCK}', the lock of process {dead['number']} on {socket.gethostname()}, "
        "which has ended"
    ]
    change(out, process={"started": 7})
    take(out).publish()
    assert LOCK not in left_in(out.parent) and len(left_in(out.parent)) == 3  # two partials of living processes


def test_a_zombie(out):
    """A process that was killed and that nobody reaps has ended too."""
    child = subprocess.Popen(["sleep", "60"])
    with open(f"/proc/{child.pid}/stat") as file:
        started = int(file.read().split()[21])
    take(out)
    change(out, process={"number": child.pid, "started": started})
    assert refused(out)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    take(out).publish()
    child.wait()


def test_a_process_that_proc_hides(monkeypatch):
    """From other users, where it is mounted with hidepid: it runs."""
    monkeypatch.setattr(processes, "_state", lambda number: None)
    monkeypatch.setattr(os, "kill", lambda *_: (_ for _ in ()).throw(PermissionError))
    assert processes.ended(processes.Process(processes.machine(), 1, 1)) is False


def test_a_process_of_another_machine(out):
    take(out)
    change(out, process=ELSEWHERE, host="node17", user="bob")
    assert "process " in (message := refused(out)) and " of bob on node17 has been writing it" in message


def test_where_processes_cannot_be_told_apart(out, monkeypatch):
    monkeypatch.setattr(processes, "machine", lambda: None)
    take(out)
    refused(out)


# Races and odd file systems


def of_the_dead(lock, number):
    """Leave a lock of a process that has ended."""
    assert lock.take("OUT") is None
    with open(lock.path) as file:
        says = json.load(file)
    says["process"]["number"] = number
    with open(lock.path, "w") as file:
        json.dump(says, file)


@pytest.mark.parametrize("marked", [False, True], ids=["", "who took it over was killed"])
def test_one_of_many_takes_it_over(out, dead, marked):
    for _ in range(10):
        stale = OutputLock.of(str(out))
        of_the_dead(stale, dead["number"])
        if marked:
            of_the_dead(OutputLock(f"{stale.path}.{stale.name}", "0123"), dead["number"])
        locks, start, answers = [OutputLock.of(str(out)) for _ in range(8)], threading.Barrier(8), {}

        def compete(lock, start=start, answers=answers):
            start.wait()
            answers[lock] = lock.take("OUT")

        threads = [threading.Thread(target=compete, args=(lock,)) for lock in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = (lock for lock, answer in answers.items() if answer is None)
        assert len(answers) == 8 and left_in(out.parent) == [LOCK]
        for lock in locks:
            lock.release()
            assert left_in(out.parent) == ([LOCK] if locks.index(lock) < locks.index(winner) else [])


def test_a_late_one_does_not_take_it_over_again(out, dead, monkeypatch):
    """Who has read a stale lock, and comes to replace it when another one has, is refused."""
    of_the_dead(OutputLock.of(str(out)), dead["number"])
    slow, quick = OutputLock.of(str(out)), OutputLock.of(str(out))
    taken_over = OutputLock._taken_over

    def late(lock, *arguments):
        if lock is slow:
            monkeypatch.undo()
            assert quick.take("OUT") is None
            assert not taken_over(lock, *arguments)
            assert len(left_in(out.parent)) == 2  # the lock and a draft
            return False
        return taken_over(lock, *arguments)

    monkeypatch.setattr(OutputLock, "_taken_over", late)
    assert f"process {os.getpid()} on " in slow.take("OUT")


def test_a_signal_while_it_is_taken_over(out, dead, monkeypatch):
    def replace(*_):
        partial_files.discard_all()
        assert left_in(out.parent) == [LOCK]
        raise InterruptedError

    of_the_dead(OutputLock.of(str(out)), dead["number"])
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(InterruptedError):
        OutputLock.of(str(out)).take("OUT")


def no_links(*_):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_without_links(out, monkeypatch, dead):
    monkeypatch.setattr(os, "link", no_links)
    take(out)
    refused(out)
    change(out, process=dead)
    take(out).publish()
    assert LOCK not in left_in(out.parent)


def test_links_that_are_made_twice(out, monkeypatch):
    """NFS sends what is not answered in time again, and then hears that it is there."""

    def twice(*arguments):
        link(*arguments)
        link(*arguments)

    link = os.link
    monkeypatch.setattr(os, "link", twice)
    take(out).publish()
    assert left_in(out.parent) == ["out.h5"]


@pytest.mark.parametrize("contents", ["", '{"mpi', '{"mpiattn": "0123", "host": "no'])
def test_a_lock_that_is_not_whole(out, contents):
    """Where there are no links, a process may be killed before it has written it."""
    path = out.parent / LOCK
    path.write_text(contents)
    assert "is not whole" in refused(out)
    os.utime(path, (time.time() - 100,) * 2)
    take(out).publish()
    assert left_in(out.parent) == ["out.h5"]


@pytest.mark.parametrize("kind", ["file", "folder", "pipe", "link", "newer"])
def test_what_is_no_lock_stays(out, kind):
    path = out.parent / LOCK
    {
        "file": lambda: path.write_text("of another program"),
        "newer": lambda: path.write_text('{"mpiattn": "0123", "of": "a later version"}'),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to("nowhere"),
    }[kind]()
    os.utime(path, (time.time() - 100,) * 2, follow_symlinks=False)
    assert re.search(r"is no lock of mpiattn|cannot be read|is of another version", refused(out))
    assert left_in(out.parent) == [LOCK]


def test_a_full_disk(out, monkeypatch):
    monkeypatch.setattr(output_lock.json, "dump", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    assert "it cannot be written: full" in refused(out)
    assert left_in(out.parent) == []


def test_a_full_disk_without_links(out, monkeypatch):
    def full(file, *mode):
        if isinstance(file, int):
            os.close(file)
            raise OSError(errno.ENOSPC, "full")
        return open(file, *mode)

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(output_lock, "open", full, raising=False)
    assert "it cannot be written: full" in refused(out)
    assert left_in(out.parent) == []


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
