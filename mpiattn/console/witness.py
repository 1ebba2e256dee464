"""A process that outlives its rank and reports how the rank ended.

A rank that the kernel kills, for example for lack of memory, cannot report that, and launchers report neither which
rank it was nor what it was doing.  So the process that the launcher started forks before MPI starts: the child is the
rank; the parent, its witness, waits for it and does nothing else.
"""

import contextlib
import ctypes
import math
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import time

from ..system.words import size
from .absent import absent
from .message import ESCAPED, FLUSH, claim, forwards, speak, speak_past, write_story
from .signals import in_words

NOTE_BYTES, LIMIT_BYTES = 1024, 8  # of the text, and of the time at which the rank will be ended
HASTE = 0.1  # seconds that the rank has to print why it ends, where the launcher kills it 0.25 s after a signal
LOOK, EARLY = 0.5, 1.0  # seconds between two looks at that time, and before it, when no rank has given up yet
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent ends
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)

WHY = {signal.SIGKILL: " (for lack of memory, if nobody sent it)", signal.SIGALRM: " (time was up)"}

SHARED = "/dev/shm"  # where MPI libraries have the memory that ranks of a host share
LITTLE = 2**21  # bytes left there, fewer than what MPICH takes at once

ENDED = "its end, at which ranks wait for all others"

_note = None  # memory shared with the witness, in the rank
launcher = None  # number of the process that started the witness, in the rank


def watch(rank):
    """Fork: continue as the given rank in the child, with the parent as its witness.

    Does nothing where it has been done, where MPI is already loaded, or outside Linux.
    """
    global _note, launcher
    if _note is not None or not sys.platform.startswith("linux") or "mpi4py.MPI" in sys.modules:
        return
    above, note = os.getppid(), mmap.mmap(-1, NOTE_BYTES + LIMIT_BYTES)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until the witness forwards them
    pid = os.fork()
    if pid:
        _wait(pid, note, rank)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _note, launcher = note, above
    tell(f"rank {rank} on {socket.gethostname()}", "starting")


def tell(who=None, doing=None):
    """Tell the witness who this rank is, or what it is doing."""
    if _note is not None:
        before = _read(_note)
        text = "\n".join(new or old for new, old in zip((who, doing), before))
        _note[:NOTE_BYTES] = text.encode(errors=ESCAPED)[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0")


@contextlib.contextmanager
def limit(doing, seconds):
    """End the rank if the body, which nothing can interrupt, takes longer than `seconds`; the witness reports it."""
    if _note is None or seconds == float("inf"):
        yield
        return
    tell(doing=doing)
    _note[NOTE_BYTES:] = struct.pack("d", time.monotonic() + seconds)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _note[NOTE_BYTES:] = struct.pack("d", math.inf)
    tell(doing="starting")


def limit_end(seconds):
    """End the rank if its process is not over in `seconds`: ranks wait for each other in MPI_Finalize."""
    if _note is not None and seconds != float("inf"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def end():
    """Tell the witness that the rank has printed its last message."""
    tell(doing=ENDED)


def _read(note):
    who, _, doing = note[:NOTE_BYTES].rstrip(b"\0").decode(errors="replace").partition("\n")
    return who, doing


def _wait(pid, note, rank):
    """Run as the witness: forward signals, wait for the rank, report how it ended, end the same way."""
    asked = []  # signals forwarded to the rank: its end by one of them needs no report

    def forward(number, frame):
        asked.append(number)
        with contextlib.suppress(ProcessLookupError):  # the rank has just ended
            os.kill(pid, number)
        if not forwards(number):
            signal.setitimer(signal.ITIMER_REAL, HASTE)

    missing = []

    def look(number, frame):
        unsaid = [number for number in asked if not forwards(number)]
        if unsaid:  # and the rank still runs: it is in the middle of a long call
            who, doing = _read(note)
            where = doing.partition(",")[0]
            speak_past(f"mpiattn: {in_words(unsaid[0])}; {who} was at: {where}\n", os.getppid())
            return
        (until,) = struct.unpack("d", note[NOTE_BYTES:])
        if until and time.monotonic() > until - EARLY:
            missing.append(absent(os.getppid(), True))
        if missing or until == math.inf:  # MPI has been started
            signal.setitimer(signal.ITIMER_REAL, 0)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    _, status = os.waitpid(pid, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    who, doing = _read(note)
    if not os.WIFSIGNALED(status):
        code = os.WEXITSTATUS(status)
        if 0 < code < 128 and doing != ENDED:  # signal handlers end with codes from 128 on
            time.sleep(FLUSH)  # MPI may have ended the rank because of another one
            if not asked:
                speak(f"mpiattn: {who} ended with code {code} in the middle; it was at: {doing}\n", rank, os.getppid())
                _end_by(signal.SIGTERM)
        os._exit(code)
    number = os.WTERMSIG(status)
    if number != signal.SIGALRM:
        doing = doing.partition(", for which ")[0]  # a time limit that was not reached
    if number not in asked:
        if doing == ENDED and number == signal.SIGALRM:
            missing.append(absent(os.getppid(), False))
        story = f"mpiattn: {who} was ended by {_name(number)}{_why(number)}; it was at: {doing}"
        story = "; ".join([story, *filter(None, missing)]) + "\n"
        if number == signal.SIGALRM:  # other ranks are at their limit too: one prints
            speak(story, rank, os.getppid())
        else:
            claim(os.getppid())
            write_story(story)
    _end_by(number)


def _why(number):
    """A likely reason for a signal, in brackets; "" where none is known."""
    if number == signal.SIGBUS and (full := _full()):
        return f" ({full})"
    return WHY.get(number, "")


def _full():
    """That this host has no room for what MPI keeps in shared memory, in words; "" if it has."""
    try:
        system = os.statvfs(SHARED)
    except OSError:
        return ""
    left = system.f_bavail * system.f_frsize
    if left >= LITTLE:
        return ""
    return (
        f"{SHARED} has {size(left)} left of {size(system.f_blocks * system.f_frsize)}, and MPICH keeps 1 MiB a rank "
        "there: remove what killed jobs have left, or make it larger, for a container by --shm-size"
    )


def _name(number):
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal, which has no name
        return f"signal {number}"


def _end_by(number):
    """End by the signal that ended the rank: on an exit code, MPICH's launcher would let the other ranks wait."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no second core file besides the rank's
    with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # not reached: the signal ended the rank
