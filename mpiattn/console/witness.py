"""A process that outlives its rank, to say how it ended.

A rank that the kernel kills, for lack of memory say, cannot tell that itself, and launchers tell neither which rank it
was nor what it was doing.  So before MPI starts, the process that the launcher started forks: the child is the rank,
the parent waits for it and does nothing else.
"""

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import socket
import sys
import time

from .message import FLUSH, claim, speak

NOTE_BYTES = 1024
PR_SET_PDEATHSIG = 1                   # of Linux's prctl: the signal that a process gets when its parent ends
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)

WHY = {signal.SIGKILL: " (for lack of memory, if nobody sent it)", signal.SIGALRM: " (time was up)"}

ENDED = "its end"

_note = None                           # memory shared with the witness, in the rank
launcher = None                        # what started the witness, in the rank: a process number


def watch(rank):
    """Go on as the rank, of that number, with a witness as parent; does nothing where it cannot or has been done."""
    global _note, launcher
    if _note is not None or not sys.platform.startswith("linux") or "mpi4py.MPI" in sys.modules:
        return
    above, note = os.getppid(), mmap.mmap(-1, NOTE_BYTES)
    pid = os.fork()
    if pid:
        _wait(pid, note, rank)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _note, launcher = note, above
    tell(f"rank {rank} on {socket.gethostname()}", "starting")


def tell(who=None, doing=None):
    """Note who this rank is, or what it is doing, for the witness."""
    if _note is not None:
        before = _read(_note)
        text = "\n".join(new or old for new, old in zip((who, doing), before))
        _note[:] = text.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0")


@contextlib.contextmanager
def limit(doing, seconds):
    """End the rank unless what is done inside, which nothing interrupts, is over in time; its witness then says so."""
    if _note is None or seconds == float("inf"):
        yield
        return
    tell(doing=doing)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    tell(doing="starting")


def end():
    """Tell the witness that the rank has said all there was to say."""
    tell(doing=ENDED)


def _read(note):
    who, _, doing = note[:].rstrip(b"\0").decode(errors="replace").partition("\n")
    return who, doing


def _wait(pid, note, rank):
    """The witness's whole life."""
    asked = []                         # signals that the rank was sent by way of its witness: nobody need be told

    def forward(number, frame):
        asked.append(number)
        with contextlib.suppress(ProcessLookupError):          # it has just ended
            os.kill(pid, number)
    for number in FORWARDED:
        signal.signal(number, forward)
    _, status = os.waitpid(pid, 0)
    who, doing = _read(note)
    if not os.WIFSIGNALED(status):
        code = os.WEXITSTATUS(status)
        if 0 < code < 128 and doing != ENDED:                    # more than that is what a signal's handler gives
            time.sleep(FLUSH)                                    # MPI may have ended it because of another rank
            if not asked:
                speak(f"mpiattn: {who} ended with code {code} in the middle; it was at: {doing}\n", rank, os.getppid())
                _end_by(signal.SIGTERM)
        os._exit(code)
    number = os.WTERMSIG(status)
    if number not in asked:
        story = f"mpiattn: {who} was ended by {_name(number)}{WHY.get(number, '')}; it was at: {doing}\n"
        if number == signal.SIGALRM:                             # that of other ranks is up, too
            speak(story, rank, os.getppid())
        else:
            claim(os.getppid())
            os.write(2, story.encode())
    _end_by(number)


def _name(number):
    try:
        return signal.Signals(number).name
    except ValueError:                                           # one of those that have a number only
        return f"signal {number}"


def _end_by(number):
    """End by a signal, that of the rank: MPICH's launcher takes no exit code for a death, and would let others wait."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))             # the rank has left its own, if it was to
    with contextlib.suppress(OSError):                           # nobody may change what SIGKILL does
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)                                       # not reached: the signal ended the rank
