"""One message when ranks fail together: which rank prints it, and how long the others wait for it."""

import contextlib
import ctypes
import os
import re
import signal
import socket
import sys
import time

from ..system.launch_variables import OPEN_MPI, launched, local_ranks
from .absent import all_there

PARTING = 10.0  # seconds that ranks wait for each other when they end together
SILENT = 5.0  # seconds that the others give rank 0 to print: launchers end all ranks with the first
FLUSH = 0.5  # seconds that a launcher needs to forward a message; it drops output after an abort
STAGGER, LATEST = 1.0, 5.0  # delay per host in seconds, so that one host prints and ends the job; its maximum
AFTER = LATEST + 2 * FLUSH  # seconds that ranks told of a failure wait, so that the failed rank prints first

PIDFD_GETFD = 438  # a call of Linux 5.6, of this number on all processors

DOCUMENTS = r"\bcu_seqlens(_k)?\b"  # arguments of Python that --documents and --documents-k set
options: set[str] = set()  # of the command that this process runs
ESCAPED = "backslashreplace"  # how characters are written that an encoding lacks
_claims: list[socket.socket] = []  # sockets, open until this process ends


def as_typed(error):
    """The text of an error; one that begins with an argument of Python begins with the option that sets it instead."""
    text = str(error)
    if "--documents" in options and re.match(f"{DOCUMENTS}|padding", text):
        text = re.sub(DOCUMENTS, r"--documents\1", text).replace("--documents_k", "--documents-k")
    name, verb, rest = text.partition(" is ")
    option = f"--{name.replace('_', '-')}"
    return f"{option}{verb}{rest}" if option in options else text


def print_any_text():
    """Let output escape what its encoding lacks: a file's name may have any character, also under LC_ALL=C."""
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=ESCAPED)


def write_story(story):
    """Print a story on standard error by one write, so that output of ranks does not mix; if nobody reads, do not."""
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError):
        os.write(2, story.encode(encoding, ESCAPED))


def claim(launcher):
    """Whether this rank is the first under this launcher that wants to print; all later claims fail."""
    if not sys.platform.startswith("linux"):
        return True
    claimed = socket.socket(socket.AF_UNIX)
    try:
        claimed.bind(f"\0mpiattn-{launcher}")
    except OSError:
        return False
    _claims.append(claimed)
    return True


def speak(story, rank, launcher):
    """Print why this rank is about to end the job, unless another rank that fails with it has printed its reason.

    launcher: process number of the launcher's process on this host, the parent of its ranks.
    """
    if not claim(launcher):
        time.sleep(PARTING)
        return
    time.sleep(min(STAGGER * (rank // local_ranks()), LATEST))
    write_story(story)
    time.sleep(FLUSH)


def forwards(number):
    """Whether the launcher forwards what ranks print after it has got this signal.

    Open MPI's does not, and kills the ranks 0.25 s later.  Ranks on other hosts than the launcher's cannot help that.
    """
    ends = number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return not (ends and launched() == (local_ranks(), OPEN_MPI))


def speak_past(story, launcher):
    """Print as `speak`, but at once and straight to the launcher's standard error; whether that was done.

    It is not if a rank has ended: then the signal is how the launcher ends the others, and the reason is printed.
    """
    if not (claim(launcher) and all_there(launcher)):
        return False
    with contextlib.suppress(OSError):
        os.write(_error_of(launcher), story.encode())
    return True


def _error_of(launcher):
    """A handle of the standard error of another process."""
    with contextlib.suppress(OSError, AttributeError):  # an older kernel
        process = os.pidfd_open(launcher)
        handle = ctypes.CDLL(None).syscall(PIDFD_GETFD, process, 2, 0)
        if handle >= 0:
            return handle  # the same open file, so that neither process writes over the other's lines
    return os.open(f"/proc/{launcher}/fd/2", os.O_WRONLY | os.O_APPEND)  # where only debuggers may have that one
