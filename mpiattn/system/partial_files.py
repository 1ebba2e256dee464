"""The hidden names that files have while they are written, and how those of jobs that ended early are removed.

A partial is called .NAME.MACHINE-PROCESS-START.RANDOM.partial.  MACHINE stands for one boot of one host and a space of
process numbers, PROCESS and START for the process that made it, in hexadecimal.  So a later job on that host can tell
whether that process still runs.  A partial of another host or of an earlier boot is never judged and so never removed.
"""

import contextlib
import hashlib
import logging
import os
import re
import tempfile
from functools import cache

BASE_BYTES = 180               # of the file's own name in its partial's: a name may have 255 bytes in all

_unfinished = {}               # partial -> argument, of the files that this process has a part in
_published = set()             # arguments whose files have their names


@cache
def _machine():
    """What is the same for two processes only if each can tell by a process number whether the other runs, or None."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read()
        return hashlib.sha256(f"{boot}{os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:12]
    except OSError:
        return None


def _started(process):
    """When a process began, in clock ticks since the boot; None if it does not run."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return int(file.read().rsplit(")", 1)[1].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _prefix(base):
    return f".{base.encode()[:BASE_BYTES].decode(errors='ignore')}."


def create(argument, folder, base):
    """Make an empty file, new and nobody else's, that will be called `base`; returns its path.

    argument: what errors and messages call the file.  Raises OSError.
    """
    record = f"{_machine()}-{os.getpid():x}-{_started(os.getpid()):x}." if _machine() else ""
    handle, partial = tempfile.mkstemp(prefix=_prefix(base) + record, suffix=".partial", dir=folder)
    os.close(handle)
    share(argument, partial)
    return partial


def share(argument, partial):
    """Note that this process has a part in a partial, which another rank made, so that it removes it if it must end."""
    _unfinished[partial] = argument
    _published.discard(argument)


def publish(partial, target):
    """Give a file its name."""
    os.replace(partial, target)
    _published.add(_unfinished.pop(partial))


def settle(partial):
    """Note that another rank gave a file its name."""
    _published.add(_unfinished.pop(partial))


def discard(partial):
    """Remove a partial; does nothing where it is gone."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)
    _unfinished.pop(partial, None)


def gone():
    """Whether another rank has removed a partial that this process has a part in: then the job is at its end."""
    return any(not os.path.exists(partial) for partial in _unfinished)


def discard_all():
    """Remove all partials that this process has a part in; returns their arguments.  For a process that must end."""
    arguments = set(_unfinished.values())
    for partial in list(_unfinished):
        with contextlib.suppress(OSError):
            discard(partial)
    return arguments


def published():
    """Arguments whose files have been written."""
    return set(_published)


def remove_stale(folder, base):
    """Remove partials of a file that this user's processes on this host left when they were killed, and log each."""
    if _machine() is None:
        return
    name = re.compile(rf"{re.escape(_prefix(base) + _machine())}-([0-9a-f]+)-([0-9a-f]+)\.\w+\.partial")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = name.fullmatch(entry.name)
            if match and _started(int(match[1], 16)) != int(match[2], 16):
                with contextlib.suppress(OSError):
                    if entry.is_file(follow_symlinks=False) and entry.stat().st_uid == os.geteuid():
                        os.unlink(entry.path)
                        logging.getLogger("mpiattn").warning(
                            "mpiattn: removed %r, which a job that was killed left behind", entry.path)
