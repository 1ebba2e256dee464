"""The lock of an output file, so that two jobs do not write it at the same time.

It is a hidden file beside the output, .NAME.lock, whose contents say who writes: host, process, Slurm job, time.  It
appears whole, as a link of a file that was written before, and is removed with the output's partial.  One whose owner
has ended is taken over: its process was one of this machine, or Slurm knows.  Only what is certain counts.
"""

import hashlib
import json
import os
import pwd
import secrets
import socket
import stat
import time
from contextlib import suppress
from typing import NamedTuple

from . import partial_files, processes, slurm_job
from .logs import note_file
from .os_errors import reason
from .processes import Process
from .slurm_job import SlurmJob

BEGINS = b'{"mpiattn": '  # how the contents do
BYTES = 4096  # that are read of them
TORN = 60.0  # seconds after which a lock that is not whole was left by a process that has ended
TRIES, PAUSE = 100, 0.05  # while others take a lock over, which takes milliseconds


class Owner(NamedTuple):
    """What a lock says of its owner.

    mpiattn: identifies the lock.  since: when it was taken, in words.
    """

    mpiattn: str
    host: str
    user: str
    since: str
    process: Process
    job: SlurmJob

    def __str__(self):
        who = str(self.job) if self.job.number else f"process {self.process.number}"
        return f"{who}{'' if self.user == _user() else f' of {self.user}'} on {self.host}"

    def ended(self):
        """Whether it is certain that it has."""
        ended, this_job = processes.ended(self.process), slurm_job.this()
        if ended is not None:
            return ended
        if self.job.number is None or self.job.cluster != this_job.cluster or self.user != _user():
            return False
        if self.job.number != this_job.number:
            return slurm_job.ended(self.job)
        if self.job.restart != this_job.restart:
            return self.job.restart < this_job.restart  # Slurm has ended every process before it requeues a job
        return slurm_job.step_ended(self.job)


class _Current(NamedTuple):
    """A lock that is there.

    name: identifies it.  owner: None if the file does not say it, and then why.  written: when, by the clock of the
    file system, of one that is not whole.
    """

    name: str
    owner: Owner | None
    why: str = ""
    written: float | None = None


class OutputLock(NamedTuple):
    """A lock, to be taken and released.  name: of this one of the locks that the path has in turn."""

    path: str
    name: str

    @classmethod
    def of(cls, target):
        """A new one for an output file."""
        folder, base = os.path.split(target)
        kept = base.encode()[: partial_files.BASE_BYTES].decode(errors="ignore")
        if kept != base:  # names that begin alike are other files
            kept += f"-{hashlib.sha256(os.fsencode(base)).hexdigest()[:12]}"
        return cls(os.path.join(folder, f".{kept}.lock"), secrets.token_hex(8))

    def take(self, argument):
        """Take it; None, or who has it, in words.  argument: as of `partial_files.create`.  Raises OSError."""
        draft = self._draft(argument)
        try:
            for _ in range(TRIES):
                if self._linked(draft):
                    return None
                current = _read(self.path)
                if current is None:  # released meanwhile
                    continue
                if not _is_stale(current, draft):
                    break
                if self._taken_over(argument, draft, current):
                    return None
                time.sleep(PAUSE)
            return self._refusal(current)
        finally:
            partial_files.discard(draft)

    def release(self):
        """Remove it, if it is this one and not yet somebody else's."""
        with suppress(OSError):
            current = _read(self.path)
            if current is not None and current.name == self.name:
                os.unlink(self.path)

    def _draft(self, argument):
        """A file with its contents."""
        owner = Owner(
            self.name,
            socket.gethostname(),
            _user(),
            time.strftime("%Y-%m-%d %H:%M:%S"),
            processes.this(),
            slurm_job.this(),
        )
        folder, base = os.path.split(self.path)
        draft = partial_files.create(argument, folder, base[1:].removesuffix(".lock"))
        try:
            os.chmod(draft, 0o644)  # for those who are refused
            with open(draft, "w") as file:
                json.dump(owner._asdict() | {"process": owner.process._asdict(), "job": owner.job._asdict()}, file)
            return draft
        except BaseException:
            partial_files.discard(draft)
            raise

    def _linked(self, draft):
        """Whether the lock was free, and now is this one."""
        try:
            os.link(draft, self.path)
            return True
        except FileExistsError:
            return os.stat(draft).st_nlink == 2  # NFS may have done it when it is asked again
        except OSError:  # a file system without links
            return self._written(draft)

    def _written(self, draft):
        """As `_linked`, by a file that does not appear whole."""
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with open(draft, "rb") as source, open(handle, "wb") as file:
                file.write(source.read())
        except BaseException:
            os.unlink(self.path)
            raise
        return True

    def _taken_over(self, argument, draft, stale):
        """Whether this process has replaced a stale lock.

        Of those that try, the owner of a lock of that very lock may: what is there does not change meanwhile.
        """
        of_it = OutputLock(f"{self.path}.{stale.name}", self.name)
        partial_files.share(argument, draft, of_it)
        try:
            if of_it.take(argument) is not None:
                return False
            current = _read(self.path)
            if current is None or current.name != stale.name:
                return False
            os.replace(draft, self.path)
        finally:
            of_it.release()
        if stale.owner:
            note_file("mpiattn: took over %r, the lock of %s, which has ended", self.path, stale.owner)
        return True

    def _refusal(self, current):
        advice = f"give another name, or remove {self.path!r}"
        if current is None:
            return f"others take its lock and release it all the time; {advice}"
        if current.owner is None:
            return f"its lock {self.path!r} {current.why}; {advice} if no job writes the file"
        of_job = current.owner.job.number not in (None, slurm_job.this().number)
        return (
            f"{current.owner} has been writing it since {current.owner.since}; {advice} if that "
            f"{'job' if of_job else 'process'} has ended"
        )


def _is_stale(current, draft):
    if current.owner is not None:
        return current.owner.ended()
    return current.written is not None and os.stat(draft).st_mtime - current.written > TORN


def _read(path):
    """The `_Current` of a path; None if nothing is there."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        return _Current("", None, f"cannot be read: {reason(error)}")
    try:
        about = os.fstat(handle)
        contents = os.read(handle, BYTES) if stat.S_ISREG(about.st_mode) else b"none"
    except OSError as error:
        return _Current("", None, f"cannot be read: {reason(error)}")
    finally:
        os.close(handle)
    if not (contents.startswith(BEGINS) or BEGINS.startswith(contents)):
        return _Current("", None, "is no lock of mpiattn")
    try:
        says = json.loads(contents)
    except ValueError:
        name = hashlib.sha256(f"{about.st_ino} {about.st_mtime_ns}".encode()).hexdigest()[:16]
        return _Current(name, None, "is not whole: a process is writing it, or was killed meanwhile", about.st_mtime)
    try:
        owner = Owner(**says | {"process": Process(**says["process"]), "job": SlurmJob(**says["job"])})
    except (KeyError, TypeError):
        return _Current("", None, "is of another version of mpiattn")
    return _Current(owner.mpiattn, owner)


def _user():
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # as in containers
        return str(os.getuid())
