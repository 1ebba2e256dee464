"""What SIGINT (Ctrl-C), SIGTERM and SIGHUP do to a command: files half made go, it is said once, the process ends.

Python turns Ctrl-C into an exception where it happens to be, and where that is a callback of a weak reference, of which
h5py has many, the exception is dropped and the program goes on.  So the handler does itself all that must be done, and
ends the process there and then.
"""

import contextlib
import os
import signal
import sys
import threading
import time

from ..system import partial_files
from . import witness
from .message import PARTING, speak

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO = 3.0                 # seconds in which a launcher that ends all ranks by SIGTERM, as one has failed, kills them


@contextlib.contextmanager
def handled(command, makes, speaks):
    """Handle the signals while a command, "run" and so on, works.

    Those that this process was started to ignore, as by nohup, stay ignored.
    makes: the argument that names the file which the command is there to write, or None.  speaks: whether this is the
    process of a launch that speaks while MPI does not run.  The exit code is 128 and the signal's number: 130 for
    Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():        # Python lets others handle none
        yield
        return

    def handler(number, frame):
        for other in NUMBERS:                # one Ctrl-C may come twice, from the terminal and from the witness
            signal.signal(other, signal.SIG_IGN)
        silent = partial_files.gone()             # the rank that removed it speaks
        unwritten = partial_files.discard_all() | ({makes} if makes else set()) - partial_files.published()
        how = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        lost = f", {' and '.join(sorted(unwritten))} was not written" if unwritten else ""
        story = f"mpiattn{command and f' {command}'}: {how}{lost}\n"
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
            _end_job(mpi.COMM_WORLD, story, number, silent)
        elif speaks:
            with contextlib.suppress(OSError):
                os.write(2, story.encode())
        os._exit(128 + number)
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number in NUMBERS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, kept)


@contextlib.contextmanager
def plain():
    """For a call of C that may wait long, in which no handler of Python's is run: let the system end the process.

    To be used only while there is nothing to be cleared away.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number, kept in before.items():
        if kept is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, kept)


def _end_job(comm, story, number, silent):
    """End all ranks, and say why unless another does."""
    if silent:
        time.sleep(PARTING)
    else:
        if number == signal.SIGTERM:
            time.sleep(ECHO)                 # Open MPI sends it where a rank has failed, and that has been said
        speak(story, comm.rank, witness.launcher or os.getppid())
    comm.Abort(128 + number)
