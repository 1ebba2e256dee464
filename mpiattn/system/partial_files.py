"""Hidden names of files that are being written, and the removal of those that ended jobs have left.

A partial is named .NAME.MACHINE-PROCESS-START.RANDOM.partial.  MACHINE identifies one boot of one host and a PID
namespace; PROCESS and START identify the process that made it, in hexadecimal.  So a later job on that host can tell
whether that process still runs.  Partials of other hosts or earlier boots are never removed: their state is unknown.
"""

import contextlib
import os
import re
import tempfile

from . import processes
from .logs import note_file
from .processes import Process

BASE_BYTES = 180  # of the file's name that its partial's name keeps: names have at most 255 bytes

_unfinished: dict[str, str] = {}  # partial -> argument, for unfinished files that this process takes part in
_published: set[str] = set()  # arguments whose files are finished
_kept: dict[str, str] = {}  # argument -> what of its unfinished file stays for a later run, in words


def _prefix(base):
    return f".{base.encode()[:BASE_BYTES].decode(errors='ignore')}."


def create(argument, folder, base):
    """Make a new, empty file with a unique name, which will be named `base` later; returns its path.

    argument: the name of the file in errors and messages.  Raises OSError.
    """
    maker = processes.this()
    record = f"{maker.machine}-{maker.number:x}-{maker.started:x}." if maker.machine else ""
    handle, partial = tempfile.mkstemp(prefix=_prefix(base) + record, suffix=".partial", dir=folder)
    os.close(handle)
    share(argument, partial)
    return partial


def share(argument, partial):
    """Register a partial that another rank made, so that this process removes it too if it must end."""
    _unfinished[partial] = argument
    _published.discard(argument)
    _kept.pop(argument, None)


def publish(argument, partial, target):
    """Rename a finished partial to its final name."""
    os.replace(partial, target)
    settle(argument, partial)


def settle(argument, partial):
    """Note that the file is published."""
    _unfinished.pop(partial, None)
    _kept.pop(argument, None)
    _published.add(argument)


def keep(argument, text):
    """Note what of an unfinished file stays for a later run if this process must end, in words."""
    _kept[argument] = text


def kept():
    """What of unfinished files stays, in words, to follow the reason why a process ends; "" if nothing does."""
    return "".join(f"; {text}" for text in _kept.values())


def discard(partial):
    """Remove a partial; does nothing if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)
    _unfinished.pop(partial, None)


def discard_all():
    """Remove all partials that this process takes part in, before it must end."""
    for partial in list(_unfinished):
        with contextlib.suppress(OSError):
            discard(partial)


def unfinished():
    """Arguments whose files are not finished."""
    return set(_unfinished.values())


def published():
    """Arguments whose files are finished."""
    return set(_published)


def remove_stale(folder, base):
    """Remove and log partials of a file that killed processes of this user have left on this host."""
    machine = processes.machine()
    if machine is None:
        return
    name = re.compile(rf"{re.escape(_prefix(base) + machine)}-([0-9a-f]+)-([0-9a-f]+)\.\w+\.partial")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = name.fullmatch(entry.name)
            if match and processes.ended(Process(machine, int(match[1], 16), int(match[2], 16))):
                with contextlib.suppress(OSError):
                    if entry.is_file(follow_symlinks=False) and entry.stat().st_uid == os.geteuid():
                        os.unlink(entry.path)
                        note_file("mpiattn: removed %r, which a job that was killed left behind", entry.path)
