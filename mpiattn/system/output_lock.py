"""The lock of an output file, so that two jobs do not write it at the same time.

It is the system's own lock (flock) of a hidden file beside the output, .NAME.lock, whose text says who writes.  One
process of a job has it, and the system takes it back when that process ends, in whatever way.  So a file that a killed
job has left locks nothing.  A file system without locks refuses nobody, but who comes second says whose file is there.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import pwd
import socket
import stat
import time

from . import partial_files
from .logs import note_file

BEGINS = "mpiattn: "  # how the text of a lock does
BYTES = 1024  # that are read of it

_paths: set[str] = set()  # of locks of outputs that this process takes part in writing


class OutputLock:
    """The lock of an output file; take it, and release it."""

    def __init__(self, target):
        folder, base = os.path.split(target)
        kept = base.encode()[: partial_files.BASE_BYTES].decode(errors="ignore")
        if kept != base:  # names that begin alike are other files
            kept += f"-{hashlib.sha256(os.fsencode(base)).hexdigest()[:12]}"
        self.path, self._handle = os.path.join(folder, f".{kept}.lock"), None

    def take(self):
        """Take it; returns why it cannot be had, in words, or None.  Raises OSError."""
        while self._handle is None:
            handle = _open(self.path)
            try:
                refusal = self._refusal(handle)
                if refusal:
                    return refusal
                # who had it may have removed the file between the two calls: then it locks nothing
                if _is_at(handle, self.path):
                    self._handle, handle = handle, None
            finally:
                if handle is not None:
                    os.close(handle)
        share(self.path)
        with contextlib.suppress(OSError):  # the text is for others to read, no more
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{BEGINS}{_whose()}".encode(), 0)
        return None

    def release(self):
        """Remove the file, and let others lock."""
        if self._handle is not None:
            remove(self.path)
            os.close(self._handle)
            self._handle = None

    def _refusal(self, handle):
        """Lock the open file; returns why that cannot be, in words, or None."""
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return f"its lock {self.path!r} is no file; give another name, or remove it"
        try:
            locked = _lock(handle)
        except BlockingIOError:
            owner = _text(handle).removeprefix(BEGINS) or "another process is writing it"
            return f"{owner}; give another name, or wait for its end"
        text = _text(handle)
        if not (BEGINS.startswith(text) or text.startswith(BEGINS)):
            return f"its lock {self.path!r} is no lock of mpiattn; give another name, or remove it"
        if text and not locked:
            note_file("%s, or was killed: %r cannot be locked on its file system", text, self.path)
        return None


def share(path):
    """Note that a process of this job has a lock, so that this one can remove the file at the job's end."""
    _paths.add(path)


def settle(path):
    """Note that the process that has a lock has removed its file."""
    _paths.discard(path)


def remove(path):
    """Remove the file of a lock that is no longer needed."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    settle(path)


def remove_all():
    """Remove the files of this job's locks, as the last thing before the job is ended."""
    for path in list(_paths):
        remove(path)


def _open(path):
    flags = os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644)  # for those who are refused to read it
    except (PermissionError, IsADirectoryError):
        return os.open(path, os.O_RDONLY | flags)  # of another user


def _lock(handle):
    """Lock an open file; whether its file system has locks.  Raises BlockingIOError if another process has this one."""
    for how in (fcntl.LOCK_EX, fcntl.LOCK_SH):
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            raise
        except OSError as error:
            # NFS grants a shared lock alone of a file that cannot be written
            if error.errno != errno.EBADF:
                break
    return False


def _is_at(handle, path):
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _text(handle):
    return os.pread(handle, BYTES, 0).decode(errors="replace")


def _whose():
    """What others are told of this process or its Slurm job."""
    number, array, task = (os.environ.get(f"SLURM_{name}") for name in ("JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID"))
    who = f"process {os.getpid()}"
    if number:
        who = f"job {number}"
    if number and array:
        who += f" (task {task} of array {array})"
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{who} of {_user()} on {socket.gethostname()} has been writing it since {since}"


def _user():
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # as in containers
        return str(os.getuid())
