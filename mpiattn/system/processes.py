"""Which process made a file, so that later ones of the same machine can tell whether it still runs."""

import hashlib
import os
from functools import cache
from typing import NamedTuple


class Process(NamedTuple):
    """A process.

    machine: of `machine`.  started: when, in clock ticks since the machine's boot; None if unknown.
    """

    machine: str | None
    number: int
    started: int | None


@cache
def machine():
    """Identifies a boot of a host and a PID namespace: processes with the same value see each other; None: unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read()
        return hashlib.sha256(f"{boot}{os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:12]
    except OSError:
        return None


def this():
    """This process."""
    state = _state(os.getpid())
    return Process(machine(), os.getpid(), state and state[1])


def ended(process):
    """Whether a process has ended; None if that cannot be known here, as of one of another machine."""
    if machine() is None or process.machine != machine():
        return None
    state = _state(process.number)
    if state is None:
        return not _exists(process.number)
    return state[0] in "ZX" or state[1] != process.started  # a zombie writes nothing, and nobody may ever reap it


def _state(number):
    """(state, time of the start) of a process as /proc shows it; None if it does not show it."""
    try:
        with open(f"/proc/{number}/stat") as file:
            state, *others = file.read().rsplit(")", 1)[1].split()
            return state, int(others[18])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _exists(number):
    """Whether there is a process of this number, also one that /proc hides from other users."""
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
